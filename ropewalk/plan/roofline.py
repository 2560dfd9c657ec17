"""Roofline bound of a training step: per kind of work, the longer of FLOPs / matmul speed and bytes / memory bandwidth
(Williams et al. 2009). No torch.

Work is of five kinds, each counted as if perfectly fused: `attention` never writes its scores (Dao et al. 2022), `loss`
never writes logits, and everything between two matmuls is one kernel that reads and writes each value once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from ropewalk.model.spec import Spec, StateBytes, two_moments

from .forecast import PURE, Precision

Kind = Literal["attention", "gemm", "loss", "optimizer", "other", "idle"]
"""`gemm`: linear layers of the blocks; `loss`: head and cross-entropy; `optimizer`: clipping and update; `other`:
norms, activation functions, residual adds, embedding. `idle` is the time in which the GPU waits."""
KINDS: tuple[Kind, ...] = ("attention", "gemm", "loss", "optimizer", "other", "idle")

WIDE = 4
"""Bytes of a float32: weights and moments; also gradients and the residual stream unless precision is pure."""
PRODUCT_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "bf16-pure": 2, "fp16": 2, "fp8": 1}
"""Bytes per element of a matmul operand."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpWork:
    """FLOPs and memory traffic of one kind of work in a step."""

    flops: float = 0.0
    bytes: float = 0.0
    """Read from and written to device memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """Peak rates of a device."""

    flops: float
    """FLOP/s of large matmuls."""
    bytes: float
    """Memory bandwidth, bytes per second."""
    gemm_flops: float | None = None
    """FLOP/s of matmuls inside blocks, if these use a narrower dtype than head and attention."""

    def least_ms(self, kind: Kind, work: OpWork) -> float:
        """Lower bound in milliseconds for any implementation."""
        flops = self.gemm_flops or self.flops if kind == "gemm" else self.flops
        return 1e3 * max(work.flops / flops, work.bytes / self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTime:
    """Measured time of one kind of work, with its roofline bound."""

    kind: Kind
    ms: float
    share: float
    flops: float
    bytes: float
    least_ms: float
    distance: float | None
    """Measured time over the bound; None where the bound is zero."""


def breakdown(times: Mapping[Kind, float], work: Mapping[Kind, OpWork], ceilings: Ceilings) -> list[KindTime]:
    """Milliseconds of a step by kind, each with its roofline bound."""
    total = sum(times.values())
    found = []
    for kind in KINDS:
        least_ms = ceilings.least_ms(kind, work[kind])
        found.append(
            KindTime(
                kind=kind,
                ms=times[kind],
                share=times[kind] / total,
                flops=work[kind].flops,
                bytes=work[kind].bytes,
                least_ms=least_ms,
                distance=times[kind] / least_ms if least_ms else None,
            )
        )
    return found


def step_work(
    spec: Spec,
    *,
    rows: int,
    precision: Precision,
    optimizer: StateBytes = two_moments,
    trained: Collection[str] | None = None,
) -> dict[Kind, OpWork]:
    """Work of a step of `rows` full sequences, each a single document. Excludes recompute; bytes of matmuls assume that
    every parameter is trained."""
    tokens = rows * spec.sequence_length
    flops = spec.token_flops("causal", trained=trained)
    factor = PRODUCT_BYTES[precision]
    narrow = max(2, factor)  # what is not a factor of an fp8 product is in bfloat16
    wide = 2 if precision in PURE else WIDE
    matrices = [p.shape for n, p in spec.parameter_specs().items() if n.startswith("blocks.") and p.is_matmul]
    return {
        # Forward reads q, k, v and writes o; backward also reads do and writes dq, dk, dv.
        "attention": OpWork(
            flops=tokens * flops.attention,
            bytes=tokens * spec.layers * 6 * (spec.heads + spec.kv_heads) * spec.head_size * narrow,
        ),
        # Three matmuls: each reads two of input, output and weight (or their gradients) and writes the third.
        "gemm": OpWork(
            flops=tokens * flops.blocks,
            bytes=sum(
                3 * tokens * sum(shape) * factor + _matrix_bytes(prod(shape), factor, wide) for shape in matrices
            ),
        ),
        "loss": OpWork(
            flops=tokens * flops.head,
            bytes=3 * tokens * spec.width * narrow + _matrix_bytes(spec.vocabulary * spec.width, narrow, wide),
        ),
        "optimizer": OpWork(bytes=_update_bytes(spec, precision, optimizer, trained)),
        "other": OpWork(bytes=_elementwise_bytes(spec, tokens, narrow, wide)),
        "idle": OpWork(),
    }


def _matrix_bytes(numbers: int, factor: int, gradient: int) -> int:
    """Reads the weight in forward and backward, writes its gradient."""
    return numbers * (2 * factor + gradient)


def _update_bytes(spec: Spec, precision: Precision, optimizer: StateBytes, trained: Collection[str] | None) -> int:
    """Reads gradients for the norm and for the update, reads and writes weights and moments: 32 bytes per weight for
    AdamW. Pure precisions have two-byte gradients and also write narrow weights: 30."""
    weights = spec.parameters(trained=trained)
    gradients, published = (2, 2) if precision in PURE else (WIDE, 0)
    return weights * (2 * gradients + 2 * WIDE + published) + 2 * spec.optimizer_bytes(optimizer, trained=trained)


def _elementwise_bytes(spec: Spec, tokens: int, narrow: int, stream: int) -> int:
    """Memory traffic between matmuls, forward and backward.

    Residual add and norm are fused. Forward reads the stream and the branch, writes their sum and its norm; backward
    reads the stream and the gradients of stream and norm, writes the gradients of stream and branch.
    """
    branch = spec.width * ((2 * stream + 2 * narrow) + (3 * stream + 2 * narrow))
    inner = spec.mlp_width * (2 if spec.gated else 1)
    activation = narrow * ((inner + spec.mlp_width) + (2 * inner + spec.mlp_width))
    rotation = narrow * 4 * (spec.heads + spec.kv_heads) * spec.head_size if spec.rotates else 0
    embedding = spec.width * 3 * stream
    gradient = stream * spec.vocabulary * spec.width
    return tokens * (spec.layers * (2 * branch + activation + rotation) + embedding) + gradient
