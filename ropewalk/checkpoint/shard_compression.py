"""Lossless compression of shard files: byte planes (first bytes of all elements, then second bytes, ...) and zstd.

Signs and exponents of weights and moments repeat, mantissas do not: in planes, zstd compresses the former and skips the
latter. Files are compressed in frames of 4 MiB, so that a tensor is read without the rest of its file. No torch.
"""

from __future__ import annotations

import time
from typing import Any, Literal

FRAME_BYTES = 4 << 20
LEVEL = 1
"""Of zstd. Higher levels save less than 1 % on planes and cost several times the time."""
SAMPLE_BYTES = 1 << 20
MEASURE_EVERY = 8
"""`auto` writes every n-th file uncompressed, to measure the disk again."""

_HEADER_BYTES = 5
_MAX_PLANES = 16
"""Bytes of the widest element."""

Mode = Literal["off", "on", "auto"]


class CompressionPolicy:
    """Decides per file whether compression makes a save durable sooner, from the measured speed of disk and
    processor."""

    def __init__(self, mode: Mode) -> None:
        self._mode = mode
        self._bytes_per_s: float | None = None
        self._files = 0

    def chooses(self, sample: memoryview, *, item: int) -> bool:
        """Whether to compress a file like `sample`, with elements of `item` bytes.

        `auto` compresses a part of the sample and compares compressing and writing less to writing all. It does not
        compress until the disk is measured.
        """
        self._files += 1
        if self._mode != "auto":
            return self._mode == "on"
        if self._bytes_per_s is None or self._files % MEASURE_EVERY == 0 or not sample:
            return False
        part = sample[:SAMPLE_BYTES]
        start = time.perf_counter()
        share = len(compress(part, item=item)) / len(part)
        seconds_per_byte = (time.perf_counter() - start) / len(part)
        return seconds_per_byte + share / self._bytes_per_s < 1 / self._bytes_per_s

    def wrote(self, size: int, *, seconds: float) -> None:
        """Records that an uncompressed file of `size` bytes became durable after `seconds`."""
        if size >= SAMPLE_BYTES:
            self._bytes_per_s = size / seconds


def compress(raw: bytes | bytearray | memoryview, *, item: int) -> bytes:
    """A frame: one byte for the number of planes, four for the size, and the compressed bytes. Incompressible data is
    stored unchanged, with 0 planes."""
    import numpy as np  # takes 0.1 s, not needed without compression

    whole = len(raw) - len(raw) % item
    planes = np.frombuffer(raw, np.uint8, whole).reshape(-1, item).T.tobytes() if item > 1 else bytes(raw[:whole])
    compressed: bytes = _codec().compress(planes + bytes(raw[whole:]), asbytes=True)
    if len(compressed) >= len(raw):
        item, compressed = 0, bytes(raw)
    return bytes([item]) + len(raw).to_bytes(4, "little") + compressed


def decompress(frame: memoryview, *, max_bytes: int = 1 << 32) -> bytes:
    """The bytes of a frame; ValueError if it is malformed or claims more than `max_bytes`."""
    if len(frame) < _HEADER_BYTES:
        raise ValueError(f"a frame of {len(frame)} bytes")
    item, size, compressed = frame[0], int.from_bytes(frame[1:_HEADER_BYTES], "little"), frame[_HEADER_BYTES:]
    if size > max_bytes or item > _MAX_PLANES or (item == 0 and len(compressed) != size):
        raise ValueError(f"a frame that claims {size} bytes in {item} planes")
    if item == 0:
        return bytes(compressed)
    try:
        # The codec fails unless the result has exactly this size.
        planes: bytes = _codec().decompress(compressed, decompressed_size=size, asbytes=True)
    except OSError as error:
        raise ValueError(f"a frame that cannot be decompressed: {error}") from None
    if item == 1:
        return planes
    import numpy as np

    whole = size - size % item
    return np.frombuffer(planes, np.uint8, whole).reshape(item, -1).T.tobytes() + planes[whole:]


def _codec() -> Any:
    import pyarrow  # takes 0.2 s, not needed without compression

    return pyarrow.Codec("zstd", compression_level=LEVEL)
