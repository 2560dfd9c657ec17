"""Which blocks are computed again so that the activations of a microbatch fit, planned while the run goes on. No torch.

After Mimose (Liao et al. 2022): what a layer keeps is a quadratic function of the size of its input, fitted to what was
counted so far; a plan is made for every size of input that comes, kept by size, and made stricter instead of failing.
Where the paper chooses layers greedily, the plan here is the one with the fewest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from ropewalk.model.activations import (
    WHOLE,
    BlockBytes,
    Division,
    Precision,
    block_bytes,
    saved_bytes,
    saved_logit_bytes,
)
from ropewalk.model.spec import Spec

from .forecast import GPU_LOGIT_BYTES, LOGIT_BYTES, PURE, SPLIT_LOGIT_BYTES, products_of
from .plan import Plan

SIZES_COUNTED = 8
"""Sizes of input whose blocks are counted before the fit is trusted. Three determine it; the paper takes about ten
iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """Activation bytes of a microbatch."""

    blocks: Mapping[int, BlockBytes]
    """By layer, lowest first."""
    rest: int
    """What blocks do not decide: embedding, rotations, masks, copies of weights, final norm, head and logits."""

    def peak(self, again: Collection[int]) -> int:
        """Bytes at the fullest moment when the blocks of layers `again` are computed again: the end of the forward
        pass, or the backward pass of such a block, when what comes after it is gone."""
        before = peak = 0
        for layer, block in self.blocks.items():
            whole = before + block.input + block.inner
            if layer in again:
                peak = max(peak, whole)
                before += block.input
            else:
                before = whole
        return max(peak, before) + self.rest


