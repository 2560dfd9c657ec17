"""Training on a tiny corpus: it learns, and neither kills, damage nor divergence cost more than time."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.base.errors import DataError, RunConflict, UserError
from ropewalk.base.events import Event, read_events
from ropewalk.checkpoint.format import list_checkpoints, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.write.persist import SaveResult
from ropewalk.checkpoint.write.snapshot import Stager
from ropewalk.load.batch import Batch
from ropewalk.parallel.executor import Executor, StepResult
from ropewalk.train import training_run
from ropewalk.train.hooks.hook import Hook
from ropewalk.train.loop import train
from ropewalk.train.training_run import TrainingRun
from tests.tiny import make_run

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread, and no measurement of the CPU's speed (0.3 s)."""
    torch.set_num_threads(1)
    monkeypatch.setattr(training_run, "peak_flops", lambda *_: 1e11)


class Stop(Exception):
    """What a test stops a run with."""


class StopAfter(Hook):
    def __init__(self, step: int) -> None:
        self._step = step

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        if run.step == self._step:
            raise Stop


def train_until(run: Path, step: int) -> None:
    with pytest.raises(Stop):
        train(run, hooks=[StopAfter(step)])


def events(run: Path, kind: str | None = None) -> list[Event]:
    return [event for event in read_events(run / "events.jsonl") if kind in (None, event["kind"])]


def final_files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in list_checkpoints(run / "checkpoints")[-1].iterdir()}


def test_the_loss_falls(tmp_path: Path) -> None:
    run = make_run(tmp_path, train__steps=60, train__batch_size=8, train__schedule__peak_lr=2e-2)
    figures = train(run)
    losses = [event["loss"] for event in events(run, "step")]
    # A uniform guess costs ln 257 = 5.55 nats; letters of fifteen words are far from uniform.
    assert losses[0] == pytest.approx(math.log(257), abs=0.1)
    assert losses[-1] < 3.2
    assert figures["validation_loss"] < 3.3
    assert (figures["step"], figures["tokens"], figures["train_loss"]) == (60, 60 * 8 * 16, losses[-1])


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, bytes], dict[str, float]]:
    run = make_run(tmp_path_factory.mktemp("straight"))
    return final_files_after(run)


def final_files_after(run: Path) -> tuple[dict[str, bytes], dict[str, float]]:
    figures = train(run)
    return final_files(run), figures


@pytest.mark.parametrize("stops", [(1,), (2,), (3,), (4,), (7,), (8,), (1, 4, 4, 5, 8)], ids=str)
def test_a_run_stopped_after_any_step_ends_with_the_same_bits(
    tmp_path: Path, straight: tuple[dict[str, bytes], dict[str, float]], stops: tuple[int, ...]
) -> None:
    run = make_run(tmp_path)
    for step in stops:
        train_until(run, step)
    assert final_files_after(run)[0] == straight[0]


def test_training_may_have_a_seed_of_its_own(tmp_path: Path) -> None:
    """As if the recipe had it, but for what was prepared."""
    folders = {name: tmp_path / name for name in ("own", "recipe's", "another")}
    own, same = make_run(folders["own"], train__seed=5), make_run(folders["recipe's"], seed=5)
    another = make_run(folders["another"])
    files = {name: final_files_after(run)[0] for name, run in zip(folders, (own, same, another), strict=True)}
    assert files["own"] == files["recipe's"]
    assert files["own"] != files["another"]


def test_microbatches_of_other_sizes_give_the_same_run(
    tmp_path: Path, straight: tuple[dict[str, bytes], dict[str, float]]
) -> None:
    figures = train(make_run(tmp_path, plan__microbatch_size=4))
    # float32 sums in another order.
    assert figures["validation_loss"] == pytest.approx(straight[1]["validation_loss"], rel=1e-4)


