"""Runs that need more than a recipe: a fault, a store, a base, several processes."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import Preempted, UserError
from ropewalk.flow.recipe import Recipe
from tests.wiring.corpora import write_corpora, write_prepared
from tests.wiring.runs import (
    Facts,
    Watch,
    _quick,
    folder,
    left,
    machine,
    prepared_here,
    ready,
    recipe_of,
    spies,
    trained_in,
)


def stepped(recipe: Recipe) -> Facts:
    """A training run in which every operation of torch is counted: what is recomputed, converted or moved."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[str(function)] += 1
            return function(*args, **(kwargs or {}))

    with folder() as place, Counting():
        facts = trained_in(place, recipe)
    return facts | {"ops": counts}


def resumed(recipe: Recipe) -> Facts:
    """A run after another one, `base/run`, that it may start from."""
    with folder() as place:
        trained_in(place / "base", recipe_of(["seed=9"]).value)
        return trained_in(place, recipe)


def broken(recipe: Recipe) -> Facts:
    """A run in which steps go wrong: losses that are not finite or, in a run of 8 steps, one far above the others."""
    spikes = recipe.train.steps == 8

    def strike(step: int, batch: Any) -> Any:
        if spikes and step == 7:
            return dataclasses.replace(batch, targets=batch.targets * 0)
        if not spikes and step > 1:
            return dataclasses.replace(batch, weight=batch.weight * math.nan)
        return batch

    with folder() as place:
        return trained_in(place, recipe, on_batch=strike)


def preempted(recipe: Recipe) -> Facts:
    """A run that a scheduler wants gone: the seconds that it believes to have."""
    from ropewalk.train.checkpointer import Checkpointer

    facts: Facts = {}
    hurry = Checkpointer.hurry

    def hurried(self: Checkpointer, seconds: float) -> bool:
        facts["grace"] = round(seconds, -1)
        return hurry(self, seconds)

    def kill(step: int) -> None:
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with folder() as place, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpointer, "hurry", hurried)
        with pytest.raises(Preempted):
            trained_in(place, recipe, after_step=kill)
    return facts


def watched(recipe: Recipe) -> Facts:
    """When a rank counts as hanging, by a clock of the test: nothing was measured, then steps of 10 s."""
    from ropewalk.train.hooks.watchdog import Watchdog

    now = 0.0
    with folder() as place:
        watch = Watchdog(place, recipe.train.faults, clock=lambda: now)
        limits = [watch.limit_s]
        for step in range(3):
            watch.beat(step)
            now += 10.0
        return {"limits": [*limits, watch.limit_s]}


def launched(recipe: Recipe) -> Facts:
    """`ropewalk launch slurm`: the job file, and where its run will lie."""
    from ropewalk.flow.job_files import launch_slurm
    from ropewalk.flow.run_processes import worker_group_of

    del launch_slurm
    team = worker_group_of(recipe, 2)
    return {"script": (team.max_restarts, team.grace_s), "run folder": recipe.name}


def evaluated(recipe: Recipe) -> Facts:
    """`ropewalk evaluate`: a model of drawn weights on held-out code and prose."""
    import torch

    from ropewalk.evaluate.evaluation import evaluate
    from ropewalk.evaluate.held_out import HeldOut
    from tests.evaluate.tiny import CODE, PROSE, planned, small, train_tokenizer, vivid, write_corpus

    torch.set_num_threads(1)
    with folder() as place:
        tokenizer = train_tokenizer(CODE + PROSE)
        write_corpus(place / "data", {"py": ("code", CODE), "book": ("prose", PROSE)}, tokenizer)
        model = vivid(small(vocabulary=tokenizer.get_vocab_size(), sequence_length=16))
        held_out = HeldOut(place / "data", recipe.evaluate, seed=recipe.seed)
        result = evaluate(planned(model, held_out), held_out)
    return {
        "tasks": list(result.tasks),
        "bytes": sum(document.bytes for document in result.documents),
        "samples": len(result.samples),
        "prompts": [sample.prompt for sample in result.samples],
        "completions": [sample.completion for sample in result.samples],
        "measured": {task: {m.name: m.value for m in metrics if not m.group} for task, metrics in result.tasks.items()},
    }


