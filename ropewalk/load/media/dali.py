"""NVIDIA DALI as an executor: decoding by the JPEG engines of the GPU and resampling by its kernels.

The windows are those that every executor gets; only who reads the pixels differs. Without a GPU DALI works on the CPU,
which is how it is tested where it is installed.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ropewalk.base.errors import ConfigError, DataError, MissingPackage, Problem

from .transforms import Chain
from .work import Made, Work


class Dali:
    """Runs a DALI pipeline for each size of batch and result it meets. `colour` is not offered."""

    def __init__(
        self,
        chain: Chain,
        *,
        device: torch.device,
        dtype: torch.dtype,
        threads: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        try:
            dali: Any = import_module("nvidia.dali")
            plugin: Any = import_module("nvidia.dali.plugin.pytorch")
        except ImportError:
            raise MissingPackage("nvidia-dali-cuda120", 'executor = "dali"', "dali") from None
        if chain.colours:
            raise ConfigError([Problem("load.media", "DALI does not do `colour` here", 'take executor = "gpu"')])
        self._dali, self._feed = dali, plugin.feed_ndarray
        self._chain, self._device, self._dtype, self._threads, self._clock = chain, device, dtype, threads, clock
        self._pipelines: dict[tuple[int, int, int], Any] = {}
        # One thread: a pipeline is run by one caller at a time and has threads of its own.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dali")

    def start(self, work: Work) -> Future[Made]:
        return self._pool.submit(self._run if self._device.type == "cpu" else self._run_on_gpu, work)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run_on_gpu(self, work: Work) -> Made:
        with torch.cuda.device(self._device):
            began, copied = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            made = self._run(work)
            copied.record()
        return dataclasses.replace(made, began=began, copied=copied)

    def _run(self, work: Work) -> Made:
        good = [place for place, data in enumerate(work.encoded) if data is not None]
        levels = self._chain.normalise
        kind = self._dtype if levels is not None else torch.uint8
        images = torch.zeros((len(work), 3, *work.shape), dtype=kind, device=self._device)
        if levels is not None:
            images += torch.from_numpy(levels.shift).to(images)[:, None, None]  # what is damaged is black
        prepared = self._clock()
        if good:
            images[good] = self._decoded(work, good).to(kind)
        return Made(images, prepared, staged_bytes=0)

    def _decoded(self, work: Work, good: list[int]) -> torch.Tensor:
        pipeline = self._pipeline(len(good), work.shape)
        # DALI decodes whole images: windows are given in their full size.
        whole = work.reductions[good, None]
        boxes, bounds = work.windows.boxes[good] * whole, work.windows.bounds[good] * whole
        first, last = np.floor(bounds[:, :2]), np.minimum(np.ceil(bounds[:, 2:]), work.sizes[good])
        start, stop = boxes[:, :2] - first, boxes[:, 2:] - first
        encoded = [data for data in work.encoded if isinstance(data, (bytes, memoryview))]
        if len(encoded) < len(good):
            raise DataError('a sample is neither JPEG nor PNG, which is all that executor = "dali" reads; take "auto"')
        pipeline.feed_input("encoded", [np.frombuffer(data, np.uint8) for data in encoded])
        for name, values in {"first": first, "extent": last - first, "start": start, "stop": stop}.items():
            pipeline.feed_input(name, list(values.astype(np.float32)))
        pipeline.feed_input("flips", [np.array(flip, np.int32) for flip in work.windows.flips[good]])
        try:
            (outputs,) = pipeline.run()
        except RuntimeError as error:
            raise DataError(f'DALI could not decode a batch: {error}; executor = "auto" names the sample') from None
        kind = torch.float32 if self._chain.normalise is not None else torch.uint8
        result = torch.empty((len(good), 3, *work.shape), dtype=kind, device=self._device)
        self._feed(outputs.as_tensor(), result)
        return result

    def _pipeline(self, count: int, shape: tuple[int, int]) -> Any:
        key = (count, *shape)
        if key not in self._pipelines:
            self._pipelines[key] = self._built(count, shape)
        return self._pipelines[key]

    def _built(self, count: int, shape: tuple[int, int]) -> Any:
        fn, types = self._dali.fn, self._dali.types
        levels = self._chain.normalise
        gpu = self._device.type == "cuda"
        pipeline = self._dali.Pipeline(
            batch_size=count,
            num_threads=self._threads,
            device_id=(self._device.index or 0) if gpu else None,
            prefetch_queue_depth=1,
        )
        with pipeline:
            encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
            first, extent, start, stop = (
                fn.external_source(name=name, dtype=types.FLOAT, ndim=1)
                for name in ("first", "extent", "start", "stop")
            )
            flips = fn.external_source(name="flips", dtype=types.INT32, ndim=0)
            # Only what filters may read is decoded: they do not look beyond it.
            pixels = fn.decoders.image_slice(
                encoded,
                first,
                extent,
                axes=[0, 1],
                normalized_anchor=False,
                normalized_shape=False,
                device="mixed" if gpu else "cpu",
                output_type=types.RGB,
            )
            # Triangles widened by the shrinking, as resample.py defines.
            resized = fn.resize(
                pixels,
                size=list(shape),
                roi_start=start,
                roi_end=stop,
                dtype=types.FLOAT,
                min_filter=types.INTERP_TRIANGULAR,
                mag_filter=types.INTERP_LINEAR,
            )
            # It computes (level - mean) / std; ours is level * scale + shift.
            mean = [0.0] * 3 if levels is None else (-levels.shift / levels.scale).tolist()
            std = [1.0] * 3 if levels is None else (1 / levels.scale).tolist()
            dtype = types.UINT8 if levels is None else types.FLOAT
            output = fn.crop_mirror_normalize(
                resized, mirror=flips, mean=mean, std=std, dtype=dtype, output_layout="CHW"
            )
            pipeline.set_outputs(output)
        pipeline.build()
        return pipeline
