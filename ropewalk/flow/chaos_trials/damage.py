"""`ropewalk chaos --damage`: is damage to any file of a run noticed?

Trains a run in a folder of its own, with an older run beside it. Each case damages one file, reads it as the product
does (`damage_readers.py`), in about one case of ten also runs the whole command, and judges the outcome. Damaged data
must never be read silently, nothing may end with a traceback, and no message may advise deleting an intact file. A case
is a function of its number: `--damage 1 --seed NUMBER` repeats it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import random
import re
import shutil
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq

from ropewalk.base.errors import RopewalkError, UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.config.read import Resolved
from ropewalk.monitor.report.preparation import write_page
from ropewalk.prepare.summary import write_summary
from ropewalk.store.kinds import kind_of

from ..data_doctor.predictions import read_record as read_predictions
from ..data_doctor.predictions import remember
from ..recipe import Recipe
from ..run_or_recipe import RecipeLike, resolve_recipe
from ..run_recipe import advance
from ..run_stages import Result
from ..start_from.start_from import RUNS
from .damage_beside import ADOPTED, DamagedRun, leave
from .damage_readers import READERS
from .trials import clear

Outcome = Literal["refused", "healed", "harmless", "silent", "traceback", "misleading"]
OUTCOMES: tuple[Outcome, ...] = ("refused", "healed", "harmless", "silent", "traceback", "misleading")
WRONG: tuple[Outcome, ...] = ("silent", "traceback", "misleading")
"""Outcomes that count as failures. `misleading`: the message does not name the file, or advises deleting an intact
one."""
GROWING = (
    "run/events*.jsonl",
    "run/evaluation/answers.jsonl",
    "run/doctor.json",
    "run/checkpoints/copies.json",
    "run/checkpoints/frequency.json",
)
"""Kinds that only record the past: losing a part of them is an earlier state (docs/formats.md)."""
COMMAND_EVERY = 10
PATIENCE_S = 120
"""A reader or command that takes longer counts as hanging; all take less than a second on a small run."""
_PASSING = (
    "run/events",
    "run/report.html",
    "run/summary.json",
    "run/heartbeats",
    "run/doctor.json",
    "prepared/report.",
)
_ADVICE = re.compile(r"\b(?:delete|remove|rm)\s+(\S+)")


@dataclass(frozen=True, slots=True)
class Case:
    """One damaged file and the outcome."""

    number: int
    kind: str
    file: str
    damage: str
    outcome: Outcome
    said: str
    command: bool
    """Whether the whole command ran too."""


def damage_run(
    recipe: RecipeLike,
    overrides: Sequence[str] = (),
    *,
    count: int,
    runs: Path = RUNS,
    seed: int = 0,
    progress: Progress | None = None,
) -> Result:
    """The outcomes of cases `seed` to `seed + count - 1` by kind of file. The user's run and data are not touched."""
    resolved = resolve_recipe(recipe, overrides)
    if resolved.value.load.corpus:
        raise UserError("--damage needs a recipe that prepares its data; this one has `load.corpus`")
    scratch = (runs / f"{resolved.value.name}.chaos").absolute()
    clear(scratch)
    say = progress or Silent()
    campaign = Campaign.make(resolved, scratch, say)
    say.begin("damage", count, "files")
    cases = []
    for number in range(seed, seed + count):
        cases.append(campaign.case(number, command=by_command(number)))
        say.advance(len(cases), cases[-1].kind)
    wrong = [case for case in cases if case.outcome in WRONG]
    say.end(f"{len(cases)} files damaged, {len(wrong)} not reported correctly")
    shutil.rmtree(scratch)
    return {
        "damages": len(cases),
        "commands": sum(case.command for case in cases),
        "outcomes": tabulate(cases),
        "wrong": [dataclasses.asdict(case) for case in wrong],
    }


def by_command(number: int, every: int = COMMAND_EVERY) -> bool:
    """Whether the command runs in this case; random, so that all kinds of files are covered over time."""
    return random.Random(f"command {number}").randrange(every) == 0


