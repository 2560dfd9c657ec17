"""`ropewalk code`: samples of generated code without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk import flow
from ropewalk.base.errors import DataError, UserError
from ropewalk.cli.main import main
from tests.evaluate.code_examples import PROBLEMS, broken, write_problems
from tests.evaluate.sandbox.isolations import any_isolation


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Problems, and two samples of each: a right one, and one that is right for the first two problems."""
    rows = []
    for number, row in enumerate(PROBLEMS):
        good = row["canonical_solution"]
        rows += [(row["task_id"], good), (row["task_id"], good if number < 2 else broken(good))]
    samples = tmp_path / "samples.jsonl"
    samples.write_text("".join(json.dumps({"task_id": task, "completion": text}) + "\n" for task, text in rows))
    return write_problems(tmp_path / "problems.jsonl.gz"), samples


def test_the_command_gives_pass_at_k_and_the_verdict_on_each_sample(
    files: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    any_isolation()
    results = tmp_path / "results.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["code", "score", *map(str, files), "--k", "1,2,5", "--results", str(results), "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["verdicts"] == {"pass": 7, "fail": 3, "timeout": 0, "fault": 0}
    assert found["metrics"]["pass@1"]["value"] == pytest.approx(0.7)
    assert found["metrics"]["pass@2"]["value"] == 1.0
    assert "pass@5" not in found["metrics"]
    assert [json.loads(line)["passed"] for line in results.read_text().splitlines()] == [True] * 4 + [True, False] * 3


def test_without_samples_the_solutions_of_the_problems_run(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    any_isolation()
    with pytest.raises(SystemExit):
        main(["code", "score", str(files[0])])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "5 samples of 5 problems: 5 pass"
    assert lines[1].split()[:3] == ["pass@1", "100.0", "%"]


def test_samples_must_belong_to_problems_and_problems_have_samples(files: tuple[Path, Path], tmp_path: Path) -> None:
    problems, samples = files
    lines = samples.read_text().splitlines(keepends=True)
    samples.write_text("".join(lines[:4]))
    with pytest.raises(UserError, match=r"3 of 5 problems have no sample, such as Ours/2.*--partial"):
        flow.run_code(problems, samples)
    samples.write_text(lines[0] + '{"task_id": "Ours/9", "completion": ""}\n')
    with pytest.raises(DataError, match=r"samples.jsonl:2: no problem has the task_id 'Ours/9'"):
        flow.run_code(problems, samples)
    samples.write_text('{"task_id": "Ours/1"}\n')
    with pytest.raises(DataError, match=r":1: a sample needs its `completion`"):
        flow.run_code(problems, samples)


def test_the_check_of_a_sandbox_is_refused_without_one() -> None:
    with pytest.raises(UserError, match="would do harm"):
        flow.check_sandbox("none")
