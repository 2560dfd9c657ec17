"""A small corpus with every kind of input, good and hostile, and settings that read it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from random_prose import prose

from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with `texts/`, `lines.jsonl` and `lines.jsonl.gz`."""
    monkeypatch.chdir(tmp_path)
    texts = Path("texts")
    (texts / "deep").mkdir(parents=True)
    for number in range(20):
        (texts / f"{number:02d}.md").write_text(prose(number), encoding="utf-8")
    (texts / "deep" / "copy.txt").write_text(prose(3), encoding="utf-8")
    (texts / "crlf.txt").write_bytes(prose(50).replace("\n", "\r\n").encode())
    (texts / "mark.txt").write_bytes(b"\xef\xbb\xbf" + prose(51).encode())
    (texts / "latin.txt").write_bytes(prose(52).encode() + b"\xe9\xff")
    (texts / "nul.txt").write_bytes(prose(53).encode() + b"\0")
    (texts / "empty.txt").write_bytes(b"")
    (texts / "short.txt").write_text("short\n")
    (texts / "special.txt").write_text(prose(54) + "<|endoftext|> is text here\n", encoding="utf-8")
    (texts / "picture.png").write_bytes(b"\x89PNG")
    lines = [json.dumps({"text": prose(100 + number), "n": number}) for number in range(12)]
    lines += ["{broken", "[1, 2]", '{"title": "no text"}', '{"text": 5}', "", json.dumps({"text": prose(101)})]
    lines += [json.dumps({"text": prose(7)}), '{"text": "' + "lone \\ud800 surrogate " * 20 + '"}']
    Path("lines.jsonl").write_bytes("\n".join(lines).encode() + b'\n{"text": "\xff"}\n')
    with gzip.open("lines.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({"body": prose(200 + number)}) + "\n" for number in range(6))
    return tmp_path


@pytest.fixture
def settings(corpus: Path) -> Prepare:
    """Three sources over `corpus`, a small vocabulary, small shards."""
    return Prepare(
        sources=(
            Source(name="texts", paths=("texts",), domain="prose"),
            Source(name="lines", paths=("lines.jsonl",)),
            Source(name="packed", paths=("*.jsonl.gz",), text_key="body"),
        ),
        filter=Filter(min_characters=100),
        tokenizer=Tokenizer(vocab_size=300, train_bytes=5000),
        validation_share=0.2,
        shard_tokens=1500,
        workers=1,
        folder=str(corpus / "prepared"),
    )


@pytest.fixture
def tree() -> Callable[[Path], dict[str, bytes]]:
    """All files below a folder but the lock, by name."""

    def read(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read
