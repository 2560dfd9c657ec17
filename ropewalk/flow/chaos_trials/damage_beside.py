"""Files beside a run: indices, copies of checkpoints, caches, corpora of other programs, leftovers of a kill.

`leave` puts one of each beside the run that `chaos --damage` damages; READERS_BESIDE open them as the product does
(`damage_readers.py` has the readers of the run itself).
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ropewalk.base.errors import DamagedCheckpoint, DataError
from ropewalk.base.files import committed_file, write_json
from ropewalk.base.progress import Silent
from ropewalk.checkpoint.config import Tiers
from ropewalk.checkpoint.format import FILE, list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.policy.frequency import Frequency, read_learned, write_learned
from ropewalk.evaluate.human.ratings_log import read_ratings
from ropewalk.evaluate.human.sheet_key import read_key
from ropewalk.evaluate.results import read_samples
from ropewalk.load.cache.disk import Disk
from ropewalk.load.cache.importance import publish, published
from ropewalk.load.config import Corpus, Load
from ropewalk.load.sources import open_source
from ropewalk.plan.speed import Speed
from ropewalk.prepare import ngrams
from ropewalk.prepare.config import Near, Substring
from ropewalk.prepare.near.index import Index
from ropewalk.prepare.near.sketch import sketch
from ropewalk.prepare.stages import healed, read_table
from ropewalk.prepare.substring.corpus import WORK, gather
from ropewalk.prepare.substring.find import find_repeats
from ropewalk.prepare.substring.match import match, match_tasks
from ropewalk.prepare.substring.sift import sample, sample_tasks, sift
from ropewalk.prepare.workers import Workers
from ropewalk.store.items import Item
from ropewalk.store.manifest import FILE as MANIFEST
from ropewalk.store.manifest import read_manifest

from ..expected_time import keep_speed, read_speed
from ..external_corpus import adopt, finished, plan_adoption
from ..human import export_sheets, import_ratings, show_ratings
from ..plan_recipe import needs_torch
from ..recipe import Recipe

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DamagedRun:
    """A whole run and its data, one file of which is damaged."""

    run: Path
    data: Path
    """Folder of the prepared data."""
    recipe: Recipe
    document: str
    """Id of one of its documents."""
    root: Path
    """Folder that holds the run, its data and the files beside them."""


Reader = Callable[[DamagedRun, Path], Any]

MATMUL = "a matmul of some shape"
MACHINE = "a machine of some kind"
ADOPTED = "adopted"
"""Folder in which prepared data refer to a corpus of another program."""
COPIES = "copies"
"""Name of the run among its copies."""
RATED = "human"
"""Folder of the sheets of raters."""
QUESTIONS = ("typical", "fluent")
"""What they have answered."""
LENGTH = 3
"""Tokens of the n-grams whose index was interrupted."""
SUBSTRING = Substring(action="remove", length=60, method="windows")
IMPORTANCE = np.linspace(0, 1, 7)


def leave(place: DamagedRun) -> None:
    """Puts the files beside the run of `place`."""
    known_matmuls(place.root / "cache").put(MATMUL, {"ours": 1.0, "torch": 2.0})
    keep_speed(place.root / "cache", MACHINE, Speed(device="cpu", flops=1e9, words="measured"))
    fetch_through(place.root / "disk-cache", place.data)
    publish(place.root / "disk-cache", IMPORTANCE, job=0)
    Index.open(place.root / "near-index", Near()).append("first", [_documents(place)])
    _leave_ngrams(place)
    _leave_substring(place)
    _leave_copies(place)
    _leave_ratings(place)
    _adopt(place)


# Caches


def _matmuls(place: DamagedRun, path: Path) -> Any:
    return known_matmuls(path.parent.parent).get(MATMUL)


def _measured(place: DamagedRun, path: Path) -> Any:
    return read_speed(path.parent, MACHINE)


def _item(place: DamagedRun, path: Path) -> Any:
    return [bytes(data) for data in fetch_through(place.root / "disk-cache", place.data)]


def _importance(place: DamagedRun, path: Path) -> Any:
    return [values.tolist() for values in published(place.root / "disk-cache", samples=len(IMPORTANCE))]


def known_matmuls(folder: Path) -> Any:
    return needs_torch("ropewalk.parallel.kernels.matmul_tuning", "training").Known("GPU", 1, folder)


def fetch_through(cache: Path, data: Path) -> list[bytes | memoryview]:
    """Reads the shards in `data` through a disk cache."""
    disk = Disk(_Files(), cache, budget_bytes=1 << 30)
    try:
        return disk.fetch([Item(str(path), 0, path.stat().st_size) for path in sorted(data.glob("*.tokens"))])
    finally:
        disk.close()


class _Files:
    """Reads items directly from their files."""

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        return [item.checked(Path(item.file).read_bytes()[item.start : item.stop]) for item in items]

    def close(self) -> None:
        pass


# Indices, and leftovers of a kill


def _documents(place: DamagedRun) -> tuple[pa.Array, pa.LargeStringArray]:
    """(ids, texts) that prepare has read."""
    files = sorted((place.data.parent / "stages" / "read").glob("*.arrow"))
    table = pa.concat_tables([read_table(path, ["id", "text"]) for path in files]).combine_chunks()
    return tuple(table[name].combine_chunks().cast(pa.large_string()) for name in ("id", "text"))


def _near(place: DamagedRun, path: Path) -> Any:
    return Index.open(path.parent, Near()).known([sketch(_documents(place)[1], Near())]).ids.to_pylist()


def _leave_ngrams(place: DamagedRun) -> None:
    """Entries of all shards, before their index is built."""
    manifest = read_manifest(place.data)
    for task in ngrams.index_tasks(
        place.data, manifest.shards, tokenizer=place.data / manifest.tokenizer.file, unit="tokens", length=LENGTH
    ):
        ngrams.index_shard(task)


def _entries(place: DamagedRun, path: Path) -> Any:
    manifest = read_manifest(place.data)

    def work() -> Path:
        return ngrams.index_shards(
            place.data,
            manifest.shards,
            tokenizer=place.data / manifest.tokenizer.file,
            unit="tokens",
            length=LENGTH,
            workers=Workers(1),
            progress=Silent(),
        )

    index = healed(work, say=_log.warning)
    made = {file.name: digest(file) for file in sorted(index.iterdir())}
    shutil.rmtree(index)
    return made


def _substring_folder(place: DamagedRun) -> Path:
    return place.data.parent / "stages" / "substring" / "interrupted"


def _leave_substring(place: DamagedRun) -> None:
    """All but the result."""
    work = _substring_folder(place) / WORK
    gather([_documents(place)[1]], folder=work)
    for one in sample_tasks(work, SUBSTRING):
        sample(one)
    for part in match_tasks(work, SUBSTRING, parts=sift(work, SUBSTRING)):
        match(part)


def _substring_work(place: DamagedRun, path: Path) -> Any:
    texts = [_documents(place)[1]]
    found = find_repeats(texts, settings=SUBSTRING, folder=_substring_folder(place), workers=Workers(1))
    return [found.spans.to_pylist(), found.documents.to_pylist()]


# Copies of checkpoints


def _leave_copies(place: DamagedRun) -> None:
    from ropewalk.checkpoint.tiers.memory_tier import finish_shard
    from ropewalk.checkpoint.tiers.tier import ShardKey

    newest = list_checkpoints(place.run / "checkpoints")[-1]
    manifest = read_checkpoint_manifest(newest)
    _remote(place).upload(newest)
    key = ShardKey(run=COPIES, step=manifest.step, attempt="first")
    with _memory(place).filling(key, size=manifest.bytes) as partial:
        for name in manifest.files:
            shutil.copyfile(newest / name, partial / name)
        finish_shard(partial, manifest, (newest / FILE).read_bytes())
    _run_name(place, newest)
    write_learned(newest.parent, Frequency(clock=lambda: 0.0).state(), alive=False, time=float(manifest.step))


def _leave_ratings(place: DamagedRun) -> None:
    """Sheets about the run's completions, and their ratings."""
    if not read_samples(place.run):
        return
    folder = place.root / RATED
    export_sheets([place.run], folder, items=4, raters=1, repeat=0)
    key = read_key(folder)
    rows = [{"id": line.id, "scores": dict.fromkeys(QUESTIONS, 3)} for line in key.sheets["r1"]]
    write_json(folder / "filled.json", {"sheet": key.sheet_name("r1"), "ratings": rows})
    import_ratings(folder, [folder / "filled.json"], run=place.run)


