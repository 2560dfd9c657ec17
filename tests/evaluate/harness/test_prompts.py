"""Prompts and continuations of task files equal those of lm-evaluation-harness 0.4.13, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.evaluate.harness.prompts import ChatTemplate
from ropewalk.evaluate.harness.task_index import SUITES
from ropewalk.evaluate.question_task import QuestionTask
from ropewalk.evaluate.task import Generate, LogLikelihood, Request, Rolling
from tests.evaluate.harness.lm_eval_prompts import STYLES, TEMPLATE, digest
from tests.evaluate.harness.opened import FOLDER, opened

SCRIPT = Path(__file__).with_name("lm_eval_prompts.py")
RECORDED = json.loads(SCRIPT.with_suffix(".json").read_text("utf-8"))


def texts_of(request: Request) -> list[str]:
    match request:
        case Rolling():
            return [str(request.text)]
        case LogLikelihood():
            return [str(request.context), str(request.continuation)]
        case Generate():
            return [str(request.prompt)]


def requests_of(task: QuestionTask) -> list[list[str]]:
    return [texts_of(request) for request in task.requests()]


def chat(style: str) -> ChatTemplate | None:
    return None if style == "none" else ChatTemplate(TEMPLATE, "<end>", style)  # type: ignore[arg-type]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("name", RECORDED["none"])
def test_a_task_asks_what_lm_eval_asks(name: str, style: str) -> None:
    task = opened(FOLDER / f"{name}.yaml", trusted=[FOLDER], chat=chat(style))
    found, recorded = requests_of(task), RECORDED[style][name]
    assert (found[0], len(found)) == (recorded["first"], recorded["count"])
    assert digest(found) == recorded


def test_every_task_file_has_its_recorded_prompts() -> None:
    assert sorted(RECORDED["none"]) == sorted(path.stem for path in FOLDER.glob("*.yaml"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "folder", [FOLDER, *sorted(path for path in SUITES.iterdir() if path.is_dir())], ids=lambda p: p.name
)
def test_lm_eval_asks_the_same_when_it_runs_beside_us(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    if folder != FOLDER:  # lm-eval would look for the data of public sets
        for path in folder.iterdir():
            if path.suffix != ".yaml" or "dataset_path: json" in path.read_text("utf-8"):
                (tmp_path / path.name).write_bytes(path.read_bytes())
        folder = tmp_path
    done = subprocess.run([sys.executable, str(SCRIPT), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for style, tasks in json.loads(done.stdout).items():
        for name, recorded in tasks.items():
            task = opened(folder / f"{name}.yaml", trusted=[folder], chat=chat(style))
            assert digest(requests_of(task)) == recorded, (style, name)
