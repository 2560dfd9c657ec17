"""A hook of a user: changes gradients, asks for a save, a rollback and the end of the run, writes what it saw."""

from __future__ import annotations

import json
from pathlib import Path

from ropewalk.train.hooks import Hook


class Watch(Hook):
    """Saves after step 3 and stops after step 5; the first attempt at step 4 is rolled back."""

    def __init__(self) -> None:
        self.seen: list[object] = []

    def before_training(self, run) -> None:
        self.seen.append(["begin", run.step])

    def on_gradients(self, run, gradients) -> None:
        if "norm.weight" in gradients:
            gradients["norm.weight"].mul_(2)

    def after_step(self, run, result) -> None:
        self.seen.append(run.step)
        if run.step == 3:
            run.request_save()
        if run.step == 4 and self.seen.count(4) == 1:
            run.request_rollback("step 4 looks odd")
        if run.step == 5:
            run.request_stop()

    def on_metrics(self, run, metrics) -> None:
        self.seen.append(["loss", run.step, metrics["loss"] > 0])

    def on_validation(self, run, loss) -> None:
        self.seen.append(["validation", run.step])

    def after_rollback(self, run, anomaly) -> None:
        self.seen.append(["rollback", run.step, anomaly.what])

    def after_training(self, run) -> None:
        path = Path(run.folder, f"watch-{run.place.rank}.json")
        path.write_text(json.dumps(self.seen))


class Needy(Hook):
    """Cannot be made from its name alone."""

    def __init__(self, limit: float) -> None:
        self.limit = limit


def function(run) -> None:
    """Is no hook."""