def tabulate(cases: Sequence[Case]) -> dict[str, dict[str, int]]:
    """Number of cases per kind of file and outcome; the last row has the totals."""
    table: dict[str, dict[str, int]] = {}
    for case in cases:
        for row in (case.kind, "in all"):
            table.setdefault(row, dict.fromkeys(OUTCOMES, 0))[case.outcome] += 1
    return {**{row: table[row] for row in sorted(table) if row != "in all"}, "in all": table["in all"]}


# Damage


def flip(path: Path, draw: random.Random) -> bytes:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def truncate(path: Path, draw: random.Random) -> bytes:
    return path.read_bytes()[: draw.randrange(path.stat().st_size)]


def zero(path: Path, draw: random.Random) -> bytes:
    data = path.read_bytes()
    start = draw.randrange(len(data))
    size = len(data[start : start + 4096])
    return data[:start] + b"\0" * size + data[start + size :]


CHANGES: dict[str, Callable[[Path, random.Random], bytes]] = {
    "flip a bit": flip,
    "truncate": truncate,
    "zero 4 KiB": zero,
}
"""Other bytes in the file."""
IN_PLACE: dict[str, Callable[[Path], None]] = {"pipe": os.mkfifo, "folder": os.mkdir}
"""Something that is not the file in its place."""
DAMAGES = (*CHANGES, "delete", "older version", *IN_PLACE)


# The campaign


