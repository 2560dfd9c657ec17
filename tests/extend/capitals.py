"""A user's evaluation task: `evaluate.tasks = ["held-out", "capitals:Capitals"]` in a recipe beside this file."""

from __future__ import annotations

from collections.abc import Sequence

from ropewalk.base.metric import Metric
from ropewalk.evaluate.intervals import proportion
from ropewalk.evaluate.task import Generate, Generation, Likelihood, Request, Rolling, Sample, Sampling, Task

CAPITALS = {"France": "Paris", "Italy": "Rome", "Peru": "Lima", "Norway": "Oslo"}
SAMPLING = Sampling(max_new_tokens=6)


class Capitals(Task):
    """Is the right capital the most likely one, and is it what the model writes?"""

    name = "capitals"

    def requests(self) -> list[Request]:
        options = [Rolling(f"The capital of {land} is {city}.") for land in CAPITALS for city in CAPITALS.values()]
        return [*options, *(Generate(f"The capital of {land} is", SAMPLING) for land in CAPITALS)]

    def metrics(self, answers: Sequence[Likelihood | Generation]) -> list[Metric]:
        likely = [answer.log_probability for answer in answers if isinstance(answer, Likelihood)]
        written = [answer.text for answer in answers if isinstance(answer, Generation)]
        n = len(CAPITALS)
        rows = [likely[first : first + n] for first in range(0, n * n, n)]
        chosen = sum(row.index(max(row)) == number for number, row in enumerate(rows))
        named = sum(city in text for city, text in zip(CAPITALS.values(), written, strict=True))
        return [
            proportion("accuracy", chosen, n, of="question", references={"chance": 1 / n}, note="most likely of four"),
            proportion("recall", named, n, of="question"),
        ]

    def records(self, answers: Sequence[Likelihood | Generation]) -> list[Sample]:
        written = [answer.text for answer in answers if isinstance(answer, Generation)]
        lands = zip(CAPITALS, written, strict=True)
        return [Sample(f"The capital of {land} is", text, domain="geography", source=self.name) for land, text in lands]
