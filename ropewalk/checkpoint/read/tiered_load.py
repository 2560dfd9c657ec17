"""Which step a run goes on from, when copies lie at several places.

The newest step for which every file of a manifest is found whole, each wherever it is: own memory, a peer's, the disk,
the remote store. A manifest names its files by the hashes of their chunks, so a file is the right one whoever kept it.
When a copy is damaged the next place is asked; when none is left, an older step is taken. Damaged copies are named,
and taken out of sight where they lie.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from ropewalk.base.errors import DamagedCheckpoint, DataError, StorageError
from ropewalk.base.files import storage
from ropewalk.base.untrusted import Refused, open_inside
from ropewalk.parallel.placement import Choose

from ..commit import RankRecord, joined
from ..format import (
    FILE,
    TOKENIZER,
    CheckpointManifest,
    identity,
    list_checkpoints,
    read_checkpoint_manifest,
    sealed,
    step_path,
)
from ..run_state import State, head_of
from ..shard_file import FileEntry, ShardFile
from ..tiers.tier import CopyOffer, CopySource, ShardKey, plain_name
from .load import Fill, Wants, needed_chunks, set_aside, take, want_all

Check = Callable[[CheckpointManifest, Path], object]
"""Raises DamagedCheckpoint when a manifest is not of a checkpoint that can be used."""

_AT_ONCE = 4
"""Files that are fetched and checked side by side."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Where a file came from."""

    source: str
    bytes: int
    """Fetched and checked."""
    seconds: float
    """To fetch and to check them."""


@dataclass(kw_only=True, slots=True)
class Report:
    """How a run found back."""

    step: int = 0
    identity: str = ""
    """Of its content."""
    files: dict[str, Taken] = field(default_factory=dict)
    seconds: float = 0.0
    """From the first question to the state in memory, every byte verified."""
    damaged: list[str] = field(default_factory=list)
    """Copies that were not what was written, by place; they are out of sight now."""
    unreachable: list[str] = field(default_factory=list)
    """Places that did not answer."""
    passed_over: list[str] = field(default_factory=list)
    """Newer steps that could not be put together, and what they lacked."""

    @property
    def bytes(self) -> int:
        """Of all files, fetched and checked."""
        return sum(taken.bytes for taken in self.files.values())

    @property
    def sources(self) -> dict[str, int]:
        """Bytes by place."""
        total: dict[str, int] = {}
        for taken in self.files.values():
            total[taken.source] = total.get(taken.source, 0) + taken.bytes
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    source: CopySource
    offer: CopyOffer


_Bad = tuple[_Copy, str]
"""A copy, and the file of it that is damaged; its other files may serve."""


class Offered:
    """What `sources`, the fastest first, have together of a run: every step that can be named, by the identity of its
    content (format.py), so that ranks can agree on one.

    Files that are not on this machine pass through the folder `scratch`, which is gone after `close`; copies that
    turned out to be damaged are then out of sight. A place that does not answer is told in the report.
    """

    def __init__(self, sources: Sequence[CopySource], *, scratch: Path, check: Check = lambda *_: None) -> None:
        self._start, self.report, self._scratch, self._check = time.perf_counter(), Report(), scratch, check
        self._copies = list(_copies(sources, self.report))
        self._candidates = _candidates(self._copies, self.report)
        self._bad: list[_Bad] = []

    def newest(self, refused: Collection[str] = ()) -> str:
        """The newest that nobody has refused; empty when there are none. When there are copies and none is whole,
        raises DamagedCheckpoint: starting from scratch would silently throw away a run."""
        left = [name for name in self._candidates if name not in refused]
        if left or not (self.report.damaged or self._copies):
            return left[0] if left else ""
        lines = [*self.report.damaged, *self.report.unreachable, *self.report.passed_over]
        end = (
            "no step is whole at any place, and nothing is deleted; make all places reachable, restore a checkpoint "
            "from a backup, or give the recipe another `name` to start from scratch"
        )
        raise DamagedCheckpoint("\n".join([*lines, end]))

    @property
    def wrong(self) -> list[str]:
        """Copies that were damaged."""
        return self.report.damaged

    def head(self, name: str) -> State | None:
        """What the manifest says; None when these places do not know of it, or when `check` refuses it."""
        manifest = self._candidates.get(name)
        if manifest is None:
            return None
        try:
            self._check(manifest, Path(f"step {manifest.step}"))
            return head_of(manifest)
        except DamagedCheckpoint as error:
            self.report.passed_over.append(str(error))
            return None

    def refuse(self, name: str) -> None:
        """Some rank cannot use it; the report says why."""

    def load(self, name: str, choose: Choose | None, fill: Fill | None = None) -> State | None:
        """The state, of which only what `choose` names is fetched, checked and read, as by `take`; None when the places
        do not have all of that."""
        manifest = self._candidates[name]
        folder, chunks = step_path(self._scratch, manifest.step), needed_chunks(manifest, choose, wholly=[TOKENIZER])
        lacking = _assemble(folder, manifest, self._copies, self.report, self._bad, chunks)
        state = None if lacking else _taken(folder, self.report, choose, fill)
        if state:
            self.report.identity = name
            self.report.step, self.report.seconds = state.step, time.perf_counter() - self._start
        else:
            self.report.passed_over.append(f"step {manifest.step}: {', '.join(lacking) or 'not readable'}")
        return state

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        _quarantine(self._bad, self.report)


