"""`ropewalk plan` in words: every figure says what it counts, every option that differs is named."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ropewalk.base.progress import amount

from .conftest import Call


def rows(text: str) -> dict[str, str]:
    found = (re.fullmatch(r"(\S.*?) {2,}(.*)", line) for line in text.splitlines())
    return {row[1]: row[2] for row in found if row}


@pytest.mark.parametrize("words", [["plan", "tiny.toml"], ["train", "tiny.toml", "--dry-run"]])
def test_flops_of_a_token_times_tokens_are_the_flops(words: list[str], tiny: Path, call: Call) -> None:
    (phase,) = json.loads(call(*words, "--json").out)["phases"]
    derived = phase["derived"]
    a_token = derived["flops_per_token_causal"]
    assert a_token < derived["flops_per_token"]
    assert phase["tokens"] * a_token == derived["flops"]
    assert (
        rows(call(*words).out)["FLOPs"] == f"{amount(derived['flops'])} ({amount(a_token)} per token, causal attention)"
    )


def test_the_flops_of_all_phases_say_which_attention_they_count(tiny: Path, call: Call) -> None:
    recipe = tiny / "tiny.toml"
    phases = "[[train.phases]]\nsteps = 4\n[[train.phases]]\nsteps = 1\nschedule.warmup_steps = 0\n[plan]"
    recipe.write_text(recipe.read_text().replace("steps = 6\n", "", 1).replace("[plan]", phases))
    total = json.loads(call("plan", "tiny.toml", "--json").out)["derived"]["flops"]
    text = call("plan", "tiny.toml").out
    assert f"{amount(total)} FLOPs, causal attention\n" in text
    assert " in 1 step\n" in text


def test_the_time_is_an_interval_with_its_reasons(tiny: Path, call: Call) -> None:
    found = rows(call("plan", "tiny.toml").out)
    assert re.fullmatch(r"training takes about [\d.]+( to [\d.]+)? \w+", found["time"])
    assert "measured" in call("plan", "tiny.toml").out


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (["parallel.recompute=full"], "recompute full"),
        (
            ["parallel.saved_activations=8-bit", 'parallel.offload=["optimizer"]'],
            "activations 8-bit, offload optimizer",
        ),
        (["parallel.devices=2", "plan.deterministic=true"], "devices 2, deterministic"),
        ([], None),
    ],
)
def test_one_process_tells_how_it_differs_from_a_plain_step(
    settings: list[str], options: str | None, tiny: Path, call: Call
) -> None:
    found = rows(call("plan", "tiny.toml", "plan.device=cpu", *settings).out)
    assert found.get("options") == options
    assert "memory" in found
    assert not {"processes", "memory per rank"} & found.keys()


def test_several_processes_tell_it_too_and_have_memory_each(tiny: Path, call: Call) -> None:
    settings = ("parallel.replicate=2", "parallel.exact=true", "parallel.saved_activations=packed")
    found = rows(call("plan", "tiny.toml", "plan.device=cpu", *settings, "plan.microbatch_size=1").out)
    assert found["processes"] == "2 = replicate 2"
    assert found["options"] == "activations packed, exact"
    assert "memory per rank" in found
