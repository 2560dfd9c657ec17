"""Settings of models, drawn at random but always valid."""

from __future__ import annotations

from hypothesis import strategies as st

from ropewalk.model.config import Model
from ropewalk.model.spec import Spec, resolve


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Any small spec."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    size = 2 * draw(st.integers(1, 5))
    settings = Model(
        layers=draw(st.integers(1, 4)),
        width=max(heads * size, 8 * heads),
        heads=heads,
        kv_heads=draw(st.sampled_from([None, *(n for n in range(1, heads + 1) if heads % n == 0)])),
        hidden=draw(st.none() | st.integers(8, 300)),
        norm=draw(st.sampled_from(["rms", "layer"])),
        mlp=draw(st.sampled_from(["swiglu", "gelu"])),
        position=draw(st.sampled_from(["rope", "learned"])),
        tied=draw(st.booleans()),
    )
    return resolve(settings, vocabulary=draw(st.integers(2, 500)), sequence_length=draw(st.integers(1, 64)))


def small(*, vocabulary: int = 37, sequence_length: int = 10, **changes: object) -> Spec:
    """A spec of two small layers, as changed."""
    settings = {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "hidden": 48, **changes}
    return resolve(Model(**settings), vocabulary=vocabulary, sequence_length=sequence_length)
