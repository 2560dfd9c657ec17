"""Token shards that are read piece by piece: behind a URL, or compressed on a local disk.

A piece is a chunk of 1 MiB of the file, or a compressed block that holds 1 MiB of tokens; each is an `Item` with its
checksum. Who reads fetches items, hands their bytes to `decode` and has the tokens of the piece; index and footer come
by ranges when the shard is opened.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from .frame import Sections, fetched_frame
from .items import Fetch, Item
from .shards import Counts, TokenLayout, Tokens, documents_of, unpacked_counts

_INDEX = ("offsets", "ids", "text_bytes", "blocks", "block_hashes")


class RemoteShard:
    """A token shard of `size` bytes behind `fetch`; `file` is a URL or a local path.

    Opening costs two rounds of requests: the footer, then the index (16 to 24 bytes a document).
    """

    def __init__(self, file: str, *, fetch: Fetch, size: int, checksum: str | None = None) -> None:
        self.file = file
        self._fetch = fetch
        self._frame = fetched_frame(file, fetch=fetch, size=size, kinds=("tokens",))
        self._frame.expect(checksum)
        self.checksum = self._frame.checksum
        self.layout = TokenLayout(self._frame)
        index = Sections(self._frame, fetch, _INDEX)
        offsets, ids = index.array("offsets", "<i8"), index.array("ids", "<u8")
        assert offsets is not None, "every shard has offsets"
        assert ids is not None, "every shard has ids"
        self.offsets: npt.NDArray[np.int64] = offsets
        self.ids: npt.NDArray[np.uint64] = ids
        self.text_bytes: npt.NDArray[np.int64] | None = index.array("text_bytes", "<i8")
        self._blocks = index.array("blocks", "<i8")
        self._hashes = index.array("block_hashes", "<u8")

    def __len__(self) -> int:
        return self.layout.documents

    @property
    def token_count(self) -> int:
        """Tokens in the shard."""
        return self.layout.token_count

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Tokens of each document."""
        return np.diff(self.offsets)

    def pieces_of(self, start: int, stop: int) -> range:
        """Numbers of the pieces that hold tokens `start` to `stop` (exclusive)."""
        return self.layout.chunks_of(start, stop)

    def tokens_of(self, piece: int) -> range:
        """The tokens that piece `piece` holds."""
        return self.layout.tokens_of(piece)

    def item(self, piece: int) -> Item:
        """What to fetch for piece `piece`."""
        if self._blocks is None or self._hashes is None:
            return self._frame.chunk(piece)
        start, stop = int(self._blocks[piece]), int(self._blocks[piece + 1])
        return Item(self.file, start, stop, checksum=int(self._hashes[piece]))

    def decode(self, piece: int, data: bytes | memoryview) -> Tokens:
        """The tokens of piece `piece` from the bytes of its item."""
        return self.layout.decode(piece, data)

    def read(self, start: int, stop: int) -> Tokens:
        """Tokens `start` to `stop` (exclusive), fetched at once: for tests and small reads."""
        pieces = self.pieces_of(start, stop)
        fetched = self._fetch.fetch([self.item(piece) for piece in pieces])
        parts = [self.decode(piece, data) for piece, data in zip(pieces, fetched, strict=True)]
        first = pieces.start * self.layout.chunk_tokens
        return np.concatenate([np.zeros(0, self.layout.dtype), *parts])[start - first : stop - first]

    def document(self, index: int) -> Tokens:
        """The tokens of document `index`, counted from 0."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.file} holds {len(self)} documents; there is no number {index}")
        return self.read(int(self.offsets[index]), int(self.offsets[index + 1]))

    @cached_property
    def count_bits(self) -> npt.NDArray[np.uint8] | None:
        """Whether the loss counts each token as a target, in bits as they are stored; None: all of them. Fetched whole
        when first asked for: an eighth of a byte a token."""
        return Sections(self._frame, self._fetch, ("counts",)).array("counts", "u1")

    def counts(self, start: int, stop: int) -> Counts | None:
        """Whether the loss counts each of the tokens `start` to `stop` (exclusive); None: all of them."""
        bits = self.count_bits
        return None if bits is None else unpacked_counts(bits, start, stop)

    def damaged_tokens(self, piece: int) -> range:
        """The tokens that are lost with piece `piece`."""
        return self.layout.tokens_of(piece)

    def damaged_documents(self, piece: int) -> range:
        """Numbers of the documents with a token in piece `piece`."""
        return documents_of(self.offsets, self.layout.tokens_of(piece))
