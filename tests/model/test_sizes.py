"""The sizes of the bench: what their names promise."""

from __future__ import annotations

import pytest

from ropewalk.base.errors import UserError
from ropewalk.model.sizes import SIZES, size_of
from ropewalk.model.spec import resolve


def parameters(name: str) -> int:
    size = size_of(name)
    return resolve(size.model, vocabulary=size.vocabulary, sequence_length=size.sequence_length).parameters()


def test_124m_is_gpt_2_but_for_the_rounded_vocabulary() -> None:
    block = (768 * 3 * 768 + 3 * 768) + (768 * 768 + 768) + (768 * 3072 + 3072) + (3072 * 768 + 768) + 4 * 768
    assert parameters("124M") == 12 * block + 2 * 768 + 50304 * 768 + 1024 * 768
    # As the paper's code has it, with 50257 tokens.
    assert parameters("124M") - (50304 - 50257) * 768 == 124_439_808


def test_7b_is_llama_2() -> None:
    assert parameters("7B") == 6_738_415_616


@pytest.mark.parametrize(("name", "least", "most"), [("350M", 345e6, 360e6), ("1.3B", 1.2e9, 1.4e9)])
def test_a_size_is_as_large_as_its_name_says(name: str, least: float, most: float) -> None:
    assert least < parameters(name) < most


@pytest.mark.parametrize("name", SIZES)
def test_every_size_is_a_valid_recipe_whose_microbatches_divide_its_batch(name: str) -> None:
    assert list(SIZES[name].model.check()) == []
    assert SIZES[name].batch_size % SIZES[name].microbatch_size == 0


def test_a_size_is_known_in_small_letters_and_an_unknown_one_names_those_there_are() -> None:
    assert size_of("124m") is SIZES["124M"]
    with pytest.raises(UserError, match=r"no size `1\.4B`; did you mean `1\.3B`\? There are tiny, 124M, 350M"):
        size_of("1.4B")
