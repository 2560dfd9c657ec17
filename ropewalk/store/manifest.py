"""The manifest: what prepare hands to load. One JSON file beside the shards, described in docs/formats.md."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ropewalk.base.errors import DataError
from ropewalk.base.files import read_regular, storage, upgraded
from ropewalk.base.seal import damaged, parse_sealed, warn_unsealed, write_sealed
from ropewalk.base.untrusted import plain_text

from .compression import Compression
from .sealed import checksum_of

FORMAT = 3
SEALED_SINCE = 3
FILE = "manifest.json"
REMEDY = (
    "run `ropewalk prepare` with its recipe again, which makes it anew and keeps what is whole; settings are changed "
    "in the recipe"
)

Split = Literal["train", "validation"]
ShardKind = Literal["tokens", "references"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardEntry:
    """One shard: documents of one source and one split. `references` say in which files of another program the tokens
    lie (`store/references.py`)."""

    file: str
    """Relative to the manifest's folder, or an absolute path, or a URL."""
    source: str
    split: Split
    documents: int
    tokens: int
    text_bytes: int
    """UTF-8 bytes of the texts that were encoded."""
    file_bytes: int
    checksum: str
    kind: ShardKind = "tokens"
    compression: Compression = "off"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCount:
    """What one step did to one source. `documents_in == documents_out + sum(removed.values())`, always; bytes likewise,
    with those that edits took."""

    step: str
    documents_in: int
    documents_out: int
    bytes_in: int
    bytes_out: int
    removed: dict[str, int]
    """Documents by the rule that removed them."""
    edited: dict[str, int]
    """Documents by the rule that changed their text."""
    removed_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of the documents removed, by rule; empty where the writer did not count them."""
    edited_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes that edits took from documents that stay, by rule."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceEntry:
    """One source of the recipe and its way through the steps."""

    name: str
    domain: str
    weight: float
    """Share of the training mixture before normalisation."""
    steps: tuple[StepCount, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerEntry:
    """The tokenizer that wrote the shards."""

    file: str
    checksum: str
    vocabulary: int
    end_of_text: int
    """Id of the token that closes every document."""
    chat: str = ""
    """Name of the template of the dialogues (`ropewalk.prepare.chat`); empty when there are none."""
    encoders: tuple[str, ...] = ()
    """The algorithms that encoded the shards; their tokens are the same."""
    refused: dict[str, str] = field(default_factory=dict)
    """Why faster ones did not, by algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableEntry:
    """A table beside the shards, such as the ledger, as it was written."""

    bytes: int
    checksum: str
    """xxh3-64 of the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The whole prepared corpus."""

    recipe_hash: str
    """Hash of the prepare settings and of the input bytes; also the name of the folder."""
    dtype: Literal["uint16", "uint32"]
    tokenizer: TokenizerEntry
    sources: tuple[SourceEntry, ...]
    shards: tuple[ShardEntry, ...]
    warnings: tuple[str, ...] = ()
    """What the one who prepared the data should have looked at."""
    ngrams: str = ""
    """Folder of the index of n-grams; empty when there is none."""
    tables: dict[str, TableEntry] = field(default_factory=dict)
    """By file name; empty where an earlier version wrote the folder."""

    def shards_of(self, split: Split, source: str | None = None) -> list[ShardEntry]:
        """The shards of one split, of one source or of all."""
        return [s for s in self.shards if s.split == split and source in (None, s.source)]

    def tokens(self, split: Split) -> int:
        """Tokens in one split."""
        return sum(shard.tokens for shard in self.shards_of(split))


def write_manifest(folder: Path, manifest: Manifest) -> Path:
    """Commits the manifest; raises DataError when the counts of a source do not add up."""
    for source in manifest.sources:
        check_counts(source)
    path = folder / FILE
    write_sealed(path, {"format": FORMAT, **dataclasses.asdict(manifest)})
    return path


def read_manifest(folder: Path) -> Manifest:
    """The manifest in `folder`, of this or any older format; DamagedFile when it is not what was written."""
    path = folder / FILE
    try:
        with storage(f"reading {path}"):
            data = read_regular(path)
    except FileNotFoundError:
        raise DataError(f"{path}: no such manifest; {REMEDY}") from None
    return parse_manifest(data, path=path)


def parse_manifest(data: bytes, *, path: Path) -> Manifest:
    """The manifest in the bytes that were read from `path`, of this or any older format."""
    tree = parse_sealed(data, path=path, what="manifest", remedy=REMEDY, sealed_since=SEALED_SINCE)
    tree = upgraded(tree, path=path, what="manifest", current=FORMAT, upgrades={1: _from_1, 2: _from_2})
    # A seal says that nothing was changed by accident; of a folder that came from elsewhere, nothing more.
    if wrong := next(_misfits(Manifest, tree, ""), None):
        raise damaged(path, what="manifest", remedy=REMEDY, why=wrong)
    return _manifest(tree)


