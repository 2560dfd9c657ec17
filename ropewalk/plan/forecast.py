"""Forecasts peak memory of a training step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Literal

from ropewalk.model.activations import Activations, block_bytes, saved_bytes
from ropewalk.model.activations import Precision as Products
from ropewalk.model.activations import Recompute as Again
from ropewalk.model.spec import Spec, StateBytes, two_moments

from .config import Recompute

Precision = Literal["fp32", "bf16", "bf16-pure", "fp16", "fp8"]
"""The settings of `train.precision` without `auto`."""
PURE: tuple[Precision, ...] = ("bf16-pure", "fp8")
"""The settings whose model weights are bfloat16, with float32 master weights in the optimizer."""

LOGIT_BYTES, GPU_LOGIT_BYTES, SPLIT_LOGIT_BYTES = 1 << 22, 1 << 32, 1 << 28
"""As in model/loss.py and parallel/tensor.py (which need torch): logits above this are chunked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes at the peak of a step."""

    weights: int
    gradients: int
    """Without accumulation only the excess over activations, which are freed as gradients are allocated."""
    optimizer: int
    activations: int
    """Saved by autograd for the backward pass of one microbatch."""
    workspace: int
    """Peak extra of the backward pass: gradients of logits or of a block's widest part, and that block's recompute."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """Optimizer memory beyond weights and gradients; defaults are those of fused AdamW."""

    state_bytes: StateBytes = two_moments
    update_copies: int = 0
    """Float32 copies of the largest parameter that an update allocates at once."""


FUSED_ADAMW = OptimizerCosts()


def memory(
    spec: Spec,
    *,
    rows: int,
    precision: Precision,
    optimizer: OptimizerCosts = FUSED_ADAMW,
    trained: Collection[str] | None = None,
    activations: Activations = "whole",
    recompute: Recompute = "none",
    device: Literal["cpu", "cuda"] = "cpu",
    accumulates: bool = True,
) -> Memory:
    """Forecasts memory for `rows` sequences per microbatch, with float32 gradients and moments; `trained` names the
    trained parameters (None: all).

    Exact for weights, gradients and moments. Without gradient accumulation, gradients are allocated block by block as
    activations are freed.
    """
    tokens = rows * spec.sequence_length
    narrow = products_of(precision)
    # Activations saved by autograd (model/activations.py), and the batch: targets, weights, documents, positions.
    pure = precision in PURE
    whole, saved = (
        saved_bytes(
            spec,
            rows=rows,
            precision=narrow,
            trained=trained,
            recompute=counted(each),
            activations=activations,
            device=device,
            pure=pure,
        )
        for each in ("none", recompute)
    )
    # Recompute, one block at a time; and copies of weights, which recomputed blocks allocate meanwhile.
    again, copies = (whole - saved) // spec.layers, 0
    if recompute == "full":
        blocks = block_bytes(spec, rows=rows, precision=narrow, trained=trained, device=device, pure=pure)
        copies = sum(block.copies for block in blocks)
    saved += tokens * (8 + 4 + 4 + 8)
    gradients = spec.gradient_bytes(trained=trained)
    return Memory(
        weights=spec.weight_bytes() + (spec.weight_bytes(2) if pure else 0),
        gradients=gradients if accumulates else max(0, gradients - saved),
        optimizer=spec.optimizer_bytes(optimizer.state_bytes, trained=trained),
        activations=saved,
        workspace=max(
            _loss_workspace(spec, tokens, narrow, device) + copies,
            _block_workspace(spec, tokens, narrow) + again,
            # Saved activations are freed before the embedding's backward pass and the update.
            _embedding_workspace(spec) - saved,
            _update_workspace(spec, optimizer) - saved,
        ),
    )


def counted(recompute: Recompute) -> Again:
    """The recompute mode a forecast assumes: none for `auto`, which recomputes only when memory runs short."""
    return "none" if recompute == "auto" else recompute


def products_of(precision: Precision) -> Products:
    """The dtype of matmuls; with fp8, of those outside the blocks."""
    return precision if precision in ("fp32", "fp16") else "bf16"


def _loss_workspace(spec: Spec, tokens: int, precision: Products, device: str) -> int:
    """Workspace of the loss, which computes gradients in the forward pass: one chunk of logits (also in float32 unless
    a GPU kernel reads them directly) or the head's gradient; then the backward pass, which scales both."""
    narrow, head = 4 if precision == "fp32" else 2, spec.vocabulary * spec.width
    logits = min(tokens * spec.vocabulary, (GPU_LOGIT_BYTES if device == "cuda" else LOGIT_BYTES) // 4)
    hidden = 4 * tokens * spec.width
    # Narrow copies of hidden states and head, and a wide copy of each addition to the head's gradient.
    copies, widened = (0, 0) if precision == "fp32" else (2 * (tokens * spec.width + head), 4 * head)
    wide = 0 if device == "cuda" else 4 if precision == "fp32" else 8
    forward = hidden + copies + max((narrow + wide) * logits, narrow * (logits + head) + widened)
    return max(forward, 4 * head + narrow * tokens * spec.width + hidden)


def _block_workspace(spec: Spec, tokens: int, precision: Products) -> int:
    """Backward pass of the last block's feed-forward: gradients of its inner features and of its largest matrix.

    Gated: of the product, f(gate), gate, up, and the fused pair (two); otherwise of output and input. A tied head's
    gradient stays allocated until the embedding's backward pass; other tensors of the loss are already freed.
    """
    narrow = 4 if precision == "fp32" else 2
    inner, columns = (6, 2) if spec.gated else (2, 1)
    features = inner * spec.mlp_width * narrow + 2 * 4 * spec.width
    waiting = 4 * spec.vocabulary * spec.width if spec.tie_embeddings else 0
    freed = narrow * tokens * spec.width + 4 * spec.vocabulary * spec.width
    return tokens * features + (2 + 4) * columns * spec.mlp_width * spec.width + waiting - freed


def _embedding_workspace(spec: Spec) -> int:
    """The embedding's dense gradient; if tied, also the head's gradient and their sum."""
    return (12 if spec.tie_embeddings else 4) * spec.vocabulary * spec.width


def _update_workspace(spec: Spec, optimizer: OptimizerCosts) -> int:
    """Copies of the largest parameter."""
    return optimizer.update_copies * 4 * max(prod(shape) for shape in spec.shapes().values())
