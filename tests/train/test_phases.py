"""Phases, ramps, frozen parts, adapters, other starts: equal to a loop written by hand, and indifferent to stops."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import RunConflict, UserError
from ropewalk.checkpoint.read.load import load
from ropewalk.flow.models import export_model
from ropewalk.load.loader import Loader
from ropewalk.model.config import Lora
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.init import initial_value
from ropewalk.model.loss import token_losses
from ropewalk.model.spec import Spec
from ropewalk.train.config import BatchRamp, LengthRamp, Phase, Schedule, Share, Train
from ropewalk.train.loop import train
from ropewalk.train.phase_spec import phases_of
from tests.tiny import make_run
from tests.train.runs import events, final_files, in_float64, last_checkpoint, quick, train_until

PHASES = (
    Phase(
        name="ramps",
        steps=8,
        batch_size=8,
        batch_ramp=BatchRamp(from_size=2, over_steps=6),
        length_ramp=LengthRamp(from_length=8, over_steps=4),
    ),
    Phase(
        name="code",
        steps=5,
        sequence_length=8,
        mixture=(Share(source="code"),),
        frozen=("embedding", "blocks.0"),
        schedule=Schedule(shape="linear", peak_lr=5e-3, warmup_steps=0, final_lr_ratio=0.0),
    ),
    Phase(name="adapters", steps=4, lora=Lora(rank=2, alpha=6.0), moments="fresh"),
    Phase(name="end", steps=4, moments="keep"),
)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@dataclass
class Hand:
    """Training with plain PyTorch: one loop a phase, no microbatches, torch's own AdamW."""

    model: Decoder
    folder: Path
    clip_norm: float = 1.0
    moments: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)

    def train(
        self,
        *,
        seed: int,
        length: int,
        sizes: list[tuple[int, int]],
        rate: Callable[[int], float],
        trained: Callable[[str], bool] = lambda name: True,
        mixture: dict[str, float] | None = None,
    ) -> list[float]:
        """One phase; `sizes` are the rows read and the length they are cut to, by step. Returns the losses."""
        loader = Loader(self.folder, sequence_length=length, batch_size=8, seed=seed, mixture=mixture)
        names = [name for name, _ in self.model.named_parameters() if trained(name)]
        parameters = dict(self.model.named_parameters())
        groups = [
            {"params": [parameters[n] for n in names if parameters[n].dim() >= 2], "weight_decay": 0.1},
            {"params": [parameters[n] for n in names if parameters[n].dim() < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-8, foreach=False)
        for name in names:
            if name in self.moments:
                adamw.state[parameters[name]] = copy.deepcopy(self.moments[name])
        losses, row = [], 0
        for step, (rows, cut) in enumerate(sizes):
            batch = loader.batch(row, rows)
            row += rows
            tokens, targets = batch.tokens.reshape(-1, cut), batch.targets.reshape(-1, cut)
            hidden = self.model(tokens)
            loss = token_losses(hidden.flatten(0, 1), self.model.head_weight, targets.flatten()).mean()
            self.model.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_([parameters[name] for name in names], self.clip_norm)
            for group in adamw.param_groups:
                group["lr"] = rate(step)
            adamw.step()
            losses.append(loss.item())
        self.moments = {name: adamw.state[parameters[name]] for name in names}
        return losses


def cosine(steps: int, *, peak: float = 1e-2, warmup: int = 2, final: float = 0.1) -> Callable[[int], float]:
    def rate(step: int) -> float:
        if step < warmup:
            return peak * (step + 1) / (warmup + 1)
        share = (step - warmup) / (steps - 1 - warmup)
        return peak * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * share)))

    return rate


def fresh(spec: Spec) -> Decoder:
    return build(spec, seed=3, dtype=torch.float64)


