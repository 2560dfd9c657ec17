"""What `new` finds in files of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_files import CHINESE, PROSE, SENTENCE, dialogues, lines, packed, pairs, parquet, play, texts, write, zipped

from ropewalk.base.errors import UserError
from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.inspection.survey import Surveyed, survey
from ropewalk.prepare.read import read_records
from ropewalk.prepare.sources import collect_files


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def one(*paths: str) -> Surveyed:
    (found,) = survey(paths)[0]
    return found


def settings(found: Surveyed) -> dict[str, Any]:
    return {key: setting.value for key, setting in found.settings.items()}


def documents(found: Surveyed) -> list[str]:
    """What the readers of prepare make of a source as it was found."""
    source = Source(name=found.name, paths=found.paths, **settings(found))
    records = [r for file in collect_files(Prepare(sources=(source,))).files for r in read_records(file)]
    assert [record.fault for record in records if record.fault] == []
    return [record.data.decode() for record in records]


CASES = {
    "text": ("a.txt", PROSE, {}),
    "markdown": ("a.md", f"# A\n{PROSE}", {}),
    "json lines": ("a.jsonl", lines(texts("text")), {}),
    "another key": ("a.jsonl", lines(texts("content")), {"text_key": "content"}),
    "a nested key": ("a.jsonl", lines(texts("meta.body")), {"text_key": "meta.body"}),
    "a usual key beside a longer one": (
        "a.jsonl",
        lines(texts("raw", content=SENTENCE * 4)),
        {"text_key": "content"},
    ),
    "a key beside pages of HTML": (
        "a.jsonl",
        lines(texts("plain", page=f"<html><body>{PROSE * 9}</body></html>")),
        {"text_key": "plain"},
    ),
    "labels": (
        "a.jsonl",
        lines(texts("text", link="https://example.org", year=1851)),
        {"url_key": "link", "time_key": "year"},
    ),
    "messages": ("a.jsonl", lines(dialogues()), {"format": "chat"}),
    "sharegpt": ("a.jsonl", lines(dialogues(container="conversations")), {"format": "chat"}),
    "turns": ("a.jsonl", lines(dialogues(container="turns")), {"format": "chat", "text_key": "turns"}),
    "alpaca": (
        "a.json",
        json.dumps([{**row, "input": ""} for row in pairs("instruction", "output")]),
        {"format": "chat"},
    ),
    "questions": ("a.jsonl", lines(pairs("question", "answer")), {"format": "chat"}),
    "a list": ("a.json", json.dumps(texts("content")), {"format": "jsonl", "text_key": "content"}),
    "json lines named json": ("a.json", lines(texts("text")), {"format": "jsonl"}),
    "json lines named txt": ("a.txt", lines(texts("content")), {"format": "jsonl", "text_key": "content"}),
    "an unknown ending": ("a.dump", lines(texts("text")), {"format": "jsonl"}),
    "parquet": (
        "a.parquet",
        parquet({"id": list(range(30)), "content": [f"{n}. {PROSE}" for n in range(30)]}),
        {"text_key": "content"},
    ),
    "parquet without its ending": (
        "a.data",
        parquet({"text": [f"{n}. {PROSE}" for n in range(30)]}),
        {"format": "parquet"},
    ),
    "dialogues in parquet": (
        "a.parquet",
        parquet({"messages": [row["messages"] for row in dialogues()]}),
        {"format": "chat"},
    ),
    "html": ("a.html", f"<html><body><p>{PROSE}</p></body></html>", {}),
    "a zip of json lines": ("a.zip", zipped({"in/a.jsonl": lines(texts("content"))}), {"text_key": "content"}),
}


@pytest.mark.parametrize(("name", "data", "expected"), CASES.values(), ids=CASES)
def test_a_file_is_read_as_what_it_is(name: str, data: bytes | str, expected: dict[str, Any]) -> None:
    found = one(write(name, data))
    assert settings(found) == expected
    assert len(documents(found)) == found.documents
    assert "ropewalk" in documents(found)[0]


@pytest.mark.parametrize("packing", ["gz", "bz2", "zst"])
def test_packed_files_are_looked_into(packing: str) -> None:
    data = lines(texts("content", count=400, text=PROSE))
    found = one(write(f"a.jsonl.{packing}", packed(data, packing)))
    assert settings(found) == {"text_key": "content"}
    assert found.documents == 400
    assert 0.9 * len(data) < found.text_bytes < len(data)


def test_sizes_of_what_was_not_read_are_estimated() -> None:
    rows = texts("content", count=6000)
    plain, small = write("a.jsonl", lines(rows)), write("b.jsonl.gz", packed(lines(rows), "gz"))
    assert Path(plain).stat().st_size > 4_000_000
    for name in (plain, small):
        found = one(name)
        assert 0.8 * 6000 < found.documents < 1.2 * 6000
        assert 0.8 * 6000 * len(PROSE) < found.text_bytes < 1.2 * 6000 * len(PROSE)


def test_files_that_are_read_in_different_ways_become_sources_of_their_own() -> None:
    write("data/notes.txt", PROSE)
    write("data/a.jsonl", lines(texts("content")))
    write("data/b.jsonl", lines(texts("content")))
    write("data/talk.json", json.dumps(dialogues()))
    found, notes = survey(["data"])
    assert notes == []
    assert {source.name: settings(source) for source in found} == {
        "data-content": {"text_key": "content"},
        "talk": {"format": "chat"},
    }
    assert [len(documents(source)) for source in found] == [61, 30]


def test_parallel_texts_become_a_source_for_each_language() -> None:
    rows = [{"file": f"{n}.html", "en": PROSE, "zh": CHINESE * 9} for n in range(20)]
    found, _ = survey([write("pages.jsonl", lines(rows))])
    assert [(source.name, settings(source)) for source in found] == [
        ("pages-en", {"text_key": "en"}),
        ("pages-zh", {"text_key": "zh"}),
    ]
    assert found[1].writing.dense_share > 0.95
    assert list(found[1].writing.languages) == ["zh"]
    assert list(found[0].writing.languages) == ["en"]


def test_a_large_file_of_speeches_is_cut_at_blank_lines_as_prepare_cuts_it() -> None:
    found = one(write("play.txt", play(16_000)))
    assert settings(found) == {"split": "blank-lines"}
    assert "1.3 MB in one file: cut at blank lines into about 16,000 documents" in found.settings["split"].reason
    assert len(documents(found)) == pytest.approx(found.documents, rel=0.05)


def test_a_folder_of_code_is_code() -> None:
    for number in range(30):
        write(f"code/{number}.py", f"def twist(yarn):\n    return yarn + {number}\n")
    write("code/readme.md", PROSE)
    assert settings(one("code")) == {"domain": "code"}


def test_what_cannot_be_read_is_told_and_the_rest_is_taken() -> None:
    write("data/a.txt", PROSE)
    write("data/b.txt", PROSE)
    write("data/empty.txt", b"")
    write("data/picture.png", b"\x89PNG\r\n")
    found, notes = survey(["data"])
    assert [source.paths for source in found] == [("data",)]
    assert any("data/empty.txt" in note and "it is empty" in note for note in notes)
    assert any("1 file with other endings passed over (.png 1)" in note for note in notes)


@pytest.mark.parametrize(
    ("name", "data", "told"),
    [
        ("a.txt", b"", "it is empty"),
        ("a.txt", b"\x89PNG\r\n\0", "it is an image"),
        ("a.txt", packed(PROSE.encode(), "gz"), "it is packed with gzip, which its name does not tell"),
        ("a.jsonl.gz", lines(texts("text")), "its name ends in .gz, but it is JSON lines"),
        ("a.txt", PROSE.encode("utf-16"), "it is text in UTF-16"),
        ("a.jsonl", lines([{"label": 1}]), "its records hold no text"),
        ("a.txt.xz", b"\xfd7zXZ\x00aaa", "it is packed with xz, which is not read"),
    ],
)
def test_a_file_that_gives_nothing_is_refused_with_the_reason(name: str, data: bytes, told: str) -> None:
    with pytest.raises(UserError, match=r"nothing of .* can be read") as refused:
        survey([write(name, data)])
    assert told in str(refused.value)


def test_chinese_is_told_and_needs_fewer_bytes_a_token() -> None:
    found = one(write("poems.jsonl", lines(texts("text", text=CHINESE * 4))))
    assert found.writing.dense_share > 0.9
    assert found.writing.characters_95 >= 20
    english = one(write("en.jsonl", lines(texts("text"))))
    assert found.writing.bytes_per_token(4096) < english.writing.bytes_per_token(4096)
