"""Which tokens the loss counts where parts of a text are masked: those that have no byte in a masked span."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from tokenizers import Tokenizer

from ropewalk.store.shards import Counts, Tokens

from .byte_level import byte_table
from .columns import Rows, text_buffers
from .cuts import Spans
from .encoders import Encoded


class Masker:
    """Knows how many bytes each token stands for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        table = byte_table(tokenizer)
        self._sizes = None if table is None else np.array([len(data) for data in table], np.int64)

    def counts(self, text: pa.LargeStringArray, rows: Rows, spans: Spans, encoded: Encoded) -> Counts:
        """One a token of `encoded`, which `text` has become; spans are of documents of these `rows`, which ascend."""
        counts = np.ones(len(encoded.tokens), bool)
        places = np.searchsorted(rows, spans.rows)
        starts = np.cumsum(encoded.lengths) - encoded.lengths
        _, offsets = text_buffers(text)
        for place in np.unique(places).tolist():
            first, last = int(starts[place]), int(starts[place] + encoded.lengths[place]) - 1
            size = int(offsets[place + 1] - offsets[place])
            begins, ends = self._borders(encoded.tokens[first:last], text[place].as_py(), size)
            mine = places == place
            for start, stop in zip(spans.starts[mine].tolist(), spans.stops[mine].tolist(), strict=True):
                begin = np.searchsorted(ends, start, side="right")
                end = np.searchsorted(begins, stop, side="left")
                counts[first + begin : first + end] = False
        return counts

    def _borders(self, tokens: Tokens, text: str, size: int) -> tuple[Rows, Rows]:
        """The byte of the text with which each token begins, and the one behind its last."""
        if self._sizes is not None:
            sizes = self._sizes[tokens]
            ends = np.cumsum(sizes)
            if len(ends) and ends[-1] == size:
                return ends - sizes, ends
        # A tokenizer that adds, drops or changes characters: its own account of where tokens come from.
        before = np.cumsum([0, *(len(character.encode()) for character in text)])
        spans = np.array(self._tokenizer.encode(text, add_special_tokens=False).offsets, np.int64).reshape(-1, 2)
        return before[spans[:, 0]], before[spans[:, 1]]
