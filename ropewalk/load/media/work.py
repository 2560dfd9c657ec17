"""One batch on its way from bytes to tensors, and who brings it there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ropewalk.base.errors import DataError
from ropewalk.store.items import Item

from .decode import Encoded, Pixels
from .geometry import Windows


@dataclass(slots=True)
class Work:
    """A batch whose windows are known."""

    encoded: list[Encoded | Pixels | Item | None]
    """Of each sample; pixels where decoding was needed to learn the size, an item where worker processes read it
    themselves, None for what is damaged."""
    sizes: npt.NDArray[np.int64]
    """B 2, height and width of each image as stored."""
    windows: Windows
    """On the images as they are decoded: shrunk by `reductions`."""
    reductions: npt.NDArray[np.int64]
    colours: npt.NDArray[np.float32] | None
    """B 3 4, how levels are mixed; None: not at all."""
    shape: tuple[int, int]
    """Height and width of the results."""
    damage: Callable[[int, str | DataError], None]
    """Called with the number of a sample and the reason when it turns out to be damaged, or the error when it cannot be
    read; raises when that is to stop the run."""

    def __len__(self) -> int:
        return len(self.encoded)


@dataclass(slots=True)
class Made:
    """The images of a batch."""

    images: Tensor
    """B C h w."""
    prepared: float
    """When they lay in host memory."""
    staged_bytes: int
    """Memory that preparing them took, beside the images themselves."""
    copied: torch.cuda.Event | None = None
    """Recorded when they are on the device and transformed; None on the CPU."""
    began: torch.cuda.Event | None = None
    """Recorded when copying begins."""


class Executor(Protocol):
    """Decodes, resamples and recolours."""

    def start(self, work: Work) -> Future[Made]:
        """Begins; what goes wrong is raised by the future."""
        ...

    def close(self) -> None:
        """Lets go of threads and processes."""
        ...


@dataclass(slots=True)
class Busy:
    """Seconds that threads, processes and the device have spent, summed over all. Safe to add to from several
    threads."""

    fetch_s: float = 0.0
    decode_s: float = 0.0
    place_s: float = 0.0
    """Cutting windows out, or resampling and recolouring where the CPU does it."""
    copy_s: float = 0.0
    """To the device; of batches whose end has been seen."""
    device_s: float = 0.0
    """Resampling and recolouring there."""
    samples: int = 0
    bytes: int = 0
    """Fetched."""
    copied_samples: int = 0
    """Samples behind `copy_s` and `device_s`."""
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(
        self,
        *,
        fetch_s: float = 0.0,
        decode_s: float = 0.0,
        place_s: float = 0.0,
        copy_s: float = 0.0,
        device_s: float = 0.0,
        samples: int = 0,
        bytes: int = 0,
        copied_samples: int = 0,
    ) -> None:
        with self._lock:
            self.fetch_s += fetch_s
            self.decode_s += decode_s
            self.place_s += place_s
            self.copy_s += copy_s
            self.device_s += device_s
            self.samples += samples
            self.bytes += bytes
            self.copied_samples += copied_samples
