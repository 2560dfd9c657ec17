"""The registry of optimizers: settings, costs and factory of each `train.optimizer.kind`. No torch.

A custom one, `train.optimizer.kind = "lion:Lion"`, is a frozen dataclass with the methods of `Rule`
(train/optim/rule.py); its fields are set in `[train.optimizer.settings]`. Its state is assumed to be two float32
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
    """An optimizer; `settings` names the keys of `[train.optimizer]` that it reads."""

    state_bytes: StateBytes = two_moments
    """Bytes of optimizer state of a parameter, by its name and shape."""
    update_copies: int = 7
    """Float32 copies of the largest parameter alive during an update: up to seven for a `Rule`."""

    @property
    def costs(self) -> OptimizerCosts:
        """The inputs of the memory forecast."""
        return OptimizerCosts(self.state_bytes, self.update_copies)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """Settings of AdamW, its variants and LAMB."""

    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdafactorSettings:
    """Settings of Adafactor, which has no first moment."""

    weight_decay: float
    relative_step: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonSettings:
    """Settings of Muon for the matrices inside blocks, with AdamW for the rest."""

    beta1: float
    beta2: float
    epsilon: float
    momentum: float
    rest_lr_ratio: float
    weight_decay: float


def is_hidden(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a parameter is a matrix inside a block; Muon and `adamw-8bit` apply only to these."""
    return name.startswith("blocks.") and len(shape) == 2


def _rows_and_columns(name: str, shape: tuple[int, ...]) -> int:
    return 4 * sum(shape)


def _one_moment_inside(name: str, shape: tuple[int, ...]) -> int:
    return 4 * prod(shape) if is_hidden(name, shape) else two_moments(name, shape)


def _two_codes_inside(name: str, shape: tuple[int, ...]) -> int:
    """Two moments, each with one byte per weight and a float32 scale per row."""
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
    methods=("begin", "update"),
)
