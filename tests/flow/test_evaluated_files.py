"""What `evaluate` of a run depends on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ropewalk.evaluate.config import Evaluate
from ropewalk.flow import evaluate_run

TASK = "dataset_path: json\ndataset_kwargs: {data_files: {test: asks.jsonl}}\ntest_split: test\ndoc_to_text: '{{q}}'\n"


def inputs(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """What the run stage is keyed by."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(evaluate_run, "list_checkpoints", lambda folder: [folder / "step-1"])
    monkeypatch.setattr(evaluate_run, "read_checkpoint_manifest", lambda path: None)
    monkeypatch.setattr(evaluate_run, "identity", lambda manifest: "abc")
    monkeypatch.setattr(evaluate_run, "_own_modules", lambda run: {})
    stages = SimpleNamespace(do=lambda name, inputs, *_, **__: found.update(inputs))
    recipe = SimpleNamespace(evaluate=Evaluate(**settings), seed=0)
    evaluate_run._evaluate_newest(SimpleNamespace(folder=Path("run"), recipe=recipe, stages=stages))  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("key", ["code_problems", "dialogues", "judge_sheet"])
def test_another_content_of_a_file_that_a_setting_names_is_evaluated(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    found = []
    for text in ("one", "one", "two"):
        file.write_text(text)
        found.append(inputs(monkeypatch, **{key: str(file)}))
    assert found[0] == found[1] != found[2]
    assert "task_files" not in inputs(monkeypatch)


def test_another_content_of_a_task_file_or_its_data_is_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, data = tmp_path / "asks.yaml", tmp_path / "asks.jsonl"
    task.write_text(TASK + "doc_to_target: b\n")
    data.write_text('{"q": "a"}\n')
    first = inputs(monkeypatch, tasks=(str(task),))
    data.write_text('{"q": "c"}\n')
    second = inputs(monkeypatch, tasks=(str(task),))
    task.write_text(TASK + "doc_to_target: d\n")
    assert first != second != inputs(monkeypatch, tasks=(str(task),)) != first
