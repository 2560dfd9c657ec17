"""Sizes a model and a schedule for data, a machine and a time: the settings that `ropewalk new` writes, each with its
reason. Rules of thumb with their sources; a recipe is a starting point, not an optimum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ropewalk.base.progress import amount, duration
from ropewalk.evaluate.config import Evaluate
from ropewalk.model.config import Model
from ropewalk.model.spec import Spec, resolve
from ropewalk.plan.speed import Speed
from ropewalk.prepare.config import Prepare

TOKENS_PER_PARAMETER = 6
"""Hoffmann et al. 2022 found 20 for large models. In the few minutes of a default recipe, the best of 64 models had
4 to 8 (docs/log.md)."""
MOST_EPOCHS = 8
"""Muennighoff et al. 2023: up to 4 times the same data is almost as good as new data, then gains fade. One MB of plays
gained nothing more after 8 times (docs/log.md)."""
_LADDER = (
    (2, 64, 2),
    (3, 96, 3),
    (3, 128, 4),
    (4, 192, 6),
    (4, 256, 4),
    (6, 384, 6),
    (8, 512, 8),
    (12, 768, 12),
    (16, 1024, 16),
    (24, 1024, 16),
    (24, 1536, 24),
    (24, 2048, 16),
)
"""(layers, width, heads), each about two to three times the one before."""
_VOCABULARIES = {64: 1024, 96: 1024, 128: 2048, 192: 2048, 256: 4096, 384: 8192, 512: 8192, 768: 32768}
"""Maximum vocabulary by width: beyond it, the head would take most of the work. Wider models: 32,768."""
_VOCABULARY_BYTES = ((300_000, 512), (3_000_000, 1024), (30_000_000, 4096), (300_000_000, 8192), (3_000_000_000, 16384))
"""(bytes of text, maximum vocabulary up to that size): rare tokens are not learned. Beyond: 32,768."""
_SHORTEST, _SHORTEST_OF_LITTLE = 128, 64
"""Sequence length; the second applies if there is too little data for longer sequences."""
VALIDATION_SHARE: float = Prepare().validation_share
_VALIDATION_ROWS, _MOST_VALIDATION_SHARE = 8, 0.2
"""Sequences that the held-out tokens should fill, and the maximum share held out for them."""
_BATCH_TOKENS, _MOST_BATCH_TOKENS = 2048, 1 << 19
_STEPS = 2000
"""Minimum optimizer steps, if there are enough tokens: a small batch learns more per token."""
_BASE_LR, _BASE_WIDTH = 5e-3, 128
"""The best learning rate for the quickstart's model, and its width."""
_EVALUATION_S, _START_S = 30, 30
_PREPARE_BYTES_PER_CORE_S = 1e6
"""Bytes of text that one core prepares per second, from reading to tokens; _START_S is added for compilation."""
_LEAST_TRAIN_SHARE = 0.4
"""Minimum share of a run's time for training, however long preparing takes."""
_PAIR_TOKENS = 16
"""Tokens that a chat template adds to a question and its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about the data that sizing needs."""

    text_bytes: int
    bytes_per_token: Callable[[int], float]
    """By vocabulary size."""
    longest_characters: int
    """90th percentile of document lengths."""
    bytes_per_character: float
    dense_characters: int = 0
    """Distinct characters that make up 95 % of Chinese, Japanese or Korean text; 0 if there is little of it."""
    chat: bool = False
    documents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedSetting:
    """The value of a setting and the reason for it."""

    value: Any
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Settings by dotted key of the recipe, and what follows from them."""

    settings: dict[str, DecidedSetting]
    parameters: int
    data_tokens: int
    """Estimate for all the data."""
    tokens: int
    """Tokens that training reads."""
    train_s: float
    prepare_s: float
    limited_by: str
    """What limits the run: `time` or `data`."""

    @property
    def epochs(self) -> float:
        return self.tokens / max(1, self.data_tokens)

    @property
    def total_s(self) -> float:
        """The whole run, from raw files to report."""
        return self.prepare_s + self.train_s + _EVALUATION_S


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A model shape and its training tokens."""

    spec: Spec
    parameters: int
    layers: int
    width: int
    heads: int
    data_tokens: float
    affordable: float
    """Tokens that the time allows."""
    batch_tokens: int
    tokens_per_s: float

    @property
    def tokens(self) -> float:
        return min(self.affordable, MOST_EPOCHS * self.data_tokens)

    @property
    def validation_share(self) -> float:
        """Held out, so that it fills some rows."""
        return share_for_validation(self.spec.sequence_length, self.data_tokens)

    @property
    def is_limited_by_data(self) -> bool:
        return self.affordable > MOST_EPOCHS * self.data_tokens


