"""Reads bytes as if they were a file of a source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from planning import planned

from ropewalk.prepare.config import Limits
from ropewalk.prepare.documents import Record
from ropewalk.prepare.read import read_records


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Record]]:
    """`read("a.txt", data, format="text", document_bytes=1000)`: the records; ids begin with `s:a.txt`."""
    monkeypatch.chdir(tmp_path)

    def read(name: str, data: bytes, **settings: object) -> list[Record]:
        Path(name).write_bytes(data)
        caps = {key: settings.pop(key) for key in list(settings) if key in Limits.__dataclass_fields__}
        return list(read_records(planned(name, limits=Limits(**caps), **settings)))

    return read
