"""`ropewalk new`: inspects data and writes a recipe for it, sized for this machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import UserError
from ropewalk.base.files import committed_file
from ropewalk.base.progress import amount, counted
from ropewalk.plan.machine import this_machine
from ropewalk.plan.speed import Speed, speed_of
from ropewalk.prepare.inspection.scripts import Writing
from ropewalk.prepare.inspection.survey import Surveyed, survey

from ..reference import commented_recipe
from ..start_from.base_model import open_base
from .fine_tuning_size import size_tuning
from .sizing import DecidedSetting, Facts, Sizing, size_run

MINUTES = 10
"""Default training budget of a new recipe."""
_DENSE_SHARE = 0.3
"""Minimum share of Chinese, Japanese and Korean text for a vocabulary with their characters."""
_EVIDENT_SHARE = 0.04
"""Minimum share of the text for a language to be named."""
_NAMES = """
en English, zh Chinese, de German, fr French, es Spanish, pt Portuguese, it Italian, nl Dutch, pl Polish, ru Russian,
uk Ukrainian, ja Japanese, ko Korean, ar Arabic, hi Hindi, tr Turkish, vi Vietnamese, id Indonesian
"""
_LANGUAGES: dict[str, str] = {words.split()[0]: words.split()[1] for words in _NAMES.split(",")}
"""Names of the most frequent language codes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """A new recipe and the facts behind it."""

    path: Path
    sources: tuple[Surveyed, ...]
    notes: tuple[str, ...]
    speed: Speed
    sizing: Sizing
    seconds: float
    """The time that was asked for."""
    start_from: str = ""
    """The base model, empty if there is none."""

    def tree(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        sizing = self.sizing
        return {
            "recipe": str(self.path),
            "sources": [_source_tree(source) for source in self.sources],
            "notes": list(self.notes),
            "machine": self.speed.words,
            "device": self.speed.device,
            "settings": {key: given.value for key, given in sizing.settings.items()},
            "parameters": sizing.parameters,
            "data_tokens": sizing.data_tokens,
            "tokens": sizing.tokens,
            "epochs": round(sizing.epochs, 2),
            "limited_by": sizing.limited_by,
            "expected_s": {"prepare": round(sizing.prepare_s), "train": round(sizing.train_s)},
        }

    def lines(self) -> list[str]:
        """The findings and decisions as lines."""
        return [*self._found(), *self._decided()]

    def _found(self) -> list[str]:
        return [line for source in self.sources for line in _source_lines(source)]

    def _decided(self) -> list[str]:
        sizing = self.sizing
        base = f" from {self.start_from}" if self.start_from else ""
        return [
            f"model: {amount(sizing.parameters)} parameters{base}; reads {amount(sizing.tokens)} tokens in "
            f"{sizing.settings['train.steps'].value:,} steps, {_passes(sizing)}",
            f"time: {_minutes(sizing.total_s)} ({self.speed.words})",
        ]


def new_recipe(
    path: Path,
    *,
    data: Sequence[str],
    name: str | None = None,
    force: bool = False,
    hours: float | None = None,
    gpu: bool = False,
    start_from: str = "",
    speed: Speed | None = None,
) -> Written:
    """Writes a recipe that trains on `data` (files, folders, globs or URLs) to `path`. Detects how to read the files,
    and sizes the model for `hours` on this machine (default: ten minutes) or on a GPU.

    `speed` is measured if not given.
    """
    if path.suffix != ".toml":
        first = f"{path} exists and is not a TOML file; the recipe comes first: ropewalk new RECIPE.toml {path}"
        named = f"{path}: a recipe is a TOML file; name it {path.with_suffix('.toml')}"
        raise UserError(first if path.exists() else named)
    if path.exists() and not force:
        raise UserError(f"{path}: exists; choose another name or add --force")
    if hours is not None and not hours > 0:
        raise UserError(f"--hours {hours}: name a time above 0, such as --hours 0.5")
    base = open_base(start_from) if start_from else None
    sources, notes = survey(data)
    machine = this_machine()
    speed = speed or speed_of(machine, gpu=gpu)
    seconds = 3600 * hours if hours else 60.0 * MINUTES
    facts = _facts(sources)
    if base:
        sizing = size_tuning(facts, speed, base, seconds=seconds, cores=machine.cores)
    else:
        sizing = size_run(facts, speed, seconds=seconds, cores=machine.cores)
    written = Written(
        path=path,
        sources=tuple(sources),
        notes=(*notes, *_advice(sources, sizing, seconds, tuned=bool(base))),
        speed=speed,
        sizing=sizing,
        seconds=seconds,
        start_from=start_from,
    )
    chat = not base and any(source.is_chat for source in sources)
    given = sizing.settings | _other_settings(speed, chat=chat, machine_has_gpu=bool(machine.gpus))
    text = commented_recipe(
        name or path.stem, head=_head(written), sources=[_source_settings(source) for source in sources], given=given
    )
    with committed_file(path, "w") as file:
        file.write(text)
    return written


def _facts(sources: Sequence[Surveyed]) -> Facts:
    text_bytes = max(1, sum(source.text_bytes for source in sources))
    shares = [(source.text_bytes / text_bytes, source.writing) for source in sources]

    def bytes_per_token(vocabulary: int) -> float:
        return 1 / sum(share / writing.bytes_per_token(vocabulary) for share, writing in shares)

    # Running text fills sequences of any length: its pieces follow each other.
    longest = [10**6 if "split" in source.settings else source.document_characters[1] for source in sources]
    dense = [s.writing.characters_95 for s in sources if s.writing.dense_share >= _DENSE_SHARE]
    return Facts(
        text_bytes=text_bytes,
        bytes_per_token=bytes_per_token,
        longest_characters=max(longest),
        bytes_per_character=max(writing.bytes_per_character for _, writing in shares),
        dense_characters=max(dense, default=0),
        chat=any(source.is_chat for source in sources),
        documents=sum(source.documents for source in sources if source.is_chat),
    )


def _source_settings(source: Surveyed) -> dict[str, DecidedSetting]:
    """Every detected setting of a source, by key."""
    settings = {key: DecidedSetting(value=found.value, reason=found.reason) for key, found in source.settings.items()}
    return {
        "name": DecidedSetting(value=source.name, reason=""),
        "paths": DecidedSetting(value=source.paths, reason="; ".join(_source_lines(source, named=False))),
        **settings,
    }


def _other_settings(speed: Speed, *, chat: bool, machine_has_gpu: bool) -> dict[str, DecidedSetting]:
    found: dict[str, DecidedSetting] = {}
    if chat:
        found["prepare.chat.template"] = DecidedSetting(
            value="chatml", reason="the tokenizer is trained here and gets the markers of this template"
        )
    if speed.device == "cuda" and not machine_has_gpu:
        found["plan.device"] = DecidedSetting(
            value="cuda", reason="sized for a GPU; with `auto` it would train for days on a CPU"
        )
    return found


def _advice(sources: Sequence[Surveyed], sizing: Sizing, seconds: float, *, tuned: bool) -> list[str]:
    found = [f"{source.name}: {note}" for source in sources for note in source.notes]
    if tuned:
        found.append("all weights are trained; for adapters alone (LoRA), remove the # before [train.lora]")
    elif any(source.is_chat for source in sources):
        found.append(
            "dialogues alone teach a new model little: `--start-from` names a trained one to fine-tune, a run or a "
            "Hugging Face directory (`train.start_from`)"
        )
    if sizing.prepare_s > seconds / 2:
        found.append(
            f"preparing {amount(sum(source.text_bytes for source in sources), 'B')} of text takes about "
            f"{_minutes(sizing.prepare_s)} the first time; name fewer files for a quicker first run"
        )
    if sizing.data_tokens < 100_000:
        found.append(f"about {amount(sizing.data_tokens)} tokens are very few: the model will memorise them")
    return found


def _head(written: Written) -> list[str]:
    sizing = written.sizing
    return [
        f"A ropewalk recipe, written by `ropewalk new` for {counted(len(written.sources), 'source')} of "
        f"about {amount(sizing.data_tokens)} tokens.",
        *written.lines(),
        "All of this is estimated from samples. Each setting was chosen for this data, for the reason after the arrow",
        "(->) above it. Every other setting is a comment with its meaning and default: remove the # to change it.",
        "",
        f"  ropewalk recipe show {written.path.name} --changed   only what differs from the defaults",
        f"  ropewalk recipe check {written.path.name}            all problems at once",
        f"  ropewalk run {written.path.name}                     from raw files to a report",
    ]


def _source_lines(source: Surveyed, *, named: bool = True) -> list[str]:
    files = "one file" if source.files == 1 else f"{source.files:,} files"
    what = f"{source.content} in {files}, {amount(source.file_bytes, 'B')}"
    holds = f"about {amount(source.documents)} documents with {amount(source.text_bytes, 'B')} of text"
    text = f"{what}; {holds}, {_languages(source.writing)}"
    return [f"{source.name}: {text}" if named else f"found {text}"]


def _languages(writing: Writing) -> str:
    """`in English`, or the shares of languages, and of scripts if there are several."""
    languages = [(code, share) for code, share in writing.languages.items() if share >= _EVIDENT_SHARE][:3]
    if not languages:
        return f"in {writing.words()} letters"
    named = [f"{_LANGUAGES.get(code, code)} {share:.0%}".removesuffix(" 100%") for code, share in languages]
    scripts = writing.words()
    return f"in {', '.join(named)}" + (f" (letters: {scripts})" if "," in scripts else "")


def _source_tree(source: Surveyed) -> dict[str, Any]:
    return {
        "name": source.name,
        "paths": list(source.paths),
        "settings": {key: found.value for key, found in source.settings.items()},
        "content": source.content,
        "files": source.files,
        "file_bytes": source.file_bytes,
        "text_bytes": source.text_bytes,
        "documents": source.documents,
        "scripts": {script: round(share, 3) for script, share in source.writing.scripts.items()},
        "languages": {code: round(share, 3) for code, share in source.writing.languages.items()},
    }


def _passes(sizing: Sizing) -> str:
    if sizing.epochs < 1:
        return f"{sizing.epochs:.0%} of the data"
    return f"about {sizing.epochs:.2g} times the data"


def _minutes(seconds: float) -> str:
    if seconds < 90:
        return "about a minute"
    if seconds < 5400:
        return f"about {round(seconds / 60)} minutes"
    return f"about {seconds / 3600:.2g} hours"
