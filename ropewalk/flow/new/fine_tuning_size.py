"""Steps and learning rate for fine-tuning: what `ropewalk new --start-from` writes for a base model, its data, a
machine and a time. Rules of thumb: a starting point, not an optimum.
"""

from __future__ import annotations

from typing import Any

from ropewalk.evaluate.config import Evaluate
from ropewalk.model.config import Model
from ropewalk.model.spec import Spec, resolve
from ropewalk.plan.speed import Speed

from ..start_from.base_model import Base
from .sizing import (
    VALIDATION_SHARE,
    DecidedSetting,
    Facts,
    Sizing,
    amount_of_steps,
    batch_tokens_for,
    every_for,
    lr_for,
    nice,
    prepare_seconds,
    share_for_validation,
    token_count,
    training_seconds,
)

MOST_EPOCHS = 3
"""Epochs, as in Stanford Alpaca and InstructGPT's supervised training within a factor of five."""
_LR_SHARE = 0.2
"""Share of the learning rate for random weights, so that the base keeps what it learned."""


def size_tuning(facts: Facts, speed: Speed, base: Base, *, seconds: float, cores: int = 1) -> Sizing:
    """As many steps as `seconds` allow, at most `MOST_EPOCHS` epochs, for a model of the base's shape."""
    spec = _spec(base)
    prepare_s = prepare_seconds(facts, cores)
    data_tokens = token_count(facts, spec.vocabulary)
    batch_tokens = batch_tokens_for(MOST_EPOCHS * data_tokens)
    tokens_per_s = speed.tokens_per_s(spec, batch_tokens=batch_tokens)
    affordable = tokens_per_s * training_seconds(seconds, prepare_s)
    wanted = min(affordable, MOST_EPOCHS * data_tokens)
    batch = max(1, batch_tokens_for(wanted) // spec.sequence_length)
    steps = amount_of_steps(wanted / (batch * spec.sequence_length))
    tokens = steps * batch * spec.sequence_length
    limited_by = "data" if affordable > MOST_EPOCHS * data_tokens else "time"
    return Sizing(
        settings=_settings(base, spec, batch=batch, steps=steps, data_tokens=data_tokens, limited_by=limited_by),
        parameters=spec.parameters(),
        data_tokens=round(data_tokens),
        tokens=tokens,
        train_s=tokens / tokens_per_s,
        prepare_s=prepare_s,
        limited_by=limited_by,
    )


def _spec(base: Base) -> Spec:
    values: dict[str, Any] = dict(base.model)
    length = base.sequence_length or 1024
    return resolve(Model(**values), vocabulary=int(values["vocabulary"]), sequence_length=length)


def _settings(
    base: Base, spec: Spec, *, batch: int, steps: int, data_tokens: float, limited_by: str
) -> dict[str, DecidedSetting]:
    row = spec.sequence_length
    seen = steps * batch * row / data_tokens
    reason = "more would be learned by heart" if limited_by == "data" else "as far as the time goes"
    found = {
        "train.start_from": DecidedSetting(
            value=base.place, reason="shape, tokenizer and sequence length come from it"
        ),
        "train.steps": DecidedSetting(value=steps, reason=f"{seen:.2g} times the data; {reason}"),
        "train.batch_size": DecidedSetting(value=batch, reason=f"{batch} x {row} = {batch * row:,} tokens per step"),
        "train.validate_every_steps": DecidedSetting(value=every_for(steps), reason="about ten times in the run"),
        "train.log_every_steps": DecidedSetting(value=max(1, nice(steps / 80)), reason=""),
        "train.schedule.peak_lr": DecidedSetting(
            value=float(f"{_LR_SHARE * lr_for(spec.width):.1e}"),
            reason="a fifth of the rate for random weights of this width",
        ),
        "checkpoint.save_every_steps": DecidedSetting(
            value=every_for(steps), reason="an interrupted run repeats at most this much"
        ),
    }
    share = share_for_validation(row, data_tokens)
    if share > VALIDATION_SHARE:
        reason = "with so little data, a smaller share would not fill a few sequences"
        found["prepare.validation_share"] = DecidedSetting(value=share, reason=reason)
    if row <= Evaluate().prompt_tokens:
        found["evaluate.prompt_tokens"] = DecidedSetting(value=row // 2, reason="rows are short")
    return found