def test_memory_for_saves_is_made_after_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no save waits for it."""
    seen: list[str] = []
    sizes: set[int] = set()
    prepare, take = Stager.prepare, Stager.take

    def prepared(self: Stager, parts: Any) -> Any:
        seen.append("prepare")
        sizes.add(prepare(self, parts).result())
        return prepare(self, parts)

    def taken(self: Stager, parts: Any, **options: Any) -> Any:
        seen.append("take")
        snapshot = take(self, parts, **options)
        sizes.add(sum(buffer.bytes for slot in self._slots for buffer in slot.buffers.values()))
        return snapshot

    class Steps(Hook):
        def after_step(self, run: TrainingRun, result: StepResult) -> None:
            seen.append(f"step {run.step}")

    monkeypatch.setattr(Stager, "prepare", prepared)
    monkeypatch.setattr(Stager, "take", taken)
    train(make_run(tmp_path), hooks=[Steps()])
    assert seen.index("step 1") < seen.index("prepare") < seen.index("step 2") < seen.index("take")
    assert len(sizes) == 1, "the state of the first step is as large as all others"


def test_a_finished_run_has_nothing_to_do_and_the_same_figures(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    first = train(run)
    before = final_files(run)
    assert train(run) == first
    assert final_files(run) == before


def test_a_damaged_newest_checkpoint_costs_only_the_steps_since_the_one_before(
    tmp_path: Path, straight: tuple[dict[str, bytes], dict[str, float]]
) -> None:
    run = make_run(tmp_path)
    train_until(run, 7)
    run = make_run(tmp_path, checkpoint__keep_last=1)
    damaged = run / "checkpoints" / "step-00000006" / "optimizer.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    train_until(run, 4)
    # Retention must not prefer the damaged one to the one that is in use.
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]
    assert final_files_after(run)[0] == straight[0]
    assert [event["step"] for event in events(run, "restored")] == [3, 3]
    assert "optimizer.safetensors: damaged" in events(run, "warning")[0]["message"]


def poison(monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Makes a weight nan after the update of step `at`."""
    honest, seen = Executor.step, 0

    def step(self: Executor, batch: Batch, *, lr: float) -> StepResult:
        nonlocal seen
        seen += 1
        result = honest(self, batch, lr=lr)
        if seen == at:
            next(iter(self.model.parameters())).data[:] = float("nan")
        return result

    monkeypatch.setattr(Executor, "step", step)


@pytest.mark.parametrize(
    ("log_every", "at", "words"),
    [(1, 5, "the weights are no longer finite at step 6"), (100, 4, "the weights are no longer finite at step 6")],
)
def test_a_run_that_diverges_stops_and_leaves_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log_every: int, at: int, words: str
) -> None:
    run = make_run(tmp_path, train__log_every_steps=log_every, checkpoint__keep_last=1, train__validate_every_steps=0)
    poison(monkeypatch, at=at)
    with pytest.raises(UserError, match=rf"{words}.*Lower `train\.schedule\.peak_lr`"):
        train(run)
    (last,) = list_checkpoints(run / "checkpoints")
    assert last.name == "step-00000003"
    assert verify_checkpoint(last) == []
    assert all(torch.isfinite(tensor).all() for tensor in load(last).model.values())


class Diary(Hook):
    """Notes every moment."""

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def before_training(self, run: TrainingRun) -> None:
        self.notes.append(("before_training", run.step))

    def before_phase(self, run: TrainingRun) -> None:
        self.notes.append(("before_phase", run.at.phase))

    def after_step(self, run: TrainingRun, result: StepResult) -> None:
        self.notes.append(("after_step", run.step))

    def on_metrics(self, run: TrainingRun, metrics: dict[str, Any]) -> None:
        assert metrics["step"] == run.step
        self.notes.append(("on_metrics", run.step))

    def on_validation(self, run: TrainingRun, loss: float) -> None:
        assert 0 < loss < 10
        self.notes.append(("on_validation", run.step))

    def after_save(self, run: TrainingRun, saved: SaveResult) -> None:
        assert verify_checkpoint(saved.path) == []
        self.notes.append(("after_save", saved.step))

    def after_training(self, run: TrainingRun) -> None:
        self.notes.append(("after_training", run.step))