def by_hand(folder: Path, spec: Spec, adapters: dict[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The run of PHASES, each number written out; `adapters` are those that the third phase begins with."""
    hand = Hand(fresh(spec), folder)
    seeds = [phase.seed(3) for phase in phases_of(Train(phases=PHASES), sequence_length=16)]
    losses = hand.train(
        seed=seeds[0],
        length=16,
        sizes=[(2, 8), (2, 8), (4, 8), (4, 8), (6, 16), (6, 16), (8, 16), (8, 16)],
        rate=cosine(8),
    )
    losses += hand.train(
        seed=seeds[1],
        length=8,
        sizes=[(4, 8)] * 5,
        rate=lambda step: 5e-3 * (1 - step / 4),
        trained=lambda name: not name.startswith(("embedding", "blocks.0.")),
        mixture={"code": 1.0},
    )
    # Adapters by their definition: a model whose matrices are W + 3 B A, and the chain rule does the rest.
    wide = Decoder(spec_with_adapters(spec)).double()
    wide.load_state_dict({**hand.model.state_dict(), **adapters})
    hand.model, hand.moments = wide, {}
    losses += hand.train(
        seed=seeds[2], length=16, sizes=[(4, 16)] * 4, rate=cosine(4), trained=lambda name: "lora" in name
    )
    merged = fresh(spec)
    trained = wide.state_dict()
    weights = {name: trained[name].clone() for name in merged.state_dict()}
    for name in trained:
        if name.endswith("lora_a"):
            part = name.removesuffix(".lora_a")
            weights[f"{part}.weight"] += 3.0 * trained[f"{part}.lora_b"] @ trained[name]
    merged.load_state_dict(weights)
    hand.model, hand.moments = merged, {}
    losses += hand.train(seed=seeds[3], length=16, sizes=[(4, 16)] * 4, rate=cosine(4))
    return hand.model.state_dict(), losses


def spec_with_adapters(spec: Spec) -> Spec:
    return dataclasses.replace(spec, lora_rank=2, lora_alpha=6.0, lora_targets="all")


def phased(folder: Path) -> Path:
    return make_run(folder, train__steps=None, train__phases=PHASES, train__log_every_steps=1)


def test_a_run_of_four_phases_equals_a_loop_written_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_float64(monkeypatch)
    run = phased(tmp_path)
    train_until(run, 14)
    # What the third phase's adapters were filled with at its beginning: A random, B zero.
    state = load(last_checkpoint(run))
    train(run)
    ended = load(last_checkpoint(run))
    plain = ended.spec
    wide = spec_with_adapters(plain)
    seed = phases_of(Train(phases=PHASES), sequence_length=16)[2].seed(3)
    adapters = {
        name: initial_value(name, shape, wide, seed=seed).double()
        for name, shape in wide.shapes().items()
        if "lora" in name
    }
    assert all((tensor == 0).all() == name.endswith("lora_b") for name, tensor in adapters.items())
    weights, losses = by_hand(tmp_path / "prepared", plain, adapters)
    ours = {event["step"]: event["loss"] for event in events(run, "step")}
    assert [ours[step] for step in sorted(ours)] == pytest.approx(losses, rel=0, abs=1e-12)
    assert weights.keys() == ended.model.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(ended.model[name], tensor, rtol=0, atol=1e-12, msg=name)
    assert state.step == 13
    assert [event["name"] for event in events(run, "phase_started")][:3] == ["ramps", "code", "adapters"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch.set_num_threads(1)
    run = phased(tmp_path_factory.mktemp("straight"))
    train(run)
    return final_files(run)


# In a ramp, at the end of a phase and in every phase; the others are at and beside the remaining borders.
STOPS = [(1,), (8,), (4, 10, 16, 19)]
MORE_STOPS = [pytest.param(stops, marks=pytest.mark.slow) for stops in [(7,), (9,), (13,), (14,), (17,), (20,)]]


@pytest.mark.parametrize("stops", [*STOPS, *MORE_STOPS], ids=str)
def test_a_run_of_phases_stopped_anywhere_ends_with_the_same_bits(
    tmp_path: Path, straight: dict[str, bytes], stops: tuple[int, ...]
) -> None:
    run = phased(tmp_path)
    for step in stops:
        train_until(run, step)
    train(run)
    assert final_files(run) == straight


@pytest.fixture
def pretrained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    in_float64(monkeypatch)
    run = make_run(tmp_path, train__steps=6)
    train(run)
    return run.rename(tmp_path / "pretrained")


def test_full_fine_tuning_equals_a_loop_that_begins_with_the_weights(tmp_path: Path, pretrained: Path) -> None:
    run = make_run(
        tmp_path, seed=9, train__steps=5, train__start_from=str(pretrained), train__mixture=(Share(source="notes"),)
    )
    train(run)
    start, ended = load(last_checkpoint(pretrained)), load(last_checkpoint(run))
    hand = Hand(fresh(start.spec), tmp_path / "prepared")
    hand.model.load_state_dict(dict(start.model))
    hand.train(seed=9, length=16, sizes=[(4, 16)] * 5, rate=cosine(5), mixture={"notes": 1.0})
    for name, tensor in hand.model.state_dict().items():
        torch.testing.assert_close(ended.model[name], tensor, rtol=0, atol=1e-12, msg=name)


def test_frozen_parameters_keep_every_bit_and_have_no_moments(tmp_path: Path, pretrained: Path) -> None:
    run = make_run(tmp_path, train__start_from=str(pretrained), train__frozen=("blocks.0-1.mlp", "*norm*"))
    train(run)
    before, after = load(last_checkpoint(pretrained)), load(last_checkpoint(run))
    frozen = {name for name in after.model if ".mlp." in name or "norm" in name}
    assert frozen
    for name in after.model:
        assert torch.equal(before.model[name], after.model[name]) == (name in frozen), name
    assert not {key.split("/")[1] for key in after.optimizer} & frozen


def test_adapters_alone_change_and_an_export_has_none(tmp_path: Path, pretrained: Path) -> None:
    run = make_run(tmp_path, train__start_from=str(pretrained), train__lora=Lora(rank=2))
    train(run)
    before, after = load(last_checkpoint(pretrained)), load(last_checkpoint(run))
    assert all(torch.equal(before.model[name], after.model[name]) for name in before.model)
    assert {key.split("/")[1] for key in after.optimizer if not key.startswith("guard/")} == {
        name for name in after.model if "lora" in name
    }
    # A later run may start from it without adapters: they are merged.
    later = make_run(tmp_path / "later", train__start_from=str(run), train__schedule__peak_lr=1e-30)
    train(later)
    merged = load(last_checkpoint(later)).model
    wide, plain = Decoder(after.spec).double(), Decoder(before.spec).double()
    wide.load_state_dict(dict(after.model))
    plain.load_state_dict(dict(merged))
    tokens = torch.arange(16)[None]
    torch.testing.assert_close(wide(tokens), plain(tokens), rtol=0, atol=1e-12)


def test_a_phase_may_start_from_another_run_in_the_middle(tmp_path: Path, pretrained: Path) -> None:
    phases = (Phase(steps=3), Phase(steps=2, start_from=str(pretrained)))
    run = make_run(tmp_path, train__steps=None, train__phases=phases, train__schedule__warmup_steps=0)
    train(run)
    alone = make_run(
        tmp_path / "alone", train__steps=2, train__start_from=str(pretrained), train__schedule__warmup_steps=0
    )
    assert [event["start_from"] != "" for event in events(run, "phase_started")] == [False, True]
    # The order of the second phase is its own, everything else is that of the run that starts there.
    train(alone)
    there, here = load(last_checkpoint(run)), load(last_checkpoint(alone))
    assert there.model.keys() == here.model.keys()
    assert there.step == 5
    assert here.step == 2


def test_a_hugging_face_directory_is_a_start(tmp_path: Path, pretrained: Path) -> None:
    export_model(pretrained, tmp_path / "hf")
    run = make_run(tmp_path, train__start_from=str(tmp_path / "hf"), train__steps=2, train__schedule__peak_lr=1e-30)
    train(run)
    before, after = load(last_checkpoint(pretrained)), load(last_checkpoint(run))
    for name, tensor in before.model.items():
        torch.testing.assert_close(after.model[name].float(), tensor.float(), rtol=1e-6, atol=1e-7)


def test_another_model_is_no_start(tmp_path: Path, pretrained: Path) -> None:
    run = make_run(tmp_path, train__start_from=str(pretrained), model__mlp_width=48)
    with pytest.raises(UserError, match=r"model\.mlp_width is 32, here 48"):
        train(run)


def test_a_checkpoint_of_more_phases_than_the_run_has_is_refused(tmp_path: Path) -> None:
    train(make_run(tmp_path, train__steps=None, train__phases=(Phase(steps=2), Phase(steps=2))))
    with pytest.raises(RunConflict, match="of another model or seed"):
        train(make_run(tmp_path, train__steps=2))


def ramps() -> Iterator[tuple[BatchRamp, int, list[int]]]:
    yield BatchRamp(from_size=2, over_steps=6), 8, [2, 2, 4, 4, 6, 6, 8, 8]
    yield BatchRamp(from_size=8, over_steps=3), 8, [8, 8, 8, 8]
    yield BatchRamp(from_size=1, over_steps=2), 4, [1, 2, 4, 4]


@pytest.mark.parametrize(("ramp", "whole", "expected"), ramps())
def test_a_batch_ramp_grows_by_even_steps(ramp: BatchRamp, whole: int, expected: list[int]) -> None:
    assert [ramp.rows(step, whole) for step in range(len(expected))] == expected


def test_a_length_ramp_doubles_at_even_distances() -> None:
    ramp = LengthRamp(from_length=8, over_steps=6)
    assert [ramp.length(step, 64) for step in range(8)] == [8, 8, 16, 16, 32, 32, 64, 64]


def test_tokens_are_counted_through_ramps() -> None:
    settings = Train(steps=9, batch_size=8, batch_ramp=BatchRamp(from_size=2, over_steps=6))
    (phase,) = phases_of(settings, sequence_length=16)
    rows = [phase.rows(step) for step in range(9)]
    assert [phase.tokens(steps) for steps in range(10)] == [16 * sum(rows[:steps]) for steps in range(10)]
