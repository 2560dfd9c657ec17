"""`ropewalk doctor data`: what people and programs read."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from ropewalk.flow.data_doctor import data_doctor as doctor
from ropewalk.flow.data_doctor import data_probe
from ropewalk.flow.data_doctor.data_probe import Examined

from .conftest import Call


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_probe, "PROBE_SECONDS", 0.02)


def test_rates_forecast_what_ifs_and_the_last_error_are_told(tiny: Path, call: Call) -> None:
    ended = call("doctor", "data", "tiny.toml", "--tokens-per-s", "1000", "--medium", "hdd", "--cores", "8")
    assert ended.status == 0, ended.err
    words = ("step", "prepare", "fetch", "hand over", "forecast", "reading", "last time", "as asked", "data on nvme")
    assert [word for word in words if word not in ended.out] == []
    assert "decided by the step itself" in ended.out
    assert "measuring how batches are made" in ended.err


def test_the_same_as_json(tiny: Path, call: Call) -> None:
    found = json.loads(call("doctor", "data", "tiny.toml", "--tokens-per-s", "1000", "--json").out)
    assert found["forecast"]["binding"] == "compute"
    assert {row["what"] for row in found["what_ifs"]} >= {"as it is", "data on object, none in memory"}


def test_remedies_are_listed_with_the_cheapest_and_its_settings(
    tiny: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def starved(*arguments: Any, **named: Any) -> Examined:
        found = data_probe.examine(*arguments, **named)
        rates = dataclasses.replace(found.rates, prepare=100.0, prepare_jitter=0.0, copy=1e12)
        return dataclasses.replace(found, rates=rates, setup=dataclasses.replace(found.setup, cores=4, cores_of_step=0))

    monkeypatch.setattr(doctor, "examine", starved)
    out = call("doctor", "data", "tiny.toml", "--tokens-per-s", "1e6").out
    assert "decided by preparing batches" in out
    assert "cheapest: 4 threads (+300%): load.threads=4" in out


def test_tuning_a_run_that_does_not_wait_says_so(tiny: Path, call: Call) -> None:
    out = call("doctor", "data", "tiny.toml", "--tokens-per-s", "1000", "--tune").out
    assert "nothing to tune: steps wait 0.0% of the time, decided by the step itself" in out


def test_tuning_for_another_machine_is_refused(tiny: Path, call: Call) -> None:
    ended = call("doctor", "data", "tiny.toml", "--tune", "--cores", "4")
    assert ended.status == 2
    assert "leave --cores, --gpu-speed and --medium out" in ended.err


def test_an_unknown_medium_is_an_error_that_lists_them(tiny: Path, call: Call) -> None:
    ended = call("doctor", "data", "tiny.toml", "--medium", "tape")
    assert (ended.status, "hdd, ssd, nvme, nfs, object" in ended.err) == (2, True)


def test_what_memory_is_worth_for_random_epochs_is_told_for_the_sizes_that_are_asked(tiny: Path, call: Call) -> None:
    sizes = ("--memory-bytes", "4000000000", "--data-bytes", "8000000000")
    half = ("doctor", "data", "tiny.toml", "--tokens-per-s", "1000", *sizes)
    out = call(*half).out
    assert "8 GB of data, 4 GB of memory: of an epoch's reads the page cache serves" in out
    assert "LRU 15%, a cache that never evicts 50%" in out
    found = json.loads(call(*half, "--json").out)["caches"]
    assert found["lru"] < found["page_cache"] < found["keep"] == 0.5
    assert "all fit" in call("doctor", "data", "tiny.toml", "--tokens-per-s", "1000").out
    small = call("doctor", "data", "tiny.toml", "--tokens-per-s", "1000", "--data-bytes", "1070000").out
    assert "1.07 MB of data" in small