def test_hooks_are_called_at_their_moments(tmp_path: Path) -> None:
    diary = Diary()
    changes = {"checkpoint__save_every_steps": 3, "checkpoint__write": "blocking"}
    run = make_run(tmp_path, train__steps=4, train__validate_every_steps=0, **changes)
    train(run, hooks=[diary])
    assert diary.notes == [
        ("before_training", 0),
        ("before_phase", 0),
        ("after_step", 1),
        ("after_step", 2),
        ("on_metrics", 2),
        ("after_step", 3),
        ("after_save", 3),
        ("after_step", 4),
        ("on_metrics", 4),
        ("on_validation", 4),
        ("after_save", 4),
        ("after_training", 4),
    ]


def documented_fields() -> dict[str, set[str]]:
    """The fields of each kind of event, from the table in docs/formats.md."""
    table = (ROOT / "docs" / "formats.md").read_text("utf-8").split("### Events")[1].split("###")[0]
    rows = re.findall(r"^\| (`.*?) \| (.*) \|$", table, re.MULTILINE)
    return {kind: set(re.findall(r"`(\w+)`", text)) for kinds, text in rows for kind in re.findall(r"`(\w+)`", kinds)}


def test_events_have_the_documented_fields(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train_until(run, 5)
    train(run)
    documented = documented_fields()
    common = {"format", "time", "rank", "kind"}
    assert {"train_started", "restored", "step", "validation", "saved", "train_finished"} <= {
        event["kind"] for event in events(run)
    }
    for event in events(run):
        assert set(event) - common == documented[event["kind"]], event["kind"]


def test_figures_of_a_run_agree_with_each_other(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    train(run)
    (started,) = events(run, "train_started")
    for event in events(run, "step"):
        assert event["tokens"] == event["step"] * 4 * 16
        assert event["flops_per_s"] == pytest.approx(event["tokens_per_s"] * started["flops_per_token"])
        assert event["mfu"] == pytest.approx(event["flops_per_s"] / started["peak_flops"])
        assert event["tokens_per_s"] == pytest.approx(4 * 16 / event["step_s"])
        assert 0 <= event["data_wait_s"] <= event["step_s"]
        assert 0 < event["mfu"] < 1
    assert started["parameters"] == sum(
        t.numel() for t in load(list_checkpoints(run / "checkpoints")[-1]).model.values()
    )


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    train(make_run(tmp_path))
    for change in ({"model__width": 32}, {"seed": 4}):
        with pytest.raises(RunConflict, match="of another model or seed"):
            train(make_run(tmp_path, **change))


def test_a_missing_or_foreign_tokenizer_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = tmp_path / "prepared" / "tokenizer.json"
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(DataError, match=r"tokenizer\.json: not the tokenizer of these shards"):
        train(run)
    file.unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: the tokenizer is missing"):
        train(run)


def test_verification_can_be_switched_off(tmp_path: Path) -> None:
    run = make_run(tmp_path, load__verify="off")
    for name in ("notes-train-00000.tokens", "notes-validation-00000.tokens"):
        file = tmp_path / "prepared" / name
        data = bytearray(file.read_bytes())
        data[0] ^= 1
        file.write_bytes(data)
    train_until(run, 4)
    with pytest.raises(DataError, match=r"notes-train-00000\.tokens: damaged shard"):
        train(make_run(tmp_path))


def worker(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ropewalk.train", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)


def test_the_worker_trains_its_run_and_exits_0(
    tmp_path: Path, straight: tuple[dict[str, bytes], dict[str, float]]
) -> None:
    run = make_run(tmp_path)
    done = worker(str(run))
    assert done.returncode == 0, done.stderr
    assert "train 8/8 steps  loss" in done.stderr
    assert final_files(run) == straight[0]


def test_the_worker_refuses_a_folder_that_is_no_run(tmp_path: Path) -> None:
    done = worker(str(tmp_path / "nowhere"))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "nowhere" in done.stderr
    assert not (tmp_path / "nowhere").exists()
    assert worker().returncode == 2


def test_the_worker_names_a_damaged_plan(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run / "plan.json").write_text(json.dumps({"format": 2}))
    done = worker(str(run))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "plan.json: this plan is damaged" in done.stderr
