"""Which step read which rows. No torch.

Steps read rows one after the other, but for ranges that were left out on purpose; their sizes change seldom, in ramps
or when a run continues with another batch. So the history is a short list of runs, and both questions, the rows of a
step and the step of a row, are a search in it.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of equal size, from `step` on; they end where the next ones begin."""

    step: int
    row: int
    """First row of step `step`."""
    rows: int
    """Rows of each."""


class History:
    """What the steps of a phase have read so far, counted from `step` and `row` on."""

    def __init__(self, *, step: int = 0, row: int = 0) -> None:
        self.step = step
        """The next step."""
        self.row = row
        """The next row."""
        self._steps: list[Steps] = []
        self._skipped: list[tuple[int, int]] = []

    @property
    def skipped(self) -> list[range]:
        """The rows that no step has read, in order."""
        return [range(*bounds) for bounds in self._skipped]

    def read(self, rows: int) -> range:
        """The next step reads the next `rows` rows; gives them."""
        last = self._steps[-1] if self._steps else None
        goes_on = last and last.rows == rows and last.row + (self.step - last.step) * rows == self.row
        if not goes_on:
            self._steps.append(Steps(self.step, self.row, rows))
        self.step += 1
        self.row += rows
        return range(self.row - rows, self.row)

    def skip(self, rows: int) -> None:
        """Leaves out the next `rows` rows."""
        if rows and self._skipped and self._skipped[-1][1] == self.row:
            self._skipped[-1] = (self._skipped[-1][0], self.row + rows)
        elif rows:
            self._skipped.append((self.row, self.row + rows))
        self.row += rows

    def rows_of(self, step: int) -> range | None:
        """The rows that `step` read; None when it has not come yet or is not remembered."""
        number = bisect.bisect_right(self._steps, step, key=lambda steps: steps.step) - 1
        if number < 0 or step >= self.step:
            return None
        steps = self._steps[number]
        first = steps.row + (step - steps.step) * steps.rows
        return range(first, first + steps.rows)

    def step_of(self, row: int) -> int | None:
        """The step that read `row`; None when it was left out, has not come yet or is not remembered."""
        number = bisect.bisect_right(self._steps, row, key=lambda steps: steps.row) - 1
        if number < 0:
            return None
        steps = self._steps[number]
        step = steps.step + (row - steps.row) // steps.rows
        behind = self._steps[number + 1].step if number + 1 < len(self._steps) else self.step
        return step if step < behind else None

    def to_json(self) -> dict[str, Any]:
        """{"step": next step, "row": next row, "batches": [[first step, its first row, rows a step], ...], "skipped":
        [[first row, row behind the last], ...]}."""
        return {
            "step": self.step,
            "row": self.row,
            "batches": [[steps.step, steps.row, steps.rows] for steps in self._steps],
            "skipped": [list(bounds) for bounds in self._skipped],
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> History:
        """What `to_json` gave, or `{"row": n}` alone: then what came before is not remembered."""
        history = cls(step=int(value.get("step", 0)), row=int(value["row"]))
        history._steps = [Steps(*map(int, entry)) for entry in value.get("batches", [])]
        history._skipped = [(int(first), int(behind)) for first, behind in value.get("skipped", [])]
        return history
