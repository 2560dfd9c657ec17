"""Packed files that unpack without an error to other bytes than were packed: nothing of that is trained on."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import zstandard
from format_samples import jsonl, tarred, zipped
from planning import planned

from ropewalk.prepare import ledger
from ropewalk.prepare.config import Filter, Prepare, Source, Tokenizer
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.read import read_records

ROWS = jsonl([{"text": f"Rope {hashlib.sha256(b'%d' % number).hexdigest()} of hemp"} for number in range(5000)])
"""Hard to pack: a reader that unpacks a few hundred kB at once gives some before it comes to the checksum."""
PACKED: dict[str, bytes] = {
    "x.jsonl.gz": gzip.compress(ROWS),
    "x.jsonl.zst": zstandard.ZstdCompressor(write_checksum=True).compress(ROWS),
    "x.jsonl.bz2": bz2.compress(ROWS),
    "x.tgz": gzip.compress(tarred({"x.jsonl": ROWS})),
    "x.zip": zipped({"x.jsonl": ROWS}),
}


def spoil(name: str, data: bytes) -> None:
    """Writes `data` with one byte changed, as late as leaves it to the checksum to tell."""
    for place in range(len(data) * 9 // 10, 0, -len(data) // 100):
        Path(name).write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
        records = list(read_records(planned(name)))
        if len(records) > 100 and records[-1].fault == "checksum":
            return
    raise AssertionError(f"{name}: every change is found by other means")


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Path, Prepare, tuple[str, ...]]]:
    """Prepares `good.jsonl` and all that starts with an x: folder, settings, warnings."""
    monkeypatch.chdir(tmp_path)
    Path("good.jsonl").write_bytes(jsonl([{"text": f"A good document with number {n}."} for n in range(50)]))

    def make() -> tuple[Path, Prepare, tuple[str, ...]]:
        settings = Prepare(
            sources=(Source(name="s", paths=("good.jsonl", "x*")),),
            filter=Filter(min_characters=1),
            tokenizer=Tokenizer(vocab_size=300, train_bytes=5000),
            validation_share=0.2,
            workers=1,
        )
        found = prepare(settings, seed=1)
        return found.folder, settings, tuple(found.manifest.warnings)

    return make


def outcomes(folder: Path) -> dict[str, str | None]:
    table = pq.read_table(folder / ledger.FILE, columns=["id", "rule"])
    return dict(zip(table["id"].to_pylist(), table["rule"].to_pylist(), strict=True))


@pytest.mark.parametrize("name", PACKED)
def test_nothing_under_a_wrong_checksum_is_kept(made, name: str) -> None:
    spoil(name, PACKED[name])
    folder, settings, warnings = made()
    rules = outcomes(folder)
    spoilt = [document for document in rules if not document.startswith("s:good")]
    assert len(spoilt) > 100
    assert {rules.pop(document) for document in spoilt} == {"checksum"}
    assert set(rules.values()) == {None}
    first = spoilt[0]
    told = (
        "its checksum is wrong: what it covers may be damaged and is left out, as is what follows; get or pack it again"
    )
    assert any(re.match(f"could not read {first} and .* more of this file: {told}", line) for line in warnings)
    assert ledger.explain(folder, first, sources=settings.sources).reason == told
    assert ledger.explain(folder, spoilt[-1], sources=settings.sources).reason == told


def test_members_of_gzip_whose_own_checksum_is_right_are_kept(made) -> None:
    lines = ROWS.splitlines(keepends=True)
    first, second, third = (b"".join(lines[start : start + 1500]) for start in (0, 1500, 3000))
    spoil("x.jsonl.gz", gzip.compress(second))
    Path("x.jsonl.gz").write_bytes(gzip.compress(first) + Path("x.jsonl.gz").read_bytes() + gzip.compress(third))
    rules = outcomes(made()[0])
    assert {rules[f"s:x.jsonl.gz:{number}"] for number in range(1, 1501)} == {None}
    assert {rule for document, rule in rules.items() if rule} == {"checksum"}
    assert "s:x.jsonl.gz:3001" not in rules
    assert rules["s:x.jsonl.gz:rest"] == rules["s:x.jsonl.gz:1501"] == "checksum"


def test_a_small_member_with_a_wrong_checksum_takes_none_before_it(made) -> None:
    Path("x.jsonl.gz").write_bytes(gzip.compress(ROWS[:1000]) + gzip.compress(ROWS[-500:])[:-8] + b"\1" * 8)
    rules = outcomes(made()[0])
    whole = ROWS[:1000].count(b"\n")
    assert {rules[f"s:x.jsonl.gz:{number}"] for number in range(1, whole + 1)} == {None}
    assert rules["s:x.jsonl.gz:rest"] == "checksum"


def test_zeros_behind_gzip_are_its_end_and_other_bytes_are_a_fault(read) -> None:
    packed = gzip.compress(b'{"text": "a"}\n') * 2
    assert [record.data for record in read("a.jsonl.gz", packed + bytes(100_000))] == [b"a", b"a"]
    *documents, rest = read("b.jsonl.gz", packed + bytes(10) + b"no gzip")
    assert ([record.data for record in documents], rest.fault, rest.doubtful) == ([b"a", b"a"], "damaged", 0)
