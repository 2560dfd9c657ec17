"""Restores a state from all tiers: own memory, peers, disk and object store.

The newest step is restored of which every file is intact in some tier. Manifests list the hashes of all chunks, so a
file is identified wherever it lies. A damaged copy is replaced by the next tier's; without one, an older step is used.
Damaged copies are reported and quarantined.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
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
from ..shard_file import ShardFile
from ..tiers.tier import CopyOffer, CopySource, ShardKey, plain_name
from .load import Check, Fill, load_or_fill, needed_chunks, set_aside

_THREADS = 4
"""Files that are fetched and verified in parallel."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FetchedFile:
    """The tier that a file came from."""

    source: str
    bytes: int
    """Fetched and verified."""
    seconds: float
    """To fetch and verify them."""


@dataclass(kw_only=True, slots=True)
class RestoreReport:
    """How a run was restored."""

    step: int = 0
    identity: str = ""
    """Hash of the content."""
    files: dict[str, FetchedFile] = field(default_factory=dict)
    seconds: float = 0.0
    """From the first request until the verified state is in memory."""
    damaged: list[str] = field(default_factory=list)
    """Damaged copies, by tier; they are quarantined."""
    unreachable: list[str] = field(default_factory=list)
    """Tiers that did not answer."""
    passed_over: list[str] = field(default_factory=list)
    """Newer steps that could not be restored, and what was missing."""

    @property
    def bytes(self) -> int:
        """Of all files, fetched and verified."""
        return sum(file.bytes for file in self.files.values())

    @property
    def sources(self) -> dict[str, int]:
        """Bytes by tier."""
        total: dict[str, int] = {}
        for file in self.files.values():
            total[file.source] = total.get(file.source, 0) + file.bytes
        return total


@dataclass(frozen=True, slots=True, eq=False)
class _Copy:
    source: CopySource
    offer: CopyOffer


class TierCandidates:
    """The states of a run in `sources`, fastest first. Each is named by the identity of its content (format.py), so
    that
    all ranks can agree on one.

    Files that are not on this machine are fetched into the folder `scratch`, which `close` removes; `close` also
    quarantines damaged copies.
    """

    def __init__(self, sources: Sequence[CopySource], *, scratch: Path, check: Check = lambda *_: None) -> None:
        self._start, self.report, self._scratch, self._check = time.perf_counter(), RestoreReport(), scratch, check
        self._copies = list(_copies(sources, self.report))
        self._manifests = _manifests(self._copies, self.report)
        self._damaged: list[tuple[_Copy, str]] = []
        """Copies and their damaged files; their other files may be intact."""

    def newest(self, refused: Collection[str] = ()) -> str:
        left = [name for name in self._manifests if name not in refused]
        if left or not (self.report.damaged or self._copies):
            return left[0] if left else ""
        lines = [*self.report.damaged, *self.report.unreachable, *self.report.passed_over]
        end = (
            "no step is intact in any tier, and nothing is deleted; make all tiers reachable, restore a checkpoint "
            "from a backup, or give the recipe another `name` to start from scratch"
        )
        raise DamagedCheckpoint("\n".join([*lines, end]))

    @property
    def wrong(self) -> list[str]:
        return self.report.damaged

    def head(self, name: str) -> State | None:
        manifest = self._manifests.get(name)
        if manifest is None:
            return None
        try:
            self._check(manifest, Path(f"step {manifest.step}"))
            return head_of(manifest)
        except DamagedCheckpoint as error:
            self.report.passed_over.append(str(error))
            return None

    def load(self, name: str, choose: Choose | None, fill: Fill | None = None) -> State | None:
        """As `load_or_fill`; fetches, verifies and reads only what `choose` names."""
        manifest = self._manifests[name]
        folder = step_path(self._scratch, manifest.step)
        missing = self._assemble(folder, manifest, choose)
        state = None if missing else self._read(folder, choose, fill)
        if state:
            self.report.identity = name
            self.report.step, self.report.seconds = state.step, time.perf_counter() - self._start
        else:
            self.report.passed_over.append(f"step {manifest.step}: {', '.join(missing) or 'not readable'}")
        return state

    def refuse(self, name: str) -> None:
        """The report has the reason."""

    def close(self) -> None:
        shutil.rmtree(self._scratch, ignore_errors=True)
        for copy in dict.fromkeys(copy for copy, _ in self._damaged):
            try:
                copy.source.quarantine(copy.offer)
            except StorageError as error:
                self.report.unreachable.append(f"{copy.source.name}: {error}")

    def _assemble(self, folder: Path, manifest: CheckpointManifest, choose: Choose | None) -> list[str]:
        """Builds the checkpoint `folder` from files of all tiers, with the chunks that `choose` needs; returns the
        files that no tier has intact."""
        shutil.rmtree(folder, ignore_errors=True)
        with storage(f"creating {folder}"):
            folder.mkdir(parents=True)
            (folder / FILE).write_bytes(sealed(manifest))
        self.report.files.clear()
        chunks = needed_chunks(manifest, choose, whole_files=[TOKENIZER])

        def fetch(name: str) -> FetchedFile | None:
            return self._fetch(folder / plain_name(name), manifest, chunks[name])

        # In parallel: one file is verified while another is fetched. Lists may be appended to from any thread.
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="restore") as pool:
            fetched = dict(zip(chunks, pool.map(fetch, chunks), strict=True))
        self.report.files.update({name: file for name, file in fetched.items() if file})
        return [name for name, file in fetched.items() if file is None]

    def _fetch(self, target: Path, manifest: CheckpointManifest, chunks: Sequence[int]) -> FetchedFile | None:
        """Fetches `chunks` of a file from the first tier that has them intact."""
        name, entry, report = target.name, manifest.files[target.name], self.report
        for copy in self._copies:
            if (copy, name) in self._damaged or copy.offer.manifest.files.get(name) != entry:
                continue
            start = time.perf_counter()
            target.unlink(missing_ok=True)
            wrong: list[str] = []
            try:
                copy.source.fetch(copy.offer, name, target, chunks)
                # Loading verifies every chunk again; here, another tier can still be asked.
                if not copy.source.checks:
                    file = ShardFile(target, entry, owners=manifest.byte_ranges(name), linked=True)
                    wrong = list(file.problems(chunks))
            except DataError as error:
                wrong = [str(error)]
            except StorageError as error:
                report.unreachable.append(f"{copy.source.name}: {error}")
                continue
            if not wrong:
                size = sum(min(entry.chunk_bytes, entry.bytes - number * entry.chunk_bytes) for number in chunks)
                return FetchedFile(source=copy.source.name, bytes=size, seconds=time.perf_counter() - start)
            where, place = f"{copy.source.name}: {copy.offer.key}: ", f"{copy.offer.where}/{name}"
            report.damaged += [where + message.replace(str(target), place) for message in wrong]
            self._damaged.append((copy, name))
        return None

    def _read(self, folder: Path, choose: Choose | None, fill: Fill | None) -> State | None:
        try:
            return load_or_fill(folder, choose, fill, linked=True)
        except DamagedCheckpoint as error:
            # It was intact when it was assembled: this machine's memory cannot be trusted.
            self.report.damaged.append(str(error))
            return None


