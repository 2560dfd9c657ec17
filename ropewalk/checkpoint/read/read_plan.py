"""What a rank needs of a checkpoint: which part of each tensor, and so which chunks of which files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ropewalk.parallel.placement import Choose

from ..format import CheckpointManifest, TensorEntry, item_bytes
from ..regions import Region, rows_of
from ..shard_file import chunks_of


def needed_chunks(
    manifest: CheckpointManifest, choose: Choose | None, *, wholly: Sequence[str]
) -> dict[str, list[int]]:
    """By file, the chunks that hold what is needed; files of which nothing is are left out. Without `choose` all are,
    and those of the files `wholly` always. A chunk is the least that can be read: it is checked as a whole."""
    files = manifest.files
    chunks = {name: set(range(len(entry.chunks))) for name, entry in files.items()}
    if choose is not None:
        chunks |= {name: set() for name in files if name not in wholly}
        for group, entries in manifest.tensors.items():
            for name, entry in entries.items():
                placement = choose(group, name, entry.shape)
                for file, begin, end in (
                    ranges(entry, Region(placement.offset, placement.local_shape)) if placement else ()
                ):
                    chunks[file].update(chunks_of(files[file], begin, end))
    return {name: sorted(numbers) for name, numbers in chunks.items() if numbers or name in wholly}


def ranges(entry: TensorEntry, region: Region) -> Iterator[tuple[str, int, int]]:
    """Files and bytes there, before packing, that are read to have `box` of a tensor."""
    item = item_bytes(entry.dtype)
    for piece in entry.pieces:
        stored = Region(piece.offset, piece.shape)
        part = stored.meet(region)
        if part is not None:
            first, last = rows_of(part, stored)
            yield piece.file, piece.begin + first * item, piece.begin + last * item
