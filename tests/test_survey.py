"""The pages that lead from the survey to the code say what is true, in both languages."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from ropewalk.config.schema import fields_of, item_of, options_of, section_of
from ropewalk.flow.recipe import Recipe
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve
from tests.flow.tiny import write_tiny
from tests.survey_shows import BENCHMARKS, BY_TESTS, COMMANDS, GPU, Kind, kind_of, runs_of

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Language:
    """What differs between the two pages."""

    file: str
    count: str
    """The line that counts: techniques, then techniques in place."""
    absent: str
    """The second column of a technique that does not exist yet; the group is its future folder."""
    see: str
    """The second column of one that has its row elsewhere: section and technique."""
    shown: dict[str, str]
    """The last column, by kind of proof."""


ENGLISH = Language(
    "survey.md",
    r"^\*\*(\d+) techniques, (\d+) in place\*\*$",
    r"not yet \(`(ropewalk/[a-z]+/)`\)",
    r"see ([\d.]+(?: \(\d\))?): (.+)",
    {kind: kind for kind in get_args(Kind)},
)
CHINESE = Language(
    "survey.zh-CN.md",
    r"^\*\*(\d+) 项技术，(\d+) 项已实现\*\*$",
    r"尚未实现（`(ropewalk/[a-z]+/)`）",
    r"见 ([\d.]+(?: \(\d\))?)：(.+)",
    {"command": "命令", "run": "运行", "GPU run": "GPU 运行", "test": "测试", "benchmark": "基准"},
)
both = pytest.mark.parametrize("language", [ENGLISH, CHINESE], ids=["English", "Chinese"])


@dataclass(frozen=True)
class Row:
    """One line of a table, with the number of its section."""

    line: int
    section: str
    technique: str
    place: str
    use: str
    evidence: str
    shown: str
    in_place: bool
    see: tuple[str, ...] | None
    """Section and technique of the row that it repeats."""

    def tokens(self) -> list[list[str]]:
        """What stands in backticks in each column after the first, sorted: word order differs."""
        return [sorted(re.findall(r"`([^`]+)`", cell)) for cell in (self.place, self.use, self.evidence)]


def text_of(language: Language) -> str:
    return (ROOT / "docs" / language.file).read_text(encoding="utf-8")


def sections_of(language: Language) -> list[str]:
    return re.findall(r"^(#+ \d+(?:\.\d+)?(?: \(\d+\))?) \S", text_of(language), flags=re.MULTILINE)


def rows_of(language: Language) -> list[Row]:
    rows: list[Row] = []
    section = ""
    for number, line in enumerate(text_of(language).splitlines(), start=1):
        if heading := re.match(r"##+ (\d+(?:\.\d+)?(?: \(\d+\))?) ", line):
            section = heading[1]
        elif re.match(r"\|[ :-]*-[ |:-]*$", line):
            rows.pop()  # what stands above the rule is the table's head
        elif line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 5, f"{language.file}:{number}: {len(cells)} columns instead of 5"
            see = re.fullmatch(language.see, cells[1])
            in_place = re.fullmatch(language.absent, cells[1]) is None and see is None
            rows.append(Row(number, section, *cells, in_place, see and see.groups()))
    return rows


def is_path(token: str) -> bool:
    return (ROOT / token.split("/")[0]).is_dir() or token.endswith((".py", ".md"))


def type_of(key: str) -> Any:
    """The type of a recipe key such as `train.schedule.peak_lr`, or None; follows lists into their items."""
    kind: Any = Recipe
    for name in key.split("."):
        section = section_of(kind) or section_of(item_of(kind))
        fields = {field.name: field.kind for field in fields_of(section)} if section else {}
        if name not in fields:
            return None
        kind = fields[name]
    return kind


def may_be(kind: Any, value: object) -> bool:
    """Whether a choice between names has this one; anything else is checked when a recipe is read."""
    named = [set(get_args(choice)) for choice in options_of(kind) if get_origin(choice) is Literal]
    return not named or any(value in names for names in named)


def test_both_pages_have_the_same_sections() -> None:
    assert sections_of(ENGLISH) == sections_of(CHINESE)
    assert len(set(sections_of(ENGLISH))) == len(sections_of(ENGLISH))


def test_both_pages_have_the_same_rows_in_the_same_order() -> None:
    english, chinese = rows_of(ENGLISH), rows_of(CHINESE)
    assert len(english) == len(chinese)
    assert [(row.section, row.tokens()) for row in english] == [(row.section, row.tokens()) for row in chinese]


def test_both_pages_agree_on_what_is_not_yet_there() -> None:
    different = [
        f"{ENGLISH.file}:{english.line} and {CHINESE.file}:{chinese.line}"
        for english, chinese in zip(rows_of(ENGLISH), rows_of(CHINESE), strict=True)
        if english.in_place != chinese.in_place
    ]
    assert different == []


@both
def test_the_count_line_counts_the_rows(language: Language) -> None:
    counts = re.findall(language.count, text_of(language), flags=re.MULTILINE)
    rows = [row for row in rows_of(language) if row.see is None]
    assert counts == [(str(len(rows)), str(sum(row.in_place for row in rows)))]


@both
def test_a_row_that_repeats_another_leads_to_it(language: Language) -> None:
    rows = rows_of(language)
    own = {(row.section, row.technique) for row in rows if row.see is None}
    assert [row.technique for row in rows if row.see and row.see not in own] == []


@both
def test_every_technique_is_named_once_in_its_section(language: Language) -> None:
    names = [(row.section, row.technique) for row in rows_of(language)]
    assert all(technique for _, technique in names)
    assert len(set(names)) == len(names)


@both
def test_every_technique_in_place_names_its_file_its_use_and_its_test(language: Language) -> None:
    incomplete = []
    for row in (row for row in rows_of(language) if row.in_place):
        place, use, evidence = row.tokens()
        files = place and all(token.startswith("ropewalk/") for token in place)
        tests = evidence and all(token.startswith(("tests/", "benchmarks/")) for token in evidence)
        if not (files and use and tests):
            incomplete.append(f"{language.file}:{row.line}: {row.technique}")
    assert incomplete == []


@both
def test_a_technique_that_is_not_yet_there_claims_no_use_and_no_evidence(language: Language) -> None:
    absent = [row for row in rows_of(language) if not row.in_place]
    assert [row.technique for row in absent if (row.use, row.evidence, row.shown) != ("–", "–", "–")] == []


@both
def test_every_technique_in_place_says_how_it_was_shown(language: Language) -> None:
    expected = {
        row.line: language.shown[kind_of(english.technique, english.use)]
        for row, english in zip(rows_of(language), rows_of(ENGLISH), strict=True)
        if row.in_place
    }
    assert {row.line: row.shown for row in rows_of(language) if row.in_place} == expected


def test_every_command_belongs_to_a_row() -> None:
    techniques = {row.technique for row in rows_of(ENGLISH) if row.in_place}
    assert {*COMMANDS, *GPU, *BY_TESTS, *BENCHMARKS} - techniques == set()


@dataclass(frozen=True)
class Ending:
    """How a file of tests ended."""

    good: bool
    passed: int
    said: str


def outcome(status: int, said: str) -> Ending:
    """What pytest's exit status and output mean: 5 says that nothing was selected, so that nothing failed either."""
    counts = re.findall(r"^(?:=+ )?(?:\d+ [a-z]+, )*?(\d+) passed\b.* in [\d.]+s", said, re.MULTILINE)
    return Ending(status in (0, 5), int(counts[-1]) if counts else 0, said[-2000:])


