"""Seals: a file is read as it was written, or not at all."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from ropewalk.base.seal import (
    DamagedFile,
    parse_sealed_lines,
    parse_sealed_toml,
    read_sealed,
    sealed_lines,
    sealed_toml,
    write_sealed,
)

TREE = {"format": 2, "weight": 1.0, "name": "wörter", "inner": {"seal": "none"}}


def flipped(data: bytes, at: int, bit: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]


def read(path: Path) -> object:
    return read_sealed(path, what="note", remedy="write it anew", current=2, sealed_since=2, upgrades={1: dict})


def test_a_sealed_file_is_json_and_is_read_back(tmp_path: Path) -> None:
    write_sealed(tmp_path / "x.json", TREE)
    assert read(tmp_path / "x.json") == TREE
    assert json.loads((tmp_path / "x.json").read_bytes()).keys() == {*TREE, "seal"}


def test_every_flipped_bit_and_every_cut_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_sealed(path, TREE)
    data = path.read_bytes()
    changed = [flipped(data, at, bit) for at in range(len(data)) for bit in range(8)]
    for other in (*changed, *(data[:size] for size in range(len(data))), data + b" "):
        path.write_bytes(other)
        with pytest.raises(DamagedFile, match=r"x\.json: this note is damaged: .*; write it anew"):
            read(path)


def test_every_flipped_bit_of_toml_and_lines_is_noticed() -> None:
    toml, lines = sealed_toml("format = 2\nweight = 1.0\n"), sealed_lines([{"a": 1}, {"b": "ö"}])
    assert parse_sealed_toml(toml, path=Path("x"), what="note", remedy="", sealed_since=2).startswith("format = 2")
    assert parse_sealed_lines(lines, path=Path("x"), what="note", remedy="") == [{"a": 1}, {"b": "ö"}]
    for at, bit in itertools.product(range(len(toml)), range(8)):
        with pytest.raises(DamagedFile):
            parse_sealed_toml(flipped(toml, at, bit), path=Path("x"), what="note", remedy="", sealed_since=2)
    for at, bit in itertools.product(range(len(lines)), range(8)):
        with pytest.raises(DamagedFile):
            parse_sealed_lines(flipped(lines, at, bit), path=Path("x"), what="note", remedy="")
    for size in range(len(lines)):
        with pytest.raises(DamagedFile):
            parse_sealed_lines(lines[:size], path=Path("x"), what="note", remedy="")


def test_a_file_of_a_format_without_seals_is_read_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "old.json"
    path.write_text('{"format": 1, "weight": 1.0}')
    assert read(path) == {"format": 2, "weight": 1.0}
    read(path)
    assert len(caplog.records) == 1
    assert path.read_text() == '{"format": 1, "weight": 1.0}'
