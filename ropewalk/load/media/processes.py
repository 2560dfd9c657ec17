"""The executor of many cores: worker processes decode into shared memory, this process only tells them what.

Threads of one process queue for the interpreter's lock and for that of the memory map; processes have their own. Here
an image costs this process some 20 us: numbers go to the workers, a few bytes come back, and the pixels lie where the
GPU copies them from. The same code decodes and places as in threads, so the images are the same bit for bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import torch

from ropewalk.store.items import Item

from .assembly import Assembly, Layout
from .shared import Bytes, Shared
from .staging import Results, shared, shared_page_locked
from .team import Team, WorkerDied
from .transforms import Chain
from .work import Busy, Made, Work
from .worker import Content, Damage, Decode, Decoded, Measure, Measured, Reply, Slice

PART = 16
"""Samples a worker is asked for at a time: to ask and to answer costs this process about 150 us."""


class Processes:
    """Brings batches to `device` as `chain` says; `processes` decode. They start with the first batch."""

    def __init__(
        self,
        chain: Chain,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        processes: int = 1,
        busy: Busy | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy = busy or Busy()
        self._assembly = Assembly(
            chain,
            device=device,
            dtype=dtype,
            staging=shared_page_locked if device.type == "cuda" else shared,
            results=shared,
            busy=self._busy,
            clock=clock,
        )
        self._encoded = Results(shared)
        self.team = Team(processes)
        # What the device is to do is told by one thread, in the order of the batches.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="finish")

    def measure(self, items: Sequence[Item]) -> Future[Measured]:
        """The sizes of images in local files."""
        return _Measuring(self.team, items).future

    def start(self, work: Work) -> Future[Made]:
        layout = self._assembly.layout(work)
        contents, encoded, memory = self._contents(work)
        batch = _Batch(work, layout, contents, encoded, memory)
        for first in range(0, len(work), PART):
            self._ask(batch, range(first, min(first + PART, len(work))))
        return batch.future

    def close(self) -> None:
        self.team.close()
        self._pool.shutdown(cancel_futures=True)
        self._assembly.close()

    def _contents(self, work: Work) -> tuple[list[Content], Bytes | None, Shared | None]:
        """Where workers find each sample. Bytes that are here are copied to shared memory, which is used again when
        the array that shows it is gone."""
        size = sum(len(data) for data in work.encoded if isinstance(data, (bytes, memoryview)))
        # Powers of two: what comes back is large enough for most batches that follow.
        encoded, memory = self._encoded.take(1 << (size - 1).bit_length()) if size else (None, None)
        contents: list[Content] = []
        stop = 0
        for data in work.encoded:
            if isinstance(data, (bytes, memoryview)):
                assert encoded is not None, "there is something to copy"
                assert memory is not None, "it is shared"
                start, stop = stop, stop + len(data)
                encoded[start:stop] = np.frombuffer(data, np.uint8)
                contents.append(Slice(memory.number, start, stop))
            else:
                assert not isinstance(data, np.ndarray), "workers decode; they are not given pixels"
                contents.append(data)
        work.encoded[:] = [None] * len(contents)
        return contents, encoded, memory

    def _ask(self, batch: _Batch, part: range) -> None:
        asked = self.team.ask(batch.request(part), memories=batch.memories)
        asked.add_done_callback(lambda future: self._answered(batch, part, future))

    def _answered(self, batch: _Batch, part: range, future: Future[Reply]) -> None:
        """Runs in the thread of the team."""
        if batch.future.done():
            return
        try:
            reply = future.result()
            assert isinstance(reply, Decoded), "what was asked"
            for place, why in reply.damages:
                batch.work.damage(part[place], why)
            self._busy.add(fetch_s=reply.fetch_s, decode_s=reply.decode_s, place_s=reply.place_s, samples=len(part))
            if batch.placed(len(part)):
                self._pool.submit(self._finish, batch)
        except WorkerDied as error:
            self._isolate(batch, part, error)
        except BaseException as error:
            # Whatever it is belongs to the thread that waits for the batch. Its buffer is not given back: workers may
            # still write there.
            batch.fail(error)

    def _isolate(self, batch: _Batch, part: range, error: WorkerDied) -> None:
        """One of the samples ends whoever decodes it: each is tried alone, and that one is damaged."""
        try:
            if len(part) == 1:
                batch.work.damage(part[0], f"the process that decodes it ends every time ({error})")
                batch.contents[part[0]] = None
            for sample in part:
                self._ask(batch, range(sample, sample + 1))
        except BaseException as failure:
            batch.fail(failure)

    def _finish(self, batch: _Batch) -> None:
        try:
            batch.future.set_result(self._assembly.finished(batch.work, batch.layout))
        except BaseException as error:
            batch.fail(error)


class _Batch:
    """A batch in the hands of workers."""

    def __init__(
        self, work: Work, layout: Layout, contents: list[Content], encoded: Bytes | None, memory: Shared | None
    ) -> None:
        assert layout.shared is not None, "workers write to shared memory"
        self.work, self.layout, self.contents = work, layout, contents
        self.target = layout.shared
        self.memories = [self.target] if memory is None else [self.target, memory]
        self.future: Future[Made] = Future()
        self._encoded = encoded
        self._left = len(work)
        self._lock = threading.Lock()

    def request(self, part: range) -> Decode:
        """What a worker must know of some samples."""
        rows = slice(part.start, part.stop)
        values = self.layout.values[rows]
        return Decode(
            contents=self.contents[rows],
            sizes=self.work.sizes[rows],
            reductions=self.work.reductions[rows],
            placing=self.layout.placing.part(rows),
            memory=self.target.number,
            start=part.start * values[0].nbytes,
            shape=tuple(values.shape),
            dtype="uint8" if values.dtype == torch.uint8 else "float32",
        )

    def placed(self, samples: int) -> bool:
        """Whether these were the last."""
        self._left -= samples
        return self._left == 0

    def fail(self, error: BaseException) -> None:
        """The first error is the batch's."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)


class _Measuring:
    """The sizes of a batch, gathered from its parts."""

    def __init__(self, team: Team, items: Sequence[Item]) -> None:
        self.future: Future[Measured] = Future()
        self._team, self._items = team, items
        self._sizes, self._whole = np.zeros((len(items), 2), np.int64), np.zeros(len(items), np.bool_)
        self._damages: list[Damage] = []
        self._fetch_s, self._left = 0.0, len(items)
        for first in range(0, len(items), PART):
            self._ask(range(first, min(first + PART, len(items))))

    def _ask(self, part: range) -> None:
        asked = self._team.ask(Measure(self._items[part.start : part.stop]))
        asked.add_done_callback(lambda future: self._answered(part, future))

    def _answered(self, part: range, future: Future[Reply]) -> None:
        """Runs in the thread of the team, one part after the other."""
        if self.future.done():
            return
        try:
            reply = future.result()
            assert isinstance(reply, Measured), "what was asked"
            rows = slice(part.start, part.stop)
            self._sizes[rows], self._whole[rows] = reply.sizes, reply.whole
            self._damages += [(part[place], why) for place, why in reply.damages]
            self._fetch_s += reply.fetch_s
        except WorkerDied as error:
            if len(part) > 1:
                for sample in part:
                    self._ask(range(sample, sample + 1))
                return
            self._damages.append((part[0], f"the process that reads it ends every time ({error})"))
        except BaseException as error:
            self.future.set_exception(error)
            return
        self._left -= len(part)
        if not self._left:
            self.future.set_result(Measured(self._sizes, self._whole, self._damages, self._fetch_s))