@dataclass(slots=True)
class Campaign:
    """A whole run whose files are damaged one at a time."""

    resolved: Resolved[Recipe]
    scratch: Path
    place: DamagedRun
    files: dict[str, list[Path]] = field(default_factory=dict)
    """By kind."""
    _older: dict[str, list[Path]] = field(default_factory=dict)
    _known: dict[Path, tuple[int, int, int]] = field(default_factory=dict)
    _values: dict[Path, Any] = field(default_factory=dict)
    _ticks: int = 0

    @classmethod
    def make(cls, resolved: Resolved[Recipe], scratch: Path, progress: Progress) -> Campaign:
        """Prepares, trains and reports a run with an older one beside it."""
        before = dataclasses.replace(resolved.value, seed=resolved.value.seed + 1)
        _made(dataclasses.replace(resolved, value=before), scratch / "older", progress)
        newer = _made(resolved, scratch / "live", progress)
        made = cls(newer[0], scratch, newer[1])
        shutil.copytree(scratch / "live", scratch / "sound")
        made.files, made._older = made._by_kind(scratch / "live"), made._by_kind(scratch / "older")
        for path in _walk(scratch / "live"):
            made._note(path)
        for kind, paths in made.files.items():
            for path in paths:
                made._values[path] = READERS[kind](made.place, path)
                made._restore()  # readers rebuild missing files and remove leftovers of a kill
        return made

    def what(self, number: int) -> tuple[str, str]:
        """File kind and damage of a case: cycles through all kinds, and through all damages for each kind."""
        kinds = sorted(self.files)
        turn, index = divmod(number, len(kinds))
        return kinds[index], DAMAGES[(index + turn) % len(DAMAGES)]

    def case(self, number: int, *, command: bool = False) -> Case:
        """Damages a file, reads it and restores everything; with `command`, repeats this with the whole command."""
        kind, damage = self.what(number)
        path = random.Random(number).choice(self.files[kind])
        name = path.relative_to(self.scratch / "live").as_posix()
        try:
            if not self._damage(path, kind, damage, number):
                return Case(number, kind, name, damage, "harmless", "the bytes are the same", False)
            outcome, said = self._read(kind, path)
            undecided = outcome == "silent" and damage in ("delete", "older version")
            if undecided and kind in GROWING:
                outcome, undecided = "harmless", False
            if undecided or command:
                self._restore()
                self._damage(path, kind, damage, number)
                other, words = self._command(kind, path)
                outcome, said = (other, words) if undecided else _worse((outcome, said), (other, words))
        finally:
            self._restore()
        return Case(number, kind, name, damage, outcome, said, command or undecided)

    def _damage(self, path: Path, kind: str, damage: str, number: int) -> bool:
        """Whether the file has changed."""
        draw, before, data = random.Random(f"damage {number}"), path.read_bytes(), None
        if damage in CHANGES:
            data = CHANGES[damage](path, draw)
        elif damage == "older version":
            data = self._earlier(path, kind, draw)
        path.unlink()
        if data is not None:
            self._write(path, data)
        elif damage in IN_PLACE:
            IN_PLACE[damage](path)
        return data != before

    def _earlier(self, path: Path, kind: str, draw: random.Random) -> bytes | None:
        """An intact file of this kind, preferably of this name; None if there is none."""
        if kind == "run/events*.jsonl":
            lines = path.read_bytes().splitlines(keepends=True)
            return b"".join(lines[: draw.randrange(len(lines))])
        others = [other for other in (*self._older.get(kind, ()), *self.files[kind]) if other != path]
        same = [other for other in others if other.name == path.name and other.parent.name == path.parent.name]
        found = [data for other in same or others if (data := other.read_bytes()) != path.read_bytes()]
        return draw.choice(found) if found else None

    def _read(self, kind: str, path: Path) -> tuple[Outcome, str]:
        before = _bytes(path)
        with _listening() as said:
            try:
                with _watched():
                    value = READERS[kind](self.place, path)
            except RopewalkError as error:
                return self._refused(path, str(error))
            except (Exception, Hang):
                return "traceback", traceback.format_exc()
        named = [line for line in said if self._names(path, line)]
        same = value == self._values[path]
        if kind in GROWING and not same and isinstance(value, list):
            same = all(item in self._values[path] for item in value)
        if same:
            rewritten = before != _bytes(path)
            return ("healed" if named or rewritten else "harmless"), "; ".join(named)
        return ("refused", "; ".join(named)) if named else ("silent", "read wrongly and silently")

    def _command(self, kind: str, path: Path) -> tuple[Outcome, str]:
        """The outcome of `ropewalk run`, in a state in which it reads the file."""
        if kind.startswith("prepared/stages/"):
            (self.place.data / "manifest.json").unlink(missing_ok=True)
        if kind.startswith("run/checkpoints/"):
            (self.place.run / "stages" / "evaluate.json").unlink(missing_ok=True)
        said = _Says()
        with _listening(said.lines):
            try:
                with _watched():
                    advance(self.resolved, runs=self.place.run.parent, progress=said)
            except RopewalkError as error:
                return self._refused(path, str(error))
            except (Exception, Hang):
                return "traceback", traceback.format_exc()
        other = [changed for changed in self._changed() if changed != path and not self._is_same(changed)]
        if other:
            return "silent", f"after the command {', '.join(map(str, other))} is not what it was"
        after, words = self._read(kind, path)
        if after == "refused" or (after == "silent" and (kind in GROWING or not path.is_file())):
            return "harmless", "the command does not need it"
        if after in WRONG:
            return after, f"after the command: {words}"
        named = "; ".join(line for line in said.lines if self._names(path, line))
        return "healed", named or "after the command"

    def _is_same(self, path: Path) -> bool:
        """Whether a file that a command rewrote is equivalent; recorded times may differ."""
        name = self._name(path)
        if name.startswith(_PASSING) or path.name in ("latest.json", ".lock"):
            return True
        kind = kind_of(name)
        if kind is None or path not in self._values:
            return True  # never read back, or new, such as a file that was set aside
        if (data := _bytes(path)) is None:
            return False
        if data == self._sound(path).read_bytes():
            return True
        try:
            return bool(READERS[kind.pattern](self.place, path) == self._values[path])
        except RopewalkError:
            return False

    def _refused(self, path: Path, message: str) -> tuple[Outcome, str]:
        if not self._names(path, message):
            return "misleading", f"{path.name} is not named: {message}"
        for target in _ADVICE.findall(message):
            advised = Path(target.strip("`,;:."))
            intact = advised.exists() and advised != path and not path.is_relative_to(advised)
            if intact:
                return "misleading", f"advises to delete {advised}, which is intact: {message}"
        return "refused", message

    def _names(self, path: Path, message: str) -> bool:
        if path.name in message or (path.parent != self.place.run and str(path.parent) in message):
            return True
        return path.parent.name.startswith("step-") and f"{path.parent.name}/" in message  # a copy in a store

    # Files

    def _by_kind(self, root: Path) -> dict[str, list[Path]]:
        found: dict[str, list[Path]] = {}
        for path in _walk(root):
            kind = kind_of(self._name(path, root))
            if kind is not None and kind.pattern in READERS and path.stat().st_size:
                found.setdefault(kind.pattern, []).append(path)
        return found

    def _name(self, path: Path, root: Path | None = None) -> str:
        """As `store/kinds.py` has it."""
        parts = path.relative_to(root or self.scratch / "live").parts
        if parts[0] == ADOPTED:
            parts = ("prepared", *parts[1:])
        return "/".join(("run", *parts[2:]) if parts[0] == "runs" else parts)

    def _sound(self, path: Path) -> Path:
        return self.scratch / "sound" / path.relative_to(self.scratch / "live")

    def _write(self, path: Path, data: bytes) -> None:
        if path.is_dir():
            path.rmdir()
        elif not path.is_file():
            path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        # Verification is cached by size, time and inode: they must differ even if the clock is coarse.
        self._ticks += 1
        os.utime(path, ns=(self._ticks, self._ticks))

    def _note(self, path: Path) -> None:
        status = path.stat()
        self._known[path] = (status.st_size, status.st_mtime_ns, status.st_ino)

    def _changed(self) -> list[Path]:
        now = {path: path.stat() for path in _walk(self.scratch / "live")}
        stamps = {path: (status.st_size, status.st_mtime_ns, status.st_ino) for path, status in now.items()}
        return [path for path in {*stamps, *self._known} if stamps.get(path) != self._known.get(path)]

    def _restore(self) -> None:
        for path in self._changed():
            sound = self._sound(path)
            if sound.exists():
                self._write(path, sound.read_bytes())
                self._note(path)
            else:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # in a checkpoint that was set aside
        for path in self.place.run.glob("checkpoints/*.damaged"):
            shutil.rmtree(path)


