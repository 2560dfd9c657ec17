"""Memory before it is spent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ropewalk.model.spec import Spec

Precision = Literal["fp32", "bf16"]

LOGIT_BYTES = 1 << 28
"""As in model/loss.py (which needs torch): logits above this are chunked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes at the fullest moment of a step."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Kept by autograd for the backward pass of one microbatch."""
    workspace: int
    """What the widest moment of the backward pass adds: gradients of logits, or of a block's widest part."""

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.workspace


def memory(spec: Spec, *, rows: int, precision: Precision) -> Memory:
    """The forecast for AdamW with float32 weights, gradients and moments, and `rows` rows a microbatch."""
    parameters = spec.parameters()
    tokens = rows * spec.sequence_length
    # Under autocast each matrix is also held once in bfloat16 while the graph lives.
    casts = 2 * spec.matmul_parameters() if precision == "bf16" else 0
    saved = tokens * _saved_bytes_per_token(spec, precision) + 4 * _logits_alive(spec, tokens) + casts
    return Memory(
        weights=4 * parameters,
        gradients=4 * parameters,
        optimizer=8 * parameters,
        activations=saved,
        workspace=max(
            _loss_workspace(spec, tokens, precision),
            _block_workspace(spec, tokens, precision),
            # What was saved is gone when the embedding's turn comes.
            _embedding_workspace(spec) - saved,
        ),
    )


def _saved_bytes_per_token(spec: Spec, precision: Precision) -> int:
    """What autograd keeps for a token, all but the logits: each tensor that some operation needs in its backward.

    `narrow` is the size of a number that feeds or leaves a matrix product; the residual stream has float32. A test
    compares with the storages that autograd really keeps.
    """
    narrow = 2 if precision == "bf16" else 4
    width, hidden = spec.width, spec.hidden
    queries, keys = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    # Tokens, targets and positions in int64, weight and document in 4 bytes each.
    batch = 3 * 8 + 2 * 4
    # Input from the residual stream, statistics, and the output that feeds a product. The unfused RMSNorm of the CPU
    # also keeps the normalised input, before its scale.
    norm = 4 * width + 8 + narrow * width + (4 * width if spec.norm == "rms" else 0)
    # The fused projection stays whole because the values are a view of it. Then the result, a logarithm a head, and one
    # reordering: of the result when queries were rotated (heads first); when not, of queries that stand in groups.
    reordered = spec.position == "rope" or 1 < spec.kv_heads < spec.heads
    attention = (queries + 2 * keys) * narrow + (2 if reordered else 1) * queries * narrow + 4 * spec.heads
    tables = 0
    if spec.position == "rope":
        attention += (queries + keys) * narrow
        # Cosines and sines, head_size numbers together: float32 once; in bf16 a copy for queries and one for keys.
        tables = 4 * spec.head_size
        attention += 2 * narrow * spec.head_size if precision == "bf16" else 0
    # swiglu keeps gate, up, silu(gate) and the product; gelu its input and output.
    feedforward = (4 if spec.gated else 2) * hidden * narrow
    return batch + tables + spec.layers * (2 * norm + attention + feedforward) + norm


def _logits_alive(spec: Spec, tokens: int) -> int:
    """Logits that exist at once: of the whole microbatch, or of one chunk of it (model/loss.py)."""
    return min(tokens * spec.vocabulary, LOGIT_BYTES // 4)


def _loss_workspace(spec: Spec, tokens: int, precision: Precision) -> int:
    """The loss's backward: gradients by log-softmax and by logits in float32; or the latter and the head's gradient."""
    logits, head = _logits_alive(spec, tokens), spec.vocabulary * spec.width
    # With chunks, the head's gradient of those before stands beside.
    others = 4 * head if logits < tokens * spec.vocabulary else 0
    if precision == "bf16":
        return others + max(8 * logits, 2 * logits + 6 * head)
    return others + max(8 * logits, 4 * logits + 4 * head)


def _block_workspace(spec: Spec, tokens: int, precision: Precision) -> int:
    """The last block's backward, feed-forward part: gradients by its inner features and by its largest matrix.

    swiglu: by the product, silu(gate), gate, up, and the fused pair (two); gelu: by output and input. A tied head's
    gradient waits for the embedding's all the while, but the logits that were saved are gone.
    """
    narrow = 2 if precision == "bf16" else 4
    inner, columns = (6, 2) if spec.gated else (2, 1)
    features = inner * spec.hidden * narrow + 2 * 4 * spec.width
    waiting = 4 * spec.vocabulary * spec.width if spec.tied else 0
    freed = 4 * _logits_alive(spec, tokens)
    return tokens * features + (2 + 4) * columns * spec.hidden * spec.width + waiting - freed


def _embedding_workspace(spec: Spec) -> int:
    """The embedding's dense gradient; when tied, also the head's and their sum."""
    return (12 if spec.tied else 4) * spec.vocabulary * spec.width
