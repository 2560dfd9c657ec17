"""Memory before it is spent."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from typing import Literal

from ropewalk.model.activations import Precision as Products
from ropewalk.model.activations import saved_bytes, saved_copy_bytes
from ropewalk.model.spec import Optimizer, Spec

Precision = Literal["fp32", "bf16", "bf16-pure", "fp16"]
"""The settings of `train.precision` without `auto`."""

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


def memory(
    spec: Spec,
    *,
    rows: int,
    precision: Precision,
    optimizer: Optimizer = "adamw",
    trained: Collection[str] | None = None,
) -> Memory:
    """The forecast for `rows` rows a microbatch, with gradients and moments in float32; `trained` names the parameters
    that have them, None all.

    Exact for weights, gradients and moments. For `bf16-pure` activations are those of `bf16`: an upper bound, because
    the stream between blocks is half as wide there.
    """
    tokens = rows * spec.sequence_length
    narrow: Products = "fp32" if precision == "fp32" else "bf16"
    # What autograd keeps (model/activations.py), and the rest of the batch: weight, document, position.
    saved = saved_bytes(spec, rows=rows, precision=narrow, trained=trained)
    saved += tokens * (4 + 4 + 8) + 4 * _logits_alive(spec, tokens)
    pure = precision == "bf16-pure"
    if pure:
        saved -= saved_copy_bytes(spec, trained=trained)  # the weights are narrow already, autocast copies none
    return Memory(
        weights=spec.weight_bytes() + (spec.weight_bytes(2) if pure else 0),
        gradients=spec.gradient_bytes(trained=trained),
        optimizer=spec.optimizer_bytes(optimizer, trained=trained),
        activations=saved,
        workspace=max(
            _loss_workspace(spec, tokens, narrow),
            _block_workspace(spec, tokens, narrow),
            # What was saved is gone when the embedding's turn comes, and at the update.
            _embedding_workspace(spec) - saved,
            _update_workspace(spec, optimizer) - saved,
        ),
    )


def _logits_alive(spec: Spec, tokens: int) -> int:
    """Logits that exist at once: of the whole microbatch, or of one chunk of it (model/loss.py)."""
    return min(tokens * spec.vocabulary, LOGIT_BYTES // 4)


def _loss_workspace(spec: Spec, tokens: int, precision: Products) -> int:
    """The loss's backward: gradients by log-softmax and by logits in float32; or the latter and the head's gradient."""
    logits, head = _logits_alive(spec, tokens), spec.vocabulary * spec.width
    # With chunks, the head's gradient of those before stands beside.
    others = 4 * head if logits < tokens * spec.vocabulary else 0
    if precision == "bf16":
        return others + max(8 * logits, 2 * logits + 6 * head)
    return others + max(8 * logits, 4 * logits + 4 * head)


def _block_workspace(spec: Spec, tokens: int, precision: Products) -> int:
    """The last block's backward, feed-forward part: gradients by its inner features and by its largest matrix.

    Gated: by the product, f(gate), gate, up, and the fused pair (two); else: by output and input. A tied head's
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


def _update_workspace(spec: Spec, optimizer: Optimizer) -> int:
    """Our own rules (train/optimizers) hold up to seven copies of the largest parameter; the fused AdamW none."""
    largest = max(prod(shape) for shape in spec.shapes().values())
    return 0 if optimizer == "adamw" else 7 * 4 * largest
