"""Sheets are blind, balanced, seeded, and repeat some items."""

from __future__ import annotations

from collections import Counter

import pytest

from ropewalk.base.errors import UserError
from ropewalk.evaluate.human.assignment import assign, choose_items
from ropewalk.evaluate.human.candidates import PromptTexts

SYSTEMS = ("a", "b", "human")


def pool(count: int = 8) -> list[PromptTexts]:
    return [
        PromptTexts(prompt=f"p{number}", domain="", source="", texts={name: f"{name}{number}" for name in SYSTEMS})
        for number in range(count)
    ]


def first_looks(lines: list) -> list[int]:
    return [line.item for line in lines if not line.repeat]


@pytest.mark.parametrize("mode", ["score", "pairwise", "binary"])
def test_every_rater_sees_every_item_once_before_repeats(mode: str) -> None:
    _, items = choose_items(pool(), mode=mode, count=24, seed=3)
    for lines in assign(items, raters=4, repeat=0.25, seed=3).values():
        assert sorted(first_looks(lines)) == list(range(24))
        assert sum(line.repeat for line in lines) == 6


def test_the_order_of_systems_is_a_latin_square_over_raters() -> None:
    prompts, items = choose_items(pool(), mode="score", count=24, seed=3)
    sheets = assign(items, raters=3, repeat=0, seed=3)
    rounds = {rater: [lines[8 * k : 8 * k + 8] for k in range(3)] for rater, lines in sheets.items()}
    for parts in rounds.values():
        for part in parts:  # each prompt once a round, each system as often as the others
            assert {items[line.item].prompt for line in part} == set(range(8))
            assert set(Counter(items[line.item].systems[0] for line in part).values()) <= {2, 3}
    for prompt in range(len(prompts)):
        for k in range(3):  # over the raters, each text of a prompt comes once in each round
            seen = [line.item for parts in rounds.values() for line in parts[k] if items[line.item].prompt == prompt]
            assert sorted(items[item].systems[0] for item in seen) == sorted(SYSTEMS)


def test_a_repeated_item_returns_half_a_sheet_later() -> None:
    _, items = choose_items(pool(), mode="score", count=24, seed=1)
    for lines in assign(items, raters=5, repeat=0.5, seed=1).values():
        place = {line.item: number for number, line in enumerate(lines) if not line.repeat}
        gaps = [number - place[line.item] for number, line in enumerate(lines) if line.repeat]
        assert len(gaps) == 12
        assert min(gaps) >= 12


def test_sides_of_pairs_are_balanced_and_change_at_the_second_look() -> None:
    _, items = choose_items(pool(), mode="pairwise", count=24, seed=2)
    sheets = assign(items, raters=2, repeat=0.25, seed=2)
    for lines in sheets.values():
        sides = {line.item: line.swapped for line in lines if not line.repeat}
        assert sum(sides.values()) == 12
        assert all(line.swapped != sides[line.item] for line in lines if line.repeat)
    one, two = ({line.item: line.swapped for line in lines if not line.repeat} for lines in sheets.values())
    assert all(one[item] != two[item] for item in one)


def test_the_seed_decides_and_ids_say_nothing_of_items() -> None:
    _, items = choose_items(pool(), mode="score", count=24, seed=5)
    sheets = assign(items, raters=2, repeat=0.1, seed=5)
    assert sheets == assign(items, raters=2, repeat=0.1, seed=5)
    assert sheets != assign(items, raters=2, repeat=0.1, seed=6)
    ids = [line.id for lines in sheets.values() for line in lines]
    assert len(set(ids)) == len(ids)
    reversed_items = assign(items[::-1], raters=2, repeat=0.1, seed=5)
    assert [line.id for line in reversed_items["r1"]] == [line.id for line in sheets["r1"]]


def test_items_are_whole_prompts_and_those_of_most_systems_come_first() -> None:
    poor = PromptTexts(prompt="poor", domain="", source="", texts={"a": "x"})
    prompts, items = choose_items([poor, *pool(3)], mode="score", count=8, seed=0)
    assert [len(prompt.texts) for prompt in prompts] == [3, 3, 1]
    assert len(items) == 7


def test_too_few_items_or_a_single_system_are_refused() -> None:
    with pytest.raises(UserError, match="--items 2 is fewer than the texts of one prompt"):
        choose_items(pool(), mode="score", count=2, seed=0)
    alone = [PromptTexts(prompt="p", domain="", source="", texts={"a": "x"})]
    with pytest.raises(UserError, match="name two runs"):
        choose_items(alone, mode="pairwise", count=9, seed=0)
