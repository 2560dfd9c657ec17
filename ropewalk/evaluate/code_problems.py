"""Programming problems with tests, in the formats of HumanEval (Chen et al. 2021) and MBPP (Austin et al. 2021)."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DataError

from .harness.table_files import read_json_lines
from .sandbox.program import Program

_HUMANEVAL = ("task_id", "prompt", "test", "entry_point")
_MBPP = ("task_id", "text", "test_list")
_HUMANEVAL_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""As in the paper: what begins after the end of the function."""
_MBPP_STOP = ("\nassert", '\n"""', "\nprint", "\nif", "\n```")


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeProblem:
    """A problem: what the model reads, and how a completion is judged."""

    task_id: str
    prompt: str
    tests: str
    names: tuple[str, ...]
    """Functions that the completed code must define for the tests."""
    prefix: str = ""
    """What precedes a completion in the tested program."""
    setup: str = ""
    """Code of the problem that the tests need."""
    stop: tuple[str, ...] = ()
    solution: str = ""
    """The canonical completion."""
    row: Mapping[str, Any] = field(default_factory=dict)

    def program(self, completion: str) -> Program:
        """The completed code with its tests."""
        source = f"{self.prefix}{completion}\n"
        return Program(source=source, setup=self.setup, tests=self.tests, names=self.names)

    def cut(self, completion: str) -> str:
        """The completion up to where the next thing begins after the function."""
        ends = [found for each in self.stop if (found := completion.find(each)) >= 0]
        return completion[: min(ends)] if ends else completion


def read_code_problems(path: Path) -> list[CodeProblem]:
    """The problems of a file of JSON lines, which may be gzipped; DataError names the line that is wrong."""
    return code_problems(((row, f"{path}:{number}") for number, row in read_json_lines(path)), str(path))


def code_problems(rows: Iterable[tuple[Mapping[str, Any], str]], place: str) -> list[CodeProblem]:
    """The problems of rows in either format, each given with what says where it stands; DataError if there is none, or
    if two have the same task_id."""
    problems = [read_code_problem(row, where) for row, where in rows]
    seen: set[str] = set()
    for problem in problems:
        if problem.task_id in seen:
            raise DataError(f"{place}: two problems have the task_id {problem.task_id!r}; leave one out")
        seen.add(problem.task_id)
    if not problems:
        raise DataError(f"{place}: there is no problem in it; give a file with one JSON object per line")
    return problems


def read_code_problem(row: Mapping[str, Any], where: str) -> CodeProblem:
    """The problem of a row in either format."""
    if "test_list" in row:
        return _mbpp(row, where)
    _require(row, _HUMANEVAL, where)
    entry = str(row["entry_point"])
    tests = f"{row['test']}\n\ncheck({entry})\n"
    setup = _parsable(str(row["prompt"]), where)
    return CodeProblem(
        task_id=str(row["task_id"]),
        prompt=str(row["prompt"]),
        prefix=str(row["prompt"]),
        setup=setup,
        tests=tests,
        names=_missing_names(tests, setup, where, {entry}),
        stop=_HUMANEVAL_STOP,
        solution=str(row.get("canonical_solution", "")),
        row=dict(row),
    )


def _mbpp(row: Mapping[str, Any], where: str) -> CodeProblem:
    _require(row, _MBPP, where)
    if not (isinstance(row["test_list"], list) and row["test_list"]):
        raise DataError(f"{where}: `test_list` must be a list of assertions")
    # What the setup needs of the tested code, such as a class, is there only after it is loaded.
    parts = [str(row.get("test_setup_code") or ""), *map(str, row["test_list"])]
    tests, solution = "\n".join(parts) + "\n", str(row.get("code", ""))
    setup, defined = _of_solution(solution, tests)
    shown = "\n".join(map(str, row["test_list"][:3]))
    return CodeProblem(
        task_id=str(row["task_id"]),
        prompt=f'"""\n{row["text"]}\n{shown}\n"""\n',
        setup=setup,
        tests=tests,
        names=_missing_names(tests, setup, where, defined),
        stop=_MBPP_STOP,
        solution=solution,
        row=dict(row),
    )


def _require(row: Mapping[str, Any], names: tuple[str, ...], where: str) -> None:
    missing = [name for name in names if name not in row]
    if missing:
        formats = f"HumanEval has {', '.join(_HUMANEVAL)}; MBPP has {', '.join(_MBPP)}"
        raise DataError(f"{where}: the problem has no `{missing[0]}` ({formats})")


def _parsable(prompt: str, where: str) -> str:
    """The prompt as code of its own: it may end where the body of the function begins."""
    for end in ("", "\n    pass\n", "    pass\n"):
        try:
            ast.parse(prompt + end)
        except SyntaxError:
            continue
        return prompt + end
    raise DataError(f"{where}: the prompt is not the beginning of a Python function")


def _of_solution(solution: str, tests: str) -> tuple[str, set[str]]:
    """What the tests need of the canonical solution: its imports as code, and the names of functions and classes, which
    may be those of built-in functions."""
    try:
        tree, used = ast.parse(solution), _names(ast.parse(tests))[0]
    except SyntaxError:
        return "", set()
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    imports = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) and _names(node)[1] & used]
    return "".join(f"{ast.unparse(node)}\n" for node in imports), defined & used


def _missing_names(tests: str, setup: str, where: str, known: set[str]) -> tuple[str, ...]:
    """The names that tests use and neither they nor the setup define: those of the tested code."""
    try:
        used, made = _names(ast.parse(tests))
        made |= _names(ast.parse(setup))[1]
    except SyntaxError as error:
        raise DataError(f"{where}: the tests are not Python: {error}") from None
    return tuple(sorted(known | (used - made - set(dir(builtins)))))


def _names(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Names that code reads, and names that it defines."""
    used: set[str] = set()
    made: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else made).add(node.id)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            made.add(node.name)
        elif isinstance(node, ast.arg):
            made.add(node.arg)
        elif isinstance(node, ast.alias):
            made.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, ast.ExceptHandler) and node.name:
            made.add(node.name)
    return used, made
