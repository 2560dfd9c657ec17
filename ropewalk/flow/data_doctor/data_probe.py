"""Measures a recipe's run for `doctor data`: the rates of its stages, its settings, and what it reads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import MissingPackage
from ropewalk.base.progress import Progress
from ropewalk.config.resolved import FILE as CONFIG
from ropewalk.config.resolved import load_resolved
from ropewalk.load.cache.simulate import hits_per_epoch
from ropewalk.load.config import AHEAD_BATCHES
from ropewalk.load.forecast import Rates, Setup, cache_hits
from ropewalk.load.gather import RowForm
from ropewalk.load.media.config import Media
from ropewalk.load.remedies import Facts
from ropewalk.plan.machine import available_memory, this_machine
from ropewalk.prepare.pipeline import Prepared
from ropewalk.prepare.pipeline import prepare as prepare_data
from ropewalk.store.compression import compress, decompress
from ropewalk.store.manifest import read_manifest
from ropewalk.store.origin import is_url
from ropewalk.train.settings import Settings, training_seed

from ..external_corpus import adopt, plan_adoption
from ..plan_recipe import needs_torch, plan_recipe
from ..preflight import check_outputs
from ..recipe import Recipe
from ..run_or_recipe import Given
from .predictions import compute_speed

PAGE_READ = 128 << 10
"""Linux read-ahead around a page of a memory-mapped shard (`read_ahead_kb`)."""

SAMPLE_BYTES = 4 << 20
"""Bytes of a shard read to measure its compression ratio."""
PROBE_SECONDS = 0.5
"""Duration of each measurement of the data path."""
STEP_SECONDS = 3.0
"""Duration of step measurements, if no run gives their speed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A recipe's run with the rates of its stages."""

    run: Path
    settings: Settings
    rates: Rates
    setup: Setup
    facts: Facts
    step_from: str
    """Source of the step's speed, in words."""
    store_known: bool
    """Whether the store was measured."""
    mapped: bool
    policy: tuple[str, ...]
    """Read policy of the store, in words; empty for memory-mapped shards."""
    device: str


def examine(meant: Given, *, tokens_per_s: float | None, progress: Progress) -> Examined:
    """Measures a recipe's run; prepares its data if needed."""
    recipe = meant.resolved.value
    prepared = prepared_data(meant, progress)
    settings = settings_of(recipe, prepared)
    run, machine, phase = meant.folder, this_machine(), settings.phases[0]
    throughput, probing = (
        needs_torch("ropewalk.train.measure.throughput", "measuring"),
        needs_torch("ropewalk.load.probe", "measuring"),
    )
    device = throughput.device_of(settings)
    files = [file for file in _files(prepared, settings) if file.exists()]
    progress.say("measuring how batches are made, warm and cold")
    data = probing.probe(functools.partial(_opened, settings), files=files, device=device, seconds=PROBE_SECONDS)
    compute, step_jitter, step_from = tokens_per_s, 0.0, "given"
    if compute is None and _same_step(run, recipe):
        compute, step_from = compute_speed(run), "the last steps of the run"
    if compute is None:
        progress.say("measuring the step")
        with contextlib.closing(throughput.Bench(settings)) as bench:
            alone = bench.alone(seconds=STEP_SECONDS)
        compute, step_jitter, step_from = alone.tokens_per_s, alone.jitter, f"{alone.steps} steps just now"
    facts = _facts(settings, prepared, files, mapped=data.mapped)
    batch_tokens = phase.batch_size * phase.sequence_length
    requests = settings.load.remote.max_requests
    rates = Rates(
        compute=compute,
        prepare=data.prepare,
        fetch=data.fetch if data.mapped else data.fetch / requests,
        bandwidth=data.bandwidth,
        copy=data.hand_over,
        batch_tokens=batch_tokens,
        fetch_jitter=data.fetch_jitter,
        prepare_jitter=data.prepare_jitter,
        step_jitter=step_jitter,
        reads=phase.batch_size,
    )
    setup = Setup(
        threads=settings.load.threads,
        cores=machine.cores,
        requests=requests,
        ahead=_ahead(settings, facts),
        hits=_hits(settings, facts, mapped=data.mapped),
        joined=data.mapped,
        copies_in_step=True,
        cores_of_step=0 if device.type == "cuda" else machine.cores,
    )
    return Examined(
        run=run,
        settings=settings,
        rates=rates,
        setup=setup,
        facts=facts,
        step_from=step_from,
        store_known=data.measured_cold,
        mapped=data.mapped,
        policy=data.policy,
        device=str(device),
    )


def examine_media(media: Media, examined: Examined, *, samples_per_s: float | None) -> dict[str, Any]:
    """Speed of the stages of a media source, and where its transforms should run for a step of `samples_per_s`."""
    probing = needs_torch("ropewalk.load.media.probe", "measuring")
    device = needs_torch("ropewalk.train.measure.throughput", "measuring").device_of(examined.settings)
    cores = examined.setup.cores
    found = probing.probe_media(media, seed=examined.settings.seed, device=device, cores=cores, seconds=PROBE_SECONDS)
    core_s = sum(work.core_s for work in found.works)
    result = {
        "name": media.name,
        "fetch_samples_per_s": found.fetch,
        "core_ms": {work.name: 1e3 * work.core_s for work in found.works},
        "device_ms": {work.name: 1e3 * work.device_s for work in found.works if work.device_s < math.inf},
        "cpu_samples_per_s": min(found.threads, cores) / core_s if core_s else None,
        "placement": None,
    }
    if samples_per_s is not None:
        placed = probing.place_transforms(media, found, samples_per_s=samples_per_s, cores=cores)
        result["placement"] = {
            "on_cpu": list(placed.on_cpu),
            "on_device": list(placed.on_device),
            "samples_per_s": placed.forecast.tokens_per_s,
            "binding": placed.forecast.binding,
        }
    return result


