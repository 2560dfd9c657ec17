"""What the backward pass will need: bytes that autograd keeps during a forward pass in eager mode. No torch.

The forward pass of model/modules.py and model/decoder.py over sizes in place of tensors: each operation keeps what the
gradients that will be asked for need, and a storage that several keep counts once. A test compares with the storages
that autograd really keeps on a CPU. A GPU keeps the same or less: its RMSNorm is fused.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from .spec import Spec

Precision = Literal["fp32", "bf16"]


def saved_bytes(spec: Spec, *, rows: int, precision: Precision, trained: Collection[str] | None = None) -> int:
    """Bytes kept after the forward pass and loss of `rows` full rows: all but weights and logits.

    `trained` names the parameters that get a gradient; None: all.
    """
    return sum(kept.bytes for kept in _pass(spec, rows, precision, trained).kept)


def saved_copy_bytes(spec: Spec, *, trained: Collection[str] | None = None) -> int:
    """The part of `saved_bytes` in bf16 that is narrow copies of weights, made by autocast."""
    return sum(kept.bytes for kept in _pass(spec, 1, "bf16", trained).kept if kept.of_weight)


def saved_logit_bytes(spec: Spec, *, tokens: int) -> int:
    """Bytes of the log-probabilities that the loss of `tokens` tokens keeps, where it is not cut into chunks."""
    return 4 * tokens * spec.vocabulary


@dataclass(frozen=True, eq=False, slots=True)
class _Storage:
    """Memory of a tensor and its views; equal only to itself."""

    bytes: int
    of_weight: bool = False


@dataclass(frozen=True, slots=True)
class _Value:
    """A tensor of the forward pass."""

    storage: _Storage
    gradient: bool
    """Whether the backward pass computes its gradient."""
    wide: bool = True
    """float32 in either precision, as the residual stream; else as narrow as the inputs of matrix products."""


def _pass(spec: Spec, rows: int, precision: Precision, trained: Collection[str] | None) -> _Pass:
    """A forward pass and its loss, recorded."""
    record = _Pass(spec, rows, precision, frozenset(spec.shapes() if trained is None else trained))
    x = record.embedding()
    for layer in range(spec.layers):
        x = record.block(x, f"blocks.{layer}")
    x = x if spec.norm_place == "post" else record.norm(x, "norm")
    record.product(x, "embedding.weight" if spec.tied else "head.weight", outputs=spec.vocabulary)
    record.keep(_Storage(8 * record.tokens))  # targets
    return record


class _Pass:
    """One forward pass: what it has kept so far."""

    def __init__(self, spec: Spec, rows: int, precision: Precision, trained: frozenset[str]) -> None:
        self.spec, self.trained = spec, trained
        self.tokens = rows * spec.sequence_length
        self.kept: set[_Storage] = set()
        self._shapes = spec.shapes()
        self._autocast = precision == "bf16"
        self._narrow = 2 if self._autocast else 4
        pages = (rows if spec.documents == "separate" else 1) * (spec.heads if spec.position == "alibi" else 1)
        # All layers share them.
        self._mask = _Storage(self._narrow * pages * spec.sequence_length**2)
        self._turn = _Storage(4 * self.tokens * spec.head_size)

    def keep(self, *storages: _Storage) -> None:
        self.kept.update(storages)

    def embedding(self) -> _Value:
        """Tables keep the numbers of the rows that were looked up, in int64."""
        tables = [name for name in ("embedding.weight", "positions.weight") if name in self.trained]
        self.keep(*(_Storage(8 * self.tokens) for _ in tables))
        return self.dropout(self._new(self.spec.width, gradient=bool(tables), wide=True))

    def block(self, x: _Value, name: str) -> _Value:
        for branch in ("attention", "mlp"):
            y = x if self.spec.norm_place == "post" else self.norm(x, f"{name}.{branch}_norm")
            y = self.attention(y, f"{name}.attention") if branch == "attention" else self.mlp(y, f"{name}.mlp")
            y = self.dropout(y)
            if self.spec.norm_place == "both":
                y = self.norm(self._widened(y, self.spec.width), f"{name}.{branch}_post_norm")
            x = self._new(self.spec.width, gradient=x.gradient or y.gradient, wide=True)
            if self.spec.norm_place == "post":
                x = self.norm(x, f"{name}.{branch}_norm")
        return x

    def dropout(self, x: _Value) -> _Value:
        """The mask takes a byte a feature."""
        if not self.spec.dropout:
            return x
        if x.gradient:
            self.keep(_Storage(self.tokens * self.spec.width))
        return self._new(self.spec.width, gradient=x.gradient, wide=x.wide)

    def norm(self, x: _Value, name: str) -> _Value:
        if self.spec.norm == "none":
            return x
        weight, bias = f"{name}.weight" in self.trained, f"{name}.bias" in self.trained
        if self.spec.norm == "rms":
            return self._rms(x, weight=weight, features=self.spec.width, means=1)
        gradient = x.gradient or weight or bias
        if gradient:
            self.keep(x.storage, _Storage(8 * self.tokens))  # with mean and deviation
        return self._new(self.spec.width, gradient=gradient, wide=True)

    def attention(self, x: _Value, name: str) -> _Value:
        spec = self.spec
        heads, groups, size = spec.heads, spec.kv_heads, spec.head_size
        fused = self.linear(x, f"{name}.qkv")
        query = key = fused
        if 1 < groups < heads:
            # Queries that stand in groups are copied side by side.
            query = self._new(heads * size, gradient=fused.gradient)
        if spec.qk_norm:
            query = self._head_norm(query, f"{name}.query_norm.weight", heads)
            key = self._head_norm(key, f"{name}.key_norm.weight", groups)
        if spec.position == "rope":
            query, key = self._rotated(query, heads), self._rotated(key, groups)
        gradient = query.gradient or key.gradient or fused.gradient
        attended = self._new(heads * size, gradient=gradient)
        if gradient:
            # With a logarithm a head. The fused projection stays whole because the values are a view of it.
            logarithms = _Storage(4 * self.tokens * heads)
            self.keep(query.storage, key.storage, fused.storage, attended.storage, logarithms)
            if spec.window is not None or spec.position == "alibi" or spec.documents == "separate":
                self.keep(self._mask)
        if (spec.position == "rope" or spec.qk_norm) and heads > 1:
            # New queries stand heads first, and so does the result: it is copied to tokens first.
            attended = self._new(heads * size, gradient=gradient)
        return self.linear(attended, f"{name}.out")

    def mlp(self, x: _Value, name: str) -> _Value:
        """Gated: gate, up, f(gate) and the product. Else input (ReLU: its positive part) and output of the
        activation."""
        inner = self.linear(x, f"{name}.up")
        hidden = self._new(self.spec.hidden, gradient=inner.gradient)
        if inner.gradient:
            self.keep(inner.storage)
            if self.spec.gated:
                self.keep(_Storage(self._narrow * self.tokens * self.spec.hidden))
        return self.linear(hidden, f"{name}.down")

    def linear(self, x: _Value, name: str) -> _Value:
        """A linear map of a block, with its adapter."""
        y = self.product(x, f"{name}.weight", outputs=self._shapes[f"{name}.weight"][0])
        gradient = y.gradient or f"{name}.bias" in self.trained
        if f"{name}.lora_a" in self._shapes:
            inner = self.product(x, f"{name}.lora_a", outputs=self.spec.lora_rank)
            added = self.product(inner, f"{name}.lora_b", outputs=self._shapes[f"{name}.lora_b"][0])
            return replace(added, gradient=gradient or added.gradient)
        return replace(y, gradient=gradient)

    def product(self, x: _Value, name: str, *, outputs: int) -> _Value:
        """A matrix keeps its input for its own gradient, and itself for that of the input. Both are narrow copies under
        autocast, each product has its own."""
        if name in self.trained:
            inputs = self._shapes[name][1]
            self.keep(_Storage(2 * self.tokens * inputs) if x.wide and self._autocast else x.storage)
        if x.gradient and self._autocast:
            self.keep(_Storage(2 * prod(self._shapes[name]), of_weight=True))
        return self._new(outputs, gradient=x.gradient or name in self.trained)

    def _head_norm(self, x: _Value, name: str, heads: int) -> _Value:
        size = self.spec.head_size
        if x.gradient and self._autocast:
            self.keep(_Storage(2 * size, of_weight=True))
        wide = self._widened(x, heads * size)
        y = self._rms(wide, weight=name in self.trained, features=heads * size, means=heads)
        return self._new(heads * size, gradient=y.gradient)

    def _rms(self, x: _Value, *, weight: bool, features: int, means: int) -> _Value:
        """Unfused, as on a CPU: the input and its means for its gradient, the normalised input for the weight's."""
        if x.gradient:
            self.keep(x.storage, _Storage(4 * self.tokens * means))
        if weight:
            self.keep(_Storage(4 * self.tokens * features))
        return self._new(features, gradient=x.gradient or weight, wide=True)

    def _rotated(self, x: _Value, heads: int) -> _Value:
        if x.gradient:
            # Cosines and sines; under autocast queries and keys of each layer have narrow copies.
            self.keep(_Storage(2 * self.tokens * self.spec.head_size) if self._autocast else self._turn)
        return self._new(heads * self.spec.head_size, gradient=x.gradient)

    def _widened(self, x: _Value, features: int) -> _Value:
        copied = self._autocast and not x.wide
        return self._new(features, gradient=x.gradient, wide=True) if copied else x

    def _new(self, features: int, *, gradient: bool, wide: bool = False) -> _Value:
        return _Value(_Storage((4 if wide else self._narrow) * self.tokens * features), gradient, wide)
