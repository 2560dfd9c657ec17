"""Figures of layers: those of a computation by hand, at no cost to the run that is measured."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model.attend import attend_for
from ropewalk.model.config import Lora
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import Spec
from ropewalk.model.trainable import trained_names, with_lora
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Plan
from ropewalk.train import active_phase as phase_module
from ropewalk.train.config import Optimizer, Phase
from ropewalk.train.hooks.layer_health import LayerFigures
from ropewalk.train.hooks.layer_stats import columns, layers_of, measuring
from ropewalk.train.loop import train
from ropewalk.train.optim.optimizers import make_optimizer
from tests.tiny import make_run, random_batch, small_spec
from tests.train.runs import events, final_files, quick, train_until
from tests.train.test_training import documented_fields

LR, DECAY, CLIP, ROWS, FIRST_ROWS = 1e-2, 0.1, 0.05, 6, 2


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def executor(
    spec: Spec, *, precision: str = "fp32", dtype: torch.dtype = torch.float32, frozen: tuple[str, ...] = ()
) -> Executor:
    plan = Plan(device="cpu", precision=precision, batch_size=ROWS, microbatch_size=FIRST_ROWS)  # type: ignore[arg-type]
    settings = Optimizer(weight_decay=DECAY)
    trained = trained_names(spec, frozen) if frozen or spec.lora_rank else None
    model = build(spec, seed=0, dtype=dtype)
    return apply(
        plan, model, None, lambda p, _: make_optimizer(p, settings, spec=spec), trained=trained, clip_norm=CLIP
    )


def measured(made: Executor, spec: Spec) -> dict[str, LayerFigures]:
    with measuring(made) as measurement:
        made.step(random_batch(spec, rows=ROWS), lr=LR)
    return {layer.name: layer for layer in measurement.read()}


def rms(value: Tensor) -> float:
    return value.square().mean().sqrt().item()


def outputs_by_hand(model: Decoder, spec: Spec) -> dict[str, float]:
    """Root mean squares of the first microbatch of a pre-norm model with learned positions, block by block."""
    batch = random_batch(spec, rows=ROWS)
    every = ROWS // FIRST_ROWS  # the first of n microbatches has every n-th row
    tokens, positions = batch.tokens[::every], batch.positions[::every]
    found: dict[str, float] = {}
    with torch.no_grad():
        x = model.embedding.weight[tokens] + model.positions.weight[positions]
        found["embedding"] = rms(x)
        for name, block in model.blocks.items():
            added = block.attention(block.attention_norm(x), angles=None, attend=attend_for(spec))
            found[f"blocks.{name}.attention"] = rms(added)
            x = x + added
            added = block.mlp(block.mlp_norm(x))
            found[f"blocks.{name}.mlp"] = rms(added)
            x = x + added
            found[f"blocks.{name}"] = rms(x)
        found["norm"] = rms(model.norm(x))
    return found


def gradients_by_hand(model: Decoder, spec: Spec) -> dict[str, Tensor]:
    """Of the mean loss over all rows at once."""
    batch = random_batch(spec, rows=ROWS)
    model.zero_grad()
    hidden = model(batch.tokens, positions_BT=batch.positions, attend=attend_for(spec))
    token_losses(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten()).mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def first_update(name: str, weight: Tensor, gradient: Tensor, clip: float) -> Tensor:
    """AdamW's first step (Loshchilov and Hutter 2019, algorithm 2): both moments are the gradient's own."""
    clipped = gradient * clip
    decay = DECAY if weight.dim() == 2 and not name.startswith("positions") else 0.0
    return -LR * (clipped / (clipped.abs() + 1e-8) + decay * weight)


def test_figures_equal_a_computation_by_hand_in_float64() -> None:
    spec = small_spec(layers=3, position="learned", norm="layer", mlp="gelu", tie_embeddings=False)
    made = executor(spec, dtype=torch.float64)
    model = copy.deepcopy(made.model)
    found = measured(made, spec)

    gradients, weights = gradients_by_hand(model, spec), dict(model.named_parameters())
    clip = min(1.0, CLIP / (math.hypot(*(g.norm().item() for g in gradients.values())) + 1e-6))
    assert clip < 1  # so that figures before and after clipping differ
    updates = {name: first_update(name, weights[name].detach(), g, clip) for name, g in gradients.items()}
    members = {name: [full for full in weights if full.startswith(name)] for name in found}
    for name, layer in found.items():
        for figure, tensors in (("gradient", gradients), ("weight", weights), ("update", updates)):
            by_hand = torch.cat([tensors[full].flatten() for full in members[name]]).norm().item()
            # One part in 10^11: sums over microbatches in another order, and the 1e-8 beside small gradients.
            assert getattr(layer, figure) == pytest.approx(by_hand, rel=1e-11), (name, figure)
        assert layer.update_ratio == layer.update / layer.weight
    activations = {name: layer.activation for name, layer in found.items() if layer.activation is not None}
    assert activations == pytest.approx(outputs_by_hand(model, spec), rel=1e-12)
    assert list(found) == [
        *("embedding", "positions"),
        *("blocks.0", "blocks.0.attention", "blocks.0.mlp"),
        *("blocks.1", "blocks.1.attention", "blocks.1.mlp"),
        *("blocks.2", "blocks.2.attention", "blocks.2.mlp"),
        *("norm", "head"),
    ]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
def test_the_update_is_that_of_the_weights_which_the_optimizer_sees(precision: str) -> None:
    spec = small_spec()
    made = executor(spec, precision=precision)
    before = {name: weight.clone() for name, weight in local(made.model_state()).items()}
    found = measured(made, spec)
    after = local(made.model_state())
    for name, layer in found.items():
        inside = [full for full in after if name in layers_of(full)]
        change = torch.cat([(after[full] - before[full]).double().flatten() for full in inside])
        assert layer.update == pytest.approx(change.norm().item(), rel=1e-5)
        assert layer.update > 0


def test_frozen_layers_have_an_output_and_no_gradient() -> None:
    spec = small_spec(layers=3)
    found = measured(executor(spec, frozen=("embedding", "blocks.0", "blocks.1.mlp*")), spec)
    untrained = [name for name, layer in found.items() if layer.gradient is None]
    assert untrained == ["embedding", "blocks.0", "blocks.0.attention", "blocks.0.mlp", "blocks.1.mlp"]
    assert all(found[name].update is None and found[name].update_ratio is None for name in untrained)
    assert all(layer.activation for layer in found.values())
    assert found["blocks.1"].gradient == found["blocks.1.attention"].gradient


def test_adapters_are_measured_by_themselves() -> None:
    spec = with_lora(small_spec(), Lora(rank=2))
    made = executor(spec)
    adapters = [
        weight.clone()
        for name, weight in local(made.model_state()).items()
        if name.startswith("blocks.0.mlp.") and "lora" in name
    ]
    found = measured(made, spec)
    assert (found["embedding"].gradient, found["norm"].gradient) == (None, None)
    assert found["blocks.0.mlp"].weight == pytest.approx(math.hypot(*(a.norm().item() for a in adapters)), rel=1e-6)


def test_a_skipped_update_is_an_update_of_0() -> None:
    spec = small_spec()
    made = executor(spec)
    made.hooks.on_gradients.append(lambda gradients: next(iter(gradients.values())).fill_(float("nan")))
    found = measured(made, spec)
    assert math.isnan(found["embedding"].gradient)
    assert {layer.update for layer in found.values()} == {0.0}
    assert columns(list(found.values()))["gradient"][1] > 0


def test_nothing_is_left_behind_in_the_model() -> None:
    spec = small_spec()
    made = executor(spec)
    measured(made, spec)
    assert made.hooks.on_gradients == []
    assert [
        name for name, module in made.model.named_modules() if module._forward_hooks or module._forward_pre_hooks
    ] == []


LORA = Phase(steps=4, lora=Lora(rank=2))
KINDS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"train__precision": "bf16"},
    "bf16-pure": {"train__precision": "bf16-pure"},
    "fp16": {"train__precision": "fp16"},
    "dropout": {"model__dropout": 0.2},
    "phases": {"train__steps": None, "train__phases": (Phase(steps=5, frozen=("blocks.0",)), LORA, Phase(steps=3))},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_measured_run_ends_with_the_bits_of_one_that_is_not(tmp_path: Path, kind: str) -> None:
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    without = make_run(plain, **KINDS[kind])
    within = make_run(watched, train__layer_stats_every_steps=1, **KINDS[kind])
    train(without)
    train(within)
    assert final_files(within) == final_files(without)
    assert [event["step"] for event in events(within, "layers")] == [
        *range(1, events(within, "train_finished")[0]["step"] + 1)
    ]
    assert events(without, "layers") == []


def test_the_interval_may_change_when_a_run_goes_on(tmp_path: Path) -> None:
    straight = make_run(tmp_path / "straight")
    train(straight)
    run = make_run(tmp_path / "stopped", train__layer_stats_every_steps=2)
    train_until(run, 5)
    run = make_run(tmp_path / "stopped", train__layer_stats_every_steps=4)
    train(run)
    assert [event["step"] for event in events(run, "layers")] == [2, 4, 4, 8]
    assert final_files(run) == final_files(straight)


def test_the_event_has_the_documented_fields_and_one_value_a_layer(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__layer_stats_every_steps=8)
    train(run)
    (event,) = events(run, "layers")
    fields = set(event) - {"format", "time", "rank", "kind"}
    assert fields == documented_fields()["layers"]
    assert {len(event[field]) for field in fields - {"step"}} == {len(event["layers"])}
    # The gradient of the whole is that of its layers, without the parts, which are inside of blocks.
    outer = [g for name, g in zip(event["layers"], event["gradient"], strict=True) if name.count(".") < 2]
    assert math.hypot(*outer) == pytest.approx(events(run, "step")[-1]["grad_norm"], rel=1e-5)


class Listener:
    """Keeps what is said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def begin(self, task: str, total: float | None, unit: str) -> None: ...
    def advance(self, done: float, note: str = "") -> None: ...
    def end(self, note: str = "") -> None: ...
    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.mark.parametrize("factor", [1e-6, 1e6])
