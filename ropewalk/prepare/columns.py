"""Arrow text columns as the two arrays that kernels read: bytes and offsets. Nothing is copied."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Offsets = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Rows = npt.NDArray[np.int64]


def text_buffers(text: pa.LargeStringArray | pa.LargeBinaryArray) -> tuple[Bytes, Offsets]:
    """(data, offsets): text i is `data[offsets[i] : offsets[i + 1]]`. The column has no nulls; a slice of one works.

    Both arrays are read-only, whatever Arrow's buffers are: a kernel is compiled again for arrays that can be written.
    """
    assert text.null_count == 0, "a text column has no nulls"
    _, offsets, data = text.buffers()
    start = text.offset
    bounds = np.frombuffer(offsets, np.int64, len(text) + 1, start * 8) if offsets else np.zeros(1, np.int64)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    for array in (content, bounds):
        array.flags.writeable = False
    return content, bounds


def string_buffers(strings: pa.StringArray) -> tuple[Bytes, Offsets]:
    """The same of a column of short strings, whose offsets have 32 bits; these are copied."""
    _, offsets, data = strings.buffers()
    bounds = (
        np.frombuffer(offsets, np.int32, len(strings) + 1, strings.offset * 4) if offsets else np.zeros(1, np.int32)
    )
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(0, np.uint8)
    content.flags.writeable = False
    return content, bounds.astype(np.int64)


def overlaid(column: pa.Array, rows: Rows, values: pa.Array) -> pa.Array:
    """`column` with `values` at `rows`."""
    if not len(rows):
        return column
    index = np.arange(len(column))
    index[rows] = len(column) + np.arange(len(rows))
    return pa.concat_arrays([column, values]).take(pa.array(index))