def asked(recipe: Recipe) -> Facts:
    """`ropewalk evaluate` before the model: the requests of the tasks, or what is wrong with their data."""
    from ropewalk.base.errors import UserError
    from ropewalk.evaluate.evaluation import open_tasks
    from ropewalk.evaluate.held_out import HeldOut
    from tests.evaluate.tiny import CODE, train_tokenizer, write_corpus

    with folder() as place:
        write_corpus(place / "data", {"py": ("code", CODE)}, train_tokenizer(CODE))
        try:
            tasks = open_tasks(HeldOut(place / "data", recipe.evaluate, seed=recipe.seed))
            return {"requests": [list(task.requests()) for task in tasks]}
        except UserError as error:
            return {"error": str(error)}


def named(recipe: Recipe) -> Facts:
    """What tasks written as YAML ask, or what is wrong with them."""
    from ropewalk.base.errors import UserError
    from ropewalk.evaluate.harness.named_tasks import NamedTasks
    from tests.evaluate.harness.lm_eval_prompts import TEMPLATE
    from tests.evaluate.harness.opened import no_corpus

    held_out = no_corpus(recipe.evaluate, chat_template=TEMPLATE)
    try:
        opener = NamedTasks(recipe.evaluate, held_out)
        asked = [task.requests() for name in recipe.evaluate.tasks for task in opener.open(name)]
    except UserError as error:
        return {"asked": str(error)}
    return {"asked": asked}


def limited(recipe: Recipe) -> Facts:
    """`ropewalk evaluate`: the questions of a benchmark."""
    from ropewalk.evaluate.held_out import HeldOut
    from tests.evaluate.test_answers import Strands

    task = Strands(HeldOut(None, recipe.evaluate, seed=recipe.seed))
    return {"questions": len(task.questions), "requests": len(task.requests())}


def stored(recipe: Recipe) -> Facts:
    """Training on compressed shards, which are read by pieces through caches and stores."""
    with folder() as place:
        zipped = recipe_of(["prepare.compression=zstd", "prepare.folder=zipped"]).value
        prepared_here(zipped)
        (found,) = (path.parent for path in (place / "zipped").glob("*/manifest.json"))
        found.rename(place / "prepared")
        return trained_in(place, recipe)


def damaged(recipe: Recipe) -> Facts:
    """Training on shards of which one has a byte that was not written."""

    def break_one(run: Path) -> None:
        shard = sorted((run.parent / "prepared").glob("notes-train-*.tokens"))[0]
        data = bytearray(shard.read_bytes())
        data[8] ^= 1
        shard.write_bytes(bytes(data))

    with folder() as place:
        return trained_in(place, recipe, before=break_one)


def adopted(recipe: Recipe) -> Facts:
    """`ropewalk prepare` of an existing corpus of tokens, and the first batch of it."""
    from ropewalk.base.progress import Silent
    from ropewalk.flow.external_corpus import adopt, plan_adoption
    from ropewalk.load.loader import Loader
    from tests.flow.test_existing_corpora import documents
    from tests.foreign_corpora import write_mds, write_megatron
    from tests.tiny import byte_tokenizer
    from tests.wiring.runs import hash_of

    with folder() as place:
        byte_tokenizer().save("tokenizer.json")
        write_prepared(place / "own")
        write_megatron(place / "mega" / "text", documents())
        write_megatron(place / "other" / "text", documents(30))
        write_mds(place / "mds", documents(), encoding="bytes", dtype="int64")
        load = recipe.load
        try:
            made = adopt(load, root=place / "data", adoption=plan_adoption(load), progress=Silent())
            loader = Loader(made.folder, sequence_length=recipe.load.sequence_length, batch_size=4, seed=1)
        except UserError as error:
            return {"error": type(error).__name__, "message": str(error).replace(str(place), "")}
        first = hash_of(loader.batch(0, 16).tokens.numpy().tobytes())
        manifest = loader._manifest
        loader.close()
        return {
            "sources": [(source.name, source.weight) for source in manifest.sources],
            "tokens": [(shard.source, shard.split, shard.tokens) for shard in manifest.shards],
            "first": first,
            "vocabulary": manifest.tokenizer.vocabulary,
        }


