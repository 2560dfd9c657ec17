"""A worker process: reads and decodes samples and puts them in shared memory, one part of a batch after the other.

It imports no torch and knows nothing of the run. Requests and replies are small and come over one socket, in order; it
ends when the socket does, so no worker outlives the process that asks. What it does hangs on the request alone: when a
worker dies, another one may do the same part again.
"""

from __future__ import annotations

import math
import os
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.items import Item
from ropewalk.store.origin import Origin

from .decode import Damaged, Encoded, Pixels, Stills, size_of
from .placing import Placing
from .shared import Bytes, mapped


class Slice(NamedTuple):
    """Bytes `start` to `stop` of the shared memory `memory`."""

    memory: int
    start: int
    stop: int


Content = Item | Slice | None
"""Where the bytes of a sample are: in a local file, in shared memory; None for what is damaged."""
Damage = tuple[int, str | DataError]
"""The number of a sample within its part, and why it cannot be had."""


@dataclass(frozen=True, slots=True)
class Map:
    """Memory that later requests speak of; its descriptor follows. There is no reply."""

    memory: int
    size: int
    forgotten: tuple[int, ...]
    """Memory that nobody speaks of any more."""


@dataclass(frozen=True, slots=True)
class Measure:
    """How large are these images?"""

    contents: Sequence[Content]


@dataclass(frozen=True, slots=True)
class Measured:
    sizes: npt.NDArray[np.int64]
    """B 2, height and width."""
    whole: npt.NDArray[np.bool_]
    """What had to be decoded to learn it."""
    damages: list[Damage]
    fetch_s: float


@dataclass(frozen=True, slots=True)
class Decode:
    """Some samples of a batch, and where in `memory` they belong."""

    contents: Sequence[Content]
    sizes: npt.NDArray[np.int64]
    """B 2, as they were measured."""
    reductions: npt.NDArray[np.int64]
    placing: Placing
    memory: int
    start: int
    """Byte of the first sample."""
    shape: tuple[int, ...]
    """Of all of them."""
    dtype: str


@dataclass(slots=True)
class Decoded:
    damages: list[Damage] = field(default_factory=list)
    fetch_s: float = 0.0
    decode_s: float = 0.0
    place_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Failed:
    """A mistake of ours."""

    trace: str


READY = "ready"
"""The first thing a worker says."""

Reply = Measured | Decoded | Failed


def main(descriptor: int) -> None:
    """Answers what comes over the socket `descriptor` until it is closed."""
    work = _Worker(Stills())
    with Connection(descriptor) as channel:
        try:
            channel.send(READY)
            while True:
                request = channel.recv()
                if isinstance(request, Map):
                    work.map(request, recv_handle(channel))
                else:
                    channel.send(work.answer(request))
        except (EOFError, ConnectionError):
            return


class _Worker:
    def __init__(self, stills: Stills) -> None:
        self._stills, self._origin = stills, Origin()
        self._memory: dict[int, Bytes] = {}

    def map(self, request: Map, descriptor: int) -> None:
        for number in request.forgotten:
            self._memory.pop(number, None)
        self._memory[request.memory] = mapped(descriptor, request.size)
        os.close(descriptor)

    def answer(self, request: Measure | Decode) -> Reply:
        try:
            return self._measured(request) if isinstance(request, Measure) else self._decoded(request)
        except Exception:
            # It belongs to the process that waits for the batch; this one goes on.
            return Failed(traceback.format_exc())

    def _measured(self, request: Measure) -> Measured:
        began = time.perf_counter()
        damages: list[Damage] = []
        count = len(request.contents)
        sizes, whole = np.zeros((count, 2), np.int64), np.zeros(count, np.bool_)
        for place, data in enumerate(self._read(request.contents, damages)):
            if data is None:
                continue
            try:
                size = size_of(data)
                if size is None:
                    size, whole[place] = self._stills.decode(data, None).shape[:2], True
                sizes[place] = size
            except Damaged as error:
                damages.append((place, str(error)))
        return Measured(sizes, whole, damages, time.perf_counter() - began)

    def _decoded(self, request: Decode) -> Decoded:
        memory = self._memory[request.memory]
        size = math.prod(request.shape) * np.dtype(request.dtype).itemsize
        targets = memory[request.start : request.start + size].view(request.dtype).reshape(request.shape)
        reply = Decoded()
        began = time.perf_counter()
        contents = self._read(request.contents, reply.damages)
        reply.fetch_s = time.perf_counter() - began
        for place, data in enumerate(contents):
            began = time.perf_counter()
            pixels = None
            try:
                if data is not None:
                    pixels = self._pixels(data, request.sizes[place], int(request.reductions[place]))
            except Damaged as error:
                reply.damages.append((place, str(error)))
            decoded = time.perf_counter()
            request.placing.place(place, pixels, targets[place])
            reply.decode_s += decoded - began
            reply.place_s += time.perf_counter() - decoded
        return reply

    def _pixels(self, data: Encoded, measured: npt.NDArray[np.int64], reduction: int) -> Pixels:
        """What threads decode; the bytes are looked at again, since they may be others than those that were measured
        an epoch ago."""
        size = size_of(data)
        pixels = self._stills.decode(data, size, reduce=reduction)
        height, width = measured.tolist()
        if (size or pixels.shape[:2]) != (height, width):
            raise Damaged(f"it is not the picture of {height} x {width} pixels that it was when it was read before")
        return pixels

    def _read(self, contents: Sequence[Content], damages: list[Damage]) -> list[Encoded | None]:
        """The bytes of each sample; neighbours in a file are read together."""
        items = [content for content in contents if isinstance(content, Item)]
        try:
            fetched = iter(self._origin.fetch(items))
        except DataError:
            return [self._read_one(place, content, damages) for place, content in enumerate(contents)]
        return [next(fetched) if isinstance(content, Item) else self._shown(content) for content in contents]

    def _read_one(self, place: int, content: Content, damages: list[Damage]) -> Encoded | None:
        try:
            return self._origin.fetch([content])[0] if isinstance(content, Item) else self._shown(content)
        except DataError as error:
            damages.append((place, error))
            return None

    def _shown(self, content: Slice | None) -> Encoded | None:
        return None if content is None else self._memory[content.memory][content.start : content.stop].data