def restore(sources: Sequence[CopySource], *, scratch: Path, wants: Wants = want_all) -> tuple[State | None, Report]:
    """The newest state that `sources` have together, on one rank; None when they have none."""
    refused: list[str] = []
    with contextlib.closing(Offered(sources, scratch=scratch)) as offered:
        while name := offered.newest(refused):
            head = offered.head(name)
            state = offered.load(name, wants(head)) if head else None
            if state:
                return state, offered.report
            refused.append(name)
    return None, offered.report


def _copies(sources: Sequence[CopySource], report: Report) -> Iterator[_Copy]:
    for source in sources:
        try:
            offers, wrong = source.offers()
        except StorageError as error:
            report.unreachable.append(f"{source.name}: {error}")
            continue
        report.damaged += wrong
        yield from (_Copy(source, offer) for offer in offers)


def _candidates(copies: Iterable[_Copy], report: Report) -> dict[str, CheckpointManifest]:
    """Every manifest that the copies give, by its identity, newest step first: those of whole checkpoints, and those
    that the shards of one launch give together."""
    shards: dict[tuple[int, str, int], dict[int, CheckpointManifest]] = {}
    for copy in copies:
        key = copy.offer.key
        shards.setdefault((key.step, key.attempt, key.world), {}).setdefault(key.rank, copy.offer.manifest)
    found: dict[str, CheckpointManifest] = {}
    for (step, _, world), parts in sorted(shards.items(), reverse=True, key=lambda item: item[0][0]):
        if len(parts) < world:
            report.passed_over.append(f"step {step}: shards of {world - len(parts)} of {world} ranks are nowhere")
            continue
        records = [RankRecord(files=parts[rank].files, tensors=parts[rank].tensors) for rank in range(world)]
        try:
            coordinator = joined(parts[0], records, path=Path(f"step {step}"))
        except StorageError as error:
            report.passed_over.append(str(error))
            continue
        # A whole checkpoint stands for all ranks that wrote it.
        coordinator = dataclasses.replace(coordinator, world=parts[0].world)
        found.setdefault(identity(coordinator), coordinator)
    return found


def _assemble(
    folder: Path,
    manifest: CheckpointManifest,
    copies: Sequence[_Copy],
    report: Report,
    bad: list[_Bad],
    chunks: Mapping[str, Sequence[int]],
) -> list[str]:
    """Makes `folder` a checkpoint of files from anywhere, with `chunks` by file; returns the files of which no place
    has these whole."""
    shutil.rmtree(folder, ignore_errors=True)
    with storage(f"creating {folder}"):
        folder.mkdir(parents=True)
        (folder / FILE).write_bytes(sealed(manifest))
    report.files.clear()

    def take(name: str) -> Taken | None:
        entry, owners = manifest.files[name], manifest.places(name)
        return _take(folder / plain_name(name), entry, copies, report, bad, owners=owners, chunks=chunks[name])

    # Side by side: checking one file and waiting for another take turns. Lists may be appended to from any thread.
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="restore") as pool:
        taken = dict(zip(chunks, pool.map(take, chunks), strict=True))
    report.files.update({name: one for name, one in taken.items() if one})
    return [name for name, one in taken.items() if one is None]


