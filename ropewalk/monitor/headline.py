"""A run in one sentence and in a dozen figures: what page and console say first."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from ropewalk.base.progress import amount, counted, duration

from .run_view import RunView
from .values import finite, mapping, text, whole

RECENT = 20
"""Records of steps that tell how quick a run is now."""


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One key figure: its name, its value as text, and what it is to be read against."""

    name: str
    value: str
    note: str = ""


def verdict(view: RunView) -> str:
    """One line: size of model and training, and what came of it."""
    parts = []
    if (count := parameters(view)) is not None:
        parts.append(f"{amount(count)} parameters")
    if (count := tokens(view)) is not None:
        parts.append(f"{amount(count)} tokens")
    bits = view.measured("bits_per_byte")
    if bits is None:
        parts.append(progress(view))
        if view.steps:
            parts.append(f"training loss {view.steps[-1].loss:.3f}")
        return ", ".join(parts) + "; not evaluated yet"
    others = [(name, view.measured(f"{name}_bits_per_byte")) for name in ("zlib", "xz")]
    beside = ", ".join(f"{name} {value:.2f}" for name, value in others if value is not None)
    return ", ".join([*parts, f"{bits:.2f} held-out bits per byte"]) + (f"; {beside}" if beside else "")


def progress(view: RunView) -> str:
    """How far training has come: "step 180 of 300"."""
    total = total_steps(view)
    if not view.steps:
        return "training has not begun"
    return f"step {view.steps[-1].step:,}" + (f" of {total:,}" if total else "")


def key_figures(view: RunView) -> list[KeyFigure]:
    """The figures of the tiles, in reading order; what is not known yet is a dash."""
    return [
        _bits(view),
        _against(view, "xz"),
        _accuracy(view),
        _validation(view),
        KeyFigure("Parameters", _amount(parameters(view)), _vocabulary(view)),
        KeyFigure("Tokens trained on", _amount(tokens(view)), _seen(view)),
        KeyFigure("Throughput", _amount(median_pace(view)), "tokens per second, median" + _mfu(view)),
        _time(view),
        *_saves(view),
    ]


def parameters(view: RunView) -> float | None:
    """Parameters of the model, from the first file that knows."""
    return _first(view.summary.get("parameters"), view.training.get("parameters"))


def tokens(view: RunView) -> float | None:
    """Tokens trained on so far."""
    return _first(view.summary.get("tokens"), view.steps[-1].tokens if view.steps else None)


def total_steps(view: RunView) -> int | None:
    """Steps the run will have when it is done, unless a phase stops early."""
    return whole(mapping(view.plan.get("derived")).get("steps")) or whole(view.setting("train.steps"))


def median_pace(view: RunView) -> float | None:
    """Tokens per second over the steps that count."""
    paces = [step.tokens_per_s for step in view.steps if math.isfinite(step.tokens_per_s)]
    return _first(view.summary.get("tokens_per_s"), statistics.median(paces) if paces else None)


def recent_pace(view: RunView) -> float | None:
    """Tokens per second over the last steps of a run that goes on; over all of one that has finished."""
    paces = [step.tokens_per_s for step in view.steps[-RECENT:] if math.isfinite(step.tokens_per_s)]
    return statistics.median(paces) if paces and not view.finished else median_pace(view)


def total_seconds(view: RunView) -> float | None:
    """Seconds of the whole run, else of the stages that have finished."""
    known = [stage.seconds for stage in view.stages if stage.seconds is not None]
    return _first(mapping(view.summary.get("seconds")).get("total"), math.fsum(known) if known else None)


def seconds_left(view: RunView) -> float | None:
    """Forecast of the rest of training from the pace of the last steps; None without one."""
    total = total_steps(view)
    recent = [step.step_s for step in view.steps[-RECENT:] if math.isfinite(step.step_s)]
    if not total or not recent or view.finished or view.steps[-1].step >= total:
        return None
    return (total - view.steps[-1].step) * statistics.median(recent)


def save_interval(view: RunView) -> str:
    """How often `checkpoint.save_every = "auto"` saves, and why; empty where it has decided nothing."""
    bound = _BOUNDS.get(text(view.saving.get("bound")))
    steps, seconds = whole(view.saving.get("steps")), finite(view.saving.get("interval_s"))
    if bound is None or steps is None or seconds is None:
        return ""
    costs = [finite(view.saving.get(name)) or 0.0 for name in ("blocked_s", "slowed_s")]
    parts = [f"every {counted(steps, 'step')} ({duration(seconds)}), {bound}", f"each costs {sum(costs):.3g} s"]
    if (between := finite(view.saving.get("mtbf_s"))) is not None:
        failures = whole(view.saving.get("failures"))
        seen = counted(failures, "failure") + " seen" if failures else "expected"
        parts.append(f"{_hours(between)} between failures ({seen})")
    return "; ".join(parts)


