"""Training as far as its data are concerned: packing, mixtures that change, damage, threads, waiting."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

import pytest
import torch

from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State
from ropewalk.flow.recipe import Recipe
from ropewalk.flow.run_dir import free_keys
from ropewalk.load.mixture import Mixture
from ropewalk.load.reader import Reader
from ropewalk.load.stalls import CAUSES
from ropewalk.train.config import Share
from ropewalk.train.loop import train
from tests.tiny import make_run
from tests.train.runs import events, final_files, last_checkpoint, quick, train_until


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


def trained(run: Path) -> State:
    train(run)
    return load(last_checkpoint(run))


def test_whole_documents_train_and_go_on_after_a_stop_with_the_same_bits(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, load__packing="best-fit") for name in ("straight", "stopped")]
    train(runs[0])
    train_until(runs[1], 5)
    train(runs[1])
    assert final_files(runs[0]) == final_files(runs[1])
    state = load(last_checkpoint(runs[0]))
    assert state.data["order"]["packing"] == "best-fit"
    # Places that hold no token are not trained tokens.
    speeds = [event["tokens_per_s"] * event["step_s"] for event in events(runs[0], "step")]
    assert all(0 < tokens <= 4 * 16 for tokens in speeds)
    assert any(tokens < 4 * 16 for tokens in speeds)


def test_any_number_of_threads_trains_to_the_same_bits(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", load__threads=1)
    many = make_run(tmp_path / "many", load__threads=3, load__prefetch_bytes=0)
    train(one)
    train(many)
    assert final_files(one) == final_files(many)


def test_a_mixture_may_change_when_a_run_continues(tmp_path: Path) -> None:
    shares = (Share(source="notes", weight=1.0), Share(source="code", weight=1.0))
    run = make_run(tmp_path, train__mixture=shares)
    train_until(run, 7)  # the newest checkpoint is of step 6
    make_run(tmp_path, train__mixture=(Share(source="code"),))
    state = trained(run)
    (event,) = events(run, "mixture_changed")
    assert (event["step"], event["row"], event["mixture"]["weights"]) == (6, 24, {"code": 1.0})
    assert [entry["row"] for entry in state.data["mixtures"]] == [0, 24]
    assert state.data["row"] == 32
    # Half of the first 24 rows and all that follow: none of the source's rows is left out or comes again.
    straight = make_run(tmp_path / "other", train__mixture=shares)
    assert trained(straight).data["mixtures"] == state.data["mixtures"][:1]


def test_what_changes_no_row_that_was_read_may_change_when_a_run_continues() -> None:
    free = set(free_keys(Recipe))
    assert {"train.mixture", "train.mixture.weight", "train.phases.mixture", "load.threads", "load.on_damage"} <= free
    assert not {"load.packing", "load.shuffle", "load.sequence_length", "train.steps"} & free


def test_shares_move_over_a_phase_and_a_source_ends_with_its_last_epoch(tmp_path: Path) -> None:
    moving = (Share(source="notes", weight=1.0, end_weight=0.0), Share(source="code", weight=0.0, end_weight=1.0))
    state = trained(make_run(tmp_path / "moving", train__mixture=moving))
    (segment,) = Mixture.from_json(state.data["mixtures"]).segments
    assert (segment.weights, segment.end_weights) == ({"notes": 1.0, "code": 0.0}, {"notes": 0.0, "code": 1.0})
    assert segment.over_rows == 8 * 4
    ending = (Share(source="notes", weight=1.0), Share(source="code", weight=9.0, max_epochs=0.1))
    state = trained(make_run(tmp_path / "ending", train__mixture=ending))
    (segment,) = Mixture.from_json(state.data["mixtures"]).segments
    assert segment.max_epochs == {"code": 0.1}


def test_damage_is_skipped_and_told_when_the_recipe_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, load__on_damage="skip")
    path = tmp_path / "prepared" / "notes-train-00001.tokens"
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.write_bytes(data)
    state = trained(run)
    told = [event["message"] for event in events(run, "warning")]
    assert any("notes-train-00001.tokens" in message and "not what was written" in message for message in told)
    assert state.step == 8
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.model.values())


def test_waiting_is_written_by_cause_and_told_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Reader.read

    def slow(self: Reader, *arguments: object) -> object:
        time.sleep(0.3)
        made = honest(self, *arguments)  # type: ignore[arg-type]
        return dataclasses.replace(made, fetched=0.0)

    monkeypatch.setattr(Reader, "read", slow)
    run = make_run(tmp_path, train__steps=2, train__log_every_steps=1, load__prefetch_bytes=0)
    train(run)
    for event in events(run, "step"):
        parts = sum(event[f"data_{cause}_s"] for cause in CAUSES)
        assert parts == pytest.approx(event["data_wait_s"], abs=0.02)
    (told,) = [event["message"] for event in events(run, "warning") if "wait for data" in event["message"]]
    assert "`prepare`: too few cores prepare batches" in told
