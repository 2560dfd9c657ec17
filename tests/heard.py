"""A `Progress` that remembers what it was told."""

from __future__ import annotations


class Heard:
    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def begin(self, task: str, total: float | None, unit: str) -> None:
        self.calls.append(("begin", task, total, unit))

    def advance(self, done: float, note: str = "") -> None:
        self.calls.append(("advance", done, note))

    def end(self, note: str = "") -> None:
        self.calls.append(("end", note))

    def say(self, text: str) -> None:
        self.calls.append(("say", text))
