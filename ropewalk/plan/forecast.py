"""Memory before it is spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ropewalk.model.spec import Spec

LOGIT_BYTES = 1 << 28
"""As in model/loss.py (which needs torch): logits above this are chunked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept for the backward pass of one microbatch, logits included."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations


def memory(spec: Spec, *, rows: int, precision: Literal["fp32", "bf16"]) -> Memory:
    """The forecast for AdamW with float32 weights, gradients and moments, and `rows` rows a microbatch."""
    parameters = spec.parameters()
    tokens = rows * spec.sequence_length
    # Under autocast each matrix is also held once in bfloat16 while the graph lives.
    casts = 2 * spec.matmul_parameters() if precision == "bf16" else 0
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=tokens * _bytes_per_token(spec, precision) + _logit_bytes(spec, tokens, precision) + casts,
    )


def _bytes_per_token(spec: Spec, precision: Literal["fp32", "bf16"]) -> int:
    """What autograd keeps for a token: the inputs of every operation in a block, then of the last norm and the head.

    `narrow` is the size of a number that feeds or leaves a matrix product, 4 the size on the residual stream.
    """
    narrow = 2 if precision == "bf16" else 4
    queries, keys = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    # Residual stream into each norm and its output; the narrow copy that feeds the product.
    norms = 2 * (4 + 4 + (narrow if narrow == 2 else 0)) * spec.width
    turned = (queries + keys) * narrow
    attention = (queries + 2 * keys) * narrow + turned + 2 * queries * narrow + 4 * spec.heads
    inner = spec.hidden * narrow
    feedforward = 4 * inner if spec.mlp == "swiglu" else 2 * inner
    return spec.layers * (norms + attention + feedforward) + 12 * spec.width


def _logit_bytes(spec: Spec, tokens: int, precision: Literal["fp32", "bf16"]) -> int:
    """Logits in the product's type, in float32, their log-softmax and its gradient; chunked when they are many."""
    alive = min(tokens * spec.vocabulary, LOGIT_BYTES // 4)
    return alive * ((2 if precision == "bf16" else 4) + 12)