def describe_table(path: Path) -> TableEntry:
    """A table that was committed, for the manifest."""
    return TableEntry(bytes=path.stat().st_size, checksum=checksum_of(path))


def check_table(folder: Path, name: str, manifest: Manifest | None = None) -> Path:
    """The path of a table in `folder`, every byte of which was checked; DamagedFile when it is not what was written."""
    path, what = folder / name, name.partition(".")[0]
    entry = (manifest or read_manifest(folder)).tables.get(name)
    if not path.exists():
        raise damaged(path, what=what, remedy=REMEDY, why="it is missing")
    if entry is None:
        warn_unsealed(path, what)
    elif path.stat().st_size != entry.bytes or checksum_of(path) != entry.checksum:
        raise damaged(path, what=what, remedy=REMEDY)
    return path


def check_name(manifest: Manifest, folder: Path) -> None:
    """DamagedFile when the manifest is that of another folder: the name says what the data was made from."""
    if manifest.recipe_hash != folder.name:
        why = f"it is sound, but it belongs to the folder {manifest.recipe_hash}"
        raise damaged(folder / FILE, what="manifest", remedy=REMEDY, why=why)


def check_tokenizer(folder: Path, manifest: Manifest) -> None:
    """DamagedFile when the tokenizer beside the manifest is not what was written."""
    path = folder / manifest.tokenizer.file
    if checksum_of(path) != manifest.tokenizer.checksum:
        raise damaged(path, what="tokenizer", remedy=REMEDY)


def check_counts(source: SourceEntry) -> None:
    """Raises DataError unless what enters a step is what leaves it, what was removed and what edits took; and unless
    steps join up."""
    previous: StepCount | None = None
    for step in source.steps:
        removed = sum(step.removed.values())
        if step.documents_in != step.documents_out + removed:
            raise DataError(
                f"source {source.name}, step {step.step}: {step.documents_in} documents in, but "
                f"{step.documents_out} out and {removed} removed"
            )
        counted = sum(step.removed_bytes.values()) + sum(step.edited_bytes.values())
        if (step.removed_bytes or step.edited_bytes) and step.bytes_in != step.bytes_out + counted:
            raise DataError(
                f"source {source.name}, step {step.step}: {step.bytes_in} bytes in, but {step.bytes_out} out and "
                f"{counted} removed or edited away"
            )
        if previous is not None and step.documents_in != previous.documents_out:
            raise DataError(
                f"source {source.name}: {previous.documents_out} documents left {previous.step}, "
                f"{step.documents_in} reached {step.step}"
            )
        previous = step


def _manifest(tree: dict[str, Any]) -> Manifest:
    return Manifest(
        recipe_hash=tree["recipe_hash"],
        dtype=tree["dtype"],
        tokenizer=TokenizerEntry(**{**tree["tokenizer"], "encoders": tuple(tree["tokenizer"].get("encoders", ()))}),
        sources=tuple(
            SourceEntry(**{**source, "steps": tuple(StepCount(**step) for step in source["steps"])})
            for source in tree["sources"]
        ),
        shards=tuple(ShardEntry(**shard) for shard in tree["shards"]),
        warnings=tuple(tree.get("warnings", ())),
        ngrams=tree.get("ngrams", ""),
        tables={name: TableEntry(**entry) for name, entry in tree["tables"].items()},
    )


def _misfits(kind: Any, value: Any, key: str) -> Iterator[str]:
    """What in a value from JSON does not fit the `kind` of a field, by its dotted `key`."""
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        told = {name: child for name, child in value.items() if name in hints or kind is not Manifest}
        needed = {f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING}
        yield from (f"it lacks `{key}{name}`" for name in sorted(needed - told.keys()))
        for name, child in told.items():
            yield from _misfits(hints.get(name), child, f"{key}{name}.")
    elif origin is tuple and isinstance(value, list):
        for index, child in enumerate(value):
            yield from _misfits(inner[0], child, f"{key}{index}.")
    elif origin is dict and isinstance(value, dict):
        for name, child in value.items():
            yield from _misfits(inner[1], child, f"{key}{name}.")
    elif not _fits(kind, value):
        text = ascii(value)
        yield f"`{key.rstrip('.')}` is {text if len(text) <= 60 else text[:57] + '...'}"


def _fits(kind: Any, value: Any) -> bool:
    if get_origin(kind) is Literal:
        return type(value) is str and value in get_args(kind)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(value) and value >= 0
    if kind is int:
        return type(value) is int and value.bit_length() < 63
    return kind is str and type(value) is str and plain_text(value) and "\0" not in value


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)


def _from_1(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 2 adds what a shard holds and how it is packed; before, all held tokens as they are."""
    return tree


def _from_2(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 3 adds the seal, and the checksums of the tables beside the shards."""
    return {**tree, "tables": {}}
