"""The executor of few cores: threads of this process decode, and resample unless the device does that.

A batch is divided into parts of a few samples, so that all threads work on the batch that is wanted first. Beyond some
cores threads stand in each other's way, for the interpreter's lock and for that of the memory map: `processes.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ropewalk.store.items import Item

from .assembly import Assembly, Layout
from .decode import Damaged, Pixels, Stills
from .staging import page_locked, pageable
from .transforms import Chain
from .work import Busy, Made, Work

PART = 8
"""Samples a thread takes at a time: handing a part over costs about 40 us, decoding a sample 500."""


class Threads:
    """Brings batches to `device` as `chain` says; `threads` decode."""

    def __init__(
        self,
        chain: Chain,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        threads: int = 1,
        busy: Busy | None = None,
        stills: Stills | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._busy = busy or Busy()
        self._stills = stills or Stills()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._assembly = Assembly(
            chain,
            device=device,
            dtype=dtype,
            staging=page_locked if device.type == "cuda" else pageable,
            results=pageable,
            busy=self._busy,
            clock=clock,
        )

    def start(self, work: Work) -> Future[Made]:
        batch = _Batch(work, self._assembly.layout(work), Future())
        parts = [range(first, min(first + PART, len(work))) for first in range(0, len(work), PART)]
        batch.parts_left = len(parts)
        for part in parts:
            self._pool.submit(self._part, batch, part)
        return batch.future

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._assembly.close()

    def _part(self, batch: _Batch, part: range) -> None:
        """Decodes some samples and puts them in their places; who is last finishes the batch."""
        if batch.future.done():
            return
        decode_s = place_s = 0.0
        try:
            for sample in part:
                began = time.perf_counter()
                pixels = self._decoded(batch.work, sample)
                decoded = time.perf_counter()
                batch.layout.placing.place(sample, pixels, batch.array[sample])
                decode_s += decoded - began
                place_s += time.perf_counter() - decoded
            self._busy.add(decode_s=decode_s, place_s=place_s, samples=len(part))
            if batch.part_done():
                batch.future.set_result(self._assembly.finished(batch.work, batch.layout))
        except BaseException as error:
            # Whatever it is belongs to the thread that waits for the batch. Its buffer is not given back: other
            # threads may still write there.
            batch.fail(error)

    def _decoded(self, work: Work, sample: int) -> Pixels | None:
        data, reduce = work.encoded[sample], int(work.reductions[sample])
        assert not isinstance(data, Item), "bytes are fetched before threads decode them"
        if data is None or isinstance(data, np.ndarray):
            return data
        try:
            height, width = work.sizes[sample].tolist()
            return self._stills.decode(data, (height, width), reduce=reduce)
        except Damaged as error:
            work.damage(sample, str(error))
            return None
        finally:
            work.encoded[sample] = None


class _Batch:
    """A batch in the hands of several threads."""

    def __init__(self, work: Work, layout: Layout, future: Future[Made]) -> None:
        self.work, self.layout, self.future = work, layout, future
        self.array: npt.NDArray[Any] = layout.values.numpy()
        self.parts_left = 0
        self._lock = threading.Lock()

    def part_done(self) -> bool:
        """Whether this was the last."""
        with self._lock:
            self.parts_left -= 1
            return self.parts_left == 0

    def fail(self, error: BaseException) -> None:
        """The first error is the batch's; parts that come after it see that it is over."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)
