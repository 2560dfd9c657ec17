"""The least time that the work of a step can take on a device: its FLOPs at the speed of products, or its bytes at that
of the memory, whichever takes longer (Williams et al. 2009). No torch.

Work is of five kinds. Each is counted as if it were perfect: what a kernel could hold back from memory does not travel.
`attention` never writes its scores (Dao et al. 2022), `loss` never its logits, and what lies between two products is
one kernel that reads and writes every number once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from ropewalk.model.spec import Spec, StateBytes, two_moments

from .forecast import PURE, Precision

Kind = Literal["attention", "gemm", "loss", "optimizer", "other", "idle"]
"""`gemm` are the linear maps of the blocks; `loss` is the head with the cross-entropy; `optimizer` clips and updates;
`other` is the rest of the work: norms, activations, sums, the embedding. `idle` is no work: a GPU that waits."""
KINDS: tuple[Kind, ...] = ("attention", "gemm", "loss", "optimizer", "other", "idle")

WIDE = 4
"""Bytes of a float32: weights and moments; gradients and the stream between blocks, unless precision is pure."""
PRODUCT_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "bf16-pure": 2, "fp16": 2, "fp8": 1}
"""Bytes of a factor of a matrix product."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpWork:
    """What a kind of work must do in a step."""

    flops: float = 0.0
    bytes: float = 0.0
    """Read from and written to the device's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ceilings:
    """What a device can do."""

    flops: float
    """FLOP/s of large matrix products."""
    bytes: float
    """Bytes a second that are read and written."""
    gemm_flops: float | None = None
    """The same of the products of the blocks, where these are narrower than those of head and attention."""

    def least_ms(self, kind: Kind, work: OpWork) -> float:
        """Milliseconds below which no implementation gets."""
        flops = self.gemm_flops or self.flops if kind == "gemm" else self.flops
        return 1e3 * max(work.flops / flops, work.bytes / self.bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class KindTime:
    """What a kind of work takes of a step, beside the least that it could."""

    kind: Kind
    ms: float
    share: float
    flops: float
    bytes: float
    least_ms: float
    distance: float | None
    """How many times as long as the least; None for what needs no time."""


def breakdown(times: Mapping[Kind, float], work: Mapping[Kind, OpWork], ceilings: Ceilings) -> list[KindTime]:
    """The times of a step by kind, in milliseconds, beside the roofline."""
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
    """The work of a step of `rows` full rows, each a single document; recomputation is not counted. Bytes of products
    are those of a model of which every parameter is trained."""
    tokens = rows * spec.sequence_length
    flops = spec.token_flops("causal", trained=trained)
    factor = PRODUCT_BYTES[precision]
    narrow = max(2, factor)  # what is not a factor of an fp8 product is in bfloat16
    wide = 2 if precision in PURE else WIDE
    matrices = [p.shape for n, p in spec.parameter_specs().items() if n.startswith("blocks.") and p.is_matmul]
    return {
        # Forward reads q, k, v and writes o; backward reads these and the gradient by o, and writes those by q, k, v.
        "attention": OpWork(
            flops=tokens * flops.attention,
            bytes=tokens * spec.layers * 6 * (spec.heads + spec.kv_heads) * spec.head_size * narrow,
        ),
        # Three products: each reads two of input, output and weight (or their gradients) and writes the third.
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
    """A weight is read forward and backward; its gradient is written."""
    return numbers * (2 * factor + gradient)


def _update_bytes(spec: Spec, precision: Precision, optimizer: StateBytes, trained: Collection[str] | None) -> int:
    """Gradients are read for their length and for the update, weights and moments are read and written: 32 bytes a
    weight for AdamW. Pure precisions have gradients of two bytes and write narrow weights too: 30."""
    weights = spec.parameters(trained=trained)
    gradients, published = (2, 2) if precision in PURE else (WIDE, 0)
    return weights * (2 * gradients + 2 * WIDE + published) + 2 * spec.optimizer_bytes(optimizer, trained=trained)


def _elementwise_bytes(spec: Spec, tokens: int, narrow: int, stream: int) -> int:
    """What lies between products, forward and backward.

    A branch adds to the stream and is normalised at once: forward it reads the stream and what is added, and writes
    both sum and normalised sum; backward it reads the stream, its gradient and that of the normalised sum, and writes
    the gradient for the stream and for the branch.
    """
    branch = spec.width * ((2 * stream + 2 * narrow) + (3 * stream + 2 * narrow))
    inner = spec.mlp_width * (2 if spec.gated else 1)
    activation = narrow * ((inner + spec.mlp_width) + (2 * inner + spec.mlp_width))
    rotation = narrow * 4 * (spec.heads + spec.kv_heads) * spec.head_size if spec.rotates else 0
    embedding = spec.width * 3 * stream
    gradient = stream * spec.vocabulary * spec.width
    return tokens * (spec.layers * (2 * branch + activation + rotation) + embedding) + gradient
