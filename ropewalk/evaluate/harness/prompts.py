"""The text that a model reads for a document: description, few-shot examples and the question, plain or as a dialogue
in the model's chat template. Equal to lm-eval's to the byte."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .doc_fields import DocFields, Document
from .fewshot import FewShotSampler
from .task_file import TaskFile
from .template import render_chat

ChatStyle = Literal["none", "single-turn", "multi-turn"]


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A model's chat template."""

    text: str
    """Jinja, as transformers keeps it."""
    end: str
    """The end-of-text token as it is spelled."""
    style: ChatStyle


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model reads, in three parts that are simply joined."""

    preamble: str
    question: str
    closing: str = ""

    @property
    def text(self) -> str:
        """The whole context."""
        return self.preamble + self.question + self.closing


@dataclass(frozen=True, slots=True)
class _Message:
    role: str
    content: str
    delimiter: str = ""

    @property
    def text(self) -> str:
        return self.content + self.delimiter


class PromptWriter:
    """Writes the prompts of a task, in the order of its documents."""

    def __init__(
        self,
        file: TaskFile,
        fields: DocFields,
        *,
        shots: int,
        sampler: FewShotSampler | None,
        chat: ChatTemplate | None,
    ) -> None:
        self._file, self._fields, self._shots, self._sampler, self._chat = file, fields, shots, sampler, chat
        self._config: dict[str, Any] = file.get("fewshot_config", {})
        self._delimiter = file.get("fewshot_delimiter", "\n\n")
        self._target_delimiter = file.get("target_delimiter", " ")
        self.several_contexts = False
        """Whether the choices stand inside the question: `doc_to_text` gives the index of the right one."""

    @property
    def choice_delimiter(self) -> str:
        """What stands between the context and a choice."""
        if self._chat is None:
            return str(self._target_delimiter)
        prefix = self._file.get("gen_prefix")
        return str(self._target_delimiter) if prefix and not prefix[-1:].isspace() else ""

    def write(self, document: Document) -> list[Prompt]:
        """The document's prompt, or one per choice where the choices stand inside the question."""
        before = self._before(document)
        prefix = self._fields.prefix(document)
        if self.several_contexts:
            questions, delimiter = self._fields.choices(document), ""
        else:
            text = self._fields.text(document)
            questions, delimiter = [str(text)], str(self._target_delimiter)
        return [self._joined([*before, *_turn(each, None, prefix, delimiter, "")]) for each in questions]

    def _before(self, document: Document) -> list[_Message]:
        description = self._fields.resolved(document, "description", self._file.get("description"))
        found = [_Message("system", description)] if description else []
        if self._shots and self._sampler:
            split = self._config.get("split", self._file.get("fewshot_split"))
            # lm-eval compares with `test_split` alone, also where it is absent.
            besides = document if split == self._file.get("test_split") else None
            for example in self._sampler.draw(self._shots, besides=besides):
                found += self._example(example)
        return found

    def _example(self, example: Document) -> list[_Message]:
        fields, config = self._fields, self._config
        text = fields.text(example, config.get("doc_to_text"))
        said = config.get("doc_to_choice", self._file.get("doc_to_choice"))
        choices = fields.choices(example, said) if said is not None else None
        answer = fields.target(example, config.get("doc_to_target"))
        if self.several_contexts:
            assert choices is not None
            assert isinstance(text, int)
            text, choices = choices[text], None
        if isinstance(answer, int) and choices:
            answer = choices[answer]
        elif isinstance(answer, list):
            answer = answer[0]
        prefix = fields.resolved(example, "gen_prefix", config.get("gen_prefix", self._file.get("gen_prefix")))
        delimiter = config.get("target_delimiter", self._target_delimiter)
        written = None if answer is None else str(answer)
        return _turn(str(text), written, prefix, delimiter, config.get("fewshot_delimiter", self._delimiter))

    def _joined(self, messages: list[_Message]) -> Prompt:
        asked = max(index for index, message in enumerate(messages) if message.role == "user")
        if self._chat is None:
            before, after = messages[:asked], messages[asked + 1 :]
            closing = messages[asked].delimiter + "".join(each.text for each in after)
            return Prompt("".join(each.text for each in before), messages[asked].content, closing)
        if self._chat.style == "single-turn":
            messages = _single_turn(messages)
        turns = [{"role": each.role, "content": each.content} for each in messages]
        last = messages[-1].role
        text = render_chat(self._chat.text, turns, end=self._chat.end, answer=last != "assistant")
        return _split(text, _asked(messages))


def _asked(messages: Sequence[_Message]) -> str:
    return next(each.content for each in reversed(messages) if each.role == "user").strip()


def _split(text: str, question: str) -> Prompt:
    """The text cut around the last place of the question."""
    begin = text.rfind(question)
    if begin < 0 or not question:
        return Prompt("", text)
    return Prompt(text[:begin], question, text[begin + len(question) :])


def _turn(question: str, answer: str | None, prefix: str | None, delimiter: str, after: str) -> list[_Message]:
    """A question, and its answer if it is known; else the answer's prefix if there is one."""
    if answer is not None and answer != "":
        between = delimiter if not prefix or _needs_space(question, prefix) else ""
        return [_Message("user", question, between), _Message("assistant", _delimited(prefix, answer), after)]
    if prefix:
        between = delimiter if _needs_space(question, prefix) else ""
        return [_Message("user", question, between), _Message("assistant", prefix)]
    return [_Message("user", question)]


def _single_turn(messages: list[_Message]) -> list[_Message]:
    """The turns as one question, between the system text and the beginning of the answer."""
    system, rest = (messages[:1], messages[1:]) if messages[0].role == "system" else ([], messages)
    answer = rest[-1:] if rest[-1].role == "assistant" else []
    asked = rest[: len(rest) - len(answer)]
    asked[-1] = replace(asked[-1], delimiter="")
    return [*system, _Message("user", "".join(each.text for each in asked)), *answer]


def _needs_space(before: str, after: str) -> bool:
    return bool(before) and not (before[-1].isspace() or after[0].isspace())


def _delimited(prefix: str | None, text: str) -> str:
    if not prefix:
        return text
    return f"{prefix} {text}" if _needs_space(prefix, text) else prefix + text