def _made(resolved: Resolved[Recipe], root: Path, progress: Progress) -> tuple[Resolved[Recipe], DamagedRun]:
    """A finished run below `root`, including files made on request, such as those of doctor and report."""
    recipe = resolved.value
    prepare = dataclasses.replace(recipe.prepare, folder=str(root / "prepared"), artifacts="keep")
    own = dataclasses.replace(resolved, value=dataclasses.replace(recipe, prepare=prepare))
    advance(own, runs=root / "runs", progress=progress)
    run = root / "runs" / recipe.name
    data = next(path.parent for path in (root / "prepared").glob("*/manifest.json"))
    write_summary(data, own.value.prepare)
    write_page(data)
    remember(run, read_predictions(run), tokens_per_s=1.0, compute=1.0, binding="compute")
    assert list_checkpoints(run / "checkpoints"), "a run that ended has a checkpoint"
    ids = pq.read_table(data / "ledger.parquet", columns=["id"])["id"]
    place = DamagedRun(run, data, own.value, ids[0].as_py(), root)
    leave(place)
    return own, place


class Hang(BaseException):
    """It takes longer than PATIENCE_S. Not an Exception: a reader must not handle it as a disk error."""


@contextlib.contextmanager
def _watched() -> Iterator[None]:
    """Raises Hang in a block that does not end; only in the main thread, which receives signals."""

    def ring(*_: object) -> None:
        raise Hang(f"it did not end within {PATIENCE_S} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class _Says(Silent):
    """Keeps all messages."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


class _Handler(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextlib.contextmanager
def _listening(lines: list[str] | None = None) -> Iterator[list[str]]:
    """Captures the warnings that are logged within the block."""
    lines = [] if lines is None else lines
    logger, handler = logging.getLogger("ropewalk"), _Handler(lines)
    logger.addHandler(handler)
    propagates, logger.propagate = logger.propagate, False
    try:
        yield lines
    finally:
        logger.propagate = propagates
        logger.removeHandler(handler)


def _bytes(path: Path) -> bytes | None:
    """The bytes of a file; None if there is none."""
    return path.read_bytes() if path.is_file() else None


def _walk(root: Path) -> list[Path]:
    return [path for path in sorted(root.rglob("*")) if path.is_file() and path.name != ".lock"]


def _worse(read: tuple[Outcome, str], command: tuple[Outcome, str]) -> tuple[Outcome, str]:
    """The outcome of reader and command: the worst of the two, else that of the command if it ran."""
    for outcome in WRONG:
        for one in (read, command):
            if one[0] == outcome:
                return one
    return read if command[0] == "harmless" else command