def prepared_data(meant: Given, progress: Progress) -> Prepared:
    """The prepared data of a recipe or a run; prepares them if needed."""
    meant.check_inputs()
    recipe = meant.resolved.value
    if meant.prepared:
        return Prepared(folder=meant.prepared, manifest=read_manifest(meant.prepared), reused=True)
    check_outputs(meant.resolved)
    if recipe.load.corpus:
        root = Path(recipe.prepare.folder)
        return adopt(recipe.load, root=root, adoption=plan_adoption(recipe.load), progress=progress)
    return prepare_data(recipe.prepare, seed=recipe.seed, progress=progress)


def settings_of(recipe: Recipe, prepared: Prepared) -> Settings:
    """The settings that a worker would read from the run directory."""
    return Settings(
        seed=training_seed(recipe.train, recipe.seed),
        recipe_seed=recipe.seed,
        load=recipe.load,
        train=recipe.train,
        checkpoint=recipe.checkpoint,
        evaluate=recipe.evaluate,
        planned=plan_recipe(recipe, vocabulary=prepared.manifest.tokenizer.vocabulary),
        data=prepared.folder,
    )


def _opened(settings: Settings, *, stalls: Any, requests_factor: int = 1, prefetch_bytes: int | None = None) -> Any:
    """The recipe's loader with one thread, other requests or prefetch, and without a cache, which would hide the
    store."""
    load = settings.load
    remote = dataclasses.replace(load.remote, max_requests=requests_factor * load.remote.max_requests)
    ahead = load.prefetch_bytes if prefetch_bytes is None else prefetch_bytes
    load = dataclasses.replace(load, threads=1, remote=remote, cache=None, prefetch_bytes=ahead)
    return needs_torch("ropewalk.train.measure.throughput", "measuring").open_loader(settings, load, stalls=stalls)


def _same_step(run: Path, recipe: Recipe) -> bool:
    """Whether the run's step is that of this recipe, so that its speed applies."""
    if not (run / CONFIG).exists():
        return False
    before = load_resolved(run, Recipe).value
    return _step_of(before) == _step_of(recipe)


def _step_of(recipe: Recipe) -> tuple[Any, ...]:
    """The settings that determine the time of a step."""
    train = recipe.train
    return recipe.model, recipe.plan, recipe.load.sequence_length, train.batch_size, train.precision, train.threads


def _files(prepared: Prepared, settings: Settings) -> Iterator[Path]:
    """The local files whose tokens the first phase reads."""
    sources = {share.source for share in settings.phases[0].mixture}
    for shard in prepared.manifest.shards_of("train"):
        if (not sources or shard.source in sources) and not is_url(shard.file):
            yield prepared.folder / shard.file


def _facts(settings: Settings, prepared: Prepared, files: Sequence[Path], *, mapped: bool) -> Facts:
    phase = settings.phases[0]
    manifest = prepared.manifest
    token_bytes = 2 if manifest.dtype == "uint16" else 4
    tokens = manifest.tokens("train")
    row_bytes = phase.sequence_length * token_bytes
    request = max(PAGE_READ, row_bytes) if mapped else 1 << 20
    # In random order every sequence is a read of its own; neighbours share reads.
    alone = settings.load.shuffle == "all" and row_bytes < request
    ratio, decompress_bytes_per_s = _compression(files)
    trained = sum(each.tokens(each.steps) for each in settings.phases)
    remote = not mapped
    return Facts(
        data_bytes=sum(file.stat().st_size for file in files) or tokens * token_bytes,
        batch_bytes=phase.batch_size * RowForm(phase.sequence_length, manifest.dtype).row_bytes,
        request_bytes=request,
        read_bytes_per_token=request / phase.sequence_length if alone else float(token_bytes),
        epochs=max(1.0, trained / max(1, tokens)),
        memory_bytes=available_memory() / 2 if remote else 0.0,
        disk_bytes=shutil.disk_usage(Path.cwd()).free / 2 if remote else 0.0,
        compression=ratio,
        decompress=decompress_bytes_per_s / token_bytes,
    )


def _compression(files: Sequence[Path]) -> tuple[float, float]:
    """Compression ratio of a shard, and bytes per second that one core decompresses; no gain without a local file or a
    compressor."""
    if not files:
        return 1.0, math.inf
    with open(files[0], "rb") as file:
        sample = file.read(SAMPLE_BYTES)
    try:
        packed = compress(sample)
    except MissingPackage:
        return 1.0, math.inf
    start = time.perf_counter()
    decompress(packed, raw_bytes=len(sample), where=str(files[0]))
    return len(sample) / len(packed), len(sample) / max(time.perf_counter() - start, 1e-9)


def _hits(settings: Settings, facts: Facts, *, mapped: bool) -> float:
    """Share of reads served by a cache: for memory-mapped shards by the page cache, already in the first epoch if they
    are verified."""
    if not mapped:
        cache = settings.load.cache
        room = cache.ram_bytes + (cache.disk_bytes if cache.disk else 0) if cache and cache.policy != "once" else 0
        return cache_hits(room, facts.data_bytes, epochs=facts.epochs)
    held = hits_per_epoch(memory_bytes=available_memory(), data_bytes=facts.data_bytes).page_cache
    return held if settings.load.verify == "open" else held * (1.0 - 1.0 / facts.epochs)


def _ahead(settings: Settings, facts: Facts) -> int:
    """Batches prefetched beside that of the step: as many as fit, at least one."""
    return max(1, min(AHEAD_BATCHES, int(settings.load.prefetch_bytes / facts.batch_bytes)) - 1)
