"""The active phase: model, optimizer, data and schedule."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ropewalk.base.errors import DamagedCheckpoint
from ropewalk.checkpoint.run_state import State
from ropewalk.load.expected import Expected, Kind
from ropewalk.load.stalls import Stalls
from ropewalk.model.protocol import ModelStage, build_stage
from ropewalk.model.spec import Spec
from ropewalk.parallel.anomaly_guard import SpikeRule
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.mesh import Mesh
from ropewalk.parallel.placement import Choose, LocalShard, Placement
from ropewalk.plan.plan import PhasePlan

from .config import Guard, Optimizer
from .data import Data, open_data
from .hooks.validation import Plateau, Stopper
from .importance import ByImportance
from .lr_schedule import Extent, learning_rate
from .measure.ceilings import expected_seconds
from .optim.optimizers import make_optimizer
from .optim.rule import Parameters
from .phase_spec import PhaseSpec
from .settings import Settings
from .start import Carrying, load_start


@dataclass(slots=True)
class Position:
    """The progress of a run."""

    phase: int = 0
    phase_step: int = 0
    step: int = 0
    """Over all phases."""
    tokens: int = 0


class ActivePhase:
    """One phase and its state on the device."""

    def __init__(
        self,
        settings: Settings,
        index: int,
        *,
        device: torch.device,
        step_hooks: StepHooks,
        verify: bool,
        stalls: Stalls | None = None,
        mesh: Mesh | None = None,
        packages: Path | None = None,
    ) -> None:
        self.phase: PhaseSpec = settings.phases[index]
        self.planned: PhasePlan = settings.planned.phases[index]
        self.spec = settings.model(index)
        self.seed = self.phase.seed(settings.seed)
        mesh = mesh or Mesh(self.planned.plan)
        self._readers, self._world = mesh.data.size, mesh.world.size
        self.data: Data = open_data(
            settings,
            self.phase,
            verify=verify,
            # Balanced sequences are exchanged between ranks on the host before the copy to the device.
            device=torch.device("cpu") if mesh.sequences.size > 1 else device,
            stalls=stalls,
            rank=mesh.data.rank,
            world=mesh.data.size,
            packages=packages,
        )
        by_importance, sampler = settings.load.importance, self.data.loader.sampler
        self.importance: ByImportance | None = None
        """Importance sampling, if configured."""
        if by_importance and sampler:
            self.importance = ByImportance(self.data.loader, sampler, by_importance, mesh.control)
        self.executor: Executor = apply(
            self.planned.plan,
            empty(self.spec),
            mesh,
            functools.partial(
                _optimizer, settings=settings.train.optimizer, spec=self.spec, exact=self.planned.plan.exact
            ),
            device=device,
            init_seed=settings.seed,
            trained=self.planned.trained,
            clip_norm=settings.train.clip_norm,
            spike=_spike_rule(settings.train.guard),
            hooks=step_hooks,
            seed=self.seed,
            draws=self.importance is not None,
            run_s=expected_seconds(
                self.planned.flops, device, self.planned.plan.precision, ranks=self.planned.plan.world
            ),
        )
        self.start = ""
        """The checkpoint or directory the phase started from; empty: the end of the previous phase."""
        self._early_stop = settings.train.early_stop
        self.begin_cycle()
        self._extent = Extent(
            steps=self.phase.steps, tokens=self.phase.tokens, tokens_per_epoch=self.data.loader.tokens
        )
        self._flops: dict[int, int] = {}

    def begin_cycle(self) -> None:
        """Resets plateau and early stopping at a restart of the schedule."""
        self.plateau = Plateau(self.phase.schedule)
        self.stopper = Stopper(self._early_stop)

    def wants(self, before: State) -> Choose:
        """The shards of the previous phase's final state that this rank reads."""
        if self.phase.start_from:
            return lambda *_: None
        choose = self._carrying(before).wants
        return _without_moments(choose) if self.phase.fresh_moments else choose

    def begin(self, before: State | None) -> None:
        """Starts from the previous phase's final state or from `start_from`. All ranks must call."""
        if self.phase.start_from:
            self.start = load_start(
                self.phase.start_from,
                self.spec,
                self.data.tokenizer,
                seed=self.seed,
                choose=self.executor.wants(),
                load=lambda weights: self.executor.load_state(weights, {}),
            )
        elif before:
            carrying = self._carrying(before)
            self.executor.load_state(carrying.weights(before.model), carrying.moments(before.optimizer))

    def resume(self, state: State) -> None:
        """Resumes from a checkpoint inside this phase."""
        self.executor.load_state(state.model, state.optimizer)
        try:
            self.data.loader.seek(state.data)
            if self.importance:
                self.importance.load(state.optimizer, state.data["importance"])
            self.plateau.load(state.validation.get("plateau", {}))
            self.stopper.load(state.validation.get("early_stop", {}))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # A manifest's checksum detects damage, not an incompatible writer.
            what = f"its place in the data cannot be read ({type(error).__name__}: {error})"
            raise DamagedCheckpoint(f"step {state.step}: damaged checkpoint: {what}") from error

    def state(self, at: Position, *, seed: int, ended: bool) -> State:
        """The state to checkpoint at this position."""
        drawn = self.importance.state() if self.importance else {}
        return State(
            step=at.step,
            tokens=at.tokens,
            seed=seed,
            spec=self.spec,
            data=self.data.loader.state(),
            model=_plain(self.executor.model_state(), self._world),
            optimizer=_plain({**self.executor.optimizer_state(), **drawn}, self._world),
            tokenizer=self.data.tokenizer,
            phase=at.phase,
            phase_step=at.phase_step,
            phase_ended=ended,
            validation={"plateau": self.plateau.state(), "early_stop": self.stopper.state()},
            chat=self.data.chat,
        )

    def learning_rate(self, step: int) -> float:
        """The learning rate of step `step` of the phase."""
        return self.plateau.share * learning_rate(step, extent=self._extent, schedule=self.phase.schedule)

    def flops(self, step: int) -> int:
        """FLOPs of step `step` of the phase, counting full attention."""
        length = self.phase.length(step)
        if length not in self._flops:
            spec: Spec = dataclasses.replace(self.planned.spec, sequence_length=length)
            self._flops[length] = spec.flops_per_token(trained=self.planned.trained)
        return self._flops[length] * self.phase.rows(step) * self.phase.sequence_length

    def tokens_read(self) -> int:
        """Tokens of the last batch without padding, over all readers."""
        return self.data.loader.filled * self._readers

    def expect(self, kind: Kind, *, done: int, in_steps: int, seconds: float) -> None:
        """Announces a pause to the loader, `in_steps` steps after the first `done` of the phase: it prefetches during
        an evaluation, and before a save, which keeps storage busy."""
        if in_steps:
            rows = sum(self.phase.rows(step) for step in range(done, done + in_steps))
            self.data.loader.expect(Expected(kind=kind, at=rows, seconds=seconds))

    def close(self) -> None:
        """Stops the loader."""
        self.data.loader.close()

    def _carrying(self, before: State) -> Carrying:
        return Carrying(before.spec, self.spec, self.executor.wants(), seed=self.seed)


def empty(spec: Spec) -> ModelStage:
    """The whole model on the meta device; each rank materializes its own shards."""
    with torch.device("meta"):
        return build_stage(spec)


def _without_moments(choose: Choose) -> Choose:
    return lambda group, name, shape: choose(group, name, shape) if group == "model" else None


def _optimizer(
    parameters: Parameters, placements: Mapping[str, Placement], *, settings: Optimizer, spec: Spec, exact: bool
) -> torch.optim.Optimizer:
    return make_optimizer(parameters, settings, spec=spec, placements=placements, exact=exact)


def _plain(parts: Mapping[str, LocalShard], world: int) -> dict[str, Any]:
    """Shards as checkpointed; a single rank saves whole tensors."""
    return dict(parts) if world > 1 else {name: part.local for name, part in parts.items()}


def _spike_rule(guard: Guard) -> SpikeRule | None:
    if guard.spike == "off":
        return None
    # `rollback` and `stop` also skip the update: weights stay sound until the host reads the anomaly.
    return SpikeRule(sigma=guard.spike_sigma, window_steps=guard.window_steps, skips=guard.spike != "record")
