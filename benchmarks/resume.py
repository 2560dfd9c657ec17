"""Is the data after a resume the data that would have come? Ours and the loaders that people use, same questions.

    make bench NAME=resume          about five minutes; `--quick` asks about other world sizes only

A run of 2 ranks reads 40 global batches of 12 windows and saves its state after 20. Others begin from that state: at
the same and at other world sizes, with other workers, with twice the batch, with another mixture. Ranks are processes.
Told is, for the windows after the resume: `exact` (every global batch holds the windows that it would have held; for
another batch size: the same windows in all; for another mixture: none twice), or how many were read again, skipped, or
doubled. The ratio of a peer is (cases that ours passes) / (cases that it passes).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from loaders import OPEN, SECOND, WRITE, Task, load, name_of, python_of, rank_environment, save, write_windows

LENGTH, ROWS, WINDOWS, STEPS, SAVED = 64, 12, 6000, 40, 20
CONTENDERS = ("ropewalk", "torchdata", "grain", "grain-elastic", "litdata", "mosaicml")
MIXES = ("ropewalk", "grain", "litdata", "mosaicml")
"""Those that mix sources; the others leave it to the user."""
SHARES, OTHER_SHARES = (0.7, 0.3), (0.3, 0.7)


class Case(NamedTuple):
    """How a run goes on from the state of another; None: it does not."""

    name: str
    world: int = 2
    workers: int = 2
    rows: int = ROWS
    weights: tuple[float, ...] = (1.0,)


CASES = (
    Case("same"),
    Case("workers 2 -> 3", workers=3),
    Case("world 2 -> 1", world=1),
    Case("world 2 -> 3", world=3),
    Case("world 2 -> 4", world=4),
    Case("batch 12 -> 24", rows=24),
    Case("mixture, same", weights=SHARES),
    Case("mixture, world 2 -> 4", world=4, weights=SHARES),
    Case("mixture .7/.3 -> .3/.7", weights=OTHER_SHARES),
)
QUICK = ("same", "world 2 -> 1", "world 2 -> 4")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contender", choices=OPEN, help="internal: one rank, or `--write`")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--task", help="internal: JSON of the task")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--begin", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.contender:
        raw = json.loads(options.task)
        task = Task(**{**raw, "folder": Path(raw["folder"]), "weights": tuple(raw["weights"])})
        if options.write:
            WRITE[options.contender](task)
        else:
            read(options, task)
        return
    with tempfile.TemporaryDirectory() as place:
        compare(Path(place), quick=options.quick)


def read(options: argparse.Namespace, task: Task) -> None:
    """One rank: its windows, step by step."""
    state = load(options.begin) if options.begin else None
    reader = OPEN[options.contender](task, state)
    seen = []
    for step in range(1, options.steps + 1):
        seen.append(name_of(reader.next()))
        if step == SAVED and options.save:
            assert reader.state is not None
            save(reader.state(), options.save)
    options.out.write_text(json.dumps(seen))
    # Some hold threads and processes that do not end by themselves.
    import os

    os._exit(0)


class Runs:
    """Starts the ranks of a loader as processes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.python = str(python_of(name))
        self._port = 29600 + list(OPEN).index(name) * 40

    def write(self) -> None:
        if self.name in WRITE:
            task = self._task(0, Case("", world=1, weights=SHARES))
            self._start(task, ["--write"]).wait()

    def run(self, tag: str, case: Case, *, steps: int, begin: str = "", save_state: bool = False) -> Any:
        """The windows of every global batch, sorted; a string when it failed."""
        self._port += 1
        processes = []
        for rank in range(case.world):
            flags = ["--steps", str(steps), "--out", str(self._file(tag, rank, "json"))]
            if save_state:
                flags += ["--save", str(self._file(tag, rank, "state"))]
            if begin:
                # A rank that did not exist takes the first one's state: what else is there?
                own = self._file(begin, rank, "state")
                flags += ["--begin", str(own if own.exists() else self._file(begin, 0, "state"))]
            processes.append(self._start(self._task(rank, case), flags))
        errors = []
        for process in processes:
            try:
                errors.append(process.communicate(timeout=120)[1])
            except subprocess.TimeoutExpired:
                process.kill()
                errors.append("timed out")
        files = [self._file(tag, rank, "json") for rank in range(case.world)]
        if not all(file.exists() for file in files):
            told = [line for error in errors for line in (error or "").splitlines() if "Error" in line]
            return "refuses: " + told[-1][:120] if told else "does not end"
        parts = [json.loads(file.read_text()) for file in files]
        return [sorted(name for part in parts for name in part[step]) for step in range(steps)]

    def _task(self, rank: int, case: Case) -> Task:
        return Task(
            folder=self.folder,
            length=LENGTH,
            rows=case.rows,
            rank=rank,
            world=case.world,
            workers=case.workers,
            weights=case.weights,
        )

    def _start(self, task: Task, flags: list[str]) -> subprocess.Popen[str]:
        raw = {name: getattr(task, name) for name in Task.__slots__}
        told = json.dumps({**raw, "folder": str(task.folder)})
        command = [self.python, __file__, "--contender", self.name, "--task", told, *flags]
        environment = rank_environment(task, self._port)
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def _file(self, tag: str, rank: int, kind: str) -> Path:
        return self.folder / f"{self.name}-{tag}-{rank}.{kind}"


