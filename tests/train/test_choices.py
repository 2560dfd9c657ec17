"""Every value of every option: the loss falls, a stop in the middle changes no bit, the model can be exported.

Each by itself, which is slow; otherwise a dozen runs hold them all, several at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from transformers import AutoModelForCausalLM

from ropewalk.base.errors import UserError
from ropewalk.base.events import read_events, steps
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import load
from ropewalk.config.schema import fields_of
from ropewalk.flow.models import export_model
from ropewalk.model.config import Lora, Model
from ropewalk.model.decoder import Decoder
from ropewalk.parallel import state
from ropewalk.parallel.executor import StepResult
from ropewalk.parallel.precision import LossScale
from ropewalk.train import training_run
from ropewalk.train.config import BatchRamp, EarlyStop, Guard, LengthRamp, Phase, Schedule, Share, Train
from ropewalk.train.config import Optimizer as OptimizerSettings
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run

STEPS = 30
# Adafactor has no momentum and LAMB's steps are in proportion to the weights: both want their own rate.
OPTIMIZERS = {"adamw": 1e-2, "adamw-8bit": 1e-2, "adafactor": 2e-2, "lamb": 5e-2, "muon": 1e-2}
WITH: dict[str, dict[str, Any]] = {
    "train.schedule.shape=step": {"train__schedule__milestones": (0.5, 1.0)},
    # No validation gains a hundred nats: the rate falls at every second one.
    "train.schedule.shape=adaptive": {
        "train__schedule__patience": 2,
        "train__schedule__min_delta": 100.0,
        "train__schedule__factor": 0.7,
        "train__schedule__final_lr_ratio": 0.2,
    },
    "train.schedule.decay_form=linear": {"train__schedule__shape": "wsd"},
    "train.schedule.decay_form=1-sqrt": {"train__schedule__shape": "wsd"},
    **{
        f"train.schedule.milestone_unit={unit}": {"train__schedule__shape": "step", "train__schedule__milestones": at}
        for unit, at in {"steps": (9.0, 20.0), "tokens": (500.0, 1000.0), "epochs": (0.5, 1.0)}.items()
    },
    **{f"train.optimizer.kind={kind}": {"train__schedule__peak_lr": rate} for kind, rate in OPTIMIZERS.items()},
    "train.optimizer.relative_step=True": {"train__optimizer__kind": "adafactor", "train__schedule__peak_lr": 0.3},
    "model.rope_scaling=linear": {"model__rope_factor": 2.0},
    "model.rope_scaling=ntk": {"model__rope_factor": 2.0},
    "model.norm=none": {"model__init": "t-fixup"},
}
"""What a value needs beside it to mean something."""


def every_value() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each value of each option with named values, read from the settings themselves: a new one is tested too."""
    sections = {"model": Model, "train": Train, "train.optimizer": OptimizerSettings, "train.schedule": Schedule}
    for section, cls in sections.items():
        for option in fields_of(cls):
            values: tuple[Any, ...] = (False, True) if option.kind is bool else tuple(option.registry or ())
            if get_origin(option.kind) is Literal:
                values = get_args(option.kind)
            if option.registry is None or len(option.registry) > 1:
                for value in values:
                    name = f"{section}.{option.name}={value}"
                    key = f"{section}.{option.name}".replace(".", "__")
                    yield name, {key: value, **WITH.get(name, {})}


