"""Report sections about the run itself: time by stage, notable events, settings, machine and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ropewalk.base.events import Event
from ropewalk.base.progress import duration

from ..draw.bars import Bar, BarGroup, bar_figure
from ..draw.markup import Child, Markup, element
from ..run_view import RunView, Setting, Stage
from ..values import mapping, number, text, whole
from .page import badge, empty, scrolling, section, table

MOST_EVENTS = 200


def time_section(view: RunView) -> Markup:
    """Seconds by stage as bars."""
    timed = [(stage, stage.seconds) for stage in view.stages if stage.seconds is not None]
    others = [stage.name for stage in view.stages if stage.seconds is None]
    waiting = f"Not finished: {', '.join(others)}." if others else ""
    if not timed:
        return section("Time", empty(f"No stage has finished yet. {waiting}".strip()))
    bars = [Bar(_stage_label(stage), seconds, duration(seconds), "tone-0") for stage, seconds in timed]
    return section("Time", bar_figure("By stage", "wall clock", [BarGroup("", bars)], wide=1080, note=waiting))


def events_section(view: RunView) -> Markup:
    """Restores, phases, anomalies, changes of settings and warnings, by time since the start."""
    if not view.notable:
        return section("Events", empty("No restores, changed settings or warnings."))
    rows = [
        (duration(max(0.0, event["time"] - view.first_time)), _kind(event), _story(event))
        for event in view.notable[:MOST_EVENTS]
    ]
    left_out = len(view.notable) - len(rows)
    note = element("p", f"{left_out} further events are in events.jsonl.", class_="note") if left_out else None
    return section("Events", table(("after", "event", ""), rows, class_="facts"), note)


def config_section(view: RunView) -> Markup:
    """Every setting with its origin; those that are not defaults come first and are marked."""
    if not view.settings:
        return section("Settings", empty("There is no readable config.toml."))
    chosen = [setting for setting in view.settings if not setting.is_default]
    defaults = [setting for setting in view.settings if setting.is_default]
    folded: Child = None
    if defaults:
        folded = element("details", element("summary", f"{len(defaults)} defaults"), scrolling(_settings(defaults)))
    shown = scrolling(_settings(chosen, marked=True)) if chosen else empty("Every setting is a default.")
    return section("Settings", shown, folded)


def machine_section(view: RunView) -> Markup:
    """The machine, versions and command of the run."""
    known: dict[str, Any] = {
        "device": view.training.get("device") or view.summary.get("device"),
        "machine": view.summary.get("machine"),
        "platform": view.launch.get("platform"),
        "ranks": view.training.get("world"),
        "ropewalk": view.launch.get("version") or view.summary.get("version"),
        "torch": view.training.get("torch"),
        "python": view.launch.get("python"),
        "seed": view.summary.get("seed", view.setting("seed")),
        "command": view.launch.get("command"),
        "starts": view.starts or None,
        "prepared data": view.manifest_folder or None,
    }
    rows = [(name, _shown(value)) for name, value in known.items() if value is not None]
    if not rows:
        return section("Machine", empty("The run has not started yet."))
    return section("Machine", table(("", ""), rows, class_="facts"))


def _stage_label(stage: Stage) -> str:
    return f"{stage.name}, kept" if stage.state == "skipped" else stage.name


def _kind(event: Event) -> Markup:
    tones = {"warning": "bad", "anomaly": "bad"}
    return badge(event["kind"].replace("_", " "), tones.get(event["kind"], "note"))


def _story(event: Event) -> str:
    """The event as a sentence."""
    if event["kind"] == "restored":
        seconds = number(event.get("seconds"))
        took = f", read in {duration(seconds)}" if seconds is not None else ""
        return f"continued from step {event['step']:,}, {text(event.get('path'))}{took}"
    if event["kind"] == "config_changed":
        return f"{text(event.get('key'))}: {_shown(event.get('before'))} became {_shown(event.get('after'))}"
    step = whole(event.get("step")) or 0
    if event["kind"] == "phase_started":
        start = text(event.get("start_from"))
        return f"{text(event.get('name'))}, after step {step:,}" + (f", with the weights of {start}" if start else "")
    if event["kind"] == "anomaly":
        return f"step {step:,}: {text(event.get('what'))} ({text(event.get('action'))})"
    if event["kind"] == "rolled_back":
        left_out = whole(event.get("left_out"))
        without = f" without {left_out} of its batches" if left_out else ""
        return f"to step {step:,}, to repeat step {whole(event.get('failed_step')):,}{without}"
    if event["kind"] == "stopped_early":
        return f"at step {step:,}, with the weights of step {whole(event.get('best_step')):,}"
    # `continued` and `warning` events contain sentences.
    rank = whole(event.get("rank"))
    return (f"rank {rank}: " if rank else "") + text(event.get("message"))


def _settings(settings: list[Setting], *, marked: bool = False) -> Markup:
    rows = [
        (
            element("code", setting.key, class_="chosen" if marked else None),
            element("code", _shown(setting.value)),
            element("span", setting.origin, class_="muted"),
        )
        for setting in settings
    ]
    return table(("key", "value", "origin"), rows, class_="settings")


def _shown(value: Any) -> str:
    """A value as text: strings without quotes, objects as `key value` pairs, everything else as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(item)}" for key, item in mapping(value).items())
    return json.dumps(value, ensure_ascii=False, default=str)
