"""A user's own data from the command line: one file, a rule that removes much, folders that cannot be written."""

from __future__ import annotations

import json
import os
import pydoc_data.topics
import shlex
from pathlib import Path

import pytest

from .conftest import Call

TINY = ["prepare.tokenizer.vocab_size=300", "model.layers=2", "model.width=32", "model.heads=2"]
TINY += ["load.sequence_length=32", "train.steps=2", "train.batch_size=4", "evaluate.samples=2"]
TINY += ["evaluate.max_bytes=3000", "evaluate.prompt_tokens=4", "evaluate.max_new_tokens=4", "train.threads=1"]


def command_in(text: str) -> list[str]:
    """The words of the first `what-if` command in a text, behind `ropewalk`."""
    words = shlex.split(text[text.index("`ropewalk prepare what-if") + 1 :].partition("`")[0])
    assert words[0] == "ropewalk"
    return words[1:]


def test_a_single_file_trains_with_no_setting_but_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("book.txt").write_text("\n\n".join(pydoc_data.topics.topics.values())[:80_000], encoding="utf-8")
    Path("book.toml").write_text('name = "book"\n[[prepare.sources]]\nname = "book"\npaths = ["book.txt"]\n')
    ended = call("run", "book.toml", *TINY, "--json")
    assert ended.status == 0, ended.err
    told = json.loads(ended.out)
    assert told["bits_per_byte"] > 0
    (line,) = told["warnings"]
    assert line.startswith("only 2 documents or blocks of documents are held out, ")
    assert line in ended.err
    assert "only 2 documents or blocks of documents are held out, " in Path(told["report"]).read_text("utf-8")
    assert "validation, " in call("prepare", "explain", "book.toml", "book:book.txt", TINY[0]).out


def test_the_command_that_a_warning_prints_works_as_printed(tiny: Path, call: Call) -> None:
    tiny.joinpath("tiny.toml").rename("my recipe.toml")
    edited = Path("my recipe.toml").read_text().replace("min_characters = 50", "min_characters = 300")
    Path("my recipe.toml").write_text(edited)
    ended = call("prepare", "my recipe.toml", "prepare.validation_share=0.3", "seed=3", "--json")
    (line,) = [line for line in json.loads(ended.out)["warnings"] if "rule min_characters removed 20 of 20" in line]
    assert line in ended.err
    words = command_in(line)
    assert words[2:5] == ["my recipe.toml", "seed=3", "prepare.validation_share=0.3"]
    found = call(*words)
    assert found.status == 0, found.err
    assert "gained 20 documents" in found.out
    assert "prepared" in ended.out
    assert len(list(Path("prepared").glob("*/manifest.json"))) == 1  # that of the warning
    page = Path(call("prepare", "report", *words[2:5]).out.strip()).read_text("utf-8")
    assert "my recipe.toml&#x27; seed=3" in page


@pytest.mark.parametrize(
    ("folder", "reason"),
    [
        (
            "/proc/x",
            '"/proc/x" cannot be written: the system makes no folders in /proc; name a folder that you can write',
        ),
        ("file", '"file" cannot be written: file is not a folder; '),
        ("file/x", '"file/x" cannot be written: file is not a folder; '),
        ("loop/x", '"loop/x" cannot be written: it is a symbolic link that leads to itself; '),
        ("closed/x", '"closed/x" cannot be written: Permission denied; '),
        ("s3://bucket/x", '"s3://bucket/x" is a URL; prepared data is written to a local folder'),
        ("", "it is empty; name a folder, such as `prepared`"),
    ],
)
def test_a_folder_that_cannot_be_written_is_one_line_before_any_work(
    tiny: Path, call: Call, folder: str, reason: str
) -> None:
    if folder == "closed/x" and os.geteuid() == 0:
        pytest.skip("root may write anywhere")
    Path("file").touch()
    Path("loop").symlink_to("loop")
    Path("closed").mkdir(mode=0o500)
    for words in (["run", "tiny.toml"], ["prepare", "explain", "tiny.toml", "notes:corpus/1.txt"]):
        ended = call(*words, f"prepare.folder='{folder}'")
        assert ended.status == 2
        (line,) = ended.err.splitlines()
        assert line.startswith(f"command line: prepare.folder='{folder}': `prepare.folder`: {reason}")
    assert not Path("runs/tiny").exists()


def test_a_run_directory_that_cannot_be_written_is_one_line(tiny: Path, call: Call) -> None:
    Path("file").touch()
    for runs, reason in (("/proc/x", "the system makes no folders in /proc"), ("file", "file is not a folder")):
        (line,) = call("prepare", "tiny.toml", "--runs", runs).err.splitlines()
        assert line.startswith(f'the run directory "{runs}/tiny" cannot be written: {reason}; name another folder')
    Path("runs").mkdir()
    Path("runs/tiny").touch()
    (line,) = call("prepare", "tiny.toml").err.splitlines()
    assert "runs/tiny is not a folder" in line
    assert not Path("prepared/stages").exists()
