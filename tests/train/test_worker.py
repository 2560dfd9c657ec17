"""The process that trains."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest

import ropewalk.train.__main__ as worker
from ropewalk.config.ranks import Ranks


def test_collections_while_training_pass_over_what_imports_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen: list[int] = []
    rendezvous: Any = None
    monkeypatch.setattr("ropewalk.train.loop.train", lambda *_, **__: frozen.append(gc.get_freeze_count()))
    monkeypatch.setattr(worker, "share_cores", lambda: None)
    try:
        worker._work(tmp_path, Ranks(), rendezvous, task="")
    finally:
        gc.unfreeze()
    assert frozen[0] > 100_000
