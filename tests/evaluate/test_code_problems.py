"""Problems in the formats of HumanEval and MBPP: solutions pass, broken ones fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.code_problems import read_code_problems
from ropewalk.evaluate.sandbox.judging import Judge
from ropewalk.evaluate.sandbox.program import Verdict

from .code_examples import MBPP, PROBLEMS, broken, write_problems
from .sandbox.isolations import any_isolation

HUMANEVAL = Path(__file__).parents[2].parent / "shared/data/humaneval/HumanEval.jsonl.gz"


def kinds(verdicts: list[Verdict]) -> list[str]:
    return [verdict.kind for verdict in verdicts]


@pytest.mark.parametrize(("rows", "name"), [(PROBLEMS, "ours.jsonl.gz"), (MBPP, "ours.jsonl")])
def test_solutions_pass_and_fail_with_one_broken_line(rows: list[dict[str, object]], name: str, tmp_path: Path) -> None:
    judge = Judge(sandbox=any_isolation().name)
    problems = read_code_problems(write_problems(tmp_path / name, rows))
    assert kinds(judge.verdicts([each.program(each.solution) for each in problems])) == ["pass"] * len(rows)
    assert kinds(judge.verdicts([each.program(broken(each.solution)) for each in problems])) == ["fail"] * len(rows)


@pytest.mark.slow
@pytest.mark.skipif(not HUMANEVAL.exists(), reason="the problems of HumanEval are not here")
def test_all_of_humaneval_passes_and_fails_with_one_broken_line() -> None:
    judge = Judge(sandbox=any_isolation().name)
    problems = read_code_problems(HUMANEVAL)
    assert kinds(judge.verdicts([each.program(each.solution) for each in problems])) == ["pass"] * 164
    assert kinds(judge.verdicts([each.program(broken(each.solution)) for each in problems])) == ["fail"] * 164


@pytest.mark.skipif(not HUMANEVAL.exists(), reason="the problems of HumanEval are not here")
def test_every_problem_of_humaneval_needs_one_function_and_its_solution_is_not_cut() -> None:
    problems = read_code_problems(HUMANEVAL)
    assert [len(each.names) for each in problems] == [1] * 164
    assert [each.task_id for each in problems if each.cut(each.solution) != each.solution] == []


def test_a_completion_ends_where_the_next_thing_begins(tmp_path: Path) -> None:
    problem = read_code_problems(write_problems(tmp_path / "ours.jsonl"))[0]
    completion = "    return 1\n\n\ndef other():\n    pass\nprint(turns([]))\n"
    assert problem.cut(completion) == "    return 1\n\n"
    assert (
        problem.cut("    def inner():\n        if x:\n            pass\n")
        == "    def inner():\n        if x:\n            pass\n"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"test": None}, "no `test`"),
        ({"prompt": "def f(:\n"}, "not the beginning of a Python function"),
        ({"test": "def check(candidate:\n"}, "tests are not Python"),
        ({"task_id": "Ours/1"}, "two problems have the task_id 'Ours/1'"),
    ],
)
def test_a_wrong_problem_is_named_with_its_line(change: dict[str, object], told: str, tmp_path: Path) -> None:
    row = {key: value for key, value in {**PROBLEMS[0], **change}.items() if value is not None}
    path = write_problems(tmp_path / "ours.jsonl", [PROBLEMS[1], row])
    with pytest.raises(DataError, match=told) as caught:
        read_code_problems(path)
    assert "ours.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "told"),
    [
        (b"", "no problem"),
        (b"{}\n[", "1: the problem has no"),
        (b"\n[", "2: not JSON"),
        (b"\x1f\x8bxx", "damaged gzip file"),
    ],
)
def test_a_file_that_holds_no_problems_is_refused(data: bytes, told: str, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_bytes(data)
    with pytest.raises(DataError, match=told):
        read_code_problems(path)
    with pytest.raises(DataError, match="No such file"):
        read_code_problems(tmp_path / "none.jsonl")
