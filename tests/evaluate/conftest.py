"""Fixtures of the tests of evaluation."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from .tiny import CODE, PROSE, train_tokenizer, write_corpus


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources, code and prose, with characters of one to four bytes."""
    folder = tmp_path_factory.mktemp("prepared")
    write_corpus(folder, {"py": ("code", CODE), "book": ("prose", PROSE)}, train_tokenizer(CODE + PROSE))
    return folder
