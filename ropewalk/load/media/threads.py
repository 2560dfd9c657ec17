"""The executor of this machine: threads decode, and resample unless the device does that; the device does the rest.

A batch is divided into parts of a few samples, so that all threads work on the batch that is wanted first.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import device as on_device
from .decode import Damaged, Pixels, Stills
from .resample import copy_window, extents, resample_levels, resample_numbers
from .staging import Buffer, Results, Staging, Timing
from .transforms import Chain
from .work import Busy, Made, Work

PART = 8
"""Samples a thread takes at a time: handing a part over costs about 40 us, decoding a sample 500."""


# Black wherever it is looked at, for what is damaged.
_BLACK, _PIXEL = np.zeros((1, 1, 3), np.uint8), np.array([0.0, 0.0, 1.0, 1.0])
_UNCHANGED = np.empty((0, 4), np.float32)
"""Stands for colours that are left as they are."""


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
        self._chain, self._device, self._dtype, self._clock = chain, device, dtype, clock
        self._busy = busy or Busy()
        self._stills = stills or Stills()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        cuda = device.type == "cuda"
        self._staging, self._results = Staging(pin=cuda), Results()
        self._stream = torch.cuda.Stream(device) if cuda else None
        # Half precision holds every level; on the CPU it is slow.
        self._precision = torch.float16 if cuda else torch.float32
        levels = chain.normalise
        self._scale = None if levels is None else torch.from_numpy(levels.scale).to(device)
        self._shift = None if levels is None else torch.from_numpy(levels.shift).to(device)

    def start(self, work: Work) -> Future[Made]:
        batch = _Batch(work, self._layout(work), Future())
        parts = [range(first, min(first + PART, len(work))) for first in range(0, len(work), PART)]
        batch.parts_left = len(parts)
        for part in parts:
            self._pool.submit(self._part, batch, part)
        return batch.future

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _layout(self, work: Work) -> _Layout:
        """Where each sample goes: its window when the device resamples, its levels when threads do, or its numbers when
        threads do all."""
        chain, count = self._chain, len(work)
        if chain.resample_on == "gpu":
            spans = extents(work.windows.bounds, work.windows.boxes, *work.shape)
            high, wide = (int(side) for side in (spans[:, 2:] - spans[:, :2]).max(axis=0))
            # Tensor cores want rows that begin at multiples of 16 bytes.
            return self._staged((count, -(-high // 8) * 8, -(-wide // 8) * 8, 3), torch.uint8, spans=spans)
        if chain.normalise is None or chain.recolour_on == "gpu":
            return self._staged((count, *work.shape, 3), torch.uint8)
        shape = (count, 3, *work.shape)
        if self._stream is not None:
            return self._staged(shape, torch.float32)
        numbers = self._results.take(shape)
        return _Layout(None, numbers, numbers.numpy(), None)

    def _staged(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, spans: npt.NDArray[np.int64] | None = None
    ) -> _Layout:
        size = math.prod(shape) * dtype.itemsize
        buffer, last = self._staging.take(size)
        if last is not None and last.finished.query():
            copy_s, device_s = (
                ms / 1e3 for ms in (last.began.elapsed_time(last.copied), last.copied.elapsed_time(last.finished))
            )
            self._busy.add(copy_s=copy_s, device_s=device_s, copied_samples=last.samples)
        values = buffer.bytes[:size].view(dtype).view(shape)
        return _Layout(buffer, values, values.numpy(), spans)

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
                self._place(batch, sample, pixels)
                decode_s += decoded - began
                place_s += time.perf_counter() - decoded
            self._busy.add(decode_s=decode_s, place_s=place_s, samples=len(part))
            if batch.part_done():
                batch.future.set_result(self._finished(batch))
        except BaseException as error:
            # Whatever it is belongs to the thread that waits for the batch. Its buffer is not given back: other
            # threads may still write there.
            batch.fail(error)

    def _decoded(self, work: Work, sample: int) -> Pixels | None:
        data, reduce = work.encoded[sample], int(work.reductions[sample])
        if data is None or isinstance(data, np.ndarray):
            return data
        try:
            return self._stills.decode(data, work.sizes[sample], reduce=reduce)
        except Damaged as error:
            work.damage(sample, str(error))
            return None
        finally:
            work.encoded[sample] = None

    def _place(self, batch: _Batch, sample: int, pixels: Pixels | None) -> None:
        """Puts a sample where the layout wants it; what is damaged (None) is black."""
        work, spans, target = batch.work, batch.layout.spans, batch.layout.array[sample]
        if spans is not None:
            if pixels is None:
                target[:] = 0
            else:
                copy_window(pixels, spans[sample], target)
            return
        bounds, box, flip = work.windows.bounds[sample], work.windows.boxes[sample], work.windows.flips[sample]
        if pixels is None:
            pixels, bounds, box = _BLACK, _PIXEL, _PIXEL
        if target.dtype == np.uint8:
            resample_levels(pixels, bounds, box, flip, target)
        else:
            levels = self._chain.normalise
            assert levels is not None, "numbers are made of levels that are normalised"
            colours = _UNCHANGED if work.colours is None else work.colours[sample]
            resample_numbers(pixels, bounds, box, flip, colours, levels.scale, levels.shift, target)

    def _finished(self, batch: _Batch) -> Made:
        prepared = self._clock()
        layout = batch.layout
        if layout.buffer is None:
            return Made(layout.values.to(self._dtype), prepared, staged_bytes=0)
        staged_bytes = layout.values.nbytes
        if self._stream is None:
            images = self._transformed(layout.values, batch)
            self._staging.give_back(layout.buffer)
            return Made(images, prepared, staged_bytes=staged_bytes)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            began, copied, finished = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            began.record()
            values = layout.values.to(self._device, non_blocking=True)
            copied.record()
            images = self._transformed(values, batch)
            finished.record()
        layout.buffer.last = Timing(began, copied, finished, len(batch.work))
        self._staging.give_back(layout.buffer)
        return Made(images, prepared, staged_bytes=staged_bytes, copied=finished, began=began)

    def _transformed(self, values: Tensor, batch: _Batch) -> Tensor:
        """What is left to do, on the device of `values`; of windows and levels a copy, since their buffer is used
        again."""
        work, spans = batch.work, batch.layout.spans
        if values.dtype == torch.float32:
            return values.to(self._dtype)
        if spans is None:
            levels_BChw = values.permute(0, 3, 1, 2)
        else:
            rows, columns, flips = _axes(work, spans, values.device)
            levels_BChw = on_device.resampled(
                values, rows, columns, size=work.shape, flips=flips, precision=self._precision
            )
        if self._scale is None or self._shift is None:
            return on_device.levels(levels_BChw)
        colours = None if work.colours is None else torch.from_numpy(work.colours).to(values.device)
        return on_device.recoloured(
            levels_BChw, colours_B34=colours, scale_C=self._scale, shift_C=self._shift, dtype=self._dtype
        )


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the threads write a batch."""

    buffer: Buffer | None
    """None: the result itself."""
    values: Tensor
    """uint8 windows or levels, B H W C; or float32 numbers, B C h w."""
    array: npt.NDArray[np.uint8] | npt.NDArray[np.float32]
    """The same memory as `values`."""
    spans: npt.NDArray[np.int64] | None
    """B 4, what of each decoded image is copied; None when threads resample."""


class _Batch:
    """A batch in the hands of several threads."""

    def __init__(self, work: Work, layout: _Layout, future: Future[Made]) -> None:
        self.work, self.layout, self.future = work, layout, future
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


def _axes(
    work: Work, spans: npt.NDArray[np.int64], device: torch.device
) -> tuple[on_device.Axis, on_device.Axis, Tensor]:
    """Boxes and bounds in pixels of the copied windows, on the device by one copy."""
    corner = np.tile(spans[:, :2], 2)
    boxes, bounds = work.windows.boxes - corner, work.windows.bounds - corner
    table = np.concatenate(
        [boxes, np.floor(bounds[:, :2]), np.ceil(bounds[:, 2:]), work.windows.flips[:, None]], axis=1
    )
    columns = torch.from_numpy(np.ascontiguousarray(table.T)).to(device, non_blocking=True)
    top, left, bottom, right, low_y, low_x, high_y, high_x, flips = columns
    return (
        on_device.Axis(top, bottom, low_y, high_y),
        on_device.Axis(left, right, low_x, high_x),
        flips > 0.5,
    )