PHASES = (
    Phase(steps=12, length_ramp=LengthRamp(from_length=8, over_steps=6)),
    Phase(steps=18, sequence_length=8, mixture=(Share(source="code", weight=2.0), Share(source="notes"))),
)
CHOICES: dict[str, dict[str, Any]] = {
    **dict(every_value()),
    "grouped queries": {"model__kv_heads": 1},
    "window": {"model__window": 5},
    "dropout": {"model__dropout": 0.1},
    "no clipping, no decay": {"train__clip_norm": 0.0, "train__optimizer__weight_decay": 0.0},
    "batch ramp": {"train__batch_ramp": BatchRamp(from_size=1, over_steps=10)},
    "length ramp": {"train__length_ramp": LengthRamp(from_length=8, over_steps=10)},
    "mixture": {"train__mixture": (Share(source="code"),)},
    "frozen": {"train__frozen": ("blocks.0", "*norm*")},
    "adapters": {"train__lora": Lora(rank=4), "train__schedule__peak_lr": 0.1},
    "adapters of attention": {"train__lora": Lora(targets="attention"), "train__schedule__peak_lr": 0.2},
    "phases": {"train__steps": None, "train__phases": PHASES},
    "fresh moments": {"train__steps": None, "train__phases": (PHASES[0], Phase(steps=18, moments="fresh"))},
    "guard": {"train__guard": Guard(not_finite="rollback", spike="skip", window_steps=5)},
    "guard off": {"train__guard": Guard(spike="off")},
    "early stop": {"train__early_stop": EarlyStop(patience=4)},
    "layers": {"train__layer_stats_every_steps": 4},
}
PAIRS: dict[str, dict[str, Any]] = {
    f"{kind} {precision}": {
        "train__optimizer__kind": kind,
        "train__schedule__peak_lr": rate,
        "train__precision": precision,
    }
    for kind, rate in OPTIMIZERS.items()
    for precision in ("bf16-pure", "fp16")
}
"""Every optimizer with weights and with gradients of 16 bits."""

TOGETHER: dict[str, tuple[str, ...]] = {
    "as Llama": (
        *("model.bias=False", "model.norm=rms", "model.norm_position=pre", "model.mlp=swiglu", "model.position=rope"),
        *("model.qk_norm=False", "model.rope_scaling=none", "model.tie_embeddings=True", "model.init=gaussian"),
        *("grouped queries", "train.precision=fp32", "train.optimizer.kind=adamw", "train.schedule.shape=cosine"),
        *("model.documents=ignore", "guard", "train.optimizer.relative_step=False"),
    ),
    "as GPT-2": (
        *("model.bias=True", "model.norm=layer", "model.mlp=gelu-tanh", "model.position=learned", "dropout"),
        *("model.init=depth-scaled", "train.precision=fp16", "train.optimizer.kind=adamw-8bit"),
        *("train.schedule.shape=linear", "layers"),
    ),
    "queries and keys normed": (
        *("model.qk_norm=True", "model.tie_embeddings=False", "train.precision=bf16", "train.optimizer.kind=muon"),
        *("train.schedule.shape=wsd", "train.schedule.decay_form=1-sqrt", "guard off"),
    ),
    "as Vaswani et al.": (
        *("model.norm_position=post", "model.norm=layer", "model.mlp=gelu", "model.position=sinusoidal"),
        *("model.init=lipschitz", "model.documents=separate", "train.precision=bf16-pure"),
        *("train.optimizer.kind=adafactor", "train.schedule.decay_form=linear", "batch ramp"),
    ),
    "without norms": (
        *("model.norm=none", "model.init=t-fixup", "model.mlp=relu2", "model.position=alibi"),
        *("train.optimizer.kind=lamb", "train.schedule.shape=constant", "no clipping, no decay"),
    ),
    "norms on both sides": (
        *("model.norm_position=both", "model.mlp=geglu", "model.rope_scaling=ntk", "model.init=ds-init", "window"),
        *("train.precision=fp8", "train.schedule.shape=step", "train.schedule.milestone_unit=epochs", "length ramp"),
    ),
    "without positions": (
        *("model.position=none", "model.init=zero-projection", "train.precision=auto"),
        *("train.schedule.shape=adaptive", "early stop", "train.optimizer.relative_step=True"),
    ),
    "a part frozen": ("frozen", "mixture", "model.rope_scaling=linear"),
    "adapters": ("adapters", "train.schedule.milestone_unit=steps"),
    "adapters of attention": ("adapters of attention", "train.schedule.milestone_unit=tokens"),
    "phases": ("phases",),
    "fresh moments": ("fresh moments",),
}
"""Runs that hold every choice at least once."""


def coordinator(names: tuple[str, ...]) -> dict[str, Any]:
    """The settings of several choices, which must not contradict each other."""
    made: dict[str, Any] = {}
    for name in names:
        assert all(made.get(key, value) == value for key, value in CHOICES[name].items()), name
        made |= CHOICES[name]
    return made


class Stop(Exception):
    """What a test stops a run with."""


