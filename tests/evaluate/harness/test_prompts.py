"""Prompts and continuations of task files equal those of lm-evaluation-harness 0.4.13, to the byte."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ropewalk.evaluate.harness.prompts import ChatTemplate
from ropewalk.evaluate.harness.task_file import read_task_file
from ropewalk.evaluate.harness.task_index import SUITES
from ropewalk.evaluate.question_task import QuestionTask
from ropewalk.evaluate.task import Generate, LogLikelihood, Request, Rolling
from tests.evaluate.harness.lm_eval_prompts import STYLES, TEMPLATE, digest
from tests.evaluate.harness.opened import FOLDER, opened

SCRIPT = Path(__file__).with_name("lm_eval_prompts.py")
FOLDERS = [FOLDER, *sorted(path for path in SUITES.iterdir() if path.is_dir())]
FILES = {path.stem: path for folder in FOLDERS for path in folder.glob("*.yaml")}
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
    task = opened(FILES[name], trusted=[FOLDER], chat=chat(style))
    found, recorded = requests_of(task), RECORDED[style][name]
    assert (found[0], len(found)) == (recorded["first"], recorded["count"])
    assert digest(found) == recorded


def test_every_task_file_has_its_recorded_prompts() -> None:
    own = [name for name, path in FILES.items() if read_task_file(path).get("dataset_path") == "json"]
    assert sorted(RECORDED["none"]) == sorted(own)


@pytest.mark.slow
def test_lm_eval_asks_the_same_today() -> None:
    pytest.importorskip("lm_eval")
    folders = [str(folder) for folder in FOLDERS]
    done = subprocess.run([sys.executable, str(SCRIPT), *folders], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == RECORDED
