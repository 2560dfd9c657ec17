"""`doctor data` on a tiny recipe: what it measures, predicts, remembers and changes."""

from __future__ import annotations

import dataclasses
import json
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import UserError
from ropewalk.base.events import EventLog
from ropewalk.base.progress import Silent
from ropewalk.flow import doctor_data, tune_data
from ropewalk.flow.data_doctor import data_doctor as doctor
from ropewalk.flow.data_doctor import data_probe, loader_tuning, predictions
from ropewalk.flow.data_doctor.data_doctor import Scenario
from ropewalk.flow.data_doctor.data_probe import Examined
from ropewalk.flow.run_or_recipe import given, resolve_recipe
from ropewalk.load.config import Load
from ropewalk.train.measure import throughput
from ropewalk.train.measure.step_profiler import MIN_STEPS

from .tiny import write_tiny


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_probe, "PROBE_SECONDS", 0.02)
    monkeypatch.setattr(data_probe, "STEP_SECONDS", 0.02)
    return write_tiny(tmp_path).relative_to(tmp_path)


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of four cores of which each prepares a hundred tokens a second."""

    def examine(*arguments: Any, **named: Any) -> Examined:
        found = data_probe.examine(*arguments, **named)
        rates = dataclasses.replace(found.rates, prepare=100.0, prepare_jitter=0.0, copy=1e12)
        return dataclasses.replace(found, rates=rates, setup=dataclasses.replace(found.setup, cores=4, cores_of_step=0))

    monkeypatch.setattr(doctor, "examine", examine)
    monkeypatch.setattr(loader_tuning, "examine", examine)


def write_steps(run: Path, *speeds: float, wait: float = 0.0) -> None:
    """Intervals of a run that trained so fast, of which steps waited the share `wait`."""
    with EventLog(run) as events:
        for number, speed in enumerate(speeds, 1):
            events.write("step", step=number, tokens_per_s=speed, step_s=1.0, data_wait_s=wait)


def test_the_forecast_is_made_of_what_was_measured(recipe: Path) -> None:
    found = doctor_data(recipe, tokens_per_s=1000.0)
    assert found["rates"]["compute"] == 1000.0
    assert found["rates"]["prepare"] > 0
    assert found["forecast"]["tokens_per_s"] <= 1000.0
    assert found["forecast"]["binding"] == "compute"
    assert found["remedies"] == []
    json.dumps(found, allow_nan=False)


def test_a_step_that_waits_gets_remedies_cheapest_first(recipe: Path, starved: None) -> None:
    found = doctor_data(recipe, tokens_per_s=1e6)
    assert found["forecast"]["binding"] == "prepare"
    assert found["forecast"]["stall"] > 0.9
    assert set(found["cheapest"]["settings"]) == {"load.threads"}
    assert found["cheapest"] == found["remedies"][0]


def test_the_speed_of_the_step_is_measured_when_nobody_knows_it(recipe: Path) -> None:
    found = doctor_data(recipe)
    assert "steps just now" in found["rates"]["step_from"]
    assert found["rates"]["compute"] > 0


def test_the_speed_of_the_step_is_that_of_the_run_without_its_waiting(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    write_steps(run, 10.0, 750.0, 750.0, wait=0.25)
    assert predictions.compute_speed(run) == pytest.approx(1000.0)


def test_the_last_prediction_is_compared_with_the_steps_that_followed_it(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "tiny"
    write_steps(run, 500.0, 500.0)
    assert doctor_data(recipe, tokens_per_s=1000.0)["last_prediction"] is None
    time.sleep(0.01)  # events carry milliseconds
    write_steps(run, 3.0, 800.0, 800.0)
    last = doctor_data(recipe, tokens_per_s=1000.0)["last_prediction"]
    assert last["measured"] == 800.0
    assert last["error"] == pytest.approx(last["predicted"] / 800.0 - 1)
    assert last["predicted"] <= 1000.0


def test_another_world_is_predicted_on_request(recipe: Path) -> None:
    # So slow a step that the rest of the machine does not matter, and so fast a one that no store keeps up.
    now = doctor_data(recipe, tokens_per_s=1e3)
    faster = doctor_data(recipe, tokens_per_s=1e3, step_speed=3.0)["asked"]
    slow = doctor_data(recipe, tokens_per_s=1e6, medium="object")["asked"]
    assert now["asked"] is None
    assert faster["limits"]["compute"] > 2 * now["forecast"]["limits"]["compute"]
    assert (slow["binding"], slow["stall"] > 0.5) == ("fetch", True)


def test_an_unknown_medium_is_answered_with_those_there_are() -> None:
    with pytest.raises(UserError, match="no medium `tape`; there are hdd, ssd, nvme, nfs, object"):
        Scenario(medium="tape")


class FakeBench:
    """Steps whose speed is known: two threads are twice as fast as one, more do not help; nor do bytes."""

    def __init__(self, settings: Any) -> None:
        self.closed = False

    def fed(self, load: Load, *, seconds: float) -> throughput.Throughput:
        return throughput.Throughput(tokens_per_s=1000.0 * min(2, load.threads), jitter=0.0, steps=10)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "Bench", FakeBench)


def test_tuning_writes_what_gained_and_nothing_else(recipe: Path, bench: None, starved: None) -> None:
    before = tomllib.loads(recipe.read_text())
    comment = "# a word of the author\n"
    recipe.write_text(comment + recipe.read_text())
    tuned = tune_data(recipe, tokens_per_s=1e6)
    assert [(change["key"], change["after"]) for change in tuned["changes"]] == [("load.threads", 2)]
    assert tuned["changes"][0]["gain"] == pytest.approx(1.0)
    after = tomllib.loads(recipe.read_text())
    assert after.pop("load") == {**before.pop("load"), "threads": 2}
    assert after == before
    assert recipe.read_text().startswith(comment)


def test_a_run_that_does_not_wait_is_not_tuned(recipe: Path, bench: None) -> None:
    text = recipe.read_text()
    tuned = tune_data(recipe, tokens_per_s=1000.0)
    assert (tuned["tried"], tuned["changes"]) == ([], [])
    assert recipe.read_text() == text


def test_a_step_of_another_speed_than_tuned_for_is_noticed(recipe: Path, bench: None) -> None:
    tune_data(recipe, tokens_per_s=1000.0)
    assert not doctor_data(recipe, tokens_per_s=1050.0)["tuning_is_stale"]
    assert doctor_data(recipe, tokens_per_s=1200.0)["tuning_is_stale"]


def test_settings_that_tuning_chooses_cannot_be_given_beside_it(recipe: Path) -> None:
    with pytest.raises(UserError, match=r"--tune chooses load\.threads itself"):
        tune_data(recipe, ["load.threads=2"])


def test_real_steps_are_fed_by_the_loader_under_other_settings(recipe: Path) -> None:
    resolved = resolve_recipe(recipe)
    settings = data_probe.settings_of(resolved.value, data_probe.prepared_data(given(resolved), Silent()))
    bench = throughput.Bench(settings)
    fed = bench.fed(settings.load, seconds=0.02)
    bench.close()
    assert fed.steps >= MIN_STEPS
    assert fed.tokens_per_s > 0
