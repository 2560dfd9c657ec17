"""The tasks `humaneval` and `mbpp`: completions are cut, run once, and scored by their verdicts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Silent
from ropewalk.evaluate.config import TASKS, Evaluate
from ropewalk.evaluate.sandbox import judging
from ropewalk.evaluate.sandbox.program import Verdict
from ropewalk.evaluate.task import Generate, Generation

from ..code_examples import MBPP, PROBLEMS, broken, write_problems
from ..sandbox.isolations import any_isolation


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_task(path: Path | str, *, samples: int = 1, name: str = "humaneval", **settings: Any) -> Any:
    given = Evaluate(code_problems=str(path), code_samples=samples, **settings)
    return TASKS[name].load()(SimpleNamespace(settings=given, progress=Silent()))


def answers(*texts: str) -> list[Generation]:
    return [Generation([], text) for text in texts]


def test_every_problem_is_asked_with_its_own_prompt_and_the_papers_stop_words(tmp_path: Path) -> None:
    any_isolation()
    task = open_task(write_problems(tmp_path / "ours.jsonl"), samples=2)
    requests = task.requests()
    assert [each.prompt for each in requests] == [row["prompt"] for row in PROBLEMS for _ in range(2)]
    assert {each.sampling.stop for each in requests} == {("\nclass", "\ndef", "\n#", "\nif", "\nprint")}
    assert isinstance(requests[0], Generate)
    assert [each.repeat for each in requests[:2]] == [0, 1]
    assert (requests[0].sampling.temperature, requests[0].sampling.top_p) == (0.8, 0.95)
    assert open_task(write_problems(tmp_path / "ours.jsonl")).requests()[0].sampling.temperature == 0


def test_completions_are_scored_by_what_they_compute(tmp_path: Path) -> None:
    any_isolation()
    task = open_task(write_problems(tmp_path / "ours.jsonl"), samples=2)
    texts = []
    for number, row in enumerate(PROBLEMS):
        good = row["canonical_solution"]
        texts += [good + "\n\nprint(1 / 0)\n", good if number < 2 else broken(good)]
    found = {metric.name: metric for metric in task.metrics(answers(*texts))}
    assert found["pass@1"].value == pytest.approx((2 + 3 * 0.5) / 5)
    assert found["pass@1"].n == 5
    assert found["pass@1"].of == "problem"
    assert (found["timeouts"].value, found["sandbox_failures"].value) == (0.0, 0.0)
    scored = task.records(answers(*texts))
    assert [each.scores["pass@1"] for each in scored] == [1.0, 1.0, 0.5, 0.5, 0.5]


def test_mbpp_asks_with_the_text_and_the_tests(tmp_path: Path) -> None:
    any_isolation()
    task = open_task(write_problems(tmp_path / "mbpp.jsonl", MBPP), name="mbpp")
    assert task.requests()[0].prompt == (
        '"""\nWrite a function to double a number.\nassert double(4) == 8\nassert double(-1) == -2\n"""\n'
    )
    metrics = task.metrics(answers(*(row["code"] for row in MBPP)))
    assert metrics[0].value == 1.0


def test_metrics_computed_again_run_nothing_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, texts = write_problems(tmp_path / "ours.jsonl"), answers(*(row["canonical_solution"] for row in PROBLEMS))
    monkeypatch.setattr(judging, "working_isolation", lambda choice: None)
    monkeypatch.setattr(judging, "run_program", lambda *given: Verdict("pass"))
    first = open_task(path).metrics(texts)
    monkeypatch.setattr(judging, "run_program", lambda *given: pytest.fail("it runs again"))
    assert open_task(path).metrics(texts) == first


def test_failures_of_the_sandbox_are_told_and_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(program: Any, *given: Any) -> Verdict:
        return Verdict("fault", "no memory") if "knots" in program.source else Verdict("pass")

    monkeypatch.setattr(judging, "working_isolation", lambda choice: None)
    monkeypatch.setattr(judging, "run_program", run)
    task = open_task(write_problems(tmp_path / "ours.jsonl"))
    said: list[str] = []
    monkeypatch.setattr(task.held_out.progress, "say", said.append, raising=False)
    found = {metric.name: metric for metric in task.metrics(answers(*[""] * 5))}
    assert (found["pass@1"].value, found["pass@1"].n) == (1.0, 4)
    assert found["sandbox_failures"].value == pytest.approx(0.2)
    assert said == ["humaneval: 1 program could not be judged and are not scored: no memory"]


def test_a_machine_without_a_sandbox_refuses_before_the_model_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(choice: str) -> None:
        raise UserError(f"no sandbox for {choice}")

    monkeypatch.setattr(judging, "working_isolation", refuse)
    with pytest.raises(UserError, match="no sandbox for namespaces"):
        open_task(write_problems(tmp_path / "ours.jsonl"), sandbox="namespaces").requests()


def test_the_problems_must_be_named_or_located(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"`evaluate\.code_problems = [^`]*`; or the data set openai/openai_humaneval"):
        open_task("")
    write_problems(tmp_path / "here.jsonl")
    (tmp_path / "datasets.toml").write_text('["openai/openai_humaneval"]\ntest = "here.jsonl"\n')
    assert [each.prompt for each in open_task("").questions] == [row["prompt"] for row in PROBLEMS]


def test_a_question_asked_alone_is_judged_too(tmp_path: Path) -> None:
    any_isolation()
    task = open_task(write_problems(tmp_path / "ours.jsonl"))
    item = task.item(task.questions[2], answers("    return 1\n"))
    assert item.verdicts == ("fail",)
