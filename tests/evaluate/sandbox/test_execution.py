"""Verdicts: what passes, what fails, and what says nothing about a program."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.sandbox import judging
from ropewalk.evaluate.sandbox.execution import printable, run_program
from ropewalk.evaluate.sandbox.inside.plain_data import dump
from ropewalk.evaluate.sandbox.isolation import TRIAL, Isolation, choose
from ropewalk.evaluate.sandbox.judging import ATTEMPTS, Judge
from ropewalk.evaluate.sandbox.program import Limits, Program, Verdict

from .isolations import any_isolation


def judged(source: str, tests: str, *names: str, setup: str = "") -> Verdict:
    program = Program(source=source, tests=tests, names=names or ("f",), setup=setup)
    return run_program(program, any_isolation(), Limits(cpu_s=2, wall_s=6.0))


@pytest.mark.parametrize(
    "tests",
    [
        "assert f([1, 2], x={'a': (1.5, None)}) == ([1, 2], {'a': (1.5, None)})",
        "assert f(10 ** 400, x=-3) == (10 ** 400, -3)",
        "assert f({1, 'é\\ud800'}, x=b'z') == ({1, 'é\\ud800'}, b'z')",
        "assert f(True, x=1j)[0] is True and f(float('inf'), x=range(3))[1] == range(3)",
        "assert type(f(1, x=0)) is tuple and f(int, x=1)[0] is int",
    ],
)
def test_arguments_and_answers_of_built_in_types_arrive_as_they_are(tests: str) -> None:
    assert judged("def f(a, *, x):\n    return a, x\n", tests) == Verdict("pass")


def test_a_wrong_answer_fails_with_the_line_of_the_test() -> None:
    verdict = judged("def f(a):\n    return a\n", "assert f(1) == 1\nassert f(2) == 3, 'two'\n")
    assert verdict == Verdict("fail", "AssertionError: two at `assert f(2) == 3, 'two'`")


def test_tests_can_catch_what_the_program_raises() -> None:
    tests = (
        "try:\n    f(0)\nexcept ZeroDivisionError as error:\n    assert 'zero' in str(error)\nelse:\n    assert False\n"
    )
    assert judged("def f(a):\n    return 1 / a\n", tests).kind == "pass"


def test_tests_that_catch_everything_do_not_pass_a_program_that_ended() -> None:
    tests = "try:\n    f()\nexcept Exception:\n    pass\n"
    assert judged("import os\ndef f():\n    os._exit(0)\n", tests).kind == "fail"
    assert judged("def f():\n    raise SystemExit(0)\n", tests).kind == "fail"


def test_arguments_that_the_program_changes_in_place_change_for_the_tests() -> None:
    source = "def f(items, table):\n    items.sort()\n    items[0].append(7)\n    table.clear()\n"
    tests = "a, b, c = [5], [[9], [3]], {1: 2}\nb.append(a)\nf(b, c)\nassert b == [[3, 7], [5], [9]] and c == {}\n"
    assert judged(source, tests).kind == "pass"


def test_objects_iterators_and_functions_of_the_program_can_be_used() -> None:
    source = """
class Pair:
    def __init__(self, a, b):
        self.a, self.b = a, b
def total(pairs):
    return sum(pair.a + pair.b for pair in pairs)
def count():
    yield from range(3)
def adder(n):
    return lambda x: x + n
"""
    tests = """