@functools.cache
def ending_of(file: str) -> Ending:
    """Runs a file of tests, slow ones too, without the project's own options, which shorten what pytest says."""
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-n", "0", "-m", "not gpu", file]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return outcome(done.returncode, done.stdout)


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tiny.toml` and its finished run."""
    folder = tmp_path_factory.mktemp("survey")
    write_tiny(folder)
    assert "report" in said_by("ropewalk run tiny.toml", folder)
    return folder


def said_by(command: str, folder: Path) -> str:
    """What a command prints, which must end well."""
    program = [sys.executable, "-m", "ropewalk", *shlex.split(command)[1:]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(program, cwd=folder, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def in_place(kind: Kind) -> list[object]:
    rows = [row for row in rows_of(ENGLISH) if row.in_place and kind_of(row.technique, row.use) == kind]
    return [pytest.param(row, id=f"{row.section} {row.technique}") for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("row", in_place("command"))
def test_the_command_of_a_row_shows_it(row: Row, tiny_run: Path) -> None:
    show = COMMANDS[row.technique]
    assert re.search(show.sign, said_by(show.command, tiny_run), re.DOTALL), show.sign


@pytest.mark.slow
@pytest.mark.parametrize("row", in_place("run"))
def test_a_run_with_the_setting_of_a_row_differs_from_one_without(row: Row) -> None:
    for shown in runs_of(row.technique, row.use):
        without, with_it = shown.without(), shown.with_it()
        seen = [fact for fact in (shown.sees, "losses") if with_it.get(fact) != without.get(fact)]
        assert seen, f"{shown.key} = {shown.value} changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("row", in_place("test"))
def test_the_tests_of_a_row_run_and_pass(row: Row) -> None:
    files = [token for token in row.tokens()[2] if token.startswith("tests/") and token != "tests/test_survey.py"]
    ended = [ending_of(file) for file in files]
    assert [each.said for each in ended if not each.good] == []
    if not sum(each.passed for each in ended):
        pytest.skip("all of its tests need what this machine does not have")


@pytest.mark.parametrize(
    ("status", "said", "good", "passed"),
    [
        (0, "..                       [100%]\n2 passed in 0.10s\n", True, 2),
        (0, "s.\n1 passed, 1 skipped, 3 deselected in 61.20s (0:01:01)\n", True, 1),
        (0, "ss\n2 skipped in 0.10s\n", True, 0),
        (5, "4 deselected in 0.10s\n", True, 0),
        (1, "F.\nFAILED tests/x.py::test_it\n1 failed, 1 passed in 0.10s\n", False, 1),
        (4, "ERROR: file or directory not found: tests/x.py\n", False, 0),
    ],
)
def test_what_pytest_says_is_understood(status: int, said: str, good: bool, passed: int) -> None:
    found = outcome(status, said)
    assert (found.good, found.passed) == (good, passed)


@pytest.mark.slow
def test_a_file_of_tests_that_pass_counts_as_passed() -> None:
    # With the project's own options pytest would print no count.
    assert ending_of("tests/base/test_seal.py").passed > 0


def benchmarked() -> list[Row]:
    return [row for row in rows_of(ENGLISH) if row.in_place and kind_of(row.technique, row.use) == "benchmark"]


@pytest.mark.parametrize("row", benchmarked(), ids=lambda row: row.technique)
def test_the_figures_of_a_row_are_those_of_its_benchmark(row: Row) -> None:
    (script,) = (token for token in row.tokens()[2] if token.startswith("benchmarks/"))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    section = page.split(f"\n## {Path(script).stem}\n")[1].split("\n## ")[0]
    figures = re.findall(r"\d+\.\d+", row.use)
    assert figures
    assert [figure for figure in figures if figure not in section] == []


def test_every_file_and_folder_of_a_technique_in_place_exists() -> None:
    missing = [
        f"{ENGLISH.file}:{row.line}: {token}"
        for row in rows_of(ENGLISH)
        if row.in_place
        for token in chain(*row.tokens())
        if is_path(token) and not (ROOT / token).exists()
    ]
    assert missing == []


def test_every_recipe_key_exists_and_every_other_name_is_in_the_formats_page() -> None:
    documented = set(re.findall(r"`([^`]+)`", (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")))
    unknown = []
    for row in rows_of(ENGLISH):
        for token in chain(*row.tokens()):
            if is_path(token) or token.startswith("ropewalk ") or token in documented:
                continue
            key, _, value = token.partition(" = ")
            kind = type_of(key)
            if kind is None or (value and not may_be(kind, json.loads(value))):
                unknown.append(f"{ENGLISH.file}:{row.line}: {token}")
    assert unknown == []


def test_every_command_names_a_verb_of_the_command_line() -> None:
    from ropewalk.cli.main import VERBS

    commands = [
        (row.line, token) for row in rows_of(ENGLISH) for token in chain(*row.tokens()) if token.startswith("ropewalk ")
    ]
    assert commands
    assert [(line, command) for line, command in commands if command.split()[1] not in VERBS] == []


def test_the_shape_of_gpt3_counts_to_175_billion_parameters() -> None:
    # Section 7.5, with GPT-3's vocabulary and row length. Its biases, which this decoder does not have, are
    # less than 0.01 % of the total; "175 billion" is itself rounded from 174.6.
    gpt3 = Model(layers=96, heads=96, width=12_288, norm="layer", mlp="gelu", position="learned")
    spec = resolve(gpt3, vocabulary=50_257, sequence_length=2048)
    assert spec.parameters() == pytest.approx(175e9, rel=0.005)
