"""Layouts beside the data: a damaged one, or a sound one of other documents, is made again."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

from ropewalk.load.layout import laid_out


@pytest.mark.parametrize("damage", ["flip", "cut", "other"])
def test_a_layout_that_is_not_what_was_written_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    lengths = np.arange(5, 60, dtype=np.int64)
    expected = laid_out(lengths, length=32, key=3, folder=tmp_path, name="docs").pieces.tolist()  # not the map
    (path,) = tmp_path.glob("*.bin")
    before = path.read_bytes()
    if damage == "other":
        laid_out(lengths + 1, length=32, key=3, folder=tmp_path, name="docs")
        shutil.copy(next(other for other in tmp_path.glob("*.bin") if other != path), path)
    else:
        path.write_bytes(bytes([before[0] ^ 1]) + before[1:] if damage == "flip" else before[:-9])
    with caplog.at_level(logging.WARNING):
        found = laid_out(lengths, length=32, key=3, folder=tmp_path, name="docs")
    assert "it is made again" in caplog.text
    assert path.read_bytes() == before
    assert found.pieces.tolist() == expected
