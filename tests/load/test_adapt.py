"""Retuning during the run: finds the setting that helps, takes back what does not, leaves well enough alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.events import read_events
from ropewalk.load import adapt
from ropewalk.load.adapt import WORTH, Adapt, Knob
from ropewalk.train.loop import train
from tests.tiny import make_run

Plant = Callable[[dict[str, int]], tuple[str, float]]
"""Settings -> the cause of waiting and the seconds a step of 1 s waits."""


def run(plant: Plant, *, intervals: int, noise: float = 0.0, start: dict[str, int] | None = None) -> Any:
    """(settings at the end, events, seconds waited in each interval) of a simulated run, 20 steps an interval."""
    settings = {"prefetch_bytes": 1, "requests": 1, "threads": 1, **(start or {})}
    causes: dict[str, Any] = {"prefetch_bytes": ("queue", "fetch"), "requests": ("fetch",), "threads": ("prepare",)}
    knobs = [
        Knob(name, value, 64, causes[name], lambda new, name=name: settings.__setitem__(name, new))  # type: ignore[misc]
        for name, value in settings.items()
    ]
    controller, draw = Adapt(knobs), random.Random(0)
    events, waits = [], []
    for _ in range(intervals):
        cause, wait = plant(settings)
        wait *= draw.uniform(1 - noise, 1 + noise)
        figures = dict.fromkeys(("queue_s", "fetch_s", "prepare_s", "copy_s"), 0.0) | {f"{cause}_s": 20 * wait}
        event = controller.observe({**figures, "wait_s": 20 * wait, "elapsed_s": 20 * (1 + wait), "batches": 20.0})
        events += [event] if event else []
        waits.append(wait)
    return settings, events, waits


@pytest.mark.parametrize("seed", range(10))
def test_it_climbs_to_the_setting_that_ends_the_waiting(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice(["requests", "threads"])
    cause = {"requests": "fetch", "threads": "prepare"}[name]
    enough = draw.choice([3, 6, 12, 24])
    settings, events, waits = run(lambda s: (cause, max(0.0, enough / s[name] - 1)), intervals=60, noise=0.03)
    assert enough <= settings[name] < 2 * enough
    assert waits[-1] == 0.0
    kept = [event for event in events if event["action"] == "keep"]
    assert [event["setting"] for event in kept] == [name] * len(kept)
    assert all(event["gain"] > 0 for event in kept)


def test_what_does_not_help_is_taken_back_and_rests_longer_each_time() -> None:
    settings, events, _ = run(lambda s: ("fetch", 0.5), intervals=400, noise=0.05)
    assert settings == {"prefetch_bytes": 1, "requests": 1, "threads": 1}
    tries = [event for event in events if event["action"] == "try"]
    assert {event["setting"] for event in tries} == {"prefetch_bytes", "requests"}, "threads do not help fetching"
    assert len(tries) <= 14, "8, 16, 32 ... intervals of rest for each of two"
    assert len([event for event in events if event["action"] == "take_back"]) in (len(tries), len(tries) - 1)


def test_nothing_is_tried_while_waiting_is_not_worth_it() -> None:
    _, events, _ = run(lambda s: ("prepare", WORTH / 2), intervals=50)
    assert events == []


def test_the_measured_gain_is_that_of_the_steps() -> None:
    settings, events, _ = run(lambda s: ("prepare", 1.0 if s["threads"] < 2 else 0.25), intervals=3)
    assert settings["threads"] == 2
    assert [event["action"] for event in events] == ["try", "keep"]
    # A step takes 1.25 s instead of 2 s.
    assert events[1]["gain"] == pytest.approx(2 / 1.25 - 1)
    assert (events[1]["wait_s_before"], events[1]["wait_s_after"]) == pytest.approx((1.0, 0.25))


def test_it_goes_on_when_the_model_becomes_faster() -> None:
    speed = {"need": 2.0}
    plant: Plant = lambda s: ("prepare", max(0.0, speed["need"] / s["threads"] - 1))  # noqa: E731
    settings: dict[str, int] = {"threads": 1}
    controller = Adapt([Knob("threads", 1, 64, ("prepare",), lambda new: settings.__setitem__("threads", new))])
    for interval in range(80):
        speed["need"] = 2.0 if interval < 30 else 16.0
        wait = plant(settings)[1]
        parts = {"queue_s": 0.0, "fetch_s": 0.0, "prepare_s": 30 * wait, "copy_s": 0.0}
        controller.observe({**parts, "wait_s": 30 * wait, "elapsed_s": 30 * (1 + wait), "batches": 30.0})
        if interval == 29:
            assert settings["threads"] == 2
    assert settings["threads"] == 16


def test_short_intervals_are_taken_together() -> None:
    applied: list[int] = []
    controller = Adapt([Knob("threads", 1, 4, ("prepare",), applied.append)])
    figures = {"queue_s": 0.0, "fetch_s": 0.0, "prepare_s": 1.0, "copy_s": 0.0, "wait_s": 1.0, "elapsed_s": 2.0}
    events = [controller.observe({**figures, "batches": 5.0}) for _ in range(4)]
    assert [event and event["action"] for event in events] == [None, None, None, "try"]
    assert applied == [2]


def test_a_run_that_retunes_itself_has_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Every interval is judged, all of its time counts as waiting, and for the threads: something is tried at once.
    monkeypatch.setattr(adapt, "LEAST_BATCHES", 1)
    monkeypatch.setattr(adapt, "WORTH", -1.0)
    monkeypatch.setattr(adapt, "binding_cause", lambda _: "prepare")
    plain = train(make_run(tmp_path / "plain"))
    run = make_run(tmp_path / "adapting", load__autotune=True)
    assert train(run)["train_loss"] == plain["train_loss"]
    told = [event for event in read_events(run / "events.jsonl") if event["kind"] == "load_adapted"]
    assert [event["action"] for event in told][:1] == ["try"]
