"""Where samples lie: files of a folder, members of tars, documents of our shards. No torch.

Each sample is one `Item`: it is fetched, cached and checked like a chunk of tokens. Opening lists what there is and
reads no picture.
"""

from __future__ import annotations

import bisect
import itertools
import os
import tarfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import fsspec
import numpy as np
import numpy.typing as npt

from ropewalk.base.errors import DataError
from ropewalk.store.blobs import Blobs, open_blobs
from ropewalk.store.items import Fetch, Item
from ropewalk.store.origin import is_url, local_path, open_origin
from ropewalk.store.shards import document_key

IMAGES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff")
"""Endings of files and members that are pictures."""
NO_LABEL = -1


class Samples(Protocol):
    """The samples of a source, numbered from 0. Safe to read from several threads."""

    @property
    def keys(self) -> npt.NDArray[np.uint64]:
        """The 64-bit key of each, from its name: what its random numbers hang on."""
        ...

    @property
    def classes(self) -> Sequence[str]:
        """Names of the labels 0, 1, ...; empty when labels are numbers of the corpus or there are none."""
        ...

    @property
    def stored_as_is(self) -> bool:
        """Whether the bytes of every item are the picture, so that `encoded` changes nothing."""
        ...

    def item(self, index: int) -> Item:
        """What to fetch for sample `index`."""
        ...

    def label(self, index: int) -> int:
        """Its class, NO_LABEL without."""
        ...

    def encoded(self, index: int, data: bytes | memoryview) -> bytes | memoryview:
        """The picture as a decoder wants it, from the bytes of its item."""
        ...

    def __len__(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Listed:
    """Samples whose places are listed in memory: files, or members of tars."""

    files: Sequence[str]
    file_of: npt.NDArray[np.int32]
    """Which of `files` holds each sample."""
    starts: npt.NDArray[np.int64]
    stops: npt.NDArray[np.int64]
    names: Sequence[str]
    keys: npt.NDArray[np.uint64]
    labels: npt.NDArray[np.int64]
    classes: Sequence[str]

    def __len__(self) -> int:
        return len(self.names)

    @property
    def stored_as_is(self) -> bool:
        return True

    def item(self, index: int) -> Item:
        start, stop = int(self.starts[index]), int(self.stops[index])
        return Item(self.files[self.file_of[index]], start, stop, name=self.names[index])

    def label(self, index: int) -> int:
        return int(self.labels[index])

    def encoded(self, index: int, data: bytes | memoryview) -> bytes | memoryview:
        return data


class Shards:
    """Documents of shards of bytes, one shard after the other. A label is the note of a document, or its `label`."""

    classes: Sequence[str] = ()

    def __init__(self, shards: Sequence[Blobs]) -> None:
        self._shards = shards
        self._ends = list(itertools.accumulate(len(shard) for shard in shards))
        self.keys: npt.NDArray[np.uint64] = np.concatenate([shard.ids for shard in shards])

    def __len__(self) -> int:
        return len(self.keys)

    @property
    def stored_as_is(self) -> bool:
        return not any(shard.compressed for shard in self._shards)

    def item(self, index: int) -> Item:
        shard, within = self._place(index)
        return shard.item(within)

    def label(self, index: int) -> int:
        shard, within = self._place(index)
        note: Any = shard.note(within)
        value = note.get("label") if isinstance(note, dict) else note
        return value if isinstance(value, int) and not isinstance(value, bool) else NO_LABEL

    def encoded(self, index: int, data: bytes | memoryview) -> bytes | memoryview:
        shard, within = self._place(index)
        return shard.decode(within, data)

    def _place(self, index: int) -> tuple[Blobs, int]:
        number = bisect.bisect_right(self._ends, index)
        return self._shards[number], index - (self._ends[number - 1] if number else 0)


def open_samples(path: str, *, fetch: Fetch | None = None) -> Samples:
    """The samples at `path` by what lies there: pictures, tars, else our shards (`.blobs`), whose index comes through
    `fetch`. DataError when there are none."""
    origin = open_origin(path)
    names = [name for name in origin.names(path) if name]
    places = [_join(path, name) for name in names] or [path]
    for endings, opened in _READERS.items():
        found = [place for place in places if place.lower().endswith(endings)]
        samples = opened(path, found, fetch) if found else ()
        if samples:
            return samples
    known = ", ".join(ending for endings in _READERS for ending in endings)
    raise DataError(f"{path}: no samples found; it should be or hold files that end in {known}")


def _files(root: str, places: list[str], fetch: Fetch | None) -> Samples:
    """One sample a file; the first folder below `root` is its class, as in torchvision's ImageFolder."""
    origin = open_origin(root)
    names = [place[len(root) :].lstrip("/") or os.path.basename(place) for place in places]
    folders = [name.split("/")[0] if "/" in name else "" for name in names]
    classes = sorted(set(folders) - {""})
    number = {folder: index for index, folder in enumerate(classes)} | {"": NO_LABEL}
    return Listed(
        files=places,
        file_of=np.arange(len(places), dtype=np.int32),
        starts=np.zeros(len(places), np.int64),
        stops=np.array([origin.size(place) for place in places], np.int64),
        names=names,
        keys=_keys(names),
        labels=np.array([number[folder] for folder in folders], np.int64),
        classes=classes,
    )


def _tars(root: str, places: list[str], fetch: Fetch | None) -> Samples:
    """WebDataset: members that differ only in what follows the first dot of their names are one sample; `cls` is its
    class. Listing costs about 30 us a member."""
    file_of: list[int] = []
    spans: list[tuple[int, int]] = []
    names: list[str] = []
    labels: list[int] = []
    for number, place in enumerate(places):
        pictures, classes = _members(place)
        for name, (key, start, stop) in pictures.items():
            file_of.append(number)
            spans.append((start, stop))
            names.append(f"{os.path.basename(place)}/{name}")
            labels.append(classes.get(key, NO_LABEL))
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    return Listed(
        files=places,
        file_of=np.array(file_of, np.int32),
        starts=starts,
        stops=stops,
        names=names,
        keys=_keys(names),
        labels=np.array(labels, np.int64),
        classes=(),
    )


def _members(place: str) -> tuple[dict[str, tuple[str, int, int]], dict[str, int]]:
    """Of one tar: pictures by name as (key, first byte, last), and labels by key."""
    pictures: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, int] = {}
    try:
        with (
            fsspec.open(place if is_url(place) else local_path(place), "rb") as file,
            tarfile.open(fileobj=file, mode="r:") as tar,
        ):
            for member in tar:
                folder, _, base = member.name.rpartition("/")
                stem, _, ending = base.partition(".")
                key = f"{folder}/{stem}"
                if not member.isfile():
                    continue
                if base.lower().endswith(IMAGES):
                    start = member.offset_data
                    pictures[member.name] = (key, start, start + member.size)
                elif ending == "cls":
                    content = tar.extractfile(member)
                    text = content.read() if content else b""
                    labels[key] = _class(text, f"{place}: {member.name}")
    except tarfile.TarError as error:
        raise DataError(f"{place}: not a readable tar: {error}; restore it from a copy") from None
    return pictures, labels


def _class(text: bytes, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise DataError(f"{where}: a class is a whole number, not {text[:40]!r}; write the tar again") from None


def _shards(root: str, places: list[str], fetch: Fetch | None) -> Samples:
    shards = [open_blobs(place, fetch=fetch) for place in places]
    for shard in shards:
        if shard.kind != "bytes":
            raise DataError(f"{shard.file}: this shard holds {shard.kind}, not pictures; give the path of others")
    return Shards(shards)


_READERS: dict[tuple[str, ...], Callable[[str, list[str], Fetch | None], Samples]] = {
    IMAGES: _files,
    (".tar",): _tars,
    (".blobs",): _shards,
}
"""How samples are read, by the endings of the files that hold them."""


def _keys(names: Sequence[str]) -> npt.NDArray[np.uint64]:
    return np.array([document_key(name) for name in names], np.uint64)


def _join(folder: str, name: str) -> str:
    return f"{folder.rstrip('/')}/{name}"