def _rated(place: DamagedRun, path: Path) -> Any:
    return read_key(path.parent), read_ratings(path.parent), show_ratings(path.parent)


def _run_name(place: DamagedRun, path: Path) -> Any:
    return needs_torch("ropewalk.checkpoint.tiers.tier_writer", "training").run_name(Tiers(), place.run / "checkpoints")


def _learned(place: DamagedRun, path: Path) -> Any:
    return read_learned(path.parent, warn=_log.warning)


def _in_memory(place: DamagedRun, path: Path) -> Any:
    from ropewalk.checkpoint.tiers.memory_tier import MemorySource

    return _restored(place, MemorySource(_memory(place), COPIES))


def _in_store(place: DamagedRun, path: Path) -> Any:
    from ropewalk.checkpoint.tiers.remote_tier import RemoteSource

    return _restored(place, RemoteSource(_remote(place), COPIES))


def _restored(place: DamagedRun, source: Any) -> Any:
    """The state as a run restores it after losing its disk; damage is reported."""
    restore = needs_torch("ropewalk.checkpoint.read.load_latest", "training").restore
    state, report = restore([source], scratch=place.root / "scratch")
    told = [*report.damaged, *report.unreachable, *report.passed_over]
    if told:
        raise DamagedCheckpoint("\n".join(told))
    return report.identity if state else None


