"""`ropewalk plan draw`: a recipe's pipeline on one picture."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from .conftest import Call

LAYERS = ("model.layers=8", "prepare.tokenizer.vocab_size=257")


def boxes(path: Path) -> int:
    return len(ElementTree.parse(path).findall(".//{http://www.w3.org/2000/svg}g"))


@pytest.mark.parametrize(
    ("kind", "actions", "bubble"),
    [("gpipe", 2 * 4 * 8, 3 / 11), ("1f1b", 2 * 4 * 8, 3 / 11), ("interleaved", 2 * 8 * 8, 3 / 19)],
)
def test_every_action_has_its_box_and_the_bubble_is_told(
    kind: str, actions: int, bubble: float, tiny: Path, call: Call
) -> None:
    drawn = call("plan", "draw", "tiny.toml", *LAYERS, "--schedule", kind, "--ranks", 4, "--microbatches", 8, "--json")
    value = json.loads(drawn.out)
    assert value["drawing"] == f"tiny-{kind}.svg"
    assert boxes(tiny / value["drawing"]) == actions
    assert value["equal_stages_bubble"] == pytest.approx(bubble)
    # The head makes the last stage longer, so that ranks wait longer than in the closed form.
    assert bubble <= value["bubble"] < bubble + 0.4
    assert [layer for stage in value["stages"] for layer in stage] == list(range(8))


def test_the_text_says_what_each_rank_waits_and_holds(tiny: Path, call: Call) -> None:
    drawn = call("plan", "draw", "tiny.toml", *LAYERS, "--ranks", 4, "--microbatches", 8, "--out", "here.svg")
    assert "4 | 3 | 2 | 1 forward passes at most" in drawn.out
    assert "(27.3% in closed form for equal stages)" in drawn.out
    assert boxes(tiny / "here.svg") == 2 * 4 * 8


def test_without_options_the_pipeline_of_the_recipe_is_drawn(tiny: Path, call: Call) -> None:
    settings = (*LAYERS, "parallel.pipeline=2", "parallel.schedule=interleaved", "parallel.chunks=4")
    value = json.loads(call("plan", "draw", "tiny.toml", *settings, "plan.microbatch_size=1", "--json").out)
    assert (value["schedule"], value["ranks"], value["chunks"], value["microbatches"]) == ("interleaved", 2, 4, 4)
    assert value["stages"] == [[layer] for layer in range(8)]
    # Another schedule does not take over the number of chunks.
    other = json.loads(call("plan", "draw", "tiny.toml", *settings, "--schedule", "1f1b", "--json").out)
    assert (other["chunks"], len(other["stages"])) == (1, 2)


def test_a_recipe_without_a_pipeline_is_told_how_to_try_one(tiny: Path, call: Call) -> None:
    ended = call("plan", "draw", "tiny.toml")
    assert ended.status == 2
    assert "set `parallel.pipeline`, or try one with --ranks 4" in ended.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--ranks", 16, "--microbatches", 16], "16 pipeline stages"),
        (["--ranks", 4, "--microbatches", 6, "--schedule", "interleaved"], "does not divide the 6 of a step"),
        (["--ranks", 4, "--chunks", 2], "leave it out, or take interleaved"),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(options: list[object], words: str, tiny: Path, call: Call) -> None:
    ended = call("plan", "draw", "tiny.toml", *LAYERS, *options)
    assert ended.status == 2
    assert words in ended.err
    assert list(tiny.glob("*.svg")) == []


def test_a_recipe_may_still_come_first(tiny: Path, call: Call) -> None:
    assert "parameters" in call("plan", "tiny.toml").out
    assert json.loads(call("plan", "tiny.toml", "model.layers=3", "--json").out)["phases"][0]["spec"]["layers"] == 3
