"""What is told of sources that would give no documents, by the first records of their files."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from made_files import PROSE, dialogues, lines, packed, pairs, parquet, play, texts, write, zipped

from ropewalk.prepare.config import Prepare, Source
from ropewalk.prepare.inspection.verdicts import Finding, findings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found(*paths: str, **settings: str) -> list[Finding]:
    return findings(Prepare(sources=(Source(name="s", paths=paths, **settings),)))


PARQUET = parquet({"id": list(range(5)), "body": [PROSE] * 5})
WRONG = {
    "another key": (
        *("a.jsonl", lines(texts("content")), {}, "text_key"),
        ['`text_key` is "text", but its records have `id` (text, about 6 characters), `content` (text'],
        'set `text_key = "content"`',
    ),
    "a key that is no text": (
        *("a.jsonl", lines(texts("body", text_count=3)), {"text_key": "text_count"}, "text_key"),
        ["`text_count` is no text but number"],
        'set `text_key = "body"`',
    ),
    "dialogues as text": (
        *("a.jsonl", lines(dialogues()), {"format": "jsonl"}, "text_key"),
        ["`messages` (list of turns)"],
        'set `format = "chat"`: they are dialogues under `messages`',
    ),
    "questions as text": (
        *("a.jsonl", lines(pairs("question", "answer")), {}, "text_key"),
        ["`question` (text", "`answer` (text"],
        'set `format = "chat"`: they are a question under `question` and its answer under `answer`',
    ),
    "text as dialogues": (
        *("a.jsonl", lines(texts("content")), {"format": "chat"}, "format"),
        ["there is no dialogue under"],
        'set `format = "jsonl"` and `text_key = "content"`',
    ),
    "dialogues under another key": (
        *("a.jsonl", lines(dialogues(container="turns")), {"format": "chat"}, "text_key"),
        ["`turns` (list of turns)"],
        'set `text_key = "turns"`',
    ),
    "languages": (
        *("a.jsonl", lines([{"en": PROSE, "de": PROSE}] * 3), {}, "text_key"),
        ["`en` (text"],
        'set `text_key = "en"`; `de` in a source of its own',
    ),
    "a column that is missing": (
        *("a.parquet", PARQUET, {}, "text_key"),
        ['`text_key` is "text", but its records have `id` (number), `body` (text'],
        'set `text_key = "body"`',
    ),
    "a list named jsonl": (
        *("a.jsonl", json.dumps(texts("text")), {}, "paths"),
        ["it is a JSON list, not an object a line"],
        'rename it to a.json and set `format = "jsonl"`',
    ),
    "a list as text": (
        *("a.json", json.dumps(texts("content")), {}, "format"),
        ["it is a JSON list, and would be read as one text"],
        'set `format = "jsonl"` and `text_key = "content"`',
    ),
    "json lines as text": (
        *("a.txt", lines(texts("content")), {}, "format"),
        ["it is JSON lines, and would be read as one text; its records have `id`"],
        'set `format = "jsonl"` and `text_key = "content"`',
    ),
    "text as json lines": ("a.jsonl", PROSE, {}, "format", ["it is plain text"], 'set `format = "text"`'),
    "parquet as json lines": ("a.jsonl", PARQUET, {}, "format", ["it is Parquet"], 'set `format = "parquet"`'),
    "a key in an archive": (
        *("a.zip", zipped({"a.jsonl": lines(texts("content"))}), {}, "text_key"),
        ['`text_key` is "text"'],
        'set `text_key = "content"`',
    ),
    "an archive without text": ("a.zip", zipped({"a.png": b"\x89PNG"}), {}, "paths", ["no file in it"], "unpack it"),
    "not packed": (
        *("a.jsonl.gz", lines(texts("text")), {}, "paths"),
        ["its name ends in .gz, but it is JSON lines"],
        "rename it to a.jsonl",
    ),
    "packed": (
        *("a.jsonl", packed(lines(texts("text")), "gz"), {}, "paths"),
        ["it is packed with gzip, which its name does not tell"],
        "rename it to a.jsonl.gz",
    ),
    "packed otherwise": (
        *("a.txt.gz", packed(PROSE.encode(), "bz2"), {}, "paths"),
        ["it is packed with bzip2"],
        "rename it to a.txt.bz2",
    ),
    "empty": ("a.txt", b"", {}, "paths", ["it is empty"], "leave it out of `paths`"),
    "binary": ("a.txt", b"\x89PNG\r\n\0", {}, "paths", ["it is an image"], "leave it out of `paths`"),
    "latin 1": ("a.txt", ("é" + PROSE).encode("latin-1"), {}, "paths", ["not UTF-8"], "iconv -f LATIN1 -t UTF-8"),
    "utf-16": ("a.txt", PROSE.encode("utf-16"), {}, "paths", ["UTF-16"], "iconv -f UTF-16 -t UTF-8"),
    "no pdf": ("a.pdf", PROSE, {}, "format", ["it is plain text"], 'set `format = "text"`'),
    "broken lines": ("a.jsonl", b'{"text": }\n{"text": "}\n', {}, "format", ["line 1 is not JSON"], 'format = "text"'),
    "a broken line": ("a.jsonl", b'{"text": "a\n', {}, "paths", ["its first record is not JSON"], 'format = "text"'),
    "damaged": ("a.parquet", PARQUET[:-9], {}, "paths", ["it is damaged"], "get or make the file again"),
}


@pytest.mark.parametrize(("name", "data", "settings", "key", "told", "remedy"), WRONG.values(), ids=WRONG)
def test_a_source_that_gives_nothing_is_told_with_what_is_there_and_what_would_fit(
    name: str, data: bytes | str, settings: dict[str, str], key: str, told: list[str], remedy: str
) -> None:
    (finding,) = found(write(name, data), **settings)
    assert (finding.fatal, finding.key) == (True, key)
    assert finding.what.startswith(name)
    assert [words for words in told if words not in finding.what] == []
    assert remedy in finding.remedy


@pytest.mark.parametrize(
    ("name", "data", "settings"),
    [
        ("a.txt", PROSE, {}),
        ("a.jsonl", lines(texts("text")), {}),
        ("a.jsonl.gz", packed(lines(texts("a.b")), "gz"), {"text_key": "a.b"}),
        ("a.json", json.dumps(texts("text")), {"format": "jsonl"}),
        ("package.json", json.dumps({"name": "rope", "scripts": {"lay": "walk"}}), {}),
        ("a.txt", lines(texts("content")), {"format": "text"}),
        ("a.json", json.dumps(dialogues()), {"format": "chat"}),
        ("a.parquet", PARQUET, {"text_key": "body"}),
        ("a.zip", zipped({"b/a.txt": PROSE.encode()}), {}),
        ("a.jsonl", lines(texts("text", text="x" * 300_000, count=2)), {}),
    ],
)
def test_of_a_source_that_is_right_nothing_is_told(name: str, data: bytes | str, settings: dict[str, str]) -> None:
    assert found(write(name, data), **settings) == []


def test_what_is_wrong_with_some_files_of_a_folder_is_a_remark() -> None:
    write("data/a.jsonl", lines(texts("text")))
    write("data/b.jsonl", lines(texts("content")))
    write("data/c.txt", b"")
    remarks = found("data")
    assert [remark.fatal for remark in remarks] == [False, False]
    assert found("data/b.jsonl", "data/a.jsonl")[0].fatal


def test_the_same_of_several_files_is_told_once() -> None:
    for letter in "abc":
        write(f"data/{letter}.jsonl", lines(texts("content")))
    (finding,) = found("data")
    assert finding.what.startswith("data/a.jsonl and 2 more files of those looked at: ")


def test_records_without_text_among_others_are_counted() -> None:
    (remark,) = found(write("a.jsonl", lines([*texts("content", count=8), *texts("text", count=12)])))
    assert not remark.fatal
    assert "8 of its first 20 records have no text under `text`" in remark.what


def test_a_large_file_that_will_be_one_document_is_a_remark() -> None:
    (remark,) = found(write("play.txt", play(16_000)))
    assert not remark.fatal
    assert "1.3 MB will be one document; `split` cuts" in remark.what
    assert found("play.txt", split="blank-lines") == []


def test_urls_are_left_alone_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fsspec")
    import fsspec

    memory = fsspec.filesystem("memory")
    memory.pipe("/store/a.jsonl", lines(texts("content")))
    settings = Prepare(sources=(Source(name="s", paths=("memory://store/a.jsonl",)),))
    assert findings(settings) == []
    (finding,) = findings(settings, remotely=True)
    assert 'set `text_key = "content"`' in finding.remedy


CHECK_WITHOUT = """
import sys
from pathlib import Path
from ropewalk.flow import check
check(Path("r.toml"))
print([name for name in ("pyarrow", "numba", "torch", "tokenizers") if name in sys.modules])
"""


def test_a_recipe_of_text_is_checked_without_slow_libraries() -> None:
    write("a.jsonl.gz", packed(lines(texts("text")), "gz"))
    write("b.txt", PROSE)
    write("r.toml", 'name = "r"\n[[prepare.sources]]\nname = "a"\npaths = ["a.jsonl.gz", "b.txt"]\n')
    done = subprocess.run([sys.executable, "-c", CHECK_WITHOUT], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