def _copies(sources: Sequence[CopySource], report: RestoreReport) -> Iterator[_Copy]:
    for source in sources:
        try:
            offers, wrong = source.offers()
        except StorageError as error:
            report.unreachable.append(f"{source.name}: {error}")
            continue
        report.damaged += wrong
        yield from (_Copy(source, offer) for offer in offers)


def _manifests(copies: Iterable[_Copy], report: RestoreReport) -> dict[str, CheckpointManifest]:
    """The manifests of all states by identity, newest step first: of whole checkpoints, and joined from the shards of
    one
    launch."""
    shards: dict[tuple[int, str, int], dict[int, CheckpointManifest]] = {}
    for copy in copies:
        key = copy.offer.key
        shards.setdefault((key.step, key.attempt, key.world), {}).setdefault(key.rank, copy.offer.manifest)
    found: dict[str, CheckpointManifest] = {}
    for (step, _, world), parts in sorted(shards.items(), reverse=True, key=lambda item: item[0][0]):
        if len(parts) < world:
            report.passed_over.append(f"step {step}: shards of {world - len(parts)} of {world} ranks are missing")
            continue
        records = [RankRecord(files=parts[rank].files, tensors=parts[rank].tensors) for rank in range(world)]
        try:
            manifest = joined(parts[0], records, path=Path(f"step {step}"))
        except StorageError as error:
            report.passed_over.append(str(error))
            continue
        # A whole checkpoint is a single shard, written by all ranks.
        manifest = dataclasses.replace(manifest, world=parts[0].world)
        found.setdefault(identity(manifest), manifest)
    return found


class DiskSource:
    """The checkpoints of a run on disk as a source of copies."""

    name = "disk"
    checks = False

    def __init__(self, folder: Path, run: str, *, renames: bool = True) -> None:
        """`renames`: whether to rename damaged checkpoints; only one of the ranks that share the folder may."""
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