def copies(recipe: Recipe) -> Facts:
    """Which machines hold the state of each, of four."""
    from ropewalk.checkpoint.tiers.tier_writer import TierWriter
    from ropewalk.config.ranks import Ranks

    facts: Facts = {"holders": []}
    with folder() as place, spies(facts):
        for rank in range(len(recipe.checkpoint.tiers.peers)):
            ranks = Ranks(rank=rank, world=4, local_rank=0, local_world=1)
            try:
                tier_writer = TierWriter(
                    recipe.checkpoint.tiers, place / "checkpoints", ranks=ranks, run="tiny", attempt="1"
                )
            except UserError as error:
                return facts | {"error": type(error).__name__}
            facts["holders"].append([peer.address for peer in tier_writer._peers])
            facts["secret"] = len(tier_writer._peers[0]._secret) if tier_writer._peers else 0
            facts["timeout"] = tier_writer._peers[0]._timeout if tier_writer._peers else 0
            tier_writer.close()
    return facts


def failing(recipe: Recipe) -> Facts:
    """Training with a disk on which every save fails."""
    from ropewalk.checkpoint.faulty import Fault, FaultyDisk

    with folder() as place:
        return trained_in(place, recipe, disk=FaultyDisk(Fault(kind="error")))


def ranked(world: int) -> Callable[[Recipe], Facts]:
    """Training on that many processes."""

    def run(recipe: Recipe) -> Facts:
        from tests.parallel.pool import POOL

        with folder() as place:
            write_prepared(place / "prepared")
            ready(place, recipe, processes=world)
            answers = POOL.run(rank_trains, str(place), IGNORED, world=world)
        return {name: [answer.get(name) for answer in answers] for name in answers[0]}

    run.__name__ = f"ranked_{world}"
    return _RANKED.setdefault(world, run)


_RANKED: dict[int, Callable[[Recipe], Facts]] = {}
IGNORED: list[tuple[str, Any]] = []
"""Keys that are made without effect (benchmarks/mutate.py); the processes of the pool are told."""


def rank_trains(rank: int, place: str, ignored: list[tuple[str, Any]]) -> Facts:
    """A rank's job."""
    import torch.distributed as dist

    from ropewalk.base.events import events_path, read_events
    from ropewalk.train.loop import train
    from tests.parallel.ranked import as_rank
    from tests.wiring.ignored import ignoring

    facts: Facts = {}
    calls: Counter[str] = Counter()
    world, run = dist.get_world_size(), Path(place) / "run"
    with as_rank(rank, world) as patch, ignoring(ignored), spies(facts):
        _quick(patch)
        for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast"):
            patch.setattr(dist, name, _counted(getattr(dist, name), name, calls))
        watch = Watch()
        try:
            train(run, hooks=[watch.hook()], stays=True)
        except UserError as error:
            watch.facts["error"] = type(error).__name__
    events = list(read_events(events_path(run, rank=rank)))
    steps = [event for event in events if event["kind"] == "step"]
    sent = {name: size for event in steps[-1:] for name, size in event["sent_bytes"].items()}
    losses = [event["loss"] for event in steps]
    return facts | {"sent": sent, "calls": dict(calls), "batches": watch.facts["batches"], "losses": losses}


def _counted(real: Callable[..., Any], name: str, calls: Counter[str]) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
        calls[name] += 1
        return real(*args, **options)

    return call


__all__ = ["left", "machine", "write_corpora"]
