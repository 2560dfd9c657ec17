"""Evaluation tasks on the model in training, under its own plan, within a time budget. No second copy of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any, TypeVar

from ropewalk.base.errors import UserError
from ropewalk.base.metric import Metric, metrics_tree, titled
from ropewalk.base.progress import Silent

from ..settings import Settings
from .hook import Hook

if TYPE_CHECKING:
    from ropewalk.evaluate.held_out import HeldOut
    from ropewalk.evaluate.task import Likelihood, Sampling, Task, TaskModel

    from ..training_run import TrainingRun

T = TypeVar("T")
KEPT = ("value", "interval", "n", "unit", "better", "of")
"""What the event holds of a metric."""


class LiveEvaluation(Hook):
    """Runs `evaluate.during.tasks` every `evaluate.during.every_steps` steps (0: never) and at the end of each phase.

    The model computes in the precision and under the plan of training. The weights do not change, and neither does
    any random number of training.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._during = settings, settings.evaluate.during
        self._held_out: HeldOut | None = None
        self._tasks: list[Task] = []

    def end_step(self, run: TrainingRun) -> None:
        if self._during.every_steps and run.is_due(self._during.every_steps):
            with run.during("evaluate"):
                self._evaluate(run)

    def _evaluate(self, run: TrainingRun) -> None:
        run.sync()
        start = clock()
        held_out, tasks = self._opened()
        model = Budgeted(self._model(run, held_out), run, until=start + self._during.budget_s)
        found: dict[str, list[Metric]] = {}
        left_out: dict[str, str] = {}
        for task in tasks:
            problem = self._problem(run, task)
            if problem:
                left_out[task.name] = problem
                continue
            try:
                found[task.name] = self._measure(run, model, held_out, task)
            except OutOfTimeError:
                left_out[task.name] = f"the budget of {self._during.budget_s:g} s is spent"
            except UnmeasuredError as error:
                left_out[task.name] = str(error)
        if run.leads:
            self._report(run, found, left_out, seconds=clock() - start)
        run.mesh.control.gather_numbers(run.place.rank)  # rank 0 may compute metrics while the others wait

    def _opened(self) -> tuple[HeldOut, list[Task]]:
        """The tasks with the items that are asked, opened once."""
        if self._held_out is None:
            from ropewalk.evaluate.evaluation import open_tasks
            from ropewalk.evaluate.held_out import HeldOut

            during = self._during
            settings = dataclasses.replace(
                self._settings.evaluate,
                tasks=during.tasks,
                limit=during.limit,
                max_bytes=during.max_bytes,
                perturbations=(),
            )
            self._held_out = HeldOut(self._settings.data, settings, seed=self._settings.recipe_seed, progress=Silent())
            self._tasks = open_tasks(self._held_out)
        return self._held_out, self._tasks

    def _model(self, run: TrainingRun, held_out: HeldOut) -> TaskModel:
        from ropewalk.evaluate.sharded_model import PlannedModel

        executor = run.executor
        return PlannedModel(run.phase.planned.plan, lambda plan: executor, spec=executor.spec, held_out=held_out)

    def _problem(self, run: TrainingRun, task: Task) -> str:
        """Why the task cannot be run under this plan; empty if it can."""
        from ropewalk.evaluate.task import Generate

        if run.phase.planned.plan.sequence and any(isinstance(request, Generate) for request in task.requests()):
            return "a plan with `parallel.sequence` cannot generate; `ropewalk evaluate` can"
        return ""

    def _measure(self, run: TrainingRun, model: TaskModel, held_out: HeldOut, task: Task) -> list[Metric]:
        """On rank 0; other ranks have only asked."""
        from ropewalk.evaluate.answers import Answers
        from ropewalk.evaluate.evaluation import ask_tasks, measure_tasks

        answers, share = Answers(None, {}), run.mesh.control.broadcast_json
        keys = ask_tasks([task], model, held_out, answers=answers, share=share)
        if not run.leads:
            return []
        try:
            return measure_tasks([task], answers, keys).tasks[task.name]
        except UserError as error:  # such as a value that is not finite: no reason to end a run of days
            raise UnmeasuredError(str(error)) from error

    def _report(
        self, run: TrainingRun, found: dict[str, list[Metric]], left_out: dict[str, str], *, seconds: float
    ) -> None:
        trees = {task: _kept(metrics_tree(m for m in metrics if not m.group)) for task, metrics in found.items()}
        run.events.write("evaluation", step=run.step, tasks=trees, left_out=left_out, seconds=seconds)
        shown = [f"{titled(task, metrics[0])} {metrics[0].text()}" for task, metrics in found.items() if metrics]
        shown += [f"{task} left out: {why}" for task, why in left_out.items()]
        run.say(f"step {run.step}: {', '.join(shown)} ({seconds:.1f} s)")


class UnmeasuredError(Exception):
    """A task's metrics cannot be computed; raised on rank 0 when all ranks have asked."""


class OutOfTimeError(Exception):
    """The time budget is spent; raised on every rank at the same call."""


class Budgeted:
    """A model that stops answering when rank 0's clock passes `until`."""

    def __init__(self, model: TaskModel, run: TrainingRun, *, until: float) -> None:
        self._model, self._run, self._until = model, run, until
        self.chunk_tokens = model.chunk_tokens

    def rolling(self, documents: Sequence[Any]) -> list[Likelihood]:
        return self._in_time(lambda: self._model.rolling(documents))

    def loglikelihood(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[Likelihood]:
        return self._in_time(lambda: self._model.loglikelihood(pairs))

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, seeds: Sequence[int]
    ) -> list[list[int]]:
        return self._in_time(lambda: self._model.generate(prompts, sampling, seeds=seeds))

    def _in_time(self, call: Callable[[], T]) -> T:
        if self._run.mesh.control.broadcast_json(clock() > self._until):
            raise OutOfTimeError
        return call()


def _kept(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: {key: value for key, value in metric.items() if key in KEPT} for name, metric in tree.items()}
