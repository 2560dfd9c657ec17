"""Chooses which blocks to recompute so that activations fit in memory, from counts made during training. No torch.

After Mimose (Liao et al. 2022): activation bytes per layer are a quadratic function of input size, fitted to counts.
Plans are cached by input size, and made stricter instead of failing. Where the paper chooses layers greedily, this
planner finds the plan with the fewest recomputed layers.
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
"""Input sizes counted before the fit is trusted. Three determine it; the paper takes about ten iterations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Foreseen:
    """Forecast activation bytes of a microbatch."""

    blocks: Mapping[int, BlockBytes]
    """Per layer, lowest first."""
    rest: int
    """Outside the blocks: embedding, rotations, masks, copies of weights, final norm, head and logits."""

    def peak(self, again: Collection[int]) -> int:
        """Peak bytes with the layers `again` recomputed: at the end of the forward pass, or in the backward pass of a
        recomputed block, when later activations are freed."""
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
    """Counts activations (model/activations.py) of `rows` sequences of `length` tokens in a stage with `layers` (None:
    all); `last` if it has the head. Bytes outside the blocks are those of a whole model, except for the logits."""
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
    # Logits, and their log-probabilities or gradients; above this size the loss chunks them.
    most = SPLIT_LOGIT_BYTES if division.tensor > 1 else GPU_LOGIT_BYTES // 2 if device == "cuda" else LOGIT_BYTES
    logits = min(saved_logit_bytes(spec, tokens=tokens) // division.tensor, most)
    owned = {layer: blocks[layer] for layer in (range(spec.layers) if layers is None else sorted(layers))}
    rest = total - sum(block.input for block in blocks) + sum(block.copies for block in owned.values())
    return Foreseen(blocks=owned, rest=rest + (2 * logits if last else 0))


def fewest(foreseen: Foreseen, budget_bytes: int) -> frozenset[int]:
    """The fewest layers to recompute for a peak within the budget; among equals the plan that saves the fewest bytes,
    then the one with the lowest layers, whose activations live longest. If none fits, the plan with the lowest peak.

    Dynamic programming over layers: for each number of recomputed layers, only the minimum of saved bytes matters, as
    fewer bytes are never worse later. The paper's greedy choice, largest layer first, may pick a late layer whose own
    backward pass then becomes the peak.
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
    # Full recompute saves the least; often recomputing all but the last layers has the same peak.
    return fewest(foreseen, foreseen.peak(foreseen.blocks))


class Estimator:
    """Activation bytes of blocks as a function of input size: `prior`, corrected by counts.

    The correction per layer is a x rows x length + b x rows x length^2 + c, fitted by least squares: `a` alone from one
    count, `a` and `b` from two.
    """

    def __init__(self, prior: Callable[[int, int], Foreseen]) -> None:
        self._prior = functools.lru_cache(maxsize=256)(prior)
        self._counts: dict[int, dict[tuple[int, int], int]] = {}
        self._fits: dict[int, tuple[float, ...]] = {}

    def observe(self, layer: int, rows: int, length: int, inner_bytes: int) -> None:
        """Records that the block of `layer` saved `inner_bytes` besides its input; replaces a count of this size."""
        self._counts.setdefault(layer, {})[rows, length] = inner_bytes
        self._fits.pop(layer, None)

    def sizes(self, layer: int) -> Collection[tuple[int, int]]:
        """(rows, length) pairs at which a block was counted."""
        return self._counts.get(layer, {}).keys()

    def estimate(self, rows: int, length: int) -> Foreseen:
        """Estimates activation bytes of a microbatch of this size."""
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
        import numpy as np  # importing takes 0.1 s, which checking a recipe need not spend

        terms = np.array([_terms(*size)[: len(counts)] for size in counts])
        off = [count - self._prior(*size).blocks[layer].inner for size, count in counts.items()]
        # Columns of similar scale limit rounding errors.
        scale = terms.max(axis=0)
        solved = np.linalg.lstsq(terms / scale, np.array(off, dtype=float), rcond=None)[0]
        return tuple(float(factor) for factor in solved / scale)


def _terms(rows: int, length: int) -> tuple[float, float, float]:
    return float(rows * length), float(rows * length * length), 1.0


class Planner:
    """Layers to recompute per input size, within `budget_bytes` of activations per microbatch."""

    def __init__(self, budget_bytes: int, estimator: Estimator, *, sizes_counted: int = SIZES_COUNTED) -> None:
        self.estimator = estimator
        self._budget_bytes, self._sizes_counted = budget_bytes, sizes_counted
        self._limits: list[tuple[int, int, int]] = []
        """(rows, length, bytes): inputs at least this large must use less than these bytes."""
        self._plans: dict[tuple[int, int], frozenset[int]] = {}

    def wants(self, layer: int, rows: int, length: int) -> bool:
        """Whether to count the block of `layer` at this size: once per bucket, until the fit is trusted."""
        counted = {(known_rows, bucket_length(known)) for known_rows, known in self.estimator.sizes(layer)}
        return (rows, bucket_length(length)) not in counted and len(counted) < self._sizes_counted

    def observe(self, layer: int, rows: int, length: int, inner_bytes: int) -> None:
        """Records a count (see `Estimator.observe`) and discards cached plans."""
        self.estimator.observe(layer, rows, length, inner_bytes)
        self._plans.clear()

    def plan_for(self, rows: int, length: int) -> frozenset[int]:
        """Layers to recompute. All sizes of a bucket share the plan of its largest."""
        bucket = rows, bucket_length(length)
        if bucket not in self._plans:
            self._plans[bucket] = fewest(self.estimator.estimate(*bucket), self.budget_for(*bucket))
        return self._plans[bucket]

    def planned_bytes(self, rows: int, length: int) -> int:
        """Forecast peak under the plan of this size's bucket."""
        foreseen = self.estimator.estimate(rows, bucket_length(length))
        return foreseen.peak(self.plan_for(rows, length))

    def budget_for(self, rows: int, length: int) -> int:
        """Activation budget in bytes for inputs of this size."""
        limits = (limit for least, shortest, limit in self._limits if rows >= least and length >= shortest)
        return min(limits, default=self._budget_bytes)

    def tighten(self, rows: int, length: int, *, excess_bytes: int = 0) -> bool:
        """Lowers the budget of this input size and larger ones after an out-of-memory error or `excess_bytes` over the
        forecast: by that much below the planned bytes. Returns whether a smaller plan exists."""
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
    """The planner of a plan with `recompute = "auto"`, before any count; other arguments as in `foresee`.
    `live_microbatches` share the plan's activation budget."""
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
    """Layers that a single process is forecast to recompute for full microbatches, before any count."""
    if plan.recompute == "full":
        return frozenset(range(spec.layers))
    if plan.recompute != "auto":
        return frozenset()
    return planner_for(plan, spec, trained=trained).plan_for(plan.microbatch_size, spec.sequence_length)


def bucket_length(length: int) -> int:
    """The largest length of the bucket. Eight buckets per doubling: a plan covers at most 12.5 % more tokens."""
    step = max(1, 1 << max(0, length.bit_length() - 4))
    return -(-length // step) * step
