"""Tiny runs of each verb in this process, and the facts that they leave behind.

A fact is something that the user can see or measure: an event, a file, a plan, a number. None is a copy of a setting:
`given` facts are what a part of the run was constructed with, for limits that only a fault would show.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import inspect
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import StorageError, UserError
from ropewalk.base.seal import write_sealed
from ropewalk.config.read import Resolved, parse
from ropewalk.config.resolved import save_resolved
from ropewalk.flow.recipe import Recipe
from ropewalk.parallel.executor import StepResult
from ropewalk.train.training_run import TrainingRun
from tests.wiring.corpora import write_corpora, write_prepared

Facts = dict[str, Any]
"""What is seen of a run, by name."""
Run = Callable[[Recipe], Facts]

RECIPE = """\
name = "tiny"
seed = 3
[[prepare.sources]]
name = "notes"
paths = ["notes.jsonl"]
[[prepare.sources]]
name = "code"
paths = ["code.jsonl"]
[prepare]
validation_share = 0.2
workers = 1
tokenizer.vocab_size = 300
deduplicate.near.kind = "off"
[load]
sequence_length = 16
[model]
layers = 2
width = 16
heads = 2
mlp_width = 32
[plan]
microbatch_size = 2
device = "cpu"
[train]
batch_size = 4
precision = "fp32"
log_every_steps = 1
validate_every_steps = 2
validation_sequences = 4
threads = 1
schedule = {peak_lr = 1e-2, warmup_steps = 1}
[checkpoint]
save_every_steps = 2
[evaluate]
max_bytes = 2000
samples = 2
prompt_tokens = 6
max_new_tokens = 6
"""

SPIED: list[tuple[str, str, str]] = [
    # What is constructed in a run, where it is defined, and the argument that is looked at.
    ("ropewalk.checkpoint.write.persist", "Persister", "threads"),
    ("ropewalk.checkpoint.write.shard_writer", "RateLimiter", "bytes_per_s"),
    ("ropewalk.checkpoint.commit", "Attempt", "timeout_s"),
    ("ropewalk.checkpoint.policy.frequency", "Frequency", "overhead"),
    ("ropewalk.checkpoint.policy.frequency", "Frequency", "mtbf_hours"),
    ("ropewalk.checkpoint.tiers.memory_tier", "MemoryTier", "folder"),
    ("ropewalk.checkpoint.tiers.memory_tier", "MemoryTier", "limit_bytes"),
    ("ropewalk.checkpoint.tiers.memory_tier", "MemoryTier.reclaim", "idle_s"),
    ("ropewalk.checkpoint.tiers.gap_scheduler", "TierLink", "limit_bytes_per_s"),
    ("ropewalk.checkpoint.write.snapshot", "Stager", "slots"),
    ("ropewalk.train.checkpointer", "retain", "keep_verified"),
    ("ropewalk.train.training_run", "deterministic", "device"),
    ("ropewalk.train.hooks.order", "DataStalls", "adapt"),
    ("ropewalk.load.endpoints", "Endpoint", "base"),
    ("ropewalk.load.endpoints", "Endpoint", "known_as"),
    ("ropewalk.checkpoint.tiers.peer_tier", "PeerServer", "timeout_s"),
    ("ropewalk.load.ring", "Ring", "threads"),
    ("ropewalk.load.ring", "Ring", "prefetch_bytes"),
    ("ropewalk.load.foresight", "Foresight", "prefetch_bytes"),
    ("ropewalk.load.endpoints", "InFlight", "policy"),
    ("ropewalk.load.endpoints", "InFlight", "requests"),
    ("ropewalk.load.hedged", "Patience", "times"),
    ("ropewalk.store.origin", "Reading", "timeout_s"),
    ("ropewalk.load.cache.ram", "Ram", "budget_bytes"),
    ("ropewalk.load.cache.ram", "Ram", "pin"),
    ("ropewalk.load.cache.disk", "Disk", "budget_bytes"),
    ("ropewalk.load.cache.peers", "Peers", "timeout_s"),
    ("ropewalk.load.cache.peers", "Peers", "secret"),
    ("ropewalk.load.cache.serve", "Server", "listen"),
    ("ropewalk.load.cache.shared", "Shared", "folder"),
    ("ropewalk.load.cache.shared", "Shared", "budget_bytes"),
    ("ropewalk.load.cache.shared", "Shared", "jobs"),
    ("ropewalk.load.cache.shared", "Shared", "job"),
    ("ropewalk.load.cache.importance", "Importance", "smoothing"),
    ("ropewalk.load.cache.packages", "Packages", "memory_bytes"),
    ("ropewalk.train.hooks.metrics", "RankWatch", "sigma"),
    ("ropewalk.parallel.microbatch", "make_schedule", "kind"),
    ("ropewalk.prepare.readers.caps", "_time", "seconds"),
    ("ropewalk.prepare.readers.caps", "_memory", "count"),
    ("ropewalk.prepare.readers.item", "Budget", "expansion"),
    ("ropewalk.prepare.near.match", "stars", "most"),
]


@contextlib.contextmanager
def spies(facts: Facts) -> Iterator[None]:
    """In the block, `facts` learns what the parts of `SPIED` are called with, as `Part(argument)`."""
    with pytest.MonkeyPatch.context() as patch:
        for name in dict.fromkeys((module, part) for module, part, _ in SPIED):
            _spy(patch, *name, [argument for *place, argument in SPIED if tuple(place) == name], facts)
        yield


def _spy(patch: pytest.MonkeyPatch, module: str, name: str, arguments: Sequence[str], facts: Facts) -> None:
    home, _, method = name.rpartition(".")
    owner = getattr(importlib.import_module(module), home) if home else importlib.import_module(module)
    if inspect.isclass(getattr(owner, method)):
        owner, method = getattr(owner, method), "__init__"
    real = getattr(owner, method)
    signature = inspect.signature(getattr(real, "py_func", real))
    assert set(arguments) <= set(signature.parameters), f"{module}.{name}({', '.join(signature.parameters)})"

    def called(*args: Any, **options: Any) -> Any:
        bound = signature.bind(*args, **options)
        bound.apply_defaults()
        for argument in arguments:
            facts.setdefault(f"{name}({argument})", set()).add(repr(bound.arguments[argument]))
        return real(*args, **options)

    patch.setattr(owner, method, called)


def recipe_of(overrides: Sequence[str]) -> Resolved[Recipe]:
    """The tiny recipe with some settings as a user writes them on the command line."""
    phases = any(override.startswith(("train.steps", "train.phases")) for override in overrides)
    return parse(Recipe, RECIPE, "tiny.toml", [*([] if phases else ["train.steps=4"]), *overrides])


@contextlib.contextmanager
def folder() -> Iterator[Path]:
    """An empty working folder with the raw corpora."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as place:
        os.chdir(place)
        try:
            write_corpora(Path())
            yield Path(place)
        finally:
            os.chdir(here)


