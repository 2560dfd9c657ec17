"""Every optimizer by its name in a recipe: settings, costs and factory. No torch.

A user's own, `train.optimizer.kind = "lion:Lion"`, is a frozen dataclass with the methods of `Rule` (train/optim/
rule.py), whose fields are its settings; `[train.optimizer.settings]` sets them. Its state is taken to be two float32
numbers per weight, unless the class has a static method `state_bytes(name, shape)`.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ropewalk.config.registry import Kind, Registry
from ropewalk.model.spec import StateBytes, two_moments
from ropewalk.plan.forecast import OptimizerCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerKind(Kind):
    """A kind of optimizer; `settings` names those of `[train.optimizer]` that it reads."""

    state_bytes: StateBytes = two_moments
    """Bytes of state of a parameter, by its name and shape."""
    update_copies: int = 7
    """Copies of the largest parameter, in float32, that an update holds at once: up to seven for a `Rule`."""

    @property
    def costs(self) -> OptimizerCosts:
        """What the memory forecast needs to know."""
        return OptimizerCosts(self.state_bytes, self.update_copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """Of AdamW, its variants, and what takes its moments."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdafactorSettings:
    """Of Adafactor, which keeps no mean of gradients."""

    weight_decay: float
    relative_step: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """Of Muon for the matrices inside blocks, with AdamW for the rest."""

    beta1: float
    beta2: float
    epsilon: float
    momentum: float
    rest_lr_ratio: float
    weight_decay: float


def is_hidden(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside a block: Muon and `adamw-8bit` treat those alone in their own way."""
    return name.startswith("blocks.") and len(shape) == 2


def _rows_and_columns(name: str, shape: tuple[int, ...]) -> int:
    return 4 * sum(shape)


def _one_moment_inside(name: str, shape: tuple[int, ...]) -> int:
    return 4 * prod(shape) if is_hidden(name, shape) else two_moments(name, shape)


def _two_codes_inside(name: str, shape: tuple[int, ...]) -> int:
    """A byte per weight and a scale per row, twice."""
    return 2 * prod(shape) + 8 * shape[0] if is_hidden(name, shape) else two_moments(name, shape)


OPTIMIZERS = Registry(
    "optimizer",
    {
        "adamw": OptimizerKind(
            target="ropewalk.train.optim.adamw:make",
            settings=AdamSettings,
            doc="AdamW (Loshchilov and Hutter 2019): 8 bytes of state per parameter.",
            update_copies=0,
        ),
        "adamw-8bit": OptimizerKind(
            target="ropewalk.train.optim.adamw_8bit:make",
            settings=AdamSettings,
            doc="AdamW with 2 bytes of state for the matrices inside blocks (Dettmers et al. 2022).",
            state_bytes=_two_codes_inside,
        ),
        "adafactor": OptimizerKind(
            target="ropewalk.train.optim.adafactor:make",
            settings=AdafactorSettings,
            doc="Almost no state, two vectors per matrix (Shazeer and Stern 2018).",
            state_bytes=_rows_and_columns,
        ),
        "lamb": OptimizerKind(
            target="ropewalk.train.optim.lamb:make",
            settings=AdamSettings,
            doc="AdamW with steps in proportion to each matrix, for very large batches (You et al. 2020): 8 bytes.",
        ),
        "muon": OptimizerKind(
            target="ropewalk.train.optim.muon:make",
            settings=MuonSettings,
            doc="Orthogonal updates of the matrices inside blocks (Jordan et al. 2024), 4 bytes; AdamW for the rest.",
            state_bytes=_one_moment_inside,
        ),
    },
    kind=OptimizerKind,
)
