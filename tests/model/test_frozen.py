"""Patterns of a recipe name the parameters that stay as they are."""

from __future__ import annotations

import fnmatch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.model.config import Lora
from ropewalk.model.trainable import adapter_names, trained_names

from .specs import small, specs

SPEC = small(layers=12, norm="layer", bias=True, tie_embeddings=False, position="learned")
NAMES = tuple(SPEC.shapes())


def frozen(*patterns: str) -> list[str]:
    left = trained_names(SPEC, patterns)
    return [name for name in NAMES if name not in left]


def test_nothing_is_frozen_without_patterns():
    assert trained_names(SPEC, ()) == NAMES


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("embedding", ["embedding.weight"]),
        ("norm", ["norm.weight", "norm.bias"]),
        ("blocks.1.mlp", [f"blocks.1.mlp.{part}.{kind}" for part in ("up", "down") for kind in ("weight", "bias")]),
        ("blocks.1.mlp.up.bias", ["blocks.1.mlp.up.bias"]),
        ("blocks.10-11.mlp.up", [f"blocks.{n}.mlp.up.{kind}" for n in (10, 11) for kind in ("weight", "bias")]),
        ("blocks.3-3.attention.out.bias", ["blocks.3.attention.out.bias"]),
        ("blocks.[02].mlp_norm.weight", ["blocks.0.mlp_norm.weight", "blocks.2.mlp_norm.weight"]),
        ("*.out.bias", [f"blocks.{n}.attention.out.bias" for n in range(12)]),
    ],
)
def test_a_pattern_names_a_part_a_range_or_what_a_shell_would(pattern, expected):
    assert frozen(pattern) == expected


def test_block_1_is_not_block_10():
    assert {name.split(".")[1] for name in frozen("blocks.1")} == {"1"}
    assert {name.split(".")[1] for name in frozen("blocks.0-3")} == {"0", "1", "2", "3"}
    assert frozen("blocks.0-3") == frozen("blocks.0", "blocks.1", "blocks.2", "blocks.3")


@settings(max_examples=100, deadline=None)
@given(spec=specs(), data=st.data())
def test_what_is_trained_is_what_no_pattern_names(spec, data):
    names = tuple(spec.shapes())
    parts = sorted({name[:end] for name in names for end, sign in enumerate(name + ".") if sign == "."})
    first = data.draw(st.integers(0, spec.layers - 1))
    ranges = [f"blocks.{first}-{data.draw(st.integers(first, spec.layers - 1))}"]
    patterns = data.draw(st.lists(st.sampled_from([*parts, *ranges, "*weight", "*.mlp.*"]), max_size=4))

    def is_frozen(name: str) -> bool:
        for pattern in patterns:
            if pattern in ranges:
                low, high = map(int, pattern.removeprefix("blocks.").split("-"))
                if any(name.startswith(f"blocks.{layer}.") for layer in range(low, high + 1)):
                    return True
            elif fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"{pattern}.*"):
                return True
        return bool(spec.lora_rank) and "lora" not in name

    expected = tuple(name for name in names if not is_frozen(name))
    if expected:
        assert trained_names(spec, patterns) == expected
    else:
        with pytest.raises(UserError, match="left to train"):
            trained_names(spec, patterns)


def test_adapters_freeze_all_else():
    spec = small(layers=4, lora=Lora(targets="attention"))
    assert trained_names(spec, ()) == adapter_names(spec)
    # Naming a part that is frozen anyhow is no mistake.
    assert trained_names(spec, ["embedding"]) == adapter_names(spec)
    assert {name.split(".")[1] for name in trained_names(spec, ["blocks.0-2"])} == {"3"}
    with pytest.raises(UserError, match="no adapter is left to train"):
        trained_names(spec, ["blocks"])


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("embeding", "did you mean `embedding`"),
        ("*.norm*", "did you mean `*norm*`"),
        ("attention", "did you mean `*attention*`"),
        ("blocks.0.atention", "did you mean `blocks.0.attention`"),
        ("blocks.0-11.mpl", "did you mean `blocks.0.mlp`"),
        ("blocks.12", "names block 12; the model has blocks 0 to 11"),
        ("blocks.10-13", "names block 12; the model has blocks 0 to 11"),
        ("blocks.3-1", "turn it around"),
        ("zzz", "ropewalk model describe"),
        ("*", "no parameter is left to train"),
    ],
)
def test_a_pattern_that_cannot_be_meant_says_what_to_write(pattern, words):
    with pytest.raises(UserError) as error:
        trained_names(SPEC, [pattern])
    assert words in str(error.value)
    assert f"`{pattern}`" in str(error.value)


def test_every_wrong_pattern_is_told_at_once():
    with pytest.raises(UserError) as error:
        trained_names(SPEC, ["embeding", "norm", "blocks.99"])
    assert len(str(error.value).splitlines()) == 2


def test_a_tied_head_is_the_embedding():
    with pytest.raises(UserError, match="freeze `embedding`"):
        trained_names(small(tie_embeddings=True), ["head"])