def _take(
    target: Path,
    entry: FileEntry,
    copies: Iterable[_Copy],
    report: Report,
    bad: list[_Bad],
    *,
    owners: dict[str, tuple[int, int]],
    chunks: Sequence[int],
) -> Taken | None:
    """The file from the first place that has `chunks` of it whole."""
    for copy in copies:
        if (copy, target.name) in bad or copy.offer.manifest.files.get(target.name) != entry:
            continue
        start = time.perf_counter()
        target.unlink(missing_ok=True)
        try:
            copy.source.fetch(copy.offer, target.name, target, chunks)
            # The load checks every chunk in any case; what comes unchecked is checked here, while others can be asked.
            wrong = (
                []
                if copy.source.checks
                else list(ShardFile(target, entry, owners=owners, linked=True).problems(chunks))
            )
        except DataError as error:
            wrong = [str(error)]
        except StorageError as error:
            report.unreachable.append(f"{copy.source.name}: {error}")
            continue
        if not wrong:
            size = sum(min(entry.chunk_bytes, entry.bytes - number * entry.chunk_bytes) for number in chunks)
            return Taken(source=copy.source.name, bytes=size, seconds=time.perf_counter() - start)
        where, file = f"{copy.source.name}: {copy.offer.key}: ", f"{copy.offer.where}/{target.name}"
        report.damaged += [where + message.replace(str(target), file) for message in wrong]
        bad.append((copy, target.name))
    return None


def _taken(folder: Path, report: Report, choose: Choose | None, fill: Fill | None) -> State | None:
    try:
        return take(folder, choose, fill, linked=True)
    except DamagedCheckpoint as error:
        # Right a moment ago, when it was put together: the memory it lies in cannot be trusted.
        report.damaged.append(str(error))
        return None


def _quarantine(bad: Iterable[_Bad], report: Report) -> None:
    done: list[_Copy] = []
    for copy, _ in bad:
        if copy in done:
            continue
        done.append(copy)
        try:
            copy.source.quarantine(copy.offer)
        except StorageError as error:
            report.unreachable.append(f"{copy.source.name}: {error}")


class DiskSource:
    """The checkpoints of a run's folder as a place to restore from."""

    name = "disk"
    checks = False

    def __init__(self, folder: Path, run: str, *, renames: bool = True) -> None:
        """`renames`: damaged checkpoints are set aside; of ranks that share the folder, one may."""
        self._folder, self._run, self._renames = folder, run, renames

    def offers(self) -> tuple[list[CopyOffer], list[str]]:
        found, wrong = [], []
        for path in list_checkpoints(self._folder):
            try:
                manifest = read_checkpoint_manifest(path)
            except DamagedCheckpoint as error:
                wrong.append(f"{self.name}: {error}")
                self._set_aside(path)
                continue
            found.append(CopyOffer(ShardKey(run=self._run, step=manifest.step, attempt="disk"), manifest, str(path)))
        return found, wrong

    def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
        source = Path(offer.where) / file
        try:
            os.close(open_inside(source))
        except FileNotFoundError:
            raise DamagedCheckpoint(f"{source}: damaged checkpoint: this file is missing") from None
        except Refused as error:
            raise DamagedCheckpoint(f"{source}: damaged checkpoint: {error}") from None
        target.symlink_to(source.resolve())

    def quarantine(self, offer: CopyOffer) -> None:
        self._set_aside(Path(offer.where))

    def _set_aside(self, path: Path) -> None:
        if self._renames:
            set_aside(path)
