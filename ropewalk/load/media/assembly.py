"""Where a batch is put together in host memory, and its way from there to the device. What threads and processes
share: they only fill the layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import device as on_device
from .placing import Placing
from .resample import extents
from .shared import Shared
from .staging import Allocate, Buffer, Results, Staging, Timing
from .transforms import Chain
from .work import Busy, Made, Work


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the samples of a batch are written."""

    buffer: Buffer | None
    """None: the result itself."""
    values: Tensor
    """uint8 windows or levels, B H W C; or float32 numbers, B C h w."""
    shared: Shared | None
    """Memory that begins with `values`, where it is shared."""
    placing: Placing


class Assembly:
    """Lays batches out for whoever decodes them, and brings them to `device` as `chain` says. Safe from several
    threads."""

    def __init__(
        self,
        chain: Chain,
        *,
        device: torch.device,
        dtype: torch.dtype,
        staging: Allocate,
        results: Allocate,
        busy: Busy,
        clock: Callable[[], float],
    ) -> None:
        self._chain, self._device, self._dtype, self._busy, self._clock = chain, device, dtype, busy, clock
        cuda = device.type == "cuda"
        self._staging, self._results = Staging(staging), Results(results)
        self._stream = torch.cuda.Stream(device) if cuda else None
        # Triton comes with every torch for NVIDIA's GPUs on Linux; elsewhere matrix products do the same.
        self._fused = cuda and find_spec("triton") is not None
        # Half precision holds every level; on the CPU it is slow.
        self._precision = torch.float16 if cuda else torch.float32
        levels = chain.normalise
        self._scale = None if levels is None else torch.from_numpy(levels.scale).to(device)
        self._shift = None if levels is None else torch.from_numpy(levels.shift).to(device)

    def layout(self, work: Work) -> Layout:
        """Where each sample goes: its window when the device resamples, its levels when the CPU does, or its numbers
        when the CPU does all."""
        chain, count = self._chain, len(work)
        if chain.resample_on == "gpu":
            spans = extents(work.windows.bounds, work.windows.boxes, *work.shape)
            high, wide = (int(side) for side in (spans[:, 2:] - spans[:, :2]).max(axis=0))
            # Tensor cores want rows that begin at multiples of 16 bytes.
            return self._staged(work, (count, -(-high // 8) * 8, -(-wide // 8) * 8, 3), torch.uint8, spans=spans)
        if chain.normalise is None or chain.recolour_on == "gpu":
            return self._staged(work, (count, *work.shape, 3), torch.uint8)
        shape = (count, 3, *work.shape)
        if self._stream is not None:
            return self._staged(work, shape, torch.float32)
        numbers, shared = self._results.numbers(shape)
        return Layout(None, numbers, shared, self._placing(work, None))

    def finished(self, work: Work, layout: Layout) -> Made:
        """The images of a batch whose samples are all in place."""
        prepared = self._clock()
        if layout.buffer is None:
            return Made(layout.values.to(self._dtype), prepared, staged_bytes=0)
        staged_bytes = layout.values.nbytes
        if self._stream is None:
            images = self._transformed(layout.values, work, layout)
            self._staging.give_back(layout.buffer)
            return Made(images, prepared, staged_bytes=staged_bytes)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            began, copied, finished = (torch.cuda.Event(enable_timing=True) for _ in range(3))
            began.record()
            values = layout.values.to(self._device, non_blocking=True)
            copied.record()
            images = self._transformed(values, work, layout)
            finished.record()
        layout.buffer.last = Timing(began, copied, finished, len(work))
        self._staging.give_back(layout.buffer)
        return Made(images, prepared, staged_bytes=staged_bytes, copied=finished, began=began)

    def close(self) -> None:
        """Lets go of the buffers when what is copied from them has arrived."""
        if self._stream is not None:
            self._stream.synchronize()
        self._staging.clear()

    def _staged(
        self,
        work: Work,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        *,
        spans: npt.NDArray[np.int64] | None = None,
    ) -> Layout:
        size = math.prod(shape) * dtype.itemsize
        buffer, last = self._staging.take(size)
        if last is not None and last.finished.query():
            copy_s, device_s = (
                ms / 1e3 for ms in (last.began.elapsed_time(last.copied), last.copied.elapsed_time(last.finished))
            )
            self._busy.add(copy_s=copy_s, device_s=device_s, copied_samples=last.samples)
        values = buffer.memory.bytes[:size].view(dtype).view(shape)
        return Layout(buffer, values, buffer.memory.shared, self._placing(work, spans))

    def _placing(self, work: Work, spans: npt.NDArray[np.int64] | None) -> Placing:
        levels = self._chain.normalise
        scale, shift = (None, None) if levels is None else (levels.scale, levels.shift)
        return Placing(work.windows, spans, work.colours, scale, shift)

    def _transformed(self, values: Tensor, work: Work, layout: Layout) -> Tensor:
        """What is left to do, on the device of `values`; of windows and levels a copy, since their buffer is used
        again."""
        spans = layout.placing.spans
        if values.dtype == torch.float32:
            return values.to(self._dtype)
        if spans is None:
            levels_BChw = values.permute(0, 3, 1, 2)
        elif self._fused:
            return self._by_one_kernel(values, work, spans)
        else:
            rows, columns, flips = _axes(_table(work, spans, values.device))
            levels_BChw = on_device.resampled(
                values, rows, columns, size=work.shape, flips=flips, precision=self._precision
            )
        if self._scale is None or self._shift is None:
            return on_device.levels(levels_BChw)
        colours = _colours(work, values.device)
        return on_device.recoloured(
            levels_BChw, colours_B34=colours, scale_C=self._scale, shift_C=self._shift, dtype=self._dtype
        )

    def _by_one_kernel(self, pixels_BHWC: Tensor, work: Work, spans: npt.NDArray[np.int64]) -> Tensor:
        from .fused import window_images

        device, (_, high, wide, channels) = pixels_BHWC.device, pixels_BHWC.shape
        return window_images(
            pixels_BHWC,
            torch.arange(len(work), device=device) * (high * wide * channels),
            torch.full((len(work),), wide * channels, device=device),
            _table(work, spans, device),
            size=work.shape,
            colours=_colours(work, device),
            scale=self._scale,
            shift=self._shift,
            dtype=self._dtype,
        )


def _table(work: Work, spans: npt.NDArray[np.int64], device: torch.device) -> Tensor:
    """Boxes and bounds in pixels of the copied windows, then flips: 9 B, on the device by one copy."""
    corner = np.tile(spans[:, :2], 2)
    boxes, bounds = work.windows.boxes - corner, work.windows.bounds - corner
    table = np.concatenate(
        [boxes, np.floor(bounds[:, :2]), np.ceil(bounds[:, 2:]), work.windows.flips[:, None]], axis=1
    )
    return torch.from_numpy(np.ascontiguousarray(table.T)).to(device, non_blocking=True)


def _axes(table_9B: Tensor) -> tuple[on_device.Axis, on_device.Axis, Tensor]:
    top, left, bottom, right, low_y, low_x, high_y, high_x, flips = table_9B
    return (
        on_device.Axis(top, bottom, low_y, high_y),
        on_device.Axis(left, right, low_x, high_x),
        flips > 0.5,
    )


def _colours(work: Work, device: torch.device) -> Tensor | None:
    return None if work.colours is None else torch.from_numpy(work.colours).to(device)