def foresee(
    spec: Spec,
    *,
    rows: int,
    length: int,
    precision: Precision,
    trained: Collection[str] | None = None,
    division: Division = WHOLE,
    layers: Collection[int] | None = None,
    last: bool = True,
    device: Literal["cpu", "cuda"] = "cpu",
    pure: bool = False,
) -> Foreseen:
    """The count of model/activations.py for `rows` rows of `length` tokens in a stage that has `layers` (None: all);
    `last` says whether it has the head. The rest is that of a whole model but for the logits."""
    spec = dataclasses.replace(spec, sequence_length=length)
    blocks = block_bytes(
        spec, rows=rows, precision=precision, trained=trained, division=division, device=device, pure=pure
    )
    total = saved_bytes(
        spec,
        rows=rows,
        precision=precision,
        trained=trained,
        division=division,
        recompute="full",
        device=device,
        pure=pure,
    )
    tokens = rows * length // division.context
    # As they are and as log-probabilities or gradients; above this size the loss cuts them into chunks.
    most = SPLIT_LOGIT_BYTES if division.tensor > 1 else GPU_LOGIT_BYTES // 2 if device == "cuda" else LOGIT_BYTES
    logits = min(saved_logit_bytes(spec, tokens=tokens) // division.tensor, most)
    owned = {layer: blocks[layer] for layer in (range(spec.layers) if layers is None else sorted(layers))}
    rest = total - sum(block.input for block in blocks) + sum(block.copies for block in owned.values())
    return Foreseen(blocks=owned, rest=rest + (2 * logits if last else 0))


def fewest(foreseen: Foreseen, budget_bytes: int) -> frozenset[int]:
    """The fewest layers to compute again so that the peak is within the budget; of such plans the one that keeps least,
    and of equal ones that of the lowest layers, which live longest. When none fits, the plan of the lowest peak.

    One pass over the layers holds, for every number of layers computed again so far, the least that can be kept: less
    is never worse for what follows, so nothing else matters. The paper's greedy choice, largest layer first, may take
    a late layer whose own backward pass is then the fullest moment.
    """
    room = budget_bytes - foreseen.rest
    plans: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for layer, block in foreseen.blocks.items():
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for count, (kept, again) in plans.items():
            whole = kept + block.input + block.inner
            options = [(count, whole, again)]
            if whole <= room:
                options.append((count + 1, kept + block.input, (*again, layer)))
            for number, bytes_kept, chosen in options:
                longer[number] = min(longer.get(number, (bytes_kept, chosen)), (bytes_kept, chosen))
        plans = longer
    for count in sorted(plans):
        kept, again = plans[count]
        if kept <= room:
            return frozenset(again)
    # Nothing keeps less than computing everything again; often all but the last layers reach its peak too.
    return fewest(foreseen, foreseen.peak(foreseen.blocks))


class Estimator:
    """What blocks keep as a function of the size of their input: `prior`, corrected by what was counted.

    The correction is a x rows x length + b x rows x length^2 + c for each layer, fitted by least squares: `a` alone to
    one count, `a` and `b` to two.
    """

    def __init__(self, prior: Callable[[int, int], Foreseen]) -> None:
        self._prior = functools.lru_cache(maxsize=256)(prior)
        self._counts: dict[int, dict[tuple[int, int], int]] = {}
        self._fits: dict[int, tuple[float, ...]] = {}

    def observe(self, layer: int, rows: int, length: int, inner_bytes: int) -> None:
        """The block of `layer` kept `inner_bytes` besides its input; counts again for the same size."""
        self._counts.setdefault(layer, {})[rows, length] = inner_bytes
        self._fits.pop(layer, None)

    def sizes(self, layer: int) -> Collection[tuple[int, int]]:
        """The rows and lengths at which a block was counted."""
        return self._counts.get(layer, {}).keys()

    def estimate(self, rows: int, length: int) -> Foreseen:
        """What a microbatch of this size will keep."""
        prior = self._prior(rows, length)
        blocks = {
            layer: dataclasses.replace(block, inner=self._corrected(layer, rows, length, block.inner))
            for layer, block in prior.blocks.items()
        }
        return Foreseen(blocks=blocks, rest=prior.rest)

    def _corrected(self, layer: int, rows: int, length: int, prior_bytes: int) -> int:
        counts = self._counts.get(layer)
        if not counts:
            return prior_bytes
        if (rows, length) in counts:
            return counts[rows, length]
        if layer not in self._fits:
            self._fits[layer] = self._fit(layer, counts)
        fit = self._fits[layer]
        correction = sum(factor * term for factor, term in zip(fit, _terms(rows, length), strict=False))
        return max(0, round(prior_bytes + correction))

    def _fit(self, layer: int, counts: dict[tuple[int, int], int]) -> tuple[float, ...]:
        import numpy as np  # a tenth of a second that checking a recipe need not spend

        terms = np.array([_terms(*size)[: len(counts)] for size in counts])
        off = [count - self._prior(*size).blocks[layer].inner for size, count in counts.items()]
        # Columns of like size, so that none is lost to rounding.
        scale = terms.max(axis=0)
        solved = np.linalg.lstsq(terms / scale, np.array(off, dtype=float), rcond=None)[0]
        return tuple(float(factor) for factor in solved / scale)


def _terms(rows: int, length: int) -> tuple[float, float, float]:
    return float(rows * length), float(rows * length * length), 1.0


class Planner:
    """The layers to compute again for every size of input, within `budget_bytes` of activations a microbatch."""

    def __init__(self, budget_bytes: int, estimator: Estimator, *, sizes_counted: int = SIZES_COUNTED) -> None:
        self.estimator = estimator
        self._budget_bytes, self._sizes_counted = budget_bytes, sizes_counted
        self._limits: list[tuple[int, int, int]] = []
        """(rows, length, bytes): inputs at least as large proved to need less than these bytes."""
        self._plans: dict[tuple[int, int], frozenset[int]] = {}

    def wants(self, layer: int, rows: int, length: int) -> bool:
        """Whether the block of `layer` should be counted at this size: once a bucket, until the fit is trusted."""
        counted = {(known_rows, bucket_length(known)) for known_rows, known in self.estimator.sizes(layer)}
        return (rows, bucket_length(length)) not in counted and len(counted) < self._sizes_counted

    def observe(self, layer: int, rows: int, length: int, inner_bytes: int) -> None:
        """Takes a count of `Estimator.observe`; plans are made anew."""
        self.estimator.observe(layer, rows, length, inner_bytes)
        self._plans.clear()

    def plan_for(self, rows: int, length: int) -> frozenset[int]:
        """The layers to compute again. Sizes of one bucket share the plan of its largest."""
        bucket = rows, bucket_length(length)
        if bucket not in self._plans:
            self._plans[bucket] = fewest(self.estimator.estimate(*bucket), self.budget_for(*bucket))
        return self._plans[bucket]

    def planned_bytes(self, rows: int, length: int) -> int:
        """The peak that is foreseen under the plan of this size's bucket."""
        foreseen = self.estimator.estimate(rows, bucket_length(length))
        return foreseen.peak(self.plan_for(rows, length))

    def budget_for(self, rows: int, length: int) -> int:
        """Bytes that inputs of this size may take."""
        limits = (limit for least, shortest, limit in self._limits if rows >= least and length >= shortest)
        return min(limits, default=self._budget_bytes)

    def tighten(self, rows: int, length: int, *, excess_bytes: int = 0) -> bool:
        """A microbatch of this size ran out of memory, or needed `excess_bytes` too many: from now on it and larger
        ones are planned to need less than was planned for it, by that much. Returns whether that is possible."""
        planned = self.planned_bytes(rows, length)
        self._limits.append((rows, bucket_length(length), planned - max(1, excess_bytes)))
        self._plans.clear()
        return self.planned_bytes(rows, length) < planned


def planner_for(
    plan: Plan,
    spec: Spec,
    *,
    trained: Collection[str] | None = None,
    division: Division = WHOLE,
    layers: Collection[int] | None = None,
    last: bool = True,
    live_microbatches: int = 1,
) -> Planner:
    """What a plan whose `recompute` is `auto` decides by, before anything was counted; the other arguments are those of
    `foresee`. `live_microbatches` share what the plan allows for activations."""
    assert plan.recompute_bytes is not None, "a plan that computes again what it must says how much it may keep"

    def prior(rows: int, length: int) -> Foreseen:
        return foresee(
            spec,
            rows=rows,
            length=length,
            precision=products_of(plan.precision),
            trained=trained,
            division=division,
            layers=layers,
            last=last,
            device=plan.device,
            pure=plan.precision in PURE,
        )

    return Planner(plan.recompute_bytes // live_microbatches, Estimator(prior))


def foreseen_again(plan: Plan, spec: Spec, *, trained: Collection[str] | None = None) -> frozenset[int]:
    """The layers whose blocks one process will compute again for full microbatches, before anything was counted."""
    if plan.recompute == "full":
        return frozenset(range(spec.layers))
    if plan.recompute != "auto":
        return frozenset()
    return planner_for(plan, spec, trained=trained).plan_for(plan.microbatch_size, spec.sequence_length)


def bucket_length(length: int) -> int:
    """The largest length of the bucket. Every doubling has eight: a plan is made for at most 12.5 % more tokens."""
    step = max(1, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
