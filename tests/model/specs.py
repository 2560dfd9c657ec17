"""Settings of models, drawn at random but always valid."""

from __future__ import annotations

from collections.abc import Collection
from typing import get_args

import torch
from hypothesis import strategies as st

from ropewalk.model.components import ACTIVATIONS, NORMS, POSITIONS
from ropewalk.model.config import (
    Documents,
    Lora,
    LoraTargets,
    Model,
    NormPlace,
    RopeScaling,
)
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.init_laws import INITS
from ropewalk.model.spec import Spec, resolve
from ropewalk.model.trainable import adapter_names, with_lora


@st.composite
def specs(draw: st.DrawFn, *, least_length: int = 1) -> Spec:
    """Any small spec, every option free, with adapters and without."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    size = 2 * draw(st.integers(1, 5))
    position = draw(st.sampled_from(list(POSITIONS)))
    scaling = draw(st.sampled_from(get_args(RopeScaling))) if position == "rope" else "none"
    length, vocabulary = draw(st.integers(least_length, 64)), draw(st.integers(2, 500))
    settings = Model(
        layers=draw(st.integers(1, 4)),
        width=max(heads * size, 8 * heads),
        heads=heads,
        kv_heads=draw(st.sampled_from([None, *(n for n in range(1, heads + 1) if heads % n == 0)])),
        mlp_width=draw(st.none() | st.integers(8, 300)),
        bias=draw(st.booleans()),
        norm=draw(st.sampled_from(list(NORMS))),
        norm_position=draw(st.sampled_from(get_args(NormPlace))),
        qk_norm=draw(st.booleans()),
        mlp=draw(st.sampled_from(list(ACTIVATIONS))),
        position=position,
        rope_scaling=scaling,
        rope_factor=1.0 if scaling == "none" else draw(st.floats(1, 8)),
        window=draw(st.none() | st.integers(1, 70)),
        documents=draw(st.sampled_from(get_args(Documents))),
        dropout=draw(st.sampled_from([0.0, 0.1])),
        init=draw(st.sampled_from(list(INITS))),
        tie_embeddings=draw(st.booleans()),
        head_size=draw(st.sampled_from([None, None, 4, 6])),
        vocabulary=draw(st.sampled_from([None, vocabulary, vocabulary + 7])),
        positions=draw(st.sampled_from([None, length, length + 5])) if position == "learned" else None,
    )
    assert not list(settings.check())
    plain = resolve(settings, vocabulary=vocabulary, sequence_length=length)
    return with_lora(plain, draw(st.none() | loras()))


def loras() -> st.SearchStrategy[Lora]:
    targets = st.sampled_from(get_args(LoraTargets))
    return st.builds(Lora, rank=st.integers(1, 9), alpha=st.sampled_from([0.5, 8.0, 16.0]), targets=targets)


@st.composite
def trained(draw: st.DrawFn, spec: Spec) -> tuple[str, ...] | None:
    """Some parameters of the spec: all, the adapters, any few, or all but the lowest."""
    names = tuple(spec.shapes())
    any_few = st.sets(st.sampled_from(names), min_size=1, max_size=4).map(tuple)
    upper = st.integers(0, len(names) - 1).map(lambda first: names[first:])
    adapters = [st.just(adapter_names(spec))] if spec.lora_rank else []
    return draw(st.one_of(st.none(), any_few, upper, *adapters))


def freeze(model: Decoder, trained: Collection[str] | None) -> None:
    """Leaves gradients to the parameters named by `trained`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained is None or name in trained)


def small(*, vocabulary: int = 37, sequence_length: int = 10, lora: Lora | None = None, **changes: object) -> Spec:
    """A spec of two small layers, as changed."""
    settings = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp_width": 48, **changes}
    return with_lora(resolve(Model(**settings), vocabulary=vocabulary, sequence_length=sequence_length), lora)


def loud(spec: Spec, *, seed: int) -> Decoder:
    """A float64 model with weights large enough, and vectors uneven enough, that no term is lost.

    Without norms nothing holds numbers down, and gated or squared parts raise them to higher powers at each layer:
    weights are then smaller.
    """
    model = build(spec, seed=seed, dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    matrix = 0.05 if spec.norm == "none" else 0.2
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(matrix * noise if parameter.dim() == 2 else parameter + 0.1 * noise)
    return model
