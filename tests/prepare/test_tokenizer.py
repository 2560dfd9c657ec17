"""The tokenizer: any text comes back, the same texts give the same file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_prose import prose
from tokenizers import Tokenizer, models

from ropewalk.base.errors import DataError
from ropewalk.prepare import tokenizer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.train(map(prose, range(30)), vocabulary=300).save(str(path))
    return tokenizer.load(path)


@given(st.text())
def test_any_text_comes_back_unchanged(trained: Tokenizer, text: str) -> None:
    (tokens,) = tokenizer.encode(trained, [text], dtype="uint16")
    assert tokens.dtype == np.uint16
    assert trained.decode(tokens.tolist(), skip_special_tokens=False) == text


def test_text_that_spells_the_end_of_text_is_not_the_end_of_text(trained: Tokenizer) -> None:
    (tokens,) = tokenizer.encode(trained, ["a<|endoftext|>b"], dtype="uint16")
    assert tokenizer.end_of_text(trained, path=Path()) not in tokens.tolist()


def test_training_gives_the_same_bytes_in_every_process_order_and_number_of_threads() -> None:
    code = (
        "import sys, hashlib; sys.path.insert(0, sys.argv[1]); from random_prose import prose\n"
        "from ropewalk.prepare.tokenizer import train\n"
        "texts = [prose(n) for n in range(200)][:: int(sys.argv[2])]\n"
        "print(hashlib.sha256(train(iter(texts), vocabulary=500).to_str().encode()).hexdigest())"
    )
    expected = tokenizer.train(map(prose, range(200)), vocabulary=500).to_str()
    for threads, order in (("false", "1"), ("true", "-1")):
        done = subprocess.run(
            [sys.executable, "-c", code, str(Path(__file__).parent), order],
            env={"TOKENIZERS_PARALLELISM": threads},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == hashlib.sha256(expected.encode()).hexdigest()


def test_the_vocabulary_counts_every_id(trained: Tokenizer) -> None:
    assert tokenizer.vocabulary_size(trained) == 300
    assert trained.token_to_id(tokenizer.END_OF_TEXT) == tokenizer.end_of_text(trained, path=Path())


def test_a_missing_a_broken_and_an_endless_tokenizer_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none.json: no such tokenizer; check `prepare.tokenizer.file`"):
        tokenizer.load(tmp_path / "none.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{}")
    with pytest.raises(DataError, match=r"broken.json: not a Hugging Face"):
        tokenizer.load(broken)
    endless = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    with pytest.raises(DataError, match="none of the tokens"):
        tokenizer.end_of_text(endless, path=tmp_path / "endless.json")