pair = Pair(1, 2)
pair.b = 5
assert total([pair, Pair(3, 4)]) == 13 and pair.b == 5
assert list(count()) == [0, 1, 2] and adder(2)(3) == 5
"""
    assert judged(source, tests, "Pair", "total", "count", "adder").kind == "pass"


def test_helpers_of_the_problem_are_its_own_and_not_those_of_the_program() -> None:
    source = "def check_sum(x):\n    return 0\ndef f(x):\n    return 1\n"
    tests = "assert check_sum(f(0)) == 2\n"
    assert judged(source, tests, setup="def check_sum(x):\n    return x + 1\n").kind == "pass"


def test_a_block_under_main_does_not_run() -> None:
    assert (
        judged("def f():\n    return 1\nif __name__ == '__main__':\n    raise SystemExit\n", "assert f() == 1").kind
        == "pass"
    )


def test_code_that_does_not_parse_fails() -> None:
    assert judged("def f(:\n", "assert f() == 1").detail.startswith("SyntaxError")


def test_a_problem_whose_own_code_is_wrong_is_no_fault_of_the_program() -> None:
    good = "def f():\n    return 1\n"
    assert judged(good, "assert f() ==\n").kind == "fault"
    assert judged(good, "assert f() == 1\n", setup="import no_such_module\n").kind == "fault"
    assert judged("def f(g):\n    return 1\n", "assert f(lambda: 1) == 1\n").kind == "fault"


def command(code: str) -> Isolation:
    return Isolation("none", lambda limits, info: [sys.executable, "-c", code])


def test_a_sandbox_that_does_not_start_is_a_fault() -> None:
    verdict = run_program(TRIAL, command("raise SystemExit('no namespaces')"), Limits())
    assert verdict == Verdict("fault", "the sandbox did not start: no namespaces")


def test_a_sandbox_that_ends_without_a_verdict_or_with_one_of_its_own_is_a_fault() -> None:
    ready = "import os, sys; os.write(1, b'ready\\n'); sys.stdin.buffer.read(4); "
    message = dump((bytes(16), "pass", ""), lambda value: 0)
    forged = f"os.write(1, {len(message).to_bytes(4, 'big') + message!r})"
    assert run_program(TRIAL, command(ready), Limits()).kind == "fault"
    assert run_program(TRIAL, command(ready + forged), Limits()).kind == "fault"


def test_no_sandbox_that_works_means_no_run() -> None:
    with pytest.raises(UserError, match=r'no sandbox .* broken here.*evaluate.sandbox = "none"'):
        choose("namespaces", lambda isolation: Verdict("fault", "broken here"))


def test_auto_takes_the_first_isolation_that_works() -> None:
    def run(isolation: Isolation) -> Verdict:
        return Verdict("pass" if isolation.name == "namespaces" else "fault")

    assert choose("auto", run).name == "namespaces"
    assert choose("none", lambda isolation: Verdict("pass")).name == "none"


def counting(verdicts: list[Verdict]) -> tuple[list[Program], Callable[..., Verdict]]:
    seen: list[Program] = []

    def run(program: Program, isolation: Isolation, limits: Limits) -> Verdict:
        seen.append(program)
        return verdicts[min(len(seen), len(verdicts)) - 1]

    return seen, run


def test_a_fault_is_retried_and_a_verdict_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = counting([Verdict("fault"), Verdict("fail", "wrong")])
    monkeypatch.setattr(judging, "run_program", run)
    monkeypatch.setattr(judging, "working_isolation", lambda choice: command(""))
    assert Judge().verdicts([TRIAL]) == [Verdict("fail", "wrong")]
    assert len(seen) == 2
    seen, run = counting([Verdict("fault")])
    monkeypatch.setattr(judging, "run_program", run)
    assert Judge().verdicts([TRIAL]) == [Verdict("fault")]
    assert len(seen) == ATTEMPTS


def test_a_machine_without_room_for_a_sandbox_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*given: object) -> Verdict:
        raise BlockingIOError(11, "no process left")

    monkeypatch.setattr(judging, "run_program", run)
    monkeypatch.setattr(judging, "working_isolation", lambda choice: command(""))
    (verdict,) = Judge().verdicts([TRIAL])
    assert verdict.kind == "fault"
    assert "no process left" in verdict.detail


def test_out_of_memory_the_machine_ends_the_program_before_its_harness() -> None:
    source = "def f(pid):\n    return int(open(f'/proc/{pid}/oom_score_adj').read())\n"
    assert judged(source, "assert f('self') == 1000\nassert f(1) < 1000\n").kind == "pass"


def test_a_program_runs_once_and_a_fault_is_not_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "working_isolation", lambda choice: command(""))
    seen, run = counting([Verdict("fault")] * ATTEMPTS + [Verdict("pass")])
    monkeypatch.setattr(judging, "run_program", run)
    judge = Judge(memory=tmp_path / "folder" / "verdicts.jsonl")
    assert judge.verdicts([TRIAL, TRIAL]) == [Verdict("fault")] * 2
    assert len(seen) == ATTEMPTS
    assert judge.verdicts([TRIAL]) == judge.verdicts([TRIAL]) == [Verdict("pass")]
    assert len(seen) == ATTEMPTS + 1
    other = Judge(memory=judge.memory, limits=Limits(cpu_s=9))
    assert other.verdicts([TRIAL]) == [Verdict("pass")]
    assert len(seen) == ATTEMPTS + 2
    assert judge.memory is not None
    judge.memory.write_bytes(judge.memory.read_bytes()[:-30])  # torn by a crash
    assert other.verdicts([TRIAL]) == [Verdict("pass")]
    assert len(seen) == ATTEMPTS + 3


def test_text_of_a_program_cannot_steer_a_terminal() -> None:
    assert printable("a\x1b[2J\nb\x07\u202e") == "a\ufffd[2J b\ufffd\ufffd"
    assert len(printable("x" * 10_000)) == 500
