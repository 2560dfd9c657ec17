"""Samples -> batches of images on the device: fetch, decode, transform, collate, copy, each in threads or processes of
its own.

Sample n of the run is a function of (seed, n): epoch n // samples, and within it a keyed permutation. Ranks take turns,
so the global sequence is the same for any number of them, and of threads. What is random about a sample hangs on
(seed, epoch, document, stage). So the state is one integer.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import xxhash

from ropewalk.base.errors import ConfigError, DataError, Problem
from ropewalk.base.seeds import seed_for
from ropewalk.load.permutation import rows_in_turn
from ropewalk.load.stalls import Stalls
from ropewalk.store.items import Fetch, Item
from ropewalk.store.origin import Origin, is_url, open_origin

from . import geometry
from .config import Media
from .decode import Damaged, Encoded, Stills, size_of
from .flight import Flight, Images, Sizes
from .processes import Processes
from .samples import Samples, open_samples
from .streams import Drawn
from .threads import Threads
from .transforms import Chain, compiled
from .work import Busy, Executor, Made, Work
from .worker import Measured

FETCH_PART = 16
"""Samples asked for at a time: neighbours among them become one request."""
BLOCK = 64
"""Neighbouring samples that stay together with `shuffle = "blocks"`."""
TOGETHER = 32
"""Blocks whose samples are then read among each other."""
MOST_AHEAD = 16
"""Batches in preparation at once, however small they are."""
MOST_THREADS = 4
"""Cores that threads of one process keep busy. Of 16 (and an H200) they gave 3,700 images a second, at most 6,200 with
nothing but a loop of decoding; processes 10,200."""

_log = logging.getLogger(__name__)


def open_media(
    media: Media,
    *,
    seed: int,
    device: torch.device | str = "cpu",
    rank: int = 0,
    world: int = 1,
    fetch: Fetch | None = None,
    stalls: Stalls | None = None,
) -> MediaLoader:
    """The loader of one `[[load.media]]`. Bytes come through `fetch` (a cache), else straight from where they lie."""
    if media.batch_size % world:
        what = f"`batch_size`: {media.batch_size} samples cannot be shared by {world} ranks evenly"
        raise ConfigError([Problem(f"load.media {media.name}", what, f"give a multiple of {world}")])
    fetch = fetch or open_origin(media.path)
    samples = open_samples(media.path, fetch=fetch)
    return MediaLoader(
        samples, media, seed=seed, device=torch.device(device), rank=rank, world=world, fetch=fetch, stalls=stalls
    )


class MediaLoader:
    """The batches of a source from any sample on; some are always in preparation while the step computes."""

    def __init__(
        self,
        samples: Samples,
        media: Media,
        *,
        seed: int,
        device: torch.device,
        fetch: Fetch,
        rank: int = 0,
        world: int = 1,
        stalls: Stalls | None = None,
    ) -> None:
        self.samples, self.media = samples, media
        self.busy = Busy()
        self.damaged: dict[str, str] = {}
        """Why, by document, of what was skipped."""
        self._seed, self._device, self._rank, self._world, self._fetch = seed, device, rank, world, fetch
        self._stalls = stalls or Stalls()
        self._chain = compiled(media, gpu=device.type == "cuda")
        self._stills = Stills()
        self._executor = _executor(self._chain, media, device, self.busy, self._stills, self._stalls.clock)
        # A cache or a distant store is asked here; of local files workers read what they decode.
        files = type(fetch) is Origin and samples.stored_as_is and not is_url(media.path)
        self._readers = self._executor if files and isinstance(self._executor, Processes) else None
        self._sizes = Sizes(len(samples))
        self._pool = ThreadPoolExecutor(media.fetch_threads, thread_name_prefix="fetch")
        self._sample = 0
        self._order = {
            "seed": seed,
            "shuffle": media.shuffle,
            "samples": len(samples),
            # Their names, not their place: a corpus may be moved.
            "names": xxhash.xxh3_64_hexdigest(samples.keys.tobytes()),
        }
        self._flights: deque[Flight] = deque()
        self._flight_bytes = media.prefetch_bytes
        """Of the last batch that was made; until one is known, one at a time is prepared ahead."""

    def state(self) -> dict[str, Any]:
        """What to remember to continue: JSON, the same on every rank."""
        return {"sample": self._sample, "order": self._order}

    def seek(self, state: dict[str, Any]) -> None:
        """Continues from what `state` returned, with any number of ranks and threads; DataError when the order is
        another one."""
        here, there = self._order, state.get("order", {})
        differing = [f"{key} was {there[key]} and is {here[key]}" for key in here if there and there[key] != here[key]]
        if differing:
            raise DataError(
                f"load.media {self.media.name}: the samples are in another order than when the state was saved: "
                f"{'; '.join(differing)}; restore what changed, or begin a new run"
            )
        self._sample = int(state["sample"])

    @property
    def epochs(self) -> float:
        """How often the source has been read."""
        return self._sample / len(self.samples)

    def next(self, rows: int | None = None) -> Images:
        """The next batch of `rows` samples over all ranks, else of `media.batch_size`; advances by as many."""
        rows = rows or self.media.batch_size
        began = self._stalls.clock()
        self._prepare_ahead(self._sample, rows)
        flight = self._flights.popleft()
        batch = flight.future.result()
        self._sample += rows
        self._flight_bytes = flight.held_bytes
        self._stalls.waited(began, self._stalls.clock(), flight.times(), bytes=flight.fetched_bytes)
        self._prepare_ahead(self._sample, rows)
        return self._received(batch, flight)

    def skip(self, rows: int) -> None:
        """Goes on as if the next `rows` samples had been read."""
        self._sample += rows

    def batch(self, first: int, rows: int) -> Images:
        """The batch of `rows` samples of the global order from `first` on, a pure function."""
        flight = self._begin(first, rows)
        return self._received(flight.future.result(), flight)

    def close(self) -> None:
        """Ends threads and processes; batches in preparation are given up."""
        # The executor first: what it finishes goes on in the pool.
        self._executor.close()
        self._pool.shutdown(cancel_futures=True)
        self._flights.clear()

    def _prepare_ahead(self, first: int, rows: int) -> None:
        """Sees to it that the batch at `first` and those after it are on their way, as memory allows."""
        while self._flights and self._flights[0].wanted != (first, rows):
            self._flights.popleft()  # after a seek, or another size: what is under way is not what comes
        count = 1 + max(1, min(MOST_AHEAD, self.media.prefetch_bytes // max(1, self._flight_bytes)))
        for number in range(len(self._flights), count):
            self._flights.append(self._begin(first + number * rows, rows))

    def _begin(self, first: int, rows: int) -> Flight:
        assert rows % self._world == 0, f"{self._world} ranks do not share {rows} samples evenly"
        block = BLOCK if self.media.shuffle == "blocks" else 0
        key = seed_for(self._seed, "media", self.media.name)
        count = rows // self._world
        indices, epochs = rows_in_turn(
            first + self._rank,
            count,
            stride=self._world,
            size=len(self.samples),
            block=block,
            together=TOGETHER,
            key=key,
        )
        flight = Flight((first, rows), indices, epochs)
        if self._readers is not None:
            flight.parts_left = 1
            self._pool.submit(self._measure, flight, self._readers)
            return flight
        parts = [range(at, min(at + FETCH_PART, count)) for at in range(0, count, FETCH_PART)]
        flight.parts_left = len(parts)
        for part in parts:
            self._pool.submit(self._fetch_part, flight, part)
        return flight

    def _fetch_part(self, flight: Flight, part: range) -> None:
        if flight.future.done():
            return
        began = self._stalls.clock()
        try:
            fetched = self._fetched(flight, part)
            for place, data in zip(part, fetched, strict=True):
                if data is not None:
                    self._open(flight, place, data)
            ended = self._stalls.clock()
            size = sum(len(data) for data in fetched if data is not None)
            self.busy.add(fetch_s=ended - began, bytes=size)
            if flight.part_done(began, ended, size):
                self._start(flight)
        except BaseException as error:
            # Whatever it is belongs to the thread that waits for the batch.
            flight.fail(error)

    def _measure(self, flight: Flight, readers: Processes) -> None:
        """Begins a batch whose bytes workers read: they say how large its images are, unless that is known."""
        began = self._stalls.clock()
        try:
            items = [self.samples.item(index) for index in flight.indices.tolist()]
            flight.encoded = [*items]
            flight.labels[:] = [self.samples.label(index) for index in flight.indices.tolist()]
            if self._sizes.tell(flight):
                self._read(flight, began)
                return
            measured = readers.measure(items)
            measured.add_done_callback(lambda future: self._pool.submit(self._measured, flight, future, began))
        except BaseException as error:
            flight.fail(error)

    def _measured(self, flight: Flight, future: Future[Measured], began: float) -> None:
        try:
            found = future.result()
            flight.sizes, flight.whole = found.sizes, found.whole
            for place, why in found.damages:
                self._damage(flight, place, why)
            self._sizes.learn(flight)
            self.busy.add(fetch_s=found.fetch_s)
            self._read(flight, began)
        except BaseException as error:
            flight.fail(error)

    def _read(self, flight: Flight, began: float) -> None:
        """Notes the bytes of a batch that workers read as they decode it, and has them do so."""
        size = sum(len(item) for item in flight.encoded if isinstance(item, Item))
        self.busy.add(bytes=size)
        flight.part_done(began, self._stalls.clock(), size)
        self._start(flight)

    def _start(self, flight: Flight) -> None:
        made = self._executor.start(self._work(flight))
        made.add_done_callback(lambda future: self._complete(flight, future))

    def _fetched(self, flight: Flight, part: range) -> list[Encoded | None]:
        """The bytes of some samples; None where they are damaged and that is to be skipped."""
        items = [self.samples.item(int(flight.indices[place])) for place in part]
        try:
            return list(self._fetch.fetch(items))
        except DataError:
            if self.media.on_damage == "stop":
                raise
        found: list[Encoded | None] = []
        for place, item in zip(part, items, strict=True):
            try:
                found.append(self._fetch.fetch([item])[0])
            except DataError as error:
                self._damage(flight, place, str(error))
                found.append(None)
        return found

    def _open(self, flight: Flight, place: int, data: Encoded) -> None:
        """Learns the size of a sample; kinds whose header we do not read are decoded for it."""
        index = int(flight.indices[place])
        try:
            encoded = self.samples.encoded(index, data)
            flight.encoded[place] = encoded
            size = size_of(encoded)
            if size is None:
                pixels = self._stills.decode(encoded, None)
                size, flight.whole[place] = pixels.shape[:2], True
                # Workers decode the bytes again: that costs less than to hand the pixels over.
                flight.encoded[place] = encoded if isinstance(self._executor, Processes) else pixels
        except Damaged as error:
            self._damage(flight, place, str(error))
            return
        flight.sizes[place] = size
        flight.labels[place] = self.samples.label(index)

    def _work(self, flight: Flight) -> Work:
        """Windows, colours and sizes of a batch whose bytes are there."""
        good = np.flatnonzero(flight.weight)
        drawn = Drawn(self._seed, self.samples.keys[flight.indices], flight.epochs)
        # What is damaged has no size; it takes that of a sample that has.
        stand_in = flight.sizes[good[0]] if len(good) else np.array([1 << 12, 1 << 12])
        sizes = np.where(flight.weight[:, None] > 0, flight.sizes, stand_in)
        try:
            windows = self._chain.windows(sizes, drawn)
        except geometry.WindowError as error:
            raise DataError(f"{self._name(flight, error.sample)}: {error}") from None
        height, width = int(windows.height[0]), int(windows.width[0])
        other = np.flatnonzero((windows.height != height) | (windows.width != width))
        if len(other):
            one = int(other[0])
            raise DataError(
                f"{self._name(flight, one)}: it is {windows.height[one]:.0f} x {windows.width[one]:.0f} pixels where "
                f"others of its batch are {height} x {width}; add a crop, or a `resize` with `width`, to the transforms"
            )
        reductions = np.where(flight.whole, 1, geometry.reductions(windows))
        return Work(
            encoded=flight.encoded,
            sizes=sizes,
            windows=geometry.reduced(windows, reductions),
            reductions=reductions,
            colours=self._chain.colour_maps(drawn),
            shape=(height, width),
            damage=lambda place, why: self._damage(flight, place, why),
        )

    def _complete(self, flight: Flight, future: Future[Made]) -> None:
        """Hands a batch over; runs in the thread that made it."""
        try:
            made = future.result()
            flight.made = made
            flight.held_bytes = flight.fetched_bytes + made.staged_bytes + made.images.nbytes
            labels, weight, indices = map(torch.from_numpy, (flight.labels, flight.weight, flight.indices))
            flight.future.set_result(Images(made.images, labels, weight, indices))
        except BaseException as error:
            flight.fail(error)

    def _received(self, batch: Images, flight: Flight) -> Images:
        """The batch for the caller's stream, which waits for the copy where there is one."""
        assert flight.made is not None, "a batch that has a result was made"
        if flight.made.copied is None:
            return batch
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(flight.made.copied)
        # Made on another stream: its memory must not be used again before this one has read it.
        batch.images.record_stream(stream)
        labels, weight = (values.to(self._device, non_blocking=True) for values in (batch.labels, batch.weight))
        return Images(batch.images, labels, weight, batch.samples)

    def _damage(self, flight: Flight, place: int, why: str | DataError) -> None:
        """A sample cannot be had: stops with its name (which an error has already), or counts it."""
        name = self._name(flight, place)
        if self.media.on_damage == "stop":
            if isinstance(why, DataError):
                raise why
            raise DataError(
                f'{name}: {why}; restore or remove it, or set `on_damage = "skip"` in load.media {self.media.name}'
            )
        flight.weight[place] = 0.0
        flight.encoded[place] = None
        self.damaged[name] = str(why)
        _log.warning("%s: skipped: %s", name, why)

    def _name(self, flight: Flight, place: int) -> str:
        item = self.samples.item(int(flight.indices[place]))
        return f"{item.file}: document {item.name}"


def _executor(
    chain: Chain, media: Media, device: torch.device, busy: Busy, stills: Stills, clock: Callable[[], float]
) -> Executor:
    """Who decodes and transforms: DALI when the recipe says so, else threads or processes, and the device."""
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[media.dtype]
    threads = media.threads or len(os.sched_getaffinity(0))
    if media.transforms[0].executor == "dali":
        from .dali import Dali

        return Dali(chain, device=device, dtype=dtype, threads=threads, clock=clock)
    if media.workers == "processes" or (media.workers == "auto" and threads > MOST_THREADS):
        return Processes(chain, device=device, dtype=dtype, processes=threads, busy=busy, clock=clock)
    return Threads(chain, device=device, dtype=dtype, threads=threads, busy=busy, stills=stills, clock=clock)
