"""Our parameters <-> those of a Hugging Face layout: other names, fused matrices taken apart, some transposed.

One table a layout says where each of our parameters goes; both directions read it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

from ropewalk.base.errors import DataError

from .layouts import NORM_EPSILON, Layout
from .lora import merged
from .parts import fused, unfused
from .sharding import split_of
from .spec import Spec

Weights = Mapping[str, Tensor]

# Our name of a part -> theirs; a fused part of ours has several of theirs, or one that stacks them.
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
# Masks and frequencies that older versions stored beside the weights.
_NOT_WEIGHTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


@dataclass(frozen=True, slots=True)
class Place:
    """Where one of our parameters is found in a layout."""

    names: tuple[str, ...]
    """Their tensors; those of one of our parameters are stacked along dimension 0."""
    transposed: bool
    """Whether they store inputs x outputs (the `Conv1D` of GPT-2)."""


def to_hugging_face(weights: Weights, spec: Spec, layout: Layout) -> dict[str, Tensor]:
    """The tensors of a `model.safetensors` in `layout`, contiguous. Adapters are merged; a GPT-2 without biases gets
    zeros for them."""
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


def from_hugging_face(tensors: Weights, spec: Spec, layout: Layout, *, norm_epsilon: float) -> dict[str, Tensor]:
    """Our parameters from the tensors of a directory; a DataError names what is missing, left over or of another shape.

    Norms that add another epsilon than ours are made equal by `_rescaled`.
    """
    left = _known_names(tensors, spec, layout)
    found: dict[str, Tensor] = {}
    for name, shape in spec.shapes().items():
        place, split = _place(name, layout), split_of(name, spec)
        missing = [theirs for theirs in place.names if theirs not in left]
        if missing:
            raise DataError(f"the tensor `{missing[0]}` is missing")
        taken = [left.pop(theirs) for theirs in place.names]
        stacked = torch.cat([tensor.T if place.transposed else tensor for tensor in taken])
        if tuple(stacked.shape) != shape:
            raise DataError(f"{' + '.join(place.names)}: {tuple(stacked.shape)}, the config says {shape}")
        rows = [rows * split.units for _, rows in split.parts] or [shape[0]]
        found[name] = fused(stacked.split(rows), split).contiguous()
    if left:
        raise DataError(f"nothing is known of the tensor `{min(left)}` ({len(left)} such)")
    return _rescaled(found, spec, scale=sqrt(NORM_EPSILON[spec.norm] / norm_epsilon))


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


def _known_names(tensors: Weights, spec: Spec, layout: Layout) -> dict[str, Tensor]:
    """The tensors under the names of the whole model, without buffers and without the copy of a tied head."""
    prefix = "model." if layout == "llama" else "transformer."

    def named() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors.items():
            # Saved from the model without its head, names lack the prefix, as in the first GPT-2.
            yield (name if name.startswith((prefix, "lm_head.")) else prefix + name), tensor

    drop = ("lm_head.weight",) if spec.tied else ()
    return {name: tensor for name, tensor in named() if name not in drop and not name.endswith(_NOT_WEIGHTS)}


def _rescaled(weights: dict[str, Tensor], spec: Spec, *, scale: float) -> dict[str, Tensor]:
    """The same function with norms of our epsilon: the residual stream `scale` times as large.

    s x / sqrt(s^2 mean(x^2) + s^2 e) = x / sqrt(mean(x^2) + e), so with s^2 e = ours every norm gives what it gave.
    All that writes to the stream is multiplied by s; a tied head with it, which the final norm takes back.
    """
    if abs(scale - 1) < 1e-9:
        return weights
    writers = ("embedding.", "positions.", "attention.out.", "mlp.down.")
    found = dict(weights)
    for name, tensor in weights.items():
        if any(writer in name for writer in writers):
            found[name] = tensor * scale
        elif name.startswith("norm.") and spec.tied:
            found[name] = tensor / scale
    return found
