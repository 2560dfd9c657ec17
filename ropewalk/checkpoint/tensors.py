"""State <-> checkpoint folder, in any layout of ranks.

Each rank writes the boxes that it holds; a tensor that several ranks hold alike is written by one of them. Whoever
reads says which box of which tensor it wants, reads the ranges that hold it, and checks them on the way.
"""

from __future__ import annotations

import contextlib
import dataclasses
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ropewalk import __version__
from ropewalk.base.errors import DamagedCheckpoint, DataError, StorageError
from ropewalk.model.hugging_face.strict import read_spec
from ropewalk.model.spec import Spec
from ropewalk.parallel.placement import Choose, LocalShard, Placement

from .commit import Attempt, Record, commit
from .disk import Disk, LocalDisk
from .format import (
    CheckpointManifest,
    Piece,
    TensorEntry,
    item_bytes,
    read_checkpoint_manifest,
)
from .read.model_check import TOKENIZER as TOKENIZER
from .read.model_check import check_weights
from .regions import Region, fill, rows_of
from .regions import whole as whole_box
from .shard_compression import Packer
from .shard_file import Pace, Payload, digest, layout
from .shard_layout import Held, Tensors, as_bytes, held, written
from .write.shard_writer import BUFFER_BYTES, Block, PayloadFile
from .write.task_graph import Graph, run

PACKED = ".planes"
"""Suffix of a safetensors file that is packed, which other readers do not understand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class State:
    """Everything that a run needs to go on."""

    step: int
    tokens: int
    seed: int
    spec: Spec
    data: dict[str, Any]
    model: Tensors
    optimizer: Tensors
    tokenizer: bytes
    """The tokenizer's file: a checkpoint generates text without anything beside it."""
    phase: int = 0
    phase_step: int = 0
    phase_ended: bool = False
    validation: dict[str, Any] = field(default_factory=dict)
    chat: str = ""
    parent: str = ""
    """These as in `CheckpointManifest`."""


def save(folder: Path, state: State, *, disk: Disk | None = None, attempt: Attempt | None = None) -> Path:
    """Commits the checkpoint of `state.step` below `folder` and returns its path; blocks until it is durable.

    All ranks of the attempt must call, each with its own parts of the tensors.
    """
    disk, attempt = disk or LocalDisk(), attempt or Attempt()
    parts = {
        group: [_on_host(part) for part in written(tensors, rank=attempt.rank)]
        for group, tensors in groups_of(state).items()
    }
    return commit(
        folder,
        manifest_of(state),
        write=lambda place: write_parts(place, parts, tokenizer=state.tokenizer, disk=disk, attempt=attempt),
        disk=disk,
        attempt=attempt,
    )


