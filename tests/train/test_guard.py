"""Steps that go wrong: each is handled as the policy says, each is an event, and a rollback leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.faulty import Fault as DiskFault
from ropewalk.checkpoint.faulty import FaultyDisk
from ropewalk.checkpoint.read.load import load
from ropewalk.load.batch import Batch
from ropewalk.load.loader import Loader
from ropewalk.parallel.anomaly_guard import GRADIENT, LOSS, OVERFLOW, SPIKE, SpikeRule, Watch
from ropewalk.parallel.executor import StepResult
from ropewalk.train import training_run
from ropewalk.train.config import EarlyStop, Guard
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.requests import RequestExchange
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run
from tests.train.runs import events, final_files, last_checkpoint, quick, train_until

FAULTS = ("nan loss", "inf gradient", "spike")
# The loss of these short runs falls so steeply that a spike is not many deviations of it.
SIGMA = 1.5


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


class Fault(Hook):
    """Breaks one step: as often as the step is tried, or only the first `times` times."""

    def __init__(self, kind: str, *, step: int, times: float = math.inf) -> None:
        self._kind, self._step, self._left = kind, step, times
        self.batches: list[Tensor] = []

    def on_batch(self, run: TrainingRun, batch: Batch) -> Batch:
        self._strikes = run.step + 1 == self._step and self._left > 0
        if not self._strikes:
            return batch
        self._left -= 1
        self.batches.append(batch.tokens)
        if self._kind == "nan loss":
            return Batch(batch.tokens, batch.targets, batch.weight * math.nan, batch.positions, batch.documents)
        if self._kind == "spike":
            # Targets that never occur: end of text after every byte.
            return Batch(batch.tokens, batch.targets * 0, batch.weight, batch.positions, batch.documents)
        return batch

    def on_gradients(self, run: TrainingRun, gradients: Mapping[str, Tensor]) -> None:
        if self._strikes and self._kind == "inf gradient":
            gradients["norm.weight"].fill_(math.inf)


class BadData(Fault):
    """Breaks the step whenever it reads the batch that it read the first time: the data are at fault."""

    def on_batch(self, run: TrainingRun, batch: Batch) -> Batch:
        if run.step + 1 == self._step and self.batches and not torch.equal(batch.tokens, self.batches[0]):
            self._strikes = False
            return batch
        return super().on_batch(run, batch)


def make(folder: Path, **changes: Any) -> Path:
    settings = {
        "train__steps": 30,
        "train__batch_size": 8,
        "train__log_every_steps": 4,
        "train__validate_every_steps": 0,
        "checkpoint__save_every_steps": 6,
        "train__guard": Guard(not_finite="rollback", spike="rollback", window_steps=8, spike_sigma=SIGMA),
    }
    return make_run(folder, **{**settings, **changes})


def guard(action: str) -> Guard:
    spike: Any = action
    not_finite: Any = "skip" if action == "record" else action
    return Guard(not_finite=not_finite, spike=spike, window_steps=8, spike_sigma=SIGMA)


def anomalies(run: Path) -> list[tuple[int, str, str]]:
    return [(event["step"], event["what"], event["action"]) for event in events(run, "anomaly")]


WORDS = {"nan loss": "loss not finite", "inf gradient": "gradient not finite", "spike": "loss spike"}


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    torch.set_num_threads(1)
    run = make(tmp_path_factory.mktemp("clean"))
    train(run)
    assert anomalies(run) == []
    return final_files(run)


@pytest.mark.parametrize("kind", FAULTS)
def test_after_a_passing_fault_the_run_is_the_one_that_never_had_it(
    tmp_path: Path, clean: dict[str, bytes], kind: str
) -> None:
    run = make(tmp_path)
    train(run, hooks=[Fault(kind, step=16, times=1)])
    assert anomalies(run) == [(16, WORDS[kind], "rollback")]
    (back,) = events(run, "rolled_back")
    assert (back["step"], back["failed_step"], back["left_out"]) == (12, 16, 0)
    assert final_files(run) == clean


def test_a_fault_before_the_first_checkpoint_goes_back_to_the_beginning(
    tmp_path: Path, clean: dict[str, bytes]
) -> None:
    run = make(tmp_path)
    train(run, hooks=[Fault("inf gradient", step=3, times=1)])
    assert [event["step"] for event in events(run, "restored")] == [0]
    assert final_files(run) == clean


@pytest.mark.parametrize(
    "kind", ["spike", *(pytest.param(kind, marks=pytest.mark.slow) for kind in FAULTS if kind != "spike")]
)
def test_after_bad_data_the_run_is_the_one_whose_data_never_had_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    run = make(tmp_path / "bad")
    train(run, hooks=[BadData(kind, step=16)])
    assert anomalies(run) == [(16, WORDS[kind], "rollback")] * 2
    assert [event["left_out"] for event in events(run, "rolled_back")] == [0, 1]
    # The same corpus without the rows of the 16th batch.
    honest = Loader.next

    def without(self: Loader, rows: int | None = None) -> Batch:
        if self.state()["row"] == 15 * 8:
            self.skip(8)
        return honest(self, rows)

    monkeypatch.setattr(Loader, "next", without)
    never = make(tmp_path / "never")
    train(never)
    ours, theirs = load(last_checkpoint(run)), load(last_checkpoint(never))
    assert all(torch.equal(ours.model[name], theirs.model[name]) for name in theirs.model)
    assert all(torch.equal(ours.optimizer[key], theirs.optimizer[key]) for key in theirs.optimizer)
    assert ours.data == theirs.data
    assert ours.data["skipped"] == [[15 * 8, 16 * 8]]


@pytest.mark.parametrize("stop", [19, *(pytest.param(stop, marks=pytest.mark.slow) for stop in (17, 25))])
def test_a_kill_after_a_rollback_changes_nothing(tmp_path: Path, stop: int) -> None:
    straight, killed = make(tmp_path / "straight"), make(tmp_path / "killed")
    train(straight, hooks=[BadData("spike", step=16)])
    train_until(killed, stop, BadData("spike", step=16))
    train(killed, hooks=[BadData("spike", step=16)])
    assert final_files(killed) == final_files(straight)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_skipped_step_leaves_weights_and_moments_alone(tmp_path: Path, kind: str) -> None:
    run = make(tmp_path, train__steps=16, train__guard=guard("skip"), checkpoint__save_every_steps=15)
    train(run, hooks=[Fault(kind, step=16)])
    before, after = load(run / "checkpoints" / "step-00000015"), load(last_checkpoint(run))
    assert anomalies(run) == [(16, WORDS[kind], "skip")]
    assert [event["skipped"] for event in events(run, "step")] == [0, 0, 0, 1]
    for name, tensor in before.model.items():
        assert torch.equal(tensor, after.model[name]), name
    for key, tensor in before.optimizer.items():
        assert torch.equal(tensor, after.optimizer[key]), key
    assert (after.step, after.data["row"]) == (16, 128)


def test_a_recorded_spike_is_followed(tmp_path: Path) -> None:
    run = make(tmp_path, train__guard=guard("record"))
    train(run, hooks=[Fault("spike", step=16)])
    assert (16, "loss spike", "record") in anomalies(run)
    assert all(event["skipped"] == 0 for event in events(run, "step"))


@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_told_to_stop_ends_with_the_reason_and_keeps_its_checkpoints(tmp_path: Path, kind: str) -> None:
    run = make(tmp_path, train__guard=guard("stop"))
    with pytest.raises(UserError, match=rf"{WORDS[kind]} at step 16.*the same command continues"):
        train(run, hooks=[Fault(kind, step=16)])
    assert last_checkpoint(run).name == "step-00000012"


def test_a_run_does_not_go_on_skipping_for_ever(tmp_path: Path) -> None:
    class Broken(Hook):
        def on_gradients(self, run: TrainingRun, gradients: Mapping[str, Tensor]) -> None:
            if run.step + 1 > 7:
                gradients["norm.weight"].fill_(math.nan)

    run = make(tmp_path, train__guard=Guard(max_consecutive=5))
    with pytest.raises(UserError, match="gradient not finite at step 13"):
        train(run, hooks=[Broken()])
    assert len(anomalies(run)) == 6


def test_a_step_that_fails_with_every_batch_ends_the_run(tmp_path: Path) -> None:
    run = make(tmp_path, train__guard=Guard(not_finite="rollback", max_consecutive=3))
    with pytest.raises(UserError, match="in spite of 3 rollbacks"):
        train(run, hooks=[Fault("nan loss", step=9)])


def watch(memory: int = 10, sigma: float = 4.0, *, skips: bool = True) -> Watch:
    return Watch(SpikeRule(sigma=sigma, window_steps=memory, skips=skips), torch.device("cpu"))


def judge(guard: Watch, loss: float, norm: float = 1.0, scale: float | None = None) -> tuple[int, float]:
    code, skipped = guard.judge(torch.tensor(loss), torch.tensor(norm), None if scale is None else torch.tensor(scale))
    return int(code), float(skipped)


@pytest.mark.parametrize(
    ("loss", "norm", "scale", "expected"),
    [
        (math.nan, math.nan, None, LOSS),
        (math.inf, 1.0, None, LOSS),
        (1.0, math.inf, None, GRADIENT),
        (1.0, math.nan, 65536.0, OVERFLOW),
        (1.0, math.inf, 1.0, GRADIENT),
        (math.nan, math.nan, 65536.0, LOSS),
        (1.0, 1.0, None, 0),
    ],
)
def test_what_is_not_finite_has_its_own_name(loss: float, norm: float, scale: float | None, expected: int) -> None:
    assert judge(watch(), loss, norm, scale) == (expected, float(expected > 0))


def test_a_spike_is_measured_by_the_losses_before_it() -> None:
    guard = watch()
    draw = torch.Generator().manual_seed(0)
    losses = (3 + 0.1 * torch.randn(200, generator=draw)).tolist()
    assert [judge(guard, loss)[0] for loss in losses] == [0] * 200
    mean, deviation = float(guard.state["mean"]), float(guard.state["variance"]) ** 0.5
    # Mean and deviation of about the latest ten of them.
    assert mean == pytest.approx(3, abs=0.1)
    assert deviation == pytest.approx(0.1, rel=0.5)
    before = {name: float(tensor) for name, tensor in guard.state.items()}
    assert judge(guard, mean + 4.1 * deviation) == (SPIKE, 1.0)
    assert {name: float(tensor) for name, tensor in guard.state.items()} == before
    assert judge(guard, mean + 3.9 * deviation) == (0, 0.0)
    assert judge(guard, mean - 40 * deviation) == (0, 0.0)


def test_nothing_is_a_spike_before_the_memory_is_full() -> None:
    guard = watch(memory=10)
    assert [judge(guard, loss)[0] for loss in [3.0, 3.1, 2.9, 50.0, 3.0]] == [0] * 5


def test_early_stopping_ends_with_the_best_weights(tmp_path: Path) -> None:
    # A rate so high that validation soon gets worse.
    settings = {
        "train__steps": 60,
        "train__validate_every_steps": 2,
        "train__early_stop": EarlyStop(patience=2),
        "train__schedule__peak_lr": 0.3,
        "train__schedule__warmup_steps": 4,
        "train__guard": Guard(spike="off"),
    }
    run = make_run(tmp_path / "straight", **settings)
    figures = train(run)
    (stopped,) = events(run, "stopped_early")
    validations = {event["step"]: event["loss"] for event in events(run, "validation")}
    best = min(validations, key=lambda step: validations[step])
    assert (stopped["best_step"], stopped["step"]) == (best, best + 4)
    assert figures["step"] == best + 4 < 60
    kept = load(run / "checkpoints" / "best" / f"step-{best:08d}")
    ended = load(last_checkpoint(run))
    assert all(torch.equal(kept.model[name], ended.model[name]) for name in kept.model)
    assert train(run) == figures
    killed = make_run(tmp_path / "killed", **settings)
    for step in (3, best - 1, best, best + 1, best + 3):
        train_until(killed, max(1, step))
    train(killed)
    assert final_files(killed) == final_files(run)


class Rejects(Hook):
    """Asks for a rollback during or after a step: the first `times` times, and to stop after another step."""

    def __init__(self, step: int, *, times: int, during: bool = False, stop: int = 0) -> None:
        self._step, self._left, self._during, self._stop = step, times, during, stop
        self.batches: list[Tensor] = []

    def before_forward(self, run: TrainingRun, batch: Batch) -> None:
        if run.step + 1 == self._step:
            self.batches.append(batch.tokens)
            if self._during:
                self._ask(run)

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == self._step and not self._during:
            self._ask(run)
        if run.step == self._stop:
            run.request_stop()

    def _ask(self, run: TrainingRun) -> None:
        if self._left:
            self._left -= 1
            run.request_rollback("looks odd")


def rollbacks(run: Path) -> list[tuple[int, int, int]]:
    return [(event["step"], event["failed_step"], event["left_out"]) for event in events(run, "rolled_back")]


@pytest.mark.parametrize("during", [False, True], ids=["after", "during"])
def test_a_step_that_a_hook_rejects_twice_gets_another_batch(tmp_path: Path, during: bool) -> None:
    run, hook = make(tmp_path, train__steps=9), Rejects(7, times=2, during=during)
    train(run, hooks=[hook])
    assert rollbacks(run) == [(6, 7, 0), (6, 7, 1)]
    assert torch.equal(hook.batches[0], hook.batches[1])
    assert not torch.equal(hook.batches[1], hook.batches[2])


class Late:
    """The sum of a group of ranks whose other ranks ask for nothing."""

    size = 2

    def __init__(self, group: object) -> None:
        self._sent = torch.zeros(0)

    def start_all_reduce(self, wishes: Tensor, *, operation: str) -> Late:
        late = Late(None)
        late._sent = wishes
        return late

    def wait(self) -> Tensor:
        return self._sent


@pytest.mark.parametrize("step", [10, 11, 12])
def test_what_a_hook_rejects_is_not_saved_while_the_request_is_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    """Step 12 is saved; requests of several ranks are heard a step later."""
    whole, run = make(tmp_path / "whole", train__steps=15), make(tmp_path / "run", train__steps=15)
    train(whole)
    monkeypatch.setattr(training_run, "RequestExchange", lambda group: RequestExchange(cast(Any, Late(group))))
    train(run, hooks=[Rejects(step, times=1)])
    assert rollbacks(run) == [(6, {10: 10, 11: 12, 12: 12}[step], 0)]
    assert final_files(run) == final_files(whole)


def test_a_hook_stops_a_run_whose_last_step_went_wrong(tmp_path: Path) -> None:
    run = make(tmp_path)
    last = train(run, hooks=[Fault("nan loss", step=14), Rejects(0, times=0, stop=14)])
    assert (last["step"], rollbacks(run)) == (12, [(12, 14, 0)])
    assert last_checkpoint(run).name == "step-00000012"


def test_a_run_that_a_hook_stops_ends_when_its_last_step_is_durable(tmp_path: Path) -> None:
    run = make(tmp_path)
    disk = FaultyDisk(DiskFault(kind="error", on=("make_folder",), after=3, times=1))
    assert train(run, hooks=[Rejects(0, times=0, stop=14)], disk=disk)["step"] == 14
    assert [event["step"] for event in events(run, "save_failed")] == [14]
    assert last_checkpoint(run).name == "step-00000014"
