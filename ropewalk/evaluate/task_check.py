"""What the configured tasks lack, found before hours of training: data, packages, a judge's key, a sandbox."""

from __future__ import annotations

from ropewalk.base.errors import UserError

from .config import TASK_FILE, TASKS, Evaluate
from .harness.named_tasks import check_named
from .held_out import HeldOut
from .question_task import QuestionTask


def check_tasks(settings: Evaluate) -> list[str]:
    """What is wrong with the tasks of `evaluate.tasks`, or missing for them. Questions of ropewalk's own tasks are
    read; a user's own task is not tried, because it may need the corpus."""
    problems, held_out = check_named(settings), HeldOut(None, settings, seed=0)
    for name in settings.tasks:
        kind = TASKS[name]
        if kind is TASK_FILE or not isinstance(kind.target, str):  # a user's own
            continue
        try:
            task = kind.load()(held_out)
            if isinstance(task, QuestionTask):
                task.requests()
                _ = task.item_metrics  # their packages
        except UserError as error:
            problems.append(str(error))
    return problems