def compare(folder: Path, *, quick: bool) -> None:
    from harness import finish

    write_windows(folder / "source0.bin", windows=WINDOWS, length=LENGTH, first=0, seed=0)
    write_windows(folder / "source1.bin", windows=WINDOWS, length=LENGTH, first=SECOND, seed=1)
    cases = [case for case in CASES if not quick or case.name in QUICK]
    table: dict[str, dict[str, str]] = {}
    for name in CONTENDERS:
        table[name] = judged(Runs(name, folder), cases)
        for case, verdict in table[name].items():
            print(f"{name:<14} {case:<24} {verdict}", flush=True)
    passed = {name: float(sum(v == "exact" for v in verdicts.values())) for name, verdicts in table.items()}
    ours = passed.pop("ropewalk")
    finish(
        "resume",
        ours={"exact": ours, "cases": float(len(cases))},
        peers={name: {"exact": count, "cases": float(len(cases))} for name, count in passed.items()},
        ratios={name: ours / max(1.0, count) for name, count in passed.items()},
        quality=table,
    )


def judged(runs: Runs, cases: list[Case]) -> dict[str, str]:
    runs.write()
    plain = runs.run("plain", Case(""), steps=STEPS, save_state=True)
    mixed: Any = "does not mix"
    if runs.name in MIXES and any(len(case.weights) > 1 for case in cases):
        mixed = runs.run("mixed", Case("", weights=SHARES), steps=STEPS, save_state=True)
    verdicts = {}
    for number, case in enumerate(cases):
        whole, tag = (plain, "plain") if len(case.weights) == 1 else (mixed, "mixed")
        if isinstance(whole, str):
            verdicts[case.name] = whole
            continue
        steps = SAVED * ROWS // case.rows
        found = runs.run(f"case{number}", case, steps=steps, begin=tag)
        verdicts[case.name] = found if isinstance(found, str) else verdict(whole, found, case)
    return verdicts


def verdict(whole: list[list[int]], found: list[list[int]], case: Case) -> str:
    expected = whole[SAVED:]
    before = {name for batch in whole[:SAVED] for name in batch}
    got = [name for batch in found for name in batch]
    again, doubled = len(before & set(got)), len(got) - len(set(got))
    if case.weights == OTHER_SHARES:
        second = sum(name >= SECOND for name in got) / len(got)
        told = f"read again {again}, doubled {doubled} of {len(got)}; second source {second:.2f}"
        return "exact" if again == doubled == 0 and abs(second - OTHER_SHARES[1]) < 0.1 else told
    wanted = {name for batch in expected for name in batch}
    same = set(got) == wanted if case.rows != ROWS else found == expected
    skipped = len(wanted - set(got))
    return (
        "exact" if same and not doubled else f"read again {again}, skipped {skipped}, doubled {doubled} of {len(got)}"
    )


if __name__ == "__main__":
    main()