class StopAfter(Hook):
    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == 17:
            raise Stop


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(training_run, "peak_flops", lambda *_: 1e11)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus, made once."""
    folder = tmp_path_factory.mktemp("corpus")
    make_run(folder)
    return folder / "prepared"


def make(folder: Path, prepared: Path, choice: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "prepared").symlink_to(prepared)
    settings = {"train__steps": STEPS, "train__validate_every_steps": 3, "train__log_every_steps": 5, **choice}
    return make_run(folder, checkpoint__save_every_steps=7, **settings)


def last(run: Path) -> Path:
    return list_checkpoints(run / "checkpoints")[-1]


def rates(run: Path) -> list[float]:
    return [event["lr"] for event in steps(list(read_events(run / "events.jsonl")))]


def test_every_choice_is_among_those_that_are_made_together() -> None:
    assert {name for names in TOGETHER.values() for name in names} == CHOICES.keys()


@pytest.mark.parametrize(
    "choice",
    [
        *(pytest.param(coordinator(names), id=f"together: {title}") for title, names in TOGETHER.items()),
        *(pytest.param(choice, id=name, marks=pytest.mark.slow) for name, choice in {**CHOICES, **PAIRS}.items()),
    ],
)
def test_it_learns_and_goes_on_after_a_stop_with_the_same_bits(
    tmp_path: Path, prepared: Path, choice: dict[str, Any]
) -> None:
    straight, stopped = (make(tmp_path / name, prepared, choice) for name in ("straight", "stopped"))
    train(straight)
    losses = [event["loss"] for event in read_events(straight / "events.jsonl") if event["kind"] == "step"]
    # Beside a frozen embedding of first values, which is also the head, adapters can gain little.
    assert losses[-1] < losses[0] - (0.005 if choice.get("train__lora") else 0.5)
    with pytest.raises(Stop):
        train(stopped, hooks=[StopAfter()])
    train(stopped)
    assert {f.name: f.read_bytes() for f in last(straight).iterdir()} == {
        f.name: f.read_bytes() for f in last(stopped).iterdir()
    }
    assert rates(straight) == rates(stopped)
    assert_exports(straight, tmp_path / "exported")


def assert_exports(run: Path, folder: Path) -> None:
    """Where a layout of Hugging Face's holds the model, the weights that were trained give the same logits there."""
    state = load(last(run))
    try:
        export_model(run, folder)
    except UserError as error:
        assert "layout" in str(error)  # noqa: PT017 - most options have one, some have none, and say so
        return
    tokens = torch.arange(2, 14)[None]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = Decoder(state.spec)
    model.load_state_dict(dict(state.model))
    with torch.no_grad():
        logits = model.logits(model(tokens))
        torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=1e-5)


def test_an_adaptive_rate_falls_and_its_state_is_in_the_checkpoint(tmp_path: Path, prepared: Path) -> None:
    run = make(tmp_path / "here", prepared, CHOICES["train.schedule.shape=adaptive"])
    train(run)
    # Ten validations, the first sets the best: falls with the 3rd, 5th, 7th and 9th, after steps 9, 15, 21 and 27.
    assert rates(run) == pytest.approx([1e-2 * 0.7**falls for falls in (0, 1, 1, 2, 3, 4)])
    plateau = read_checkpoint_manifest(last(run)).validation["plateau"]
    assert (plateau["share"], plateau["waited"]) == (pytest.approx(0.7**4), 1)


def test_an_overflow_in_fp16_is_told_with_the_scale(tmp_path: Path, prepared: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(state, "LossScale", lambda device: LossScale(device, start=2.0**32))
    run = make(tmp_path / "here", prepared, CHOICES["train.precision=fp16"])
    train(run)
    logged = [event for event in read_events(run / "events.jsonl") if event["kind"] == "step"]
    anomalies = [event for event in read_events(run / "events.jsonl") if event["kind"] == "anomaly"]
    assert logged[0]["skipped"] == 5
    assert logged[0]["loss_scale"] == 2.0**28
    assert [event["step"] for event in anomalies[:5]] == [1, 2, 3, 4, 5]
    assert {(event["what"], event["action"]) for event in anomalies} == {("overflow in fp16", "skip")}
    assert logged[-1]["skipped"] == 0
    assert logged[-1]["loss"] < logged[0]["loss"]
