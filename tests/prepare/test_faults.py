"""What could not be read is named, with the reason and the remedy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pyarrow as pa
import pytest

from ropewalk import flow
from ropewalk.base.errors import DataError
from ropewalk.base.progress import Silent
from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.faults import MOST_NAMED, REASONS, warnings
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.sources import PYTHON_SOURCES
from tests.flow.tiny import write_tiny

NOTES = Source(name="notes", paths=("notes/",), text_key="body")


class Listener(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def told(rows: list[tuple[str, str | None]], source: Source = NOTES) -> list[str]:
    """The warnings for documents of these (id, rule)."""
    ids = pa.array([f"{source.name}:{name}" for name, _ in rows])
    rules = pa.array([rule for _, rule in rows], pa.string())
    return list(warnings(pa.table({"id": ids, "source": [source.name] * len(rows), "rule": rules}), [source]))


def test_prepare_names_what_it_could_not_read_and_the_manifest_keeps_it(settings: Prepare) -> None:
    packed = Path("lines.jsonl.gz").read_bytes()
    Path("cut.jsonl.gz").write_bytes(packed[: len(packed) * 2 // 3])
    listener = Listener()
    made = prepare(settings, seed=1, progress=listener)
    assert set(made.manifest.warnings) <= set(listener.lines)
    assert re.match(
        "could not read packed:cut.jsonl.gz:rest: .* what comes after its document [1-5] is lost",
        made.manifest.warnings[0],
    )
    assert any(line.startswith("could not read lines:lines.jsonl:13: it is not JSON") for line in listener.lines)
    assert len([line for line in made.manifest.warnings if line.startswith("could not read")]) == MOST_NAMED + 1


def test_data_that_was_there_already_names_it_again_and_the_result_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_tiny(tmp_path)
    Path("corpus/latin.txt").write_bytes(b"caf\xe9 " * 50)
    first, again = Listener(), Listener()
    made = flow.prepare("tiny.toml", progress=first)
    flow.prepare("tiny.toml", ["name=another"], progress=again)
    line, *others = made["warnings"]
    assert not any(other.startswith("could not read") for other in others)
    assert line.startswith("could not read notes:corpus/latin.txt: it is not UTF-8")
    assert first.lines.count(line) == again.lines.count(line) == 1


def test_when_nothing_is_left_the_files_are_named_before_the_error(settings: Prepare) -> None:
    Path("only").mkdir()
    Path("only/latin.txt").write_bytes(b"caf\xe9 " * 50)
    listener = Listener()
    with pytest.raises(DataError, match="no document is left"):
        prepare(
            dataclasses.replace(settings, sources=(Source(name="only", paths=("only",)),)), seed=1, progress=listener
        )
    assert any(line.startswith("could not read only:only/latin.txt: it is not UTF-8") for line in listener.lines)


def test_lines_of_one_file_are_one_warning() -> None:
    rows = [("a.jsonl:1", None), *((f"a.jsonl:{number}", "no_text_key") for number in range(2, 9))]
    (line,) = told(rows)
    assert line.startswith(
        "could not read notes:a.jsonl:2 and 6 more of this file: there is no text under the key `body`"
    )


def test_of_many_files_a_handful_is_named_what_loses_most_first_and_the_others_are_counted() -> None:
    rows = [
        *((f"{number}.txt", "not_utf8") for number in range(20)),
        ("b.jsonl.gz:1", None),
        ("b.jsonl.gz:rest", "damaged"),
    ]
    lines = told(rows)
    assert len(lines) == MOST_NAMED + 1
    assert "notes:b.jsonl.gz:rest" in lines[0]
    assert lines[-1].startswith(f"could not read {21 - MOST_NAMED} more: `ropewalk prepare report`")


def test_a_file_of_which_nothing_is_read_says_so() -> None:
    assert "nothing of it could be read" in told([("a.txt", None), ("b.jsonl.gz:rest", "damaged")])[0]
    assert "nothing of it could be read" in told([("b.jsonl.gz:rest", "damaged")])[0]


def test_the_last_document_of_an_archive_is_named_by_its_member() -> None:
    rows = [("a.tar!x.txt", None), ("a.tar!y.jsonl:3", None), ("a.tar:rest", "damaged")]
    assert "what comes after its document y.jsonl:3 is lost" in told(rows)[0]


def test_judgements_and_built_in_corpora_are_no_warnings() -> None:
    assert told([("a.txt", "empty"), ("b.txt", "http_status"), ("c.txt", None)]) == []
    assert told([("stdlib/a.py", "not_utf8")], Source(name="code", paths=(PYTHON_SOURCES,))) == []


@pytest.mark.parametrize("rule", REASONS)
def test_every_reason_comes_with_a_remedy_and_its_key(rule: str) -> None:
    (line,) = told([("a", rule)])
    assert "; " in line
    assert "{" not in line