def size_run(facts: Facts, speed: Speed, *, seconds: float, cores: int = 1) -> Sizing:
    """The largest model that sees `TOKENS_PER_PARAMETER` tokens per parameter within `seconds` and at most
    `MOST_EPOCHS` epochs; the smallest shape if none does."""
    prepare_s = prepare_seconds(facts, cores)
    train_s = training_seconds(seconds, prepare_s)
    choices = [_choice(facts, speed, shape, train_s=train_s, seconds=seconds) for shape in _LADDER]
    fitting = [each for each in choices if each.tokens >= TOKENS_PER_PARAMETER * each.parameters]
    in_memory = [each for each in fitting if 24 * each.parameters < 0.5 * speed.memory_bytes]
    best = in_memory[-1] if in_memory else choices[0]
    batch = max(1, best.batch_tokens // best.spec.sequence_length)
    steps = amount_of_steps(best.tokens / (batch * best.spec.sequence_length))
    tokens = steps * batch * best.spec.sequence_length
    return Sizing(
        settings=_settings(facts, best, batch=batch, steps=steps, tokens=tokens),
        parameters=best.parameters,
        data_tokens=round(best.data_tokens),
        tokens=tokens,
        train_s=tokens / best.tokens_per_s,
        prepare_s=prepare_s,
        limited_by="data" if best.is_limited_by_data else "time",
    )


def prepare_seconds(facts: Facts, cores: int) -> float:
    """Seconds from raw files to tokens."""
    return _START_S + facts.text_bytes / (_PREPARE_BYTES_PER_CORE_S * cores)


def training_seconds(seconds: float, prepare_s: float) -> float:
    """The part of `seconds` that remains for training."""
    return max(_LEAST_TRAIN_SHARE * seconds, seconds - prepare_s - _EVALUATION_S)


def token_count(facts: Facts, vocabulary: int) -> float:
    """Tokens of all the data, including those that a chat template adds."""
    return facts.text_bytes / facts.bytes_per_token(vocabulary) + facts.chat * _PAIR_TOKENS * facts.documents


def share_for_validation(sequence_length: int, data_tokens: float) -> float:
    """Held out, so that it fills some rows."""
    wanted = _VALIDATION_ROWS * sequence_length / max(1.0, data_tokens)
    return min(_MOST_VALIDATION_SHARE, max(VALIDATION_SHARE, float(f"{wanted:.1g}")))


def lr_for(width: int) -> float:
    """Learning rate for random weights."""
    return float(f"{min(_BASE_LR, _BASE_LR * (_BASE_WIDTH / width) ** 0.75):.1e}")


def every_for(steps: int) -> int:
    """Steps between validations or checkpoints."""
    return nice(steps / 8)


def _choice(facts: Facts, speed: Speed, shape: tuple[int, int, int], *, train_s: float, seconds: float) -> _Choice:
    layers, width, heads = shape
    vocabulary = _vocabulary(facts, width)
    bytes_per_token = facts.bytes_per_token(vocabulary)
    length = _length(facts, bytes_per_token, most=_longest(speed, seconds, chat=facts.chat))
    spec = resolve(Model(layers=layers, width=width, heads=heads), vocabulary=vocabulary, sequence_length=length)
    data_tokens = token_count(facts, vocabulary)
    # Batch size and its cost on a GPU depend on each other; two rounds are enough.
    batch_tokens = _BATCH_TOKENS
    for _ in range(2):
        tokens_per_s = speed.tokens_per_s(spec, batch_tokens=batch_tokens)
        affordable = tokens_per_s * train_s
        batch_tokens = batch_tokens_for(min(affordable, MOST_EPOCHS * data_tokens))
    return _Choice(
        spec=spec,
        parameters=spec.parameters(),
        layers=layers,
        width=width,
        heads=heads,
        data_tokens=data_tokens,
        affordable=affordable,
        batch_tokens=batch_tokens,
        tokens_per_s=tokens_per_s,
    )


def _vocabulary(facts: Facts, width: int) -> int:
    by_bytes = next((size for most, size in _VOCABULARY_BYTES if facts.text_bytes <= most), 32_768)
    fit = min(by_bytes, _VOCABULARIES.get(width, 32_768))
    if facts.dense_characters:
        # One token per frequent character, as many for pairs, plus bytes and markers.
        wanted = 1 << math.ceil(math.log2(256 + 1.25 * facts.dense_characters))
        return min(max(fit, wanted), 2 * by_bytes)
    return fit


def _length(facts: Facts, bytes_per_token: float, *, most: int) -> int:
    """Sequence length: a power of two that holds 90 % of documents, or `most`."""
    longest = _tokens_of_longest(facts, bytes_per_token)
    length = min(most, max(_SHORTEST, 1 << math.ceil(math.log2(max(2.0, longest)))))
    held_out = _MOST_VALIDATION_SHARE * facts.text_bytes / bytes_per_token
    while length > _SHORTEST_OF_LITTLE and length * _VALIDATION_ROWS > held_out:
        length //= 2
    return length


def _tokens_of_longest(facts: Facts, bytes_per_token: float) -> float:
    tokens = facts.longest_characters * facts.bytes_per_character / bytes_per_token
    return tokens + _PAIR_TOKENS * facts.chat


def _longest(speed: Speed, seconds: float, *, chat: bool) -> int:
    if speed.device == "cuda":
        return 1024
    return 512 if chat or seconds > 7200 else 256


def batch_tokens_for(tokens: float) -> int:
    """Tokens per step of a run that reads `tokens`."""
    return min(_MOST_BATCH_TOKENS, max(_BATCH_TOKENS, 1 << round(math.log2(max(1.0, tokens / _STEPS)))))


def amount_of_steps(steps: float) -> int:
    """Rounded to two digits, at least 20."""
    whole = max(20, round(steps))
    return max(20, round(whole, 2 - len(str(whole))))


def _settings(facts: Facts, best: _Choice, *, batch: int, steps: int, tokens: int) -> dict[str, DecidedSetting]:
    spec = best.spec
    every = every_for(steps)
    rate = lr_for(best.width)
    found = {
        "prepare.tokenizer.vocab_size": DecidedSetting(
            value=spec.vocabulary, reason=_vocabulary_reason(facts, spec.vocabulary)
        ),
        "load.sequence_length": DecidedSetting(value=spec.sequence_length, reason=_length_reason(facts, spec)),
        "model.layers": DecidedSetting(
            value=best.layers,
            reason=f"{amount(best.parameters)} parameters: {tokens / best.parameters:.0f} tokens per parameter",
        ),
        "model.width": DecidedSetting(value=best.width, reason=""),
        "model.heads": DecidedSetting(value=best.heads, reason=f"{best.width // best.heads} features per head"),
        "train.steps": DecidedSetting(value=steps, reason=_steps_reason(best, tokens)),
        "train.batch_size": DecidedSetting(
            value=batch, reason=f"{batch} x {spec.sequence_length} = {batch * spec.sequence_length:,} tokens per step"
        ),
        "train.validate_every_steps": DecidedSetting(value=every, reason="about ten times in the run"),
        "train.log_every_steps": DecidedSetting(value=max(1, nice(steps / 80)), reason=""),
        "train.optimizer.kind": DecidedSetting(value="muon", reason="the best of those tried for models of this size"),
        "train.optimizer.rest_lr_ratio": DecidedSetting(value=2.0, reason="goes with it"),
        "train.schedule.peak_lr": DecidedSetting(
            value=rate, reason=f"for a width of {best.width}; wider models need a smaller one"
        ),
        "checkpoint.save_every_steps": DecidedSetting(
            value=every, reason="an interrupted run repeats at most this much"
        ),
    }
    if best.validation_share > VALIDATION_SHARE:
        held_out = DecidedSetting(
            value=best.validation_share, reason="with so little data, a smaller share would not fill a few sequences"
        )
        found["prepare.validation_share"] = held_out
    if best.spec.sequence_length <= Evaluate().prompt_tokens:
        found["evaluate.prompt_tokens"] = DecidedSetting(value=best.spec.sequence_length // 2, reason="rows are short")
    return found


def _vocabulary_reason(facts: Facts, vocabulary: int) -> str:
    text = f"{amount(facts.text_bytes, 'B')} of text, about {facts.bytes_per_token(vocabulary):.1f} bytes per token"
    if not facts.dense_characters:
        return text
    return f"{text}; {facts.dense_characters:,} distinct characters make up 95 % of the Chinese, Japanese or Korean"


def _length_reason(facts: Facts, spec: Spec) -> str:
    if _tokens_of_longest(facts, facts.bytes_per_token(spec.vocabulary)) <= spec.sequence_length:
        return "nine of ten documents fit"
    return "documents are longer, but in this time longer sequences would cost more than they gain"


def _steps_reason(best: _Choice, tokens: int) -> str:
    epochs = tokens / best.data_tokens
    data = f"{amount(best.data_tokens)} tokens of data"
    seen = f"{data} x {epochs:.2g} epochs" if epochs >= 1 else f"{epochs:.0%} of the {data}"
    if best.is_limited_by_data:
        return f"{seen} = {amount(tokens)} tokens; more epochs over so little data gain little"
    takes = f"about {amount(best.tokens_per_s)} tokens/s for {duration(tokens / best.tokens_per_s)}"
    return f"{seen} = {amount(tokens)} tokens; {takes}"


def nice(value: float) -> int:
    """The largest of 1, 2, 5, 10, 20, 50, ... that is not above `value`."""
    if value < 1:
        return 1
    power = 10 ** math.floor(math.log10(value))
    return int(next(factor for factor in (5, 2, 1) if factor * power <= value) * power)
