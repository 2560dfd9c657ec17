"""What is said of settings that do not fit together: the true reason, and only remedies that are one."""

from __future__ import annotations

from typing import Any

import pytest

from ropewalk.plan.layout import problems
from ropewalk.plan.plan import Plan
from tests.tiny import small_spec


def said(**settings: Any) -> str:
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=2, **settings)
    return "\n".join(problems(plan, small_spec()))


@pytest.mark.parametrize(
    "settings", [{"saved_activations": "8-bit"}, {"saved_activations": "packed"}, {"offload": ("activations",)}]
)
def test_recomputation_is_no_remedy_where_something_else_hinders_compiling(settings: dict[str, Any]) -> None:
    assert said(compile=True, **settings).endswith("must see; leave it to `auto`")
    assert said(compile=True, recompute="full", **settings) != ""


@pytest.mark.parametrize("recompute", ["attention", "auto"])
def test_full_recomputation_is_a_remedy_where_it_makes_compiling_possible(recompute: str) -> None:
    assert said(compile=True, recompute=recompute).endswith("leave it to `auto`, or set `parallel.recompute` full")
    assert said(compile=True, recompute="full") == ""


@pytest.mark.parametrize("recompute", ["full", "auto"])
def test_why_blocks_with_packed_activations_are_not_computed_again(recompute: str) -> None:
    eight = said(saved_activations="8-bit", recompute=recompute)
    assert (
        f"`parallel.recompute` {recompute}: a block computed again from rounded inputs would be another block" in eight
    )
    packed = said(saved_activations="packed", recompute=recompute)
    assert "one that is computed again keeps its input alone" in packed


@pytest.mark.parametrize("settings", [{"tensor": 2}, {"tensor": 2, "sequence": True}, {"context": 2}], ids=str)
def test_blocks_that_communicate_may_be_compiled(settings: dict[str, Any]) -> None:
    assert said(compile=True, **settings) == ""
