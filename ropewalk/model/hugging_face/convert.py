"""Converts parameters from and to Hugging Face layouts: renames, splits fused matrices, transposes.

One table per layout gives the place of each parameter; both directions read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt
from typing import Protocol

import torch
from torch import Tensor

from ropewalk.base.errors import DamagedModel

from ..init import fused, unfused
from ..sharding import split_of
from ..spec import Spec
from ..trainable import merged
from .configs import NORM_EPSILON, Layout

Weights = Mapping[str, Tensor]

# Our name of a part -> theirs; a fused part of ours maps to several of theirs, or to one that stacks them.
_LLAMA_BLOCK = {
    "attention_norm": ("input_layernorm",),
    "attention.qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention.out": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "mlp.up": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down": ("mlp.down_proj",),
}
_GPT2_BLOCK = {
    "attention_norm": ("ln_1",),
    "attention.qkv": ("attn.c_attn",),
    "attention.out": ("attn.c_proj",),
    "mlp_norm": ("ln_2",),
    "mlp.up": ("mlp.c_fc",),
    "mlp.down": ("mlp.c_proj",),
}
_LLAMA = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
_GPT2 = {"embedding": "transformer.wte", "positions": "transformer.wpe", "norm": "transformer.ln_f", "head": "lm_head"}
# Masks and frequencies that older versions stored with the weights.
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class Place:
    """Location of one of our parameters in a layout."""

    names: tuple[str, ...]
    """Names of their tensors; several are stacked along dimension 0."""
    transposed: bool
    """Whether they store inputs x outputs (the `Conv1D` of GPT-2)."""


def to_hugging_face(weights: Weights, spec: Spec, layout: Layout) -> dict[str, Tensor]:
    """Contiguous tensors of a `model.safetensors` in `layout`. Merges adapters; a GPT-2 without biases gets zero
    biases."""
    weights, spec = merged(weights, spec)
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place = _place(name, layout)
        parts = unfused(tensor, split_of(name, spec))
        if len(place.names) == 1:
            parts = [torch.cat(parts)]
        for theirs, part in zip(place.names, parts, strict=True):
            found[theirs] = (part.T if place.transposed else part).contiguous()
    if layout == "gpt2" and not spec.bias:
        found |= {
            name.removesuffix("weight") + "bias": tensor.new_zeros(tensor.shape[1])
            for name, tensor in found.items()
            if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        }
    return found


class Stored(Protocol):
    """A tensor in a file; any part of it can be read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """Reads the slice of `shape` at `offset`."""
        ...