def write_parts(
    place: Path,
    parts: Mapping[str, Iterable[Held]],
    *,
    tokenizer: bytes,
    disk: Disk,
    attempt: Attempt,
    threads: int = 1,
    pace: Pace | None = None,
    there: Mapping[str, Mapping[str, Future[None]]] | None = None,
    digests: Mapping[str, Mapping[str, str]] | None = None,
    packer: Packer | None = None,
    tell: Callable[[Mapping[str, float]], None] = lambda _: None,
) -> Record:
    """Writes one file a group, and on rank 0 the tokenizer; returns when they are durable. The bytes are the same for
    any number of `threads`.

    By group and name: when the parts are `there`, if not now, and what they hashed to then (`digests`); StorageError
    when one has changed since. `packer` decides whether a file is packed. `tell` gets the seconds by kind of task.
    """
    graph, files = Graph(), {}
    tensors: dict[str, dict[str, TensorEntry]] = {}
    there, digests = there or {}, digests or {}
    with contextlib.ExitStack() as opened:
        for group, group_parts in parts.items():
            name = f"{group}.safetensors" if attempt.world == 1 else f"{group}-{attempt.rank:05d}.safetensors"
            ordered = sorted(group_parts, key=lambda part: part.name)
            header, begins = layout([(p.name, p.dtype, p.region.shape, p.bytes) for p in ordered])
            arrivals, expected = there.get(group, {}), digests.get(group, {})
            item = _packed_item(ordered, arrivals, packer) if packer else 0
            name += PACKED if item else ""
            blocks = [Block(data=memoryview(header)), *(_block(group, p, arrivals, expected) for p in ordered)]
            files[name] = PayloadFile(disk, place / name, blocks, packed=item, pace=pace)
            tensors[group] = {
                part.name: TensorEntry(
                    dtype=part.dtype,
                    shape=part.shape,
                    pieces=(Piece(file=name, begin=begin, offset=part.region.offset, shape=part.region.shape),),
                )
                for part, begin in zip(ordered, begins, strict=True)
            }
        if attempt.rank == 0:
            files[TOKENIZER] = PayloadFile(disk, place / TOKENIZER, [Block(data=memoryview(tokenizer))])
        for file in files.values():
            file.add_to(graph, opened)
        tell(run(graph, threads=threads, memory_bytes=BUFFER_BYTES))
    entries = {name: file.close() for name, file in files.items()}
    plain = [name for name, entry in entries.items() if name != TOKENIZER and not entry.frames]
    if packer and plain:
        seconds = max(files[name].ended for name in plain) - min(files[name].began for name in plain)
        packer.wrote(sum(entries[name].bytes for name in plain), seconds=seconds)
    return Record(files=entries, tensors=tensors)


def groups_of(state: State) -> dict[str, Tensors]:
    """The tensors of a state by the file they go to."""
    return {"model": state.model, "optimizer": state.optimizer}


def manifest_of(state: State) -> CheckpointManifest:
    """What the manifest says before anything is written."""
    return CheckpointManifest(
        step=state.step,
        tokens=state.tokens,
        seed=state.seed,
        spec=dataclasses.asdict(state.spec),
        data=state.data,
        files={},
        tensors={},
        versions={"ropewalk": __version__, "torch": torch.__version__, "python": platform.python_version()},
        parent=state.parent,
        phase=state.phase,
        phase_step=state.phase_step,
        phase_ended=state.phase_ended,
        validation=state.validation,
        chat=state.chat,
    )


