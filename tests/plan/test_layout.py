"""Errors about settings that do not fit together give the true reason, and only remedies that help."""

from __future__ import annotations

from typing import Any

import pytest

from ropewalk.plan.layout import problems
from ropewalk.plan.plan import Plan
from tests.tiny import small_spec


def found(**settings: Any) -> str:
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=2, **settings)
    return "\n".join(problems(plan, small_spec()))


@pytest.mark.parametrize(
    "settings", [{"saved_activations": "8-bit"}, {"saved_activations": "packed"}, {"offload": ("activations",)}]
)
def test_recomputation_is_no_remedy_where_something_else_prevents_compiling(settings: dict[str, Any]) -> None:
    assert found(compile=True, **settings).endswith("need the inside of a block; use `auto`")
    assert found(compile=True, recompute="full", **settings) != ""


@pytest.mark.parametrize("recompute", ["attention", "auto"])
def test_full_recomputation_is_a_remedy_where_it_makes_compiling_possible(recompute: str) -> None:
    assert found(compile=True, recompute=recompute).endswith("use `auto`, or set `parallel.recompute` full")
    assert found(compile=True, recompute="full") == ""


@pytest.mark.parametrize("recompute", ["full", "auto"])
def test_packed_activations_and_recomputation_are_refused_with_the_reason(recompute: str) -> None:
    eight = found(saved_activations="8-bit", recompute=recompute)
    assert f"`parallel.recompute` {recompute}: recomputing a block from rounded inputs would change its result" in eight
    packed = found(saved_activations="packed", recompute=recompute)
    assert "a recomputed block saves only its input" in packed


@pytest.mark.parametrize("settings", [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}], ids=str)
def test_blocks_that_communicate_may_be_compiled(settings: dict[str, Any]) -> None:
    assert found(compile=True, **settings) == ""
