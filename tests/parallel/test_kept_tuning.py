"""Tuning results in the user's cache: a damaged file is measured again, never believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.parallel.kernels.matmul_tuning import Known


def test_damaged_tuning_results_are_measured_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Known("GPU", 1, tmp_path).put("problem", {"ours": 1.0, "torch": 2.0})  # type: ignore[arg-type]
    assert Known("GPU", 1, tmp_path).get("problem") == {"ours": 1.0, "torch": 2.0}  # type: ignore[arg-type]
    (path,) = (tmp_path / "products").iterdir()
    path.write_bytes(path.read_bytes().replace(b"2.0", b"0.0"))
    assert Known("GPU", 1, tmp_path).get("problem") is None  # type: ignore[arg-type]
    assert "measured again" in caplog.text
