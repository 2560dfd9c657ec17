"""Which program wrote a corpus, and its catalogue."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Literal

import xxhash

from ropewalk.base.errors import DataError
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import Manifest, parse_manifest
from ropewalk.store.origin import Origin, is_url, local_path
from ropewalk.store.references import Catalogue

from .litdata import scan_litdata
from .mds import scan_mds
from .megatron import scan_megatron
from .parquet import scan_parquet
from .strict import INDEX, check_catalogue, read_index
from .webdataset import scan_webdataset

Format = Literal["ropewalk", "megatron", "mds", "litdata", "webdataset", "parquet"]
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_ENDINGS: dict[Format, tuple[str, ...]] = {"megatron": (".idx",), "webdataset": _ARCHIVES, "parquet": (".parquet",)}
"""How the files of a format end, where it has no index of them."""


def scan(place: str, *, format: Format, origin: Origin, column: str = "", dtype: str = "") -> Catalogue:
    """Where the documents of the corpus at `place` lie. `column` and `dtype` mean what the format's module says.

    Its files are a stranger's: DataError names the one that is not what it should be.
    """
    return check_catalogue(_scan(absolute(place), format=format, origin=origin, column=column, dtype=dtype))


def _scan(place: str, *, format: Format, origin: Origin, column: str, dtype: str) -> Catalogue:
    if format == "mds":
        return scan_mds(place, origin=origin, column=column, dtype=dtype)
    if format == "litdata":
        return scan_litdata(place, origin=origin, column=column)
    if format == "megatron":
        return scan_megatron(_files(place, origin, _ENDINGS[format]), origin=origin)
    if format == "webdataset":
        return scan_webdataset(_files(place, origin, _ENDINGS[format]), origin=origin, column=column, dtype=dtype)
    if format == "parquet":
        return scan_parquet(_files(place, origin, _ENDINGS[format]), origin=origin, column=column)
    raise DataError(f"{place}: a prepared folder has its own index; it is read as it is")


def detect(place: str, *, origin: Origin) -> Format:
    """The format of what lies at `place`; DataError when nothing there is known."""
    names = _names(place, origin)
    if MANIFEST in names:
        return "ropewalk"
    if INDEX in names:
        index = read_index(place, origin=origin)
        if "shards" in index:
            return "mds"
        if "chunks" in index:
            return "litdata"
    for format, endings in _ENDINGS.items():
        if any(name.endswith(endings) for name in names):
            return format
    below = sorted({name.split("/")[0] for name in names if name.endswith(f"/{INDEX}")})
    hint = f"; there are corpora in {', '.join(below)}: name one of them" if below else ""
    raise DataError(
        f"{place}: no corpus is known there{hint}. Looked for {MANIFEST}, {INDEX} (MDS, litdata), .idx, .tar and "
        ".parquet files"
    )


def corpus_files(place: str, format: Format, *, origin: Origin) -> list[tuple[str, int, str]]:
    """(name, size, checksum of the content of indices) of the files of a corpus: what tells it from another."""
    if format in _ENDINGS:
        files = _files(place, origin, _ENDINGS[format])
    else:
        files = [f"{place}/{MANIFEST if format == 'ropewalk' else INDEX}"]
    if format == "megatron":
        files += [file.removesuffix(".idx") + ".bin" for file in files]
    return [(os.path.basename(file), origin.size(file), _index_checksum(file, origin)) for file in files]


def read_prepared(folder: str, *, origin: Origin) -> Manifest:
    """The manifest of a folder that prepare made, local or behind a URL."""
    file = f"{folder}/{MANIFEST}"
    return parse_manifest(origin.read(file), path=Path(file))


def absolute(place: str) -> str:
    """`place` as it can be found from any working folder."""
    return place.rstrip("/") if is_url(place) else os.path.abspath(local_path(place))


def _names(place: str, origin: Origin) -> list[str]:
    """Names of the files that `place` means: of a folder, of one file, or of NAME when there is NAME.idx."""
    found = origin.names(place)
    if found:
        return found
    return [os.path.basename(file) for file in _candidates(place, origin)]


def _candidates(place: str, origin: Origin) -> list[str]:
    """Files that `place` names when it is no folder: a file, a glob, or a prefix of Megatron-LM."""
    if is_url(place):
        return [place if place.endswith((".idx", ".parquet", *_ARCHIVES)) else f"{place.removesuffix('.bin')}.idx"]
    found = sorted(glob.glob(local_path(place)))
    prefix = f"{local_path(place).removesuffix('.bin')}.idx"
    return [prefix] if os.path.isfile(prefix) else [name for name in found if os.path.isfile(name)]


def _files(place: str, origin: Origin, endings: tuple[str, ...]) -> list[str]:
    """Files of the corpus by name, those of a folder from its top alone."""
    below = [name for name in origin.names(place) if name.endswith(endings) and "/" not in name]
    found = [f"{place}/{name}" for name in below] or [f for f in _candidates(place, origin) if f.endswith(endings)]
    if not found:
        raise DataError(f"{place}: no file there ends in {' or '.join(endings)}")
    return found


def _index_checksum(file: str, origin: Origin) -> str:
    """Of an index, whose content decides what the corpus is; tokens are told by their size alone."""
    return xxhash.xxh3_64_hexdigest(origin.read(file)) if file.endswith((INDEX, MANIFEST, ".idx")) else ""