def _hours(seconds: float) -> str:
    return duration(seconds) if seconds < 360_000 else f"{seconds / 3600:,.0f} h"


def _saves(view: RunView) -> list[KeyFigure]:
    first, _, rest = save_interval(view).partition("; ")
    every, _, bound = first.partition(", ")
    return [KeyFigure("Checkpoint", every, f"{bound}; {rest}")] if every else []


_BOUNDS = {
    "overhead": "as often as the budget allows",
    "failures": "as failures demand",
    "persist": "as fast as they become durable",
}


def _first(*values: object) -> float | None:
    return next((found for value in values if (found := finite(value)) is not None), None)


def _amount(value: float | None) -> str:
    return "–" if value is None else amount(value)


def _bits(view: RunView) -> KeyFigure:
    bits = view.measured("bits_per_byte")
    size, loss, perplexity = finite(view.evaluation.get("bytes")), view.measured("loss"), view.measured("perplexity")
    note = "not evaluated yet" if bits is None else "whole documents"
    note += f", {amount(size, 'B')}" if size else ""
    note += f", loss {loss:.3f}" if loss is not None else ""
    note += f", perplexity {perplexity:.3g}" if perplexity is not None else ""
    return KeyFigure("Held-out bits per byte", "–" if bits is None else f"{bits:.3f}", note)


def _against(view: RunView, name: str) -> KeyFigure:
    """How much shorter the model's code of the held-out text is than a compressor's."""
    bits, other = view.measured("bits_per_byte"), view.measured(f"{name}_bits_per_byte")
    if bits is None or not other:
        return KeyFigure(f"Beside {name}", "–", "not evaluated yet")
    change = 100 * (bits / other - 1)
    return KeyFigure(f"Beside {name}", f"{change:+.1f} %".replace("-", "−"), f"{name} needs {other:.3f} bits per byte")


def _accuracy(view: RunView) -> KeyFigure:
    share, parses = view.measured("accuracy"), view.measured("parse_rate")
    note = "next token is the first choice" if share is not None else "not evaluated yet"
    if parses is not None:
        note += f"; {100 * parses:.0f} % of code parses"
    return KeyFigure("Accuracy", "–" if share is None else f"{100 * share:.1f} %", note)


def _validation(view: RunView) -> KeyFigure:
    """The last one of training; the evaluation measures other text, and tells bits per byte."""
    last = view.validations[-1] if view.validations else None
    loss = _first(last.loss if last else None, view.summary.get("validation_loss"))
    if loss is None:
        return KeyFigure("Validation loss", "–", "not measured yet")
    measured = f", {last.measured_on}, step {last.step:,}" if last else ""
    return KeyFigure("Validation loss", f"{loss:.3f}", f"nats per token{measured}")


def _vocabulary(view: RunView) -> str:
    size = whole(mapping(view.manifest.get("tokenizer")).get("vocabulary"))
    return f"vocabulary of {size:,}" if size else ""


def _seen(view: RunView) -> str:
    """Training tokens against those in the corpus: how often each was seen."""
    shards = view.manifest.get("shards")
    rows = [mapping(shard) for shard in shards] if isinstance(shards, list) else []
    size = sum(whole(row.get("tokens")) or 0 for row in rows if row.get("split") == "train")
    seen = tokens(view)
    return f"{seen / size:.2f} epochs of {amount(size)}" if size and seen else ""


def _mfu(view: RunView) -> str:
    shares = [step.mfu for step in view.steps if math.isfinite(step.mfu)]
    return f", {100 * statistics.median(shares):.0f} % of peak FLOP/s" if shares else ""


def _time(view: RunView) -> KeyFigure:
    seconds = total_seconds(view)
    memory = [step.memory_bytes for step in view.steps if math.isfinite(step.memory_bytes)]
    notes = [] if view.finished else ["finished stages"]
    notes += [f"peak memory {amount(max(memory), 'B')}"] if memory else []
    return KeyFigure("Time", "–" if seconds is None else duration(seconds), ", ".join(notes))
