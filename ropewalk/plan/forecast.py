"""Memory before it is spent."""

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
"""Those in which the model's own weights are bfloat16, beside float32 ones for the optimizer."""

LOGIT_BYTES, GPU_LOGIT_BYTES, SPLIT_LOGIT_BYTES = 1 << 22, 1 << 32, 1 << 28
"""As in model/loss.py and parallel/tensor.py (which need torch): logits above this are chunked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes at the fullest moment of a step."""

    weights: int
    gradients: int
    """Of all microbatches; of a single one what they need more than its activations, as which go they come."""
    optimizer: int
    activations: int
    """Kept by autograd for the backward pass of one microbatch."""
    workspace: int
    """What the widest moment of the backward pass adds: gradients of logits, or of a block's widest part, with what is
    computed again of that block."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


@dataclass(frozen=True, slots=True)
class OptimizerCosts:
    """What an optimizer needs beside weights and gradients; the defaults are those of the fused AdamW."""

    state_bytes: StateBytes = two_moments
    update_copies: int = 0
    """Copies of the largest parameter, in float32, that an update holds at once."""


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
    """The forecast for `rows` rows a microbatch, with gradients and moments in float32; `trained` names the parameters
    that have them, None all.

    Exact for weights, gradients and moments. A step that does not accumulate gradients of several microbatches has them
    block by block, as its activations go.
    """
    tokens = rows * spec.sequence_length
    narrow = products_of(precision)
    # What autograd keeps (model/activations.py), and the rest of the batch: target, weight, document, position.
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
    # What is computed again, a block at a time; and copies of weights, which blocks that keep nothing have meanwhile.
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
            # What was saved is gone when the embedding's turn comes, and at the update.
            _embedding_workspace(spec) - saved,
            _update_workspace(spec, optimizer) - saved,
        ),
    )


def counted(recompute: Recompute) -> Again:
    """What a forecast takes for computed again: nothing for `auto`, which keeps all where there is room."""
    return "none" if recompute == "auto" else recompute


def products_of(precision: Precision) -> Products:
    """The type of matrix products; in fp8 that of those outside blocks."""
    return precision if precision in ("fp32", "fp16") else "bf16"


def _loss_workspace(spec: Spec, tokens: int, precision: Products, device: str) -> int:
    """The loss, which makes its gradients in the forward pass: the logits of a chunk, in float32 too unless a GPU's
    kernel reads them as they are, or the head's gradient by them; and the backward pass, which scales both."""
    narrow, head = 4 if precision == "fp32" else 2, spec.vocabulary * spec.width
    logits = min(tokens * spec.vocabulary, (GPU_LOGIT_BYTES if device == "cuda" else LOGIT_BYTES) // 4)
    hidden = 4 * tokens * spec.width
    # Narrow copies of hidden states and head; and of what is added to the head's gradient, a wide one.
    copies, widened = (0, 0) if precision == "fp32" else (2 * (tokens * spec.width + head), 4 * head)
    wide = 0 if device == "cuda" else 4 if precision == "fp32" else 8
    forward = hidden + copies + max((narrow + wide) * logits, narrow * (logits + head) + widened)
    return max(forward, 4 * head + narrow * tokens * spec.width + hidden)


def _block_workspace(spec: Spec, tokens: int, precision: Products) -> int:
    """The last block's backward, feed-forward part: gradients by its inner features and by its largest matrix.

    Gated: by the product, f(gate), gate, up, and the fused pair (two); else: by output and input. A tied head's
    gradient waits for the embedding's all the while, but what the loss kept is gone.
    """
    narrow = 4 if precision == "fp32" else 2
    inner, columns = (6, 2) if spec.gated else (2, 1)
    features = inner * spec.mlp_width * narrow + 2 * 4 * spec.width
    waiting = 4 * spec.vocabulary * spec.width if spec.tie_embeddings else 0
    freed = narrow * tokens * spec.width + 4 * spec.vocabulary * spec.width
    return tokens * features + (2 + 4) * columns * spec.mlp_width * spec.width + waiting - freed


def _embedding_workspace(spec: Spec) -> int:
    """The embedding's dense gradient; when tied, also the head's and their sum."""
    return (12 if spec.tie_embeddings else 4) * spec.vocabulary * spec.width


def _update_workspace(spec: Spec, optimizer: OptimizerCosts) -> int:
    """Copies of the largest parameter."""
    return optimizer.update_copies * 4 * max(prod(shape) for shape in spec.shapes().values())
