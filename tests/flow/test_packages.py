"""Packages that a recipe needs are named before any work, all at once."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from ropewalk.base.errors import ConfigError
from ropewalk.flow.recipes import check
from tests.flow.tiny import write_tiny


def test_a_recipe_names_every_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    Path("corpus/paper.pdf").write_bytes(b"%PDF-1.4")
    overrides = ['prepare.compression="zstd"', 'prepare.sources.1.paths=["corpus"]']
    find = importlib.util.find_spec
    hidden = ("zstandard", "pypdf")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find(name, *rest))
    with pytest.raises(ConfigError) as raised:
        check(Path("tiny.toml"), overrides)
    told = str(raised.value)
    assert "`prepare.compression` needs the package `zstandard`" in told
    assert "`prepare.sources.1.paths` needs the package `pypdf`" in told
    assert "pip install -e '.[pdf,zstd]'" in told
    hidden = ()
    check(Path("tiny.toml"), overrides)
