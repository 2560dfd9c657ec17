"""Lossless packing of payload files: first bytes of all numbers, then second bytes, and so on; then zstd. No torch.

Signs and exponents of weights and moments repeat, mantissas do not: side by side in planes, zstd finds the former and
passes over the latter. A file is packed in frames of 4 MiB, so that one tensor is read without the rest.
"""

from __future__ import annotations

import time
from typing import Any, Literal

FRAME_BYTES = 4 << 20
LEVEL = 1
"""Of zstd. Higher ones gain under 1 % on planes and cost several times as much."""
SAMPLE_BYTES = 1 << 20
MEASURE_EVERY = 8
"""One file in so many is written as it is, to measure the disk again."""

_HEADER_BYTES = 5
_MOST_PLANES = 16
"""Bytes of the widest number."""

Mode = Literal["off", "on", "auto"]


class CompressionPolicy:
    """Decides file by file whether packing makes a save durable sooner, from what disk and processor were measured to
    do."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._bytes_per_s: float | None = None
        self._asked = 0

    def chooses(self, sample: memoryview, *, item: int) -> bool:
        """Whether to pack a file of numbers of `item` bytes like `sample`.

        `auto` packs a part of it and compares: packing and writing less, or writing all. Before the disk is measured it
        writes all.
        """
        self._asked += 1
        if self._mode != "auto":
            return self._mode == "on"
        if self._bytes_per_s is None or self._asked % MEASURE_EVERY == 0 or not sample:
            return False
        part = sample[:SAMPLE_BYTES]
        start = time.perf_counter()
        share = len(compress(part, item=item)) / len(part)
        seconds_a_byte = (time.perf_counter() - start) / len(part)
        return seconds_a_byte + share / self._bytes_per_s < 1 / self._bytes_per_s

    def wrote(self, size: int, *, seconds: float) -> None:
        """A file of `size` bytes was written as it is and became durable in so long."""
        if size >= SAMPLE_BYTES:
            self._bytes_per_s = size / seconds


def compress(raw: bytes | bytearray | memoryview, *, item: int) -> bytes:
    """A frame: the number of planes in a byte, the size in four, and the packed bytes. What does not get smaller is
    left as it is, in no planes."""
    import numpy as np  # a tenth of a second that runs without packing need not spend

    whole = len(raw) - len(raw) % item
    planes = np.frombuffer(raw, np.uint8, whole).reshape(-1, item).T.tobytes() if item > 1 else bytes(raw[:whole])
    packed: bytes = _codec().compress(planes + bytes(raw[whole:]), asbytes=True)
    if len(packed) >= len(raw):
        item, packed = 0, bytes(raw)
    return bytes([item]) + len(raw).to_bytes(4, "little") + packed


def decompress(frame: memoryview, *, most_bytes: int = 1 << 32) -> bytes:
    """The bytes that became `frame`; ValueError when it is no frame, or says that it holds more than `most_bytes`."""
    if len(frame) < _HEADER_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes")
    item, size, packed = frame[0], int.from_bytes(frame[1:_HEADER_BYTES], "little"), frame[_HEADER_BYTES:]
    if size > most_bytes or item > _MOST_PLANES or (item == 0 and len(packed) != size):
        raise ValueError(f"a frame that says it holds {size} bytes in {item} planes")
    if item == 0:
        return bytes(packed)
    try:
        # The codec refuses what does not unpack to exactly so many bytes.
        planes: bytes = _codec().decompress(packed, decompressed_size=size, asbytes=True)
    except OSError as error:
        raise ValueError(f"a frame that cannot be unpacked: {error}") from None
    if item == 1:
        return planes
    import numpy as np

    whole = size - size % item
    return np.frombuffer(planes, np.uint8, whole).reshape(item, -1).T.tobytes() + planes[whole:]


def _codec() -> Any:
    import pyarrow  # a fifth of a second that runs without packing need not spend

    return pyarrow.Codec("zstd", compression_level=LEVEL)