@pytest.mark.parametrize(
    "model",
    [{}, {"model__norm_position": "post"}, {"model__norm": "none", "model__init": "t-fixup"}],
    ids=["pre", "post", "none"],
)
@pytest.mark.parametrize("part", ["", "mlp"], ids=["block", "mlp"])
def test_a_block_of_wrong_size_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, factor: float, model: dict[str, Any], part: str
) -> None:
    def build_sick(spec: Spec) -> Decoder:
        made = build(spec, seed=0)
        with torch.no_grad():
            for matrix in (p for p in made.get_submodule(f"blocks.5.{part}".rstrip(".")).parameters() if p.dim() == 2):
                matrix.mul_(factor)
        return made

    monkeypatch.setattr(phase_module, "empty", build_sick)
    run = make_run(tmp_path, train__layer_stats_every_steps=1, train__steps=2, model__layers=8, **model)
    listener = Listener()
    train(run, progress=listener)
    warning = events(run, "warning")[0]["message"]
    assert warning.startswith("step 1: blocks.5")
    assert "look at the weights" in warning or "`train.precision=fp32`" in warning
    assert f"warning: {warning}" in listener.lines


def test_a_healthy_run_has_no_warning(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__layer_stats_every_steps=1, train__steps=20, model__layers=8)
    train(run)
    assert events(run, "warning") == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16-pure", "fp16"])
def test_on_a_gpu_a_measured_step_waits_only_to_be_read(precision: str) -> None:
    spec = small_spec()
    plan = Plan(device="cuda", precision=precision, batch_size=ROWS, microbatch_size=FIRST_ROWS)  # type: ignore[arg-type]
    model = build(spec, seed=0, device="cuda")
    made = apply(plan, model, None, lambda p, _: make_optimizer(p, Optimizer(), spec=spec), clip_norm=CLIP)
    batch = random_batch(spec, rows=ROWS).pinned()
    made.step(batch, lr=LR)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with measuring(made) as measurement:
            made.step(batch, lr=LR)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(layer.update for layer in measurement.read())
