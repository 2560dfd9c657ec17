"""One batch of images in preparation, from the numbers of its samples to its tensors."""

from __future__ import annotations

import math
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from ropewalk.load.stalls import Times
from ropewalk.store.items import Item

from .decode import Encoded, Pixels
from .work import Made


@dataclass(frozen=True, slots=True)
class Images:
    """One batch; all tensors on the device of the loader."""

    images: Tensor
    """B C H W: numbers when the source is normalised, else uint8."""
    labels: Tensor
    """int64 B, the class; -1 without."""
    weight: Tensor
    """float32 B: 0 for samples that are damaged, whose image is black."""
    samples: Tensor
    """int64 B, the numbers of the samples within their source; on the CPU."""

    def __len__(self) -> int:
        return len(self.labels)


class Flight:
    """A batch in the hands of several threads."""

    def __init__(self, wanted: tuple[int, int], indices: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]) -> None:
        self.wanted, self.indices, self.epochs = wanted, indices, epochs
        count = len(indices)
        self.encoded: list[Encoded | Pixels | Item | None] = [None] * count
        self.sizes = np.zeros((count, 2), np.int64)
        self.whole = np.zeros(count, np.bool_)
        """What had to be decoded to learn its size; so it is not decoded smaller."""
        self.labels = np.full(count, -1, np.int64)
        self.weight = np.ones(count, np.float32)
        self.future: Future[Images] = Future()
        self.made: Made | None = None
        self.parts_left = 0
        self.fetched_bytes = self.held_bytes = 0
        self._lock = threading.Lock()
        self._began, self._fetched = math.inf, -math.inf

    def part_done(self, began: float, ended: float, fetched_bytes: int) -> bool:
        """Notes when a part was fetched; whether it was the last."""
        with self._lock:
            self._began, self._fetched = min(self._began, began), max(self._fetched, ended)
            self.fetched_bytes += fetched_bytes
            self.parts_left -= 1
            return self.parts_left == 0

    def fail(self, error: BaseException) -> None:
        """The first error is the batch's."""
        with self._lock:
            if not self.future.done():
                self.future.set_exception(error)

    def times(self) -> Times:
        """When the batch passed its stages; the copy is known only when it is over."""
        assert self.made is not None, "asked of a batch that has a result"
        times = Times(self._began, self._fetched, self.made.prepared)
        if self.made.began is not None and self.made.copied is not None and self.made.copied.query():
            times.copied = times.prepared + self.made.began.elapsed_time(self.made.copied) / 1e3
        return times


class Sizes:
    """What is known of the sizes of a source's images: after the first epoch no header is read for them."""

    def __init__(self, samples: int) -> None:
        self._sizes = np.zeros((samples, 2), np.int32)
        self._whole = np.zeros(samples, np.bool_)

    def learn(self, flight: Flight) -> None:
        """Keeps the sizes of a batch that was measured; of what is damaged they are 0, which means unknown."""
        self._sizes[flight.indices], self._whole[flight.indices] = flight.sizes, flight.whole

    def tell(self, flight: Flight) -> bool:
        """Whether all sizes of a batch are known; it then has them."""
        sizes = self._sizes[flight.indices]
        if not sizes.all():
            return False
        flight.sizes, flight.whole = sizes.astype(np.int64), self._whole[flight.indices]
        return True