def _memory(place: DamagedRun) -> Any:
    from ropewalk.checkpoint.tiers.memory_tier import MemoryTier

    return MemoryTier(place.root / "memory")


def _remote(place: DamagedRun) -> Any:
    from ropewalk.checkpoint.tiers.remote_tier import RemoteTier

    return RemoteTier(str(place.root / "remote"), run=COPIES, retries=0)


# Corpora of other programs


def _load(place: DamagedRun) -> Load:
    """A token corpus in Parquet, written if it is not there."""
    file = place.root / "corpus" / "tokens.parquet"
    if not file.exists():
        manifest = read_manifest(place.data)
        rows = [[*range(start, start + 9), manifest.tokenizer.end_of_text] for start in range(0, 90, 3)]
        with committed_file(file) as opened:
            pq.write_table(pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))}), opened)
    tokenizer = str(place.data / "tokenizer.json")
    return Load(corpus=(Corpus(path=str(file), format="parquet", column="input_ids"),), tokenizer=tokenizer)


def _adopt(place: DamagedRun) -> Path:
    load = _load(place)
    return adopt(load, root=place.root / ADOPTED, adoption=plan_adoption(load), progress=Silent()).folder


def read_adopted(place: DamagedRun, path: Path) -> Any:
    """As a run that trains on this corpus opens them; a reported and rebuilt file counts as refused."""
    told: list[str] = []
    manifest = finished(path.parent, expected=plan_adoption(_load(place)).hash, say=told.append)
    if manifest is None:
        raise DataError(
            "\n".join(told) or f"{path.parent / MANIFEST}: there is none; the corpus is looked through again"
        )
    for split, _ in itertools.groupby(manifest.shards, key=lambda entry: entry.split):
        open_source(path.parent, manifest.shards_of(split), verify=True)
    return digest(path)


def digest(path: Path) -> str | None:
    """Of the bytes of a file; None when there is none."""
    return hashlib.blake2b(path.read_bytes()).hexdigest() if path.is_file() else None


READERS_BESIDE: dict[str, Reader] = {
    "prepared/*/ngrams-*.work/*.entries": _entries,
    "prepared/stages/substring/*/work*": _substring_work,
    "prepared/*/*.references": read_adopted,
    "near-index/index.json": _near,
    "near-index/*.arrow": _near,
    "human/key.json": _rated,
    "human/ratings.jsonl": _rated,
    "human/human.json": _rated,
    "run/checkpoints/copies.json": _run_name,
    "run/checkpoints/frequency.json": _learned,
    "memory/*/*/*/manifest.json": _in_memory,
    "memory/*/*/*/*": _in_memory,
    "remote/*/*/manifest.json": _in_store,
    "remote/*/*/*": _in_store,
    "cache/products/*.json": _matmuls,
    "cache/speed.json": _measured,
    "disk-cache/items/*/*.item": _item,
    "disk-cache/importance-*.bin": _importance,
}
"""By the pattern of `store/kinds.py`."""