class Reader:
    """A checkpoint open for reading: gives any box of any tensor, every byte checked on the way."""

    def __init__(self, path: Path, *, linked: bool = False) -> None:
        """`linked`: its files may be links to anywhere, since we made them ourselves."""
        self.path, self._linked = path, linked
        self.manifest = read_checkpoint_manifest(path)
        self._open: dict[str, Payload] = {}

    def tensor(self, group: str, name: str, region: Region | None = None) -> Tensor:
        """A box of a tensor (None: all of it), on the CPU; reads the ranges that hold it and no others."""
        entry = self.manifest.tensors.get(group, {}).get(name)
        if entry is None:
            raise DataError(f"{self.path}: no tensor `{name}` in its {group}; it is of another model")
        region = region or whole_box(entry.shape)
        item = item_bytes(entry.dtype)
        target = self._memory(region.size * item, f"{group}/{name}")
        left = region.size
        for piece in entry.pieces:
            stored = Region(piece.offset, piece.shape)
            part = stored.meet(region)
            if part is not None:
                first, last = rows_of(part, stored)
                data = self._payload(piece.file).raw(piece.begin + first * item, piece.begin + last * item)
                fill(target, region, part, stored, data, item)
                self._payload(piece.file).release()
                left -= part.size
        # The manifest was checked when it was read; memory that nobody filled must not become a weight in any case.
        if left:
            raise DamagedCheckpoint(f"{self.path}: damaged checkpoint: {left} numbers of {group}/{name} are nowhere")
        kind: torch.dtype = getattr(torch, entry.dtype)
        # torch does not reinterpret what holds nothing.
        return (
            torch.from_numpy(target).view(kind).reshape(region.shape)
            if region.size
            else torch.empty(region.shape, dtype=kind)
        )

    def parts(self, group: str, choose: Choose) -> dict[str, LocalShard]:
        """The part of every tensor of a group that is chosen."""
        found = {}
        for name, entry in self.manifest.tensors.get(group, {}).items():
            placement = choose(group, name, entry.shape)
            if placement is not None:
                found[name] = LocalShard(
                    self.tensor(group, name, Region(placement.offset, placement.local_shape)), placement
                )
        return found

    def tensors(self, group: str) -> dict[str, Tensor]:
        """Every tensor of a group, whole."""
        return {name: self.tensor(group, name) for name in self.manifest.tensors.get(group, {})}

    def into(self, group: str, target: Mapping[str, Tensor]) -> None:
        """Fills `target`, plain tensors or parts of DTensors of any layout, in place. Type and shape must match."""
        for part in held(target):
            entry = self.manifest.tensors[group].get(part.name)
            stored = (entry.dtype, entry.shape) if entry else "nothing"
            if entry is None or stored != (part.dtype, part.shape):
                raise DataError(f"{self.path}: {group}/{part.name} holds {stored}, {part.dtype} {part.shape} is asked")
            part.local.copy_(self.tensor(group, part.name, part.region))

    def file(self, name: str) -> bytes:
        """A file that holds no tensors."""
        if name not in self.manifest.files:
            raise DamagedCheckpoint(f"{self.path / name}: damaged checkpoint: this file is missing")
        return bytes(self._payload(name).read(0, self.manifest.files[name].bytes))

    def _memory(self, size: int, what: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
        try:
            return np.empty(size, np.uint8)
        except MemoryError:
            raise StorageError(f"{self.path}: {what} has {size} bytes, more than this machine has left") from None

    def _payload(self, name: str) -> Payload:
        if name not in self._open:
            entry = self.manifest.files[name]
            owners = self.manifest.places(name)
            self._open[name] = Payload(self.path / name, entry, owners=owners, linked=self._linked)
        return self._open[name]


class Stream(Mapping[str, Tensor | LocalShard]):
    """The tensors of a group, each read when it is asked for and not kept: the part that `choose` names, or with None
    all of it. What nobody needs is left out.

    A tensor that cannot be read comes as zeros, and `problem` says what is wrong with it: ranks that load a state
    together also publish it together, so each of them must come to the end before they decide that it is of no use.
    """

    def __init__(self, reader: Reader, group: str, choose: Choose | None) -> None:
        self._reader, self._group = reader, group
        self._entries = reader.manifest.tensors.get(group, {})
        self._placements: dict[str, Placement | None] = dict.fromkeys(self._entries)
        if choose is not None:
            chosen = {name: choose(group, name, entry.shape) for name, entry in self._entries.items()}
            self._placements = {name: placement for name, placement in chosen.items() if placement is not None}
        self.problem: DamagedCheckpoint | None = None

    def __getitem__(self, name: str) -> Tensor | LocalShard:
        placement = self._placements[name]
        region = Region(placement.offset, placement.local_shape) if placement else whole_box(self._entries[name].shape)
        local = self._read(name, region)
        return LocalShard(local, placement) if placement else local

    def __iter__(self) -> Iterator[str]:
        return iter(self._placements)

    def __len__(self) -> int:
        return len(self._placements)

    def __contains__(self, name: object) -> bool:
        return name in self._placements  # without reading it

    def check(self) -> None:
        """Raises what is wrong with the tensors that were read, if anything is."""
        if self.problem:
            raise self.problem

    def _read(self, name: str, region: Region) -> Tensor:
        if self.problem is None:
            try:
                return self._reader.tensor(self._group, name, region)
            except DamagedCheckpoint as error:
                self.problem = error
        return torch.zeros(region.shape, dtype=getattr(torch, self._entries[name].dtype))


Wants = Callable[[State], Choose | None]
"""By what a manifest says, as a state without tensors: which parts of them are needed; None: all, whole."""

Fill = Callable[[State], None]
"""Takes a state over whose tensors are read as they are asked for (`Stream`)."""


def whole(_: State) -> None:
    """Wants all."""


def load(path: Path, *, optimizer: bool = True, choose: Choose | None = None, linked: bool = False) -> State:
    """The state in the checkpoint folder `path`, every byte that is read checked; without `optimizer` its tensors stay
    unread. With `choose` tensors are parts, and the ranges that hold them are read and no others. `linked` as in
    `Reader`."""
    reader = Reader(path, linked=linked)

    def tensors(group: str) -> Tensors:
        return reader.tensors(group) if choose is None else reader.parts(group, choose)

    return dataclasses.replace(
        head_of(reader.manifest),
        model=tensors("model"),
        optimizer=tensors("optimizer") if optimizer else {},
        tokenizer=reader.file(TOKENIZER),
    )


def load_weights(path: Path) -> State:
    """The model of the checkpoint folder `path`, without its optimizer, when its weights are those of its spec: ready
    to be built. Whether its tokenizer can be used is for whoever encodes to find out (prepare/foreign.py)."""
    check_weights(read_checkpoint_manifest(path), path)
    return load(path, optimizer=False)


def take(path: Path, choose: Choose | None, fill: Fill | None, *, linked: bool = False) -> State:
    """`load`, or with `fill` gives the state to it, tensor by tensor, and returns it without any. DamagedCheckpoint
    when some of what was read is not what was written: what `fill` made of it is then of no use."""
    if fill is None:
        return load(path, choose=choose, linked=linked)
    reader = Reader(path, linked=linked)
    model, optimizer = (Stream(reader, group, choose) for group in ("model", "optimizer"))
    head = dataclasses.replace(head_of(reader.manifest), tokenizer=reader.file(TOKENIZER))
    fill(dataclasses.replace(head, model=model, optimizer=optimizer))
    model.check()
    optimizer.check()
    return head


def head_of(manifest: CheckpointManifest) -> State:
    """What a manifest says of the state: all but its tensors and the tokenizer."""
    return State(
        step=manifest.step,
        tokens=manifest.tokens,
        seed=manifest.seed,
        spec=read_spec(manifest.spec, name="a checkpoint"),
        data=manifest.data,
        model={},
        optimizer={},
        tokenizer=b"",
        phase=manifest.phase,
        phase_step=manifest.phase_step,
        phase_ended=manifest.phase_ended,
        validation=manifest.validation,
        chat=manifest.chat,
        parent=manifest.parent,
    )


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint to `step-00000100.damaged`: it no longer counts among those to keep."""
    aside = path.with_name(path.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    LocalDisk().rename(path, aside)
    return aside


def _block(group: str, part: Held, there: Mapping[str, Future[None]], expected: Mapping[str, str]) -> Block:
    """The bytes of a part; after it has been written, it must still hash to what is expected of it."""
    data = as_bytes(part.local)

    def check() -> None:
        if part.name in expected and digest(data) != expected[part.name]:
            raise StorageError(
                f"{group}/{part.name}: the copy in memory changed before it was written, so this checkpoint is given "
                "up; older ones are intact. Test this machine's memory"
            )

    return Block(data=data, there=there.get(part.name), check=check)


def _packed_item(parts: Sequence[Held], there: Mapping[str, Future[None]], packer: Packer) -> int:
    """Bytes of the numbers as which to pack a file of these parts, those of the largest; 0: not to pack it."""
    largest = max(parts, key=lambda part: part.bytes, default=None)
    if largest is None:
        return 0
    if largest.name in there:
        there[largest.name].result()
    item = item_bytes(largest.dtype)
    return item if packer.chooses(as_bytes(largest.local), item=item) else 0


def _on_host(part: Held) -> Held:
    return dataclasses.replace(part, local=part.local.cpu())
