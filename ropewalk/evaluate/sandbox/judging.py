"""Runs many programs over the cores of this machine; remembers verdicts by content, retries sandbox failures."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from ropewalk.base.progress import Progress, Silent

from .execution import run_program
from .isolation import TRIAL, Isolation, SandboxChoice, choose
from .program import VERDICTS, Limits, Program, Verdict

ATTEMPTS = 3
"""Of a program whose sandbox fails."""


@functools.cache
def working_isolation(choice: SandboxChoice) -> Isolation:
    """The isolation that `evaluate.sandbox` stands for on this machine, tried once per process; UserError if none."""
    return choose(choice, lambda isolation: run_program(TRIAL, isolation, Limits()))


@dataclass(frozen=True, kw_only=True, slots=True)
class Judge:
    """Gives verdicts on programs."""

    sandbox: SandboxChoice = "auto"
    limits: Limits = field(default_factory=Limits)
    memory: Path | None = None
    """A file of verdicts by content: a program with the same tests and limits runs once. None runs all."""
    workers: int = 0
    """Programs at a time; 0: as many as cores."""

    def check(self) -> None:
        """UserError if no sandbox works here."""
        working_isolation(self.sandbox)

    def verdicts(self, programs: Sequence[Program], progress: Progress | None = None) -> list[Verdict]:
        """The verdict on each program."""
        # A verdict without isolation says nothing about one with it: the program saw another machine.
        free = "free " if self.sandbox == "none" else ""
        keys = [free + program.key(self.limits) for program in programs]
        known = self._read_memory()
        missing = {key: program for key, program in zip(keys, programs, strict=True) if key not in known}
        if missing:
            known |= self._run(missing, progress or Silent())
        return [known[key] for key in keys]

    def _run(self, programs: Mapping[str, Program], progress: Progress) -> dict[str, Verdict]:
        isolation = working_isolation(self.sandbox)
        found: dict[str, Verdict] = {}
        progress.begin("run code", len(programs), "programs")
        executor = ThreadPoolExecutor(self.workers or len(os.sched_getaffinity(0)))
        try:
            waiting: set[Future[tuple[str, Verdict]]] = {
                executor.submit(self._attempt, key, program, isolation) for key, program in programs.items()
            }
            while waiting:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                fresh = dict(future.result() for future in done)
                self._remember(fresh)
                found |= fresh
                progress.advance(len(found), counted_kinds(found.values()))
        finally:
            executor.shutdown(cancel_futures=True)
            progress.end(counted_kinds(found.values()))
        return found

    def _attempt(self, key: str, program: Program, isolation: Isolation) -> tuple[str, Verdict]:
        verdict = Verdict("fault")
        for _ in range(ATTEMPTS):
            try:
                verdict = run_program(program, isolation, self.limits)
            except OSError as error:  # no memory or process left for the sandbox
                verdict = Verdict("fault", f"the sandbox did not start: {error}")
            if verdict.kind != "fault":
                break
        return key, verdict

    def _read_memory(self) -> dict[str, Verdict]:
        if self.memory is None or not self.memory.exists():
            return {}
        found = {}
        for line in self.memory.read_bytes().splitlines():
            try:
                key, kind, detail = orjson.loads(line)
            except ValueError:
                continue  # torn by a crash: that program runs again
            if kind in VERDICTS:
                found[key] = Verdict(kind, detail)
        return found

    def _remember(self, verdicts: Mapping[str, Verdict]) -> None:
        """Appends verdicts; a fault is none."""
        lines = [
            orjson.dumps([key, verdict.kind, verdict.detail]) + b"\n"
            for key, verdict in verdicts.items()
            if verdict.kind != "fault"
        ]
        if self.memory is not None and lines:
            self.memory.parent.mkdir(parents=True, exist_ok=True)
            # One write of whole lines: other processes may append to the same file.
            with self.memory.open("ab", buffering=0) as file:
                file.write(b"".join(lines))


def counted_kinds(verdicts: Iterable[Verdict]) -> str:
    """How many verdicts there are of each kind: "160 pass  3 fail  1 timeout"."""
    kinds = [verdict.kind for verdict in verdicts]
    return "  ".join(f"{kinds.count(kind)} {kind}" for kind in VERDICTS if kind in kinds)
