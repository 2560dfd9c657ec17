"""prepare: raw files -> filtered, deduplicated, tokenized shards and a manifest, in a folder named by a hash.

`build` makes the folder; here is what decides its name, and whether it is there already.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from ropewalk.base.errors import ConfigError, DamagedFile, Problem
from ropewalk.base.files import locked, storage
from ropewalk.base.progress import Progress, Silent
from ropewalk.config.renames import old_names
from ropewalk.config.schema import fields_of
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import Manifest, check_name, check_table, check_tokenizer, read_manifest

from . import ledger, ngrams, pack, tokenizer
from .build import Job, build
from .checksums import Checksums
from .config import Prepare
from .kernels.words import WORDS_ID
from .language import language_id
from .measures import list_digests
from .near.index import Index
from .near.sketch import algorithm
from .sources import InputFile, collect_files
from .stages import FOLDER as STAGES
from .stages import drop, key_of, sharing

VERSION = "prepare-4"
"""Part of the hash: raise it when the same inputs and settings give other bytes."""

_SILENT = Silent()


@dataclass(frozen=True, slots=True)
class Inputs:
    """What prepare will read, and the hash that names its output."""

    files: tuple[InputFile, ...]
    hash: str
    addition: str
    """The same without what an index of near-duplicates held before: the name of what these inputs add to it."""
    passed_over: tuple[str, ...]
    """A sentence for every folder in which files were not taken."""

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True, slots=True)
class Prepared:
    """Prepared data that is whole."""

    folder: Path
    manifest: Manifest
    reused: bool
    """Whether it was there already."""


def plan_inputs(settings: Prepare, *, seed: int) -> Inputs:
    """The input files and the hash of all that the output depends on; reads every file that was touched since the last
    time.

    Raises ConfigError for settings that contradict each other and DataError for paths that give no file.
    """
    problems = [Problem(f"prepare.{where}", what) for where, what in settings.check()]
    if not settings.sources:
        problems.append(Problem("prepare.sources", "there is none", "add a source with `name` and `paths`"))
    if problems:
        raise ConfigError(problems)
    stages = Path(settings.folder) / STAGES
    with sharing(stages):
        checksums = Checksums(stages / "checksums" / "files.arrow")
        found = collect_files(settings, checksums=checksums)
        checksums.save()
    given = settings.tokenizer.file
    parts = {
        "version": VERSION,
        "words": WORDS_ID,
        "near": algorithm(settings.deduplicate.near),
        "language": language_id() if settings.filter.language else "",
        "seed": seed,
        "settings": _what_matters(settings),
        "tokenizer": xxhash.xxh3_128_hexdigest(tokenizer.read(Path(given))) if given else "",
        "lists": list_digests(settings.filter),
        "files": [(file.source, file.name, file.reader, file.packing, file.checksum) for file in found.files],
    }
    addition = key_of(parts)[:16]
    near = settings.deduplicate.near
    if not near.index or near.kind == "off":
        return Inputs(found.files, addition, addition, found.passed_over)
    before = Index.open(Path(near.index), near).before(addition).additions
    return Inputs(found.files, key_of(parts, before)[:16], addition, found.passed_over)


def prepare(
    settings: Prepare, *, seed: int, progress: Progress = _SILENT, inputs: Inputs | None = None, recipe: str = ""
) -> Prepared:
    """The prepared data of these settings, made or found whole; a killed prepare continues where it was.

    `inputs` are those of `plan_inputs`, where the caller has them already; `recipe` is how commands name the recipe.
    """
    inputs = inputs or plan_inputs(settings, seed=seed)
    for line in inputs.passed_over:
        progress.say(line)
    folder = Path(settings.folder) / inputs.hash
    manifest = finished(folder)
    if manifest is not None:
        return Prepared(folder, manifest, reused=True)
    stages = Path(settings.folder) / STAGES
    with locked(folder, wait=progress.say), sharing(stages):
        manifest = finished(folder, say=lambda text: progress.say(f"{text}; preparing this data again"))
        if manifest is not None:
            return Prepared(folder, manifest, reused=True)
        with storage(f"preparing {folder} again"):
            (folder / MANIFEST).unlink(missing_ok=True)
        named = (inputs.files, inputs.hash, inputs.addition, folder, stages, progress, recipe)
        manifest = build(Job(settings, seed, *named))
    if settings.artifacts == "drop":
        drop(stages)
    return Prepared(folder, manifest, reused=False)


def _what_matters(settings: Prepare) -> dict[str, Any]:
    """The settings that the output depends on. Paths do not matter, the files they give do."""
    tree: dict[str, Any] = _lasting(settings)
    for source in tree["sources"]:
        del source["paths"]
    return old_names(tree, "prepare")


def _lasting(settings: Any) -> Any:
    """A config as plain values, without what may change when a run continues."""
    if isinstance(settings, tuple):
        return [_lasting(item) for item in settings]
    if not dataclasses.is_dataclass(settings):
        return settings
    fields = [field for field in fields_of(type(settings)) if not field.continues]
    return {field.name: _lasting(getattr(settings, field.name)) for field in fields}


def finished(folder: Path, *, say: Callable[[str], None] = lambda text: None) -> Manifest | None:
    """The manifest when all that it names is there, with the sizes and checksums it names; else `say` is told what is
    wrong. Reads every byte but those of shards, whose chunks are checked when they are trained on."""
    if not (folder / MANIFEST).exists():
        return None
    try:
        manifest = read_manifest(folder)
        check_name(manifest, folder)
        check_tokenizer(folder, manifest)
        for name in manifest.tables:
            check_table(folder, name, manifest)
    except DamagedFile as error:
        say(error.fault)
        return None
    for entry in manifest.shards:
        if not pack.is_intact(entry, folder):
            say(f"{folder / entry.file}: this shard is missing or damaged")
            return None
    if not ledger.is_intact(folder, manifest):
        say(f"{folder}: its ledger or statistics are missing or damaged")
        return None
    if manifest.ngrams and not ngrams.is_intact(folder / manifest.ngrams):
        say(f"{folder / manifest.ngrams}: this index of n-grams is missing or damaged")
        return None
    return manifest
