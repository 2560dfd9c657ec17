"""What the backward pass will need: bytes that autograd keeps during a forward pass in eager mode. No torch.

Counted tensor by tensor from the modules; a test compares with the storages that autograd really keeps on a CPU. A GPU
keeps the same or less: its RMSNorm is fused. `narrow` is the size of a number that feeds or leaves a matrix product,
2 bytes under bf16; the residual stream is float32 in either precision.
"""

from __future__ import annotations

from typing import Literal

from .spec import Spec

Precision = Literal["fp32", "bf16"]


def saved_bytes(spec: Spec, *, rows: int, precision: Precision) -> int:
    """Bytes kept after the forward pass and loss of `rows` full rows: all but weights and logits."""
    narrow = _narrow(precision)
    norms = {"pre": 2 * spec.layers + 1, "post": 2 * spec.layers, "both": 4 * spec.layers + 1}[spec.norm_place]
    branches = 2 * spec.layers + 1  # with the head
    # Tokens for the embedding's gradient and targets for the loss's, in int64.
    token = 8 + 8 + (8 if spec.position == "learned" else 0)
    token += norms * _norm(spec) + branches * narrow * spec.width
    token += spec.layers * (_attention(spec, precision) + _feed_forward(spec, precision))
    token += branches * spec.width if spec.dropout else 0  # a byte a feature: the mask
    # Cosines and sines; in bf16 each layer keeps copies instead.
    token += 4 * spec.head_size if spec.position == "rope" and precision == "fp32" else 0
    return rows * spec.sequence_length * token + _shared(spec, rows, precision)


def saved_logit_bytes(spec: Spec, *, tokens: int) -> int:
    """Bytes of the log-probabilities that the loss of `tokens` tokens keeps, where it is not cut into chunks."""
    return 4 * tokens * spec.vocabulary


def _shared(spec: Spec, rows: int, precision: Precision) -> int:
    """What does not grow with tokens: the mask of attention, and under autocast a narrow copy of each matrix."""
    masked = spec.window is not None or spec.position == "alibi" or spec.documents == "separate"
    pages = (rows if spec.documents == "separate" else 1) * (spec.heads if spec.position == "alibi" else 1)
    total = _narrow(precision) * pages * spec.sequence_length**2 if masked else 0
    if precision == "bf16":
        total += 2 * spec.matmul_parameters()
        total += spec.layers * 2 * 2 * spec.head_size if spec.qk_norm else 0  # scales of queries and keys
    return total


def _norm(spec: Spec) -> int:
    """The input from the residual stream and statistics; the unfused RMSNorm of the CPU also keeps the normalised
    input, before its scale."""
    width = spec.width
    return {"rms": 4 * width + 4 + 4 * width, "layer": 4 * width + 8, "none": 0}[spec.norm]


def _attention(spec: Spec, precision: Precision) -> int:
    """One layer's attention, a token: from the fused projection to what feeds the output projection."""
    narrow = _narrow(precision)
    queries, keys = spec.heads * spec.head_size, spec.kv_heads * spec.head_size
    # The fused projection stays whole because the values are a view of it; the result; a logarithm a head.
    total = (queries + 2 * keys) * narrow + queries * narrow + 4 * spec.heads
    grouped = 1 < spec.kv_heads < spec.heads
    rotated = spec.position == "rope"
    if rotated or spec.qk_norm:
        # New queries and keys; they stand heads first, so the result is reordered to tokens first. For a single head
        # both orders are the same.
        total += (queries + keys) * narrow + queries * narrow * (spec.heads > 1)
    elif grouped:
        # Queries that stand in groups are copied side by side.
        total += queries * narrow
    if spec.qk_norm:
        total += 4 * (queries + keys) + 4 * (spec.heads + spec.kv_heads)
        # The input of the norm: widened to float32; or part of the fused projection, unless queries were copied.
        total += 4 * (queries + keys) if precision == "bf16" else 4 * queries * grouped
    if rotated and precision == "bf16":
        # Copies of cosines and sines, head_size numbers together, for queries and for keys.
        total += 2 * narrow * spec.head_size
    return total


def _feed_forward(spec: Spec, precision: Precision) -> int:
    """Gated: gate, up, f(gate) and the product. Else input (ReLU: its positive part) and output of the activation."""
    return (4 if spec.gated else 2) * spec.hidden * _narrow(precision)


def _narrow(precision: Precision) -> int:
    return 2 if precision == "bf16" else 4