class Imported(Mapping[str, Tensor]):
    """Our parameters from the tensors of a directory, read lazily; before any read, a DamagedModel names missing,
    unexpected or misshaped tensors.

    Norms with another epsilon than ours are made equivalent by a larger residual stream:
    s x / sqrt(s^2 mean(x^2) + s^2 e) = x / sqrt(mean(x^2) + e), so with s^2 e = ours every norm has the same output.
    All weights that write to the stream are multiplied by s; so is a tied head, which the final norm compensates.
    """

    def __init__(self, tensors: Mapping[str, Stored], spec: Spec, layout: Layout, *, norm_epsilon: float) -> None:
        self._spec, self._layout = spec, layout
        self._tensors = _known_names(tensors, spec, layout)
        if spec.layers > len(self._tensors):
            raise DamagedModel(f"{len(self._tensors)} tensors cannot be a model of {spec.layers} layers")
        self._scale = sqrt(NORM_EPSILON[spec.norm] / norm_epsilon)
        self.shapes = spec.shapes()
        left = set(self._tensors)
        for name, shape in self.shapes.items():
            left -= self._checked(name, shape)
        if left:
            raise DamagedModel(f"nothing is known of the tensor `{min(left)}` ({len(left)} such)")

    def __getitem__(self, name: str) -> Tensor:
        return self.part(name, (0,) * len(self.shapes[name]), self.shapes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)

    def part(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """A slice of a parameter. For fused ones, reads the units that contain its rows."""
        split = split_of(name, self._spec)
        if not split.parts:
            return self._rescaled(name, self._rows(name, 0, offset[0], shape[0], offset[1:], shape[1:]).contiguous())
        rows = [rows for _, rows in split.parts]
        unit = sum(rows)
        first, last = offset[0] // unit, -(-(offset[0] + shape[0]) // unit)
        parts, base = [], 0
        for number, side in enumerate(rows):
            begin = split.units * base + first * side
            parts.append(self._rows(name, number, begin, (last - first) * side, offset[1:], shape[1:]))
            base += side
        here = fused(parts, replace(split, units=last - first)) if last > first else parts[0]
        return self._rescaled(name, here.narrow(0, offset[0] - first * unit, shape[0]).contiguous())

    def _rows(
        self, name: str, part: int, begin: int, count: int, offset: tuple[int, ...], shape: tuple[int, ...]
    ) -> Tensor:
        """Consecutive rows of our parameter in their tensors; columns start at `offset`."""
        place = _place(name, self._layout)
        if len(place.names) > 1:  # every part is a separate tensor
            before = sum(self._outputs(theirs, place) for theirs in place.names[:part])
            begin, theirs = begin - before, place.names[part]
        else:
            (theirs,) = place.names
        at, sides = (begin, *offset), (count, *shape)
        if place.transposed:
            return self._tensors[theirs].read(at[::-1], sides[::-1]).T
        return self._tensors[theirs].read(at, sides)

    def _outputs(self, theirs: str, place: Place) -> int:
        return self._tensors[theirs].shape[-1 if place.transposed else 0]

    def _checked(self, name: str, shape: tuple[int, ...]) -> set[str]:
        """Names of their tensors for our parameter, after checking their combined shape."""
        place, split = _place(name, self._layout), split_of(name, self._spec)
        missing = [theirs for theirs in place.names if theirs not in self._tensors]
        if missing:
            raise DamagedModel(f"the tensor `{missing[0]}` is missing")
        shapes = [self._tensors[theirs].shape for theirs in place.names]
        shapes = [sides[::-1] if place.transposed else sides for sides in shapes]
        wanted = [shape]
        if len(shapes) > 1:
            wanted = [(rows * split.units, *shape[1:]) for _, rows in split.parts]
        if shapes != wanted:
            found = " + ".join(map(str, shapes))
            raise DamagedModel(f"{' + '.join(place.names)}: {found}, the config says {' + '.join(map(str, wanted))}")
        return set(place.names)

    def _rescaled(self, name: str, tensor: Tensor) -> Tensor:
        if abs(self._scale - 1) < 1e-9:
            return tensor
        if any(writer in name for writer in ("embedding.", "positions.", "attention.out.", "mlp.down.")):
            return tensor * self._scale
        return tensor / self._scale if name.startswith("norm.") and self._spec.tie_embeddings else tensor


def _place(name: str, layout: Layout) -> Place:
    part, _, kind = name.rpartition(".")
    if not part.startswith("blocks."):
        theirs = (_LLAMA if layout == "llama" else _GPT2)[part]
        return Place((f"{theirs}.{kind}",), transposed=False)
    _, layer, inner = part.split(".", 2)
    if layout == "llama":
        return Place(tuple(f"model.layers.{layer}.{theirs}.{kind}" for theirs in _LLAMA_BLOCK[inner]), transposed=False)
    transposed = kind == "weight" and not inner.endswith("norm")
    return Place(tuple(f"transformer.h.{layer}.{theirs}.{kind}" for theirs in _GPT2_BLOCK[inner]), transposed)


def _known_names(tensors: Mapping[str, Stored], spec: Spec, layout: Layout) -> dict[str, Stored]:
    """Tensors by their names in the whole model, without buffers and without the copy of a tied head."""
    prefix = "model." if layout == "llama" else "transformer."

    def named() -> Iterator[tuple[str, Stored]]:
        for name, tensor in tensors.items():
            # Names lack the prefix if saved from the model without its head, as in the first GPT-2.
            yield (name if name.startswith((prefix, "lm_head.")) else prefix + name), tensor

    drop = ("lm_head.weight",) if spec.tie_embeddings else ()
    return {name: tensor for name, tensor in named() if name not in drop and not name.endswith(_NOT_WEIGHTS)}
