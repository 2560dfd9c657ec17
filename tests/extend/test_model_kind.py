"""A user's kind of model in one file beside the recipe: planned, trained on any ranks, recomputed, saved, evaluated."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from ropewalk.base.errors import ConfigError, UserError
from ropewalk.model.components import MODELS, Table
from ropewalk.model.protocol import build_model
from ropewalk.plan.config import Parallel
from ropewalk.plan.layout import laid_out
from ropewalk.plan.plan import Plan
from tests.model.specs import small

from .recurrent import Recurrent
from .test_components import TWO, Call, call, trained

__all__ = ["call"]

OURS = Path(__file__).with_name("recurrent.py")
KIND = "model.kind=recurrent:Recurrent"


def test_a_recurrent_model_trains_on_one_device_replicas_and_a_pipeline(call: Call) -> None:
    assert len(OURS.read_text().splitlines()) < 60
    shutil.copy(OURS, ".")
    alone = trained(call, "alone", KIND)
    assert alone[-1] < alone[0]
    for parallel in ("replicate", "pipeline"):
        assert trained(call, parallel, KIND, f"parallel.{parallel}=2", *TWO) == pytest.approx(alone, rel=1e-5)
    status, out, err = call("evaluate", "runs/alone", "--json")
    assert status == 0, err
    assert json.loads(out)["bits_per_byte"] > 0
    # Without the auxiliary loss of its layers another model is trained.
    Path("recurrent.py").write_text(OURS.read_text().replace("coefficient=0.1", "coefficient=0.0"))
    plain = trained(call, "plain", KIND)
    assert plain != pytest.approx(alone, rel=1e-3)


def test_its_declarations_are_exact() -> None:
    spec = small(kind="tests.extend.recurrent:Recurrent")
    model = build_model(spec, seed=0)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == spec.shapes()
    assert spec.parameters() == sum(p.numel() for p in model.parameters())
    assert spec.flops_per_token() == 6 * (spec.layers * 2 * spec.width**2 + spec.vocabulary * spec.width)


def test_a_class_that_declares_no_components_is_no_model_kind() -> None:
    with pytest.raises(ConfigError, match="`colorsys:rgb_to_hsv` is no model kind: it has no `components`"):
        MODELS["colorsys:rgb_to_hsv"]


def test_positions_of_a_recurrent_model_are_not_split() -> None:
    spec = small(kind="tests.extend.recurrent:Recurrent")
    plan = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=2)
    with pytest.raises(UserError, match=r"`parallel.context` splits positions, which .* needs together"):
        laid_out(plan, Parallel(context=2), spec, processes=2)
    assert not laid_out(plan, Parallel(tensor=2), spec, processes=2).sequence


def test_a_parameter_that_no_component_declares_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Recurrent, "components", lambda spec: {"embedding": Table(spec.vocabulary, spec.width)})
    with pytest.raises(
        UserError, match=r"parameter `blocks\.0\..*` has shape .*, but its component does not declare it"
    ):
        build_model(small(kind="tests.extend.recurrent:Recurrent", layers=5), seed=0)
