"""Which layer is named, for figures made up."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.train.hooks.layer_health import FACTOR, LayerFigures, find_symptom

SIZES = st.floats(min_value=1e-9, max_value=1e9)


def layer(name: str, *, gradient: float | None = 1.0, activation: float | None = 1.0) -> LayerFigures:
    return LayerFigures(name=name, gradient=gradient, weight=1.0, update=0.001, activation=activation)


def model(blocks: int) -> dict[str, LayerFigures]:
    names = [f"blocks.{block}{part}" for block in range(blocks) for part in ("", ".attention", ".mlp")]
    return {name: layer(name) for name in ["embedding", *names, "norm"]} | {"head": layer("head", activation=None)}


def changed(layers: dict[str, LayerFigures], figure: str, **values: float | None) -> list[LayerFigures]:
    """The layers with other values by name, dots written as underscores."""
    new = {name.replace("_", "."): value for name, value in values.items()}
    return [dataclasses.replace(one, **{figure: new[name]}) if name in new else one for name, one in layers.items()]


@given(size=SIZES, spread=st.lists(st.floats(min_value=1, max_value=FACTOR / 1.001), min_size=8, max_size=8))
def test_layers_within_the_factor_are_healthy(size: float, spread: list[float]) -> None:
    values = {f"blocks_{block}": size * factor for block, factor in enumerate(spread)}
    assert find_symptom(changed(model(8), "gradient", **values)) is None


@given(size=SIZES, block=st.integers(0, 7), factor=st.floats(min_value=2 * FACTOR, max_value=1e12), small=st.booleans())
def test_a_block_beyond_the_factor_is_named(size: float, block: int, factor: float, small: bool) -> None:
    values = {f"blocks_{other}": size for other in range(8)}
    values[f"blocks_{block}"] = size / factor if small else size * factor
    symptom = find_symptom(changed(model(8), "gradient", **values))
    assert symptom is not None
    assert (symptom.layer, symptom.figure) == (f"blocks.{block}", "gradient")
    assert symptom.what == ("vanishes" if small else "explodes")
    assert symptom.others == 0


def test_a_part_is_named_where_its_block_as_a_whole_is_usual() -> None:
    symptom = find_symptom(changed(model(8), "gradient", blocks_4_mlp=1e-5))
    assert symptom is not None
    assert str(symptom).startswith("blocks.4.mlp: the gradient vanishes: 1e-05, the median of all is 1;")


def test_a_gradient_that_fades_from_block_to_block_names_the_first_and_counts_the_others() -> None:
    values = {f"blocks_{block}": 4.0**block for block in range(16)}
    symptom = find_symptom(changed(model(16), "gradient", **values))
    assert symptom is not None
    # The median is 4^7.5 + a little; 4^0 to 4^2 are more than 1000 times below, 4^13 to 4^15 above.
    assert (symptom.layer, symptom.what, symptom.others) == ("blocks.0", "vanishes", 5)


def test_the_block_where_the_stream_jumps_is_named_and_not_those_that_it_passes_through() -> None:
    jumped = {f"blocks_{block}": 1e5 for block in range(2, 8)}
    symptom = find_symptom(changed(model(8), "activation", **jumped))
    assert symptom is not None
    assert (symptom.layer, symptom.what, symptom.usual) == ("blocks.2", "explodes", 1.0)
    symptom = find_symptom(changed(model(8), "activation", embedding=1e-5))
    assert symptom is not None
    assert (symptom.layer, symptom.usual) == ("blocks.0", 1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_comes_from_the_first_layer_on_its_way(bad: float) -> None:
    up = changed(model(4), "activation", blocks_1=bad, blocks_1_mlp=bad, blocks_2=bad, blocks_3=bad, norm=bad)
    down = changed(model(4), "gradient", embedding=bad, blocks_0=bad, blocks_0_mlp=bad)
    for layers, name in ((up, "blocks.1.mlp"), (down, "blocks.0.mlp")):
        symptom = find_symptom(layers)
        assert symptom is not None
        assert (symptom.layer, symptom.what) == (name, "is not finite")


def test_with_a_scaled_loss_an_overflow_of_gradients_is_nobody_s_fault() -> None:
    overflowed = changed(model(4), "gradient", blocks_0=math.inf)
    assert find_symptom(overflowed, scaled_loss=True) is None
    assert find_symptom(changed(model(4), "activation", blocks_0=math.inf), scaled_loss=True) is not None


def test_two_blocks_are_too_few_to_say_which_of_them_is_wrong() -> None:
    assert find_symptom(changed(model(2), "gradient", blocks_0=1e-9)) is None
    trained = changed(model(5), "gradient", blocks_0=None, blocks_1=None, blocks_2=None, blocks_3=1e-9)
    assert find_symptom(trained) is None


def test_projections_that_start_at_0_are_no_symptom() -> None:
    silent = {f"blocks_{block}_{part}": 0.0 for block in range(4) for part in ("attention", "mlp")}
    assert find_symptom(changed(model(4), "activation", **silent)) is None
    symptom = find_symptom(changed(model(4), "activation", blocks_1_mlp=0.0))
    assert symptom is not None
    assert symptom.layer == "blocks.1.mlp"


def test_the_same_trouble_is_told_once() -> None:
    attention = find_symptom(changed(model(4), "activation", blocks_1_attention=1e-9))
    mlp = find_symptom(changed(model(4), "activation", blocks_1_mlp=1e-9))
    elsewhere = find_symptom(changed(model(4), "activation", blocks_2_mlp=1e-9))
    assert attention is not None
    assert attention.same_trouble(mlp)
    assert not attention.same_trouble(elsewhere)
    assert not attention.same_trouble(None)
