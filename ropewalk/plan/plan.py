"""A Plan: the layout of a run on devices. Pure data, made on any machine, executed by `parallel`."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.seal import damaged, read_sealed, write_sealed
from ropewalk.config.renames import PLAN, upgraded_model
from ropewalk.model.activations import Activations
from ropewalk.model.spec import Spec, spec_of_tree, spec_tree

from .config import Backend, Compression, ContextKind, Fp8, Offload, Recompute, Switch
from .forecast import Memory, Precision

FORMAT = 4
SEALED_SINCE = 3
FILE = "plan.json"
REMEDY = "run `ropewalk run` with the recipe again, which writes a new plan; to change a plan, edit the recipe"


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Parallel degrees, whose product is the number of processes, and sizes."""

    device: Literal["cpu", "cuda"]
    precision: Precision
    batch_size: int
    microbatch_size: int
    sequence_length: int | None = None
    """Tokens per sequence at these sizes; shorter sequences come in larger microbatches. None: any length."""
    pipeline: int = 1
    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    compile: bool = False
    deterministic: bool = False
    fp8: Fp8 = "quicker"
    tuning: Switch = "auto"
    # The fields below are those of `Parallel`.
    zero: Literal[0, 1, 2, 3] = 0
    """0 where `shard` is 1."""
    sequence: bool = False
    context_method: ContextKind = "ring"
    schedule: str = "1f1b"
    chunks: int = 1
    stages: tuple[tuple[int, ...], ...] = ()
    """Layers of every pipeline stage; empty without a pipeline. Stage s runs on pipeline rank s modulo `pipeline`."""
    recompute: Recompute = "none"
    recompute_bytes: int | None = None
    """Memory for saved activations with `recompute` auto."""
    saved_activations: Activations = "whole"
    partition_activations: bool = False
    offload: tuple[Offload, ...] = ()
    offload_path: str = ""
    exact: bool = False
    balance: bool = False
    resplit: bool = False
    devices: int = 1
    bucket_bytes: int = 25 << 20
    gradient_compression: Compression = "none"
    powersgd_rank: int = 4
    backend: Backend = "auto"

    @property
    def data(self) -> int:
        """Data-parallel ranks, which read different sequences."""
        return self.replicate * self.shard

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.pipeline * self.replicate * self.shard * self.context * self.tensor

    @property
    def microbatches(self) -> int:
        """Microbatches per step and data-parallel rank."""
        return self.batch_size // (self.microbatch_size * self.replicate * self.shard)

    def microbatch_size_of(self, length: int) -> int:
        """Sequences of `length` tokens per microbatch, with the same number of tokens as at full length."""
        return self.microbatch_size * ((self.sequence_length or length) // length)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhasePlan:
    """The plan of one phase, with its model, memory forecast and length."""

    plan: Plan
    spec: Spec
    """The model of this phase, with its longest sequence length."""
    memory: Memory
    steps: int
    tokens: int
    """Tokens of the whole phase."""
    trained: tuple[str, ...] | None = None
    """Trained parameters; None: all."""

    @property
    def flops(self) -> int:
        """FLOPs of the whole phase, causal-exact."""
        return self.tokens * self.spec.flops_per_token("causal", trained=self.trained)

    def tree(self) -> dict[str, Any]:
        """Plain values for JSON, with derived values under `derived`."""
        derived = {
            "parameters": self.spec.parameters(),
            "flops_per_token": self.spec.flops_per_token(trained=self.trained),
            "flops_per_token_causal": self.spec.flops_per_token("causal", trained=self.trained),
            "flops": self.flops,
        }
        return {**dataclasses.asdict(self), "spec": spec_tree(self.spec), "derived": derived}


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plans of a run, one per phase."""

    phases: tuple[PhasePlan, ...]

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    @property
    def tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases)

    @property
    def flops(self) -> int:
        """FLOPs of the whole run, causal-exact."""
        return sum(phase.flops for phase in self.phases)

    @property
    def fullest(self) -> PhasePlan:
        """The phase that needs the most memory."""
        return max(self.phases, key=lambda phase: phase.memory.total)

    def tree(self) -> dict[str, Any]:
        """Plain values for JSON."""
        derived = {
            "parameters": self.phases[-1].spec.parameters(),
            "steps": self.steps,
            "tokens": self.tokens,
            "flops": self.flops,
        }
        return {"format": FORMAT, "phases": [phase.tree() for phase in self.phases], "derived": derived}


def alone(plan: Plan) -> Plan:
    """The same work on one device."""
    return Plan(
        device=plan.device,
        precision=plan.precision,
        batch_size=plan.batch_size,
        microbatch_size=plan.microbatch_size,
        sequence_length=plan.sequence_length,
    )


def save_plan(run: Path, planned: Planned) -> None:
    """Commits `plan.json`."""
    write_sealed(run / FILE, planned.tree())


def load_plan(run: Path) -> Planned:
    """The plan saved in `run`; DamagedFile if it was changed after saving."""
    path = run / FILE
    tree = read_sealed(
        path,
        what="plan",
        remedy=REMEDY,
        current=FORMAT,
        sealed_since=SEALED_SINCE,
        upgrades={1: _list_of_phases, 2: lambda tree: tree, 3: lambda tree: tree},
    )
    try:
        return Planned(phases=tuple(_phase(phase) for phase in tree["phases"]))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, what="plan", remedy=REMEDY, why=f"{type(error).__name__}: {error}") from None


def _phase(tree: dict[str, Any]) -> PhasePlan:
    return PhasePlan(
        plan=_plan(tree["plan"]),
        spec=spec_of_tree(upgraded_model(tree["spec"])),
        memory=Memory(**tree["memory"]),
        steps=tree["steps"],
        tokens=tree["tokens"],
        trained=None if tree["trained"] is None else tuple(tree["trained"]),
    )


def _plan(tree: dict[str, Any]) -> Plan:
    stages, offload = tree.get("stages", ()), tree.get("offload", ())
    tree = {PLAN.get(key, key): value for key, value in tree.items()}  # keys of formats before 4
    return Plan(**{**tree, "stages": tuple(tuple(layers) for layers in stages), "offload": tuple(offload)})


def _list_of_phases(tree: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had a single phase, without its tokens."""
    phase = {key: tree[key] for key in ("plan", "spec", "memory", "steps")}
    return {"format": 2, "phases": [{**phase, "tokens": tree["derived"]["tokens"], "trained": None}]}