def hash_of(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def planned(recipe: Recipe) -> Facts:
    """`ropewalk plan`: the plan, which workers execute, and what it needs."""
    from ropewalk.flow.plan_recipe import plan_recipe

    try:
        plan = plan_recipe(recipe, vocabulary=257, machine=machine())
    except UserError as error:
        return {"error": type(error).__name__, "message": str(error)}
    tree = plan.tree()
    first = tree["phases"][0]
    return {
        "plan": [phase["plan"] for phase in tree["phases"]],
        "memory": first["memory"],
        "spec": [phase["spec"] for phase in tree["phases"]],
        "world": plan.phases[0].plan.world,
        "microbatches": plan.phases[0].plan.microbatches,
        "trained": [phase["trained"] for phase in tree["phases"]],
        "derived": tree["derived"],
    }


def machine(memory_bytes: int = 1 << 33) -> Any:
    from ropewalk.plan.machine import Machine

    return Machine(processor="test", cores=2, memory_bytes=memory_bytes, bf16=False, gpus=())


def trained(recipe: Recipe) -> Facts:
    """`ropewalk train`, on prepared random sentences of two sources."""
    with folder() as place:
        return trained_in(place, recipe)


def trained_in(
    place: Path,
    recipe: Recipe,
    *,
    before: Callable[[Path], None] | None = None,
    on_batch: Callable[[int, Any], Any] | None = None,
    after_step: Callable[[int], None] | None = None,
    disk: Any = None,
) -> Facts:
    """The same in a folder of the caller, who may change the run directory `before`, and batches."""
    from ropewalk.train.loop import train

    run = ready(place, recipe)
    if before:
        before(run)
    facts: Facts = {}
    watch = Watch(on_batch, after_step)
    with spies(facts), pytest.MonkeyPatch.context() as patch:
        _quick(patch)
        try:
            train(run, hooks=[watch.hook()], disk=disk)
        except (UserError, StorageError) as error:
            facts |= {"error": f"{type(error).__name__}: {error}".replace(str(place), "")}
    known = ("run", "prepared", "base", "zipped")
    beside = {path.relative_to(place) for path in place.rglob("*") if path.is_file()}
    facts["beside"] = sorted(path.as_posix() for path in beside if len(path.parts) > 1 and path.parts[0] not in known)
    facts["package folders"] = sorted(path.parent.relative_to(place).as_posix() for path in place.rglob("rank-0"))
    sent = [path for path in beside if path.parts[0] == "remote"]
    facts["remote steps"] = sorted({path.parts[2].rpartition("-")[0] for path in sent})
    facts["remote run"] = "named" in {path.parts[1] for path in sent}
    return facts | watch.facts | left(run)


def ready(place: Path, recipe: Recipe, *, processes: int | None = None) -> Path:
    """A run directory as the stages before `train` leave it."""
    from ropewalk.flow.plan_recipe import plan_recipe
    from ropewalk.plan.plan import save_plan
    from ropewalk.store.manifest import read_manifest

    run, prepared = place / "run", place / "prepared"
    if not prepared.exists():
        write_prepared(prepared)
    vocabulary = read_manifest(prepared).tokenizer.vocabulary
    save_resolved(run, Resolved(recipe, {}))
    record = {"format": 2, "stage": "prepare", "input": "", "seconds": 0.0, "result": {"folder": str(prepared)}}
    write_sealed(run / "stages" / "prepare.json", record)
    save_plan(run, plan_recipe(recipe, vocabulary=vocabulary, machine=machine(), processes=processes))
    return run


def _quick(patch: pytest.MonkeyPatch) -> None:
    """No measurement of the CPU's speed (0.3 s)."""
    from ropewalk.train import training_run

    patch.setattr(training_run, "peak_flops", lambda *_: 1e11)


class Watch:
    """What only shows while a run goes on: threads, and the batches."""

    def __init__(self, on_batch: Any = None, after_step: Any = None) -> None:
        self._on_batch, self._after_step = on_batch, after_step
        self.facts: Facts = {"threads": set(), "batches": []}

    def hook(self) -> Any:
        import torch

        from ropewalk.train.hooks.hook import Hook

        facts, change, tell = self.facts, self._on_batch, self._after_step

        class Looking(Hook):
            def on_batch(self, run: TrainingRun, batch: Any) -> Any:
                facts["batches"].append((tuple(batch.tokens.shape), hash_of(batch.tokens.numpy().tobytes())))
                return change(run.step + 1, batch) if change else batch

            def after_step(self, run: TrainingRun, result: StepResult) -> None:
                names = {thread.name.rpartition("_")[0] for thread in threading.enumerate()}
                facts["threads"] |= names & {"host-optimizer", "state-read", "state-write", "activations", "device"}
                facts["torch threads"] = torch.get_num_threads()
                if tell:
                    tell(run.step)

        return Looking()


def left(run: Path) -> Facts:
    """The events and files of a run."""
    from ropewalk.base.events import read_events
    from ropewalk.checkpoint.format import list_checkpoints
    from ropewalk.checkpoint.read.load import load

    events = list(read_events(run / "events.jsonl"))
    steps = [event for event in events if event["kind"] == "step"]
    checkpoints = list_checkpoints(run / "checkpoints")
    facts: Facts = {
        "events": Counter(event["kind"] for event in events),
        "losses": [event["loss"] for event in steps],
        "norms": [event["grad_norm"] for event in steps],
        "lr": [event["lr"] for event in steps],
        "tokens": [event["tokens"] for event in steps],
        "logged": [event["step"] for event in steps],
        "loss_scale": [event.get("loss_scale") for event in steps],
        "validations": [(e["step"], e["sequences"], e["loss"]) for e in events if e["kind"] == "validation"],
        "anomalies": [(e["step"], e["what"], e["action"]) for e in events if e["kind"] == "anomaly"],
        "saved": [event["step"] for event in events if event["kind"] == "saved"],
        "copied": sorted({(e["step"], e["tier"].split()[0]) for e in events if e["kind"] == "copied"}),
        "warnings": [event["message"] for event in events if event["kind"] == "warning"],
        "blocked": [e["seconds"] > 0.9 * e["persist_s"] for e in events if e["kind"] == "saved"],
        "intervals": [event["bound"] for event in events if event["kind"] == "save_interval"],
        "ended early": [event["best_step"] for event in events if event["kind"] == "stopped_early"],
        "phases": [(e["name"], bool(e["start_from"])) for e in events if e["kind"] == "phase_started"],
        "checkpoints": [path.name for path in checkpoints],
        "files": sorted(path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()),
    }
    if checkpoints:
        state = load(checkpoints[-1])
        for name, group in (("weights", state.model), ("moments", state.optimizer)):
            facts[name] = {key: hash_of(_bytes(tensor)) for key, tensor in group.items()}
            facts[f"{name} names"] = sorted(
                (key, tuple(tensor.shape), str(tensor.dtype)) for key, tensor in group.items()
            )
        facts["packed"] = sorted(path.suffix for path in checkpoints[-1].iterdir())
    return facts


def _bytes(tensor: Any) -> bytes:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().tobytes() if tensor.dim() else repr(tensor.item()).encode()


def prepared(recipe: Recipe) -> Facts:
    """`ropewalk prepare`, on small documents that are good, bad, alike and long."""
    with folder():
        return prepared_here(recipe)


def prepared_here(recipe: Recipe) -> Facts:
    import pyarrow.parquet as pq

    from ropewalk.prepare.bloom import BloomFilter
    from ropewalk.prepare.pipeline import prepare

    facts: Facts = {}
    init = BloomFilter.__init__

    def measured(self: BloomFilter, settings: Any) -> None:
        init(self, settings)
        facts["filter bytes"] = self.memory_bytes

    try:
        with spies(facts), pytest.MonkeyPatch.context() as patch:
            patch.setattr(BloomFilter, "__init__", measured)
            result = prepare(recipe.prepare, seed=recipe.seed)
    except UserError as error:
        return facts | {"error": type(error).__name__, "message": str(error).replace(str(Path.cwd()), "")}
    rows = pq.read_table(result.folder / "ledger.parquet").to_pylist()
    made = [path for path in Path(recipe.prepare.folder).rglob("stages/*/*") if path.is_file()]
    # Checksums of the raw files are remembered only when these are old enough: by the clock, not by a setting.
    made = [path for path in made if path.parent.name != "checksums"]
    files = {path.name: path for path in result.folder.rglob("*") if path.is_file()}
    kept = [row for row in rows if row["outcome"] != "removed"]
    return facts | {
        "documents": [row["id"] for row in rows],
        "removed": sorted((row["id"], row["rule"]) for row in rows if row["outcome"] == "removed"),
        "rules": Counter((row["source"], row["rule"]) for row in rows if row["outcome"] == "removed"),
        "kept bytes": {row["id"]: row["bytes"] for row in kept},
        "edits": [row["edits"] for row in rows],
        "columns": [(row["domain"], row["url"], row["time"], row["licence"]) for row in rows],
        "split": {row["id"]: row["split"] for row in kept},
        "weights": [source.weight for source in result.manifest.sources],
        "alarms": [tuple(getattr(source, "warnings", ())) for source in result.manifest.sources],
        "tokenizer": hash_of((result.folder / "tokenizer.json").read_bytes()),
        "vocabulary": result.manifest.tokenizer.vocabulary,
        "chat": result.manifest.tokenizer.chat,
        "shards": [(s.file, s.tokens, s.compression, s.checksum) for s in result.manifest.shards],
        "files": sorted(files),
        "index": sorted(path.suffix for path in Path("index").rglob("*")),
        "artifacts": sorted((path.parent.name, hash_of(path.read_bytes())) for path in made),
        "sizes": {name: path.stat().st_size for name, path in files.items() if name != "manifest.json"},
        "folder": result.folder.parent.name,
    }
