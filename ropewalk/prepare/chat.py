"""Dialogues: turns as one text, templates that render them as tokens, and which of these the loss counts.

A reader gives a dialogue as one text, every turn as `RECORD role UNIT content` (the ASCII separators 0x1E and 0x1F,
which no role and no content holds), so that the steps before encoding treat it as any other document. A template, which
is data, turns it into what the model reads. The loss counts an answer (the content of a turn of `assistant`) and the
marker that closes it, from which a model learns to stop; it counts nothing else of a dialogue.

An answer and its marker are encoded apart from what surrounds them, so that no token belongs to both sides of a border.
All text between two answers is encoded as one. Special tokens cut a text anyway, and contents are stripped of
surrounding white space (as in the template of Llama 3), so that byte-level tokenizers give the same ids for the whole
rendered text: those of `apply_chat_template` in transformers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ropewalk.base.errors import DataError, UserError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from ropewalk.store.shards import Counts, Tokens

RECORD, UNIT = "\x1e", "\x1f"
ANSWERS = "assistant"
"""The role whose turns are learned."""

ROLES = {
    **{name: name for name in (ANSWERS, "user", "system")},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "bot", "chatgpt", "model"), ANSWERS),
}
"""What data sets in use call the sides, in small letters; other roles keep their names."""

END = "{end}"
"""In a template: the tokenizer's end-of-text token."""


class Turn(NamedTuple):
    """One turn of a dialogue."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """How turns are written. `{role}` is the role, `{Role}` the same with a capital, `{end}` the end of text."""

    opening: str
    """Before the content of every turn."""
    closing: str
    """After the content of a turn that is no answer."""
    answer_closing: str
    """After an answer: the marker at which generation stops. Counted."""
    answer_behind: str = ""
    """After that marker. Not counted."""
    markers: tuple[str, ...] = ()
    """Special tokens of a tokenizer that is trained here."""


TEMPLATES: dict[str, Template] = {
    "chatml": Template(
        opening="<|im_start|>{role}\n",
        closing="<|im_end|>\n",
        answer_closing="<|im_end|>",
        answer_behind="\n",
        markers=("<|im_start|>", "<|im_end|>"),
    ),
    # For any tokenizer. An empty line ends a question, not an answer, which may hold empty lines of its own.
    "plain": Template(opening="{Role}:\n", closing="\n\n", answer_closing=END),
}


def join_turns(turns: Iterable[Turn]) -> str:
    """The text of a dialogue, as readers give it; separators inside a role or a content become spaces."""
    return "".join(f"{RECORD}{_clean(role)}{UNIT}{_clean(content)}" for role, content in turns)


def split_turns(text: str, *, document: str) -> list[Turn]:
    """The turns of a dialogue's text; DataError names the `document` that is none, or that a filter has cut up."""
    first, *records = text.split(RECORD)
    parts = [record.split(UNIT) for record in records]
    if first or not parts or any(len(part) != 2 for part in parts):
        raise DataError(
            f'document {document}: its text is no dialogue of turns; read its source with format="chat", and let no '
            "rule that cuts texts apply to it"
        )
    return [Turn(role, content) for role, content in parts]


class Encoded(NamedTuple):
    """A dialogue as tokens."""

    tokens: Tokens
    counts: Counts
    text_bytes: int
    """UTF-8 bytes of the rendered text, markers spelled out."""


Encode: TypeAlias = "Callable[[Sequence[str]], Iterable[Tokens]]"
"""Texts -> the tokens of each, without special tokens."""


class ChatEncoder:
    """A template in the tokens of one tokenizer: a marker is a special token where the tokenizer has it, else text."""

    def __init__(self, template: Template, tokenizer: Tokenizer, encode: Encode, *, end: int) -> None:
        self._template, self._encode = template, encode
        added = {str(token): number for number, token in tokenizer.get_added_tokens_decoder().items()}
        self._special = {marker: added[marker] for marker in template.markers if marker in added} | {END: end}
        self._spelled = {END: str(tokenizer.id_to_token(end))}
        self._cut = re.compile("|".join(map(re.escape, self._special)))
        (closing,) = self._assembled([list(self._pieces(template.answer_closing, counts=True))])
        self.closing: list[int] = closing.tokens.tolist()
        """The tokens that close an answer."""

    def dialogues(self, dialogues: Iterable[Sequence[Turn]]) -> list[Encoded]:
        """Each dialogue as tokens, without the end of text that closes every document."""
        return self._assembled([list(self._rendered(turns)) for turns in dialogues])

    def prompt(self, turns: Sequence[Turn]) -> list[int]:
        """The tokens after which the model answers `turns`."""
        opening = self._pieces(self._template.opening, role=ANSWERS)
        (encoded,) = self._assembled([[*self._rendered(turns), *opening]])
        tokens: list[int] = encoded.tokens.tolist()
        return tokens

    def _rendered(self, turns: Sequence[Turn]) -> Iterator[_Piece]:
        template = self._template
        for role, content in turns:
            answer = role == ANSWERS
            yield from self._pieces(template.opening, role=role)
            yield _Piece(content.strip(), None, answer)
            if answer:
                yield from self._pieces(template.answer_closing, counts=True)
                yield from self._pieces(template.answer_behind)
            else:
                yield from self._pieces(template.closing)

    def _pieces(self, text: str, *, role: str = "", counts: bool = False) -> Iterator[_Piece]:
        """A text of the template, cut at its special tokens; a marker spelled out in a role or a content is text."""
        position = 0
        for found in self._cut.finditer(text):
            yield _Piece(_named(text[position : found.start()], role), None, counts)
            spelled = self._spelled.get(found[0], found[0])
            yield _Piece(spelled, self._special[found[0]], counts)
            position = found.end()
        yield _Piece(_named(text[position:], role), None, counts)

    def _assembled(self, dialogues: list[list[_Piece]]) -> list[Encoded]:
        import numpy as np  # a tenth of a second that checking a recipe need not spend

        dialogues = [list(_joined(pieces)) for pieces in dialogues]
        texts = [piece.text for pieces in dialogues for piece in pieces if piece.special is None]
        tokens = iter(self._encode(texts))
        encoded = []
        for pieces in dialogues:
            parts = [next(tokens) if p.special is None else np.array([p.special], np.uint32) for p in pieces]
            lengths = [len(part) for part in parts]
            encoded.append(
                Encoded(
                    tokens=np.concatenate([np.zeros(0, np.uint32), *parts]).astype(np.uint32),
                    counts=np.repeat(np.array([piece.counts for piece in pieces], bool), lengths),
                    text_bytes=sum(len(piece.text.encode()) for piece in pieces),
                )
            )
        return encoded


def template_named(name: str) -> Template:
    """The template of this name; UserError lists those there are."""
    if name not in TEMPLATES:
        raise UserError(f'no chat template "{name}"; there are {", ".join(TEMPLATES)}')
    return TEMPLATES[name]


def jinja(name: str) -> str:
    """The template as transformers keeps it (`chat_template`); it gives our text, markers and end of text included."""
    template = template_named(name)
    content = "message['content'] | trim"
    answer = " + ".join(
        [
            _expression(template.opening),
            content,
            *filter(None, [_expression(template.answer_closing), _expression(template.answer_behind)]),
        ]
    )
    other = " + ".join([_expression(template.opening), content, _expression(template.closing)])
    opening = _expression(_named(template.opening, ANSWERS))
    return (
        f"{{% for message in messages %}}{{% if message['role'] == '{ANSWERS}' %}}{{{{ {answer} }}}}"
        f"{{% else %}}{{{{ {other} }}}}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{{{{ {opening} }}}}{{% endif %}}"
    )


class _Piece(NamedTuple):
    text: str
    special: int | None
    """The id of a special token; `text` is how it is spelled."""
    counts: bool


def _joined(pieces: Iterable[_Piece]) -> Iterator[_Piece]:
    """The pieces without empty ones; texts that do not count become one where nothing stands between them."""
    run = ""
    for piece in pieces:
        if piece.special is None and not piece.counts:
            run += piece.text
            continue
        if run:
            yield _Piece(run, None, False)
            run = ""
        if piece.text:
            yield piece
    if run:
        yield _Piece(run, None, False)


def _named(text: str, role: str) -> str:
    values = {"{role}": role, "{Role}": role.capitalize()}
    return re.sub(r"\{role\}|\{Role\}", lambda found: values[found[0]], text)


def _expression(text: str) -> str:
    """A text of a template as an expression of Jinja."""
    values = {"{role}": "message['role']", "{Role}": "message['role'] | capitalize", END: "eos_token"}
    parts = re.split(r"(\{role\}|\{Role\}|\{end\})", text)
    return " + ".join(values.get(part) or json.dumps(part) for part in parts if part)


def _clean(text: str) -> str:
    return text.replace(RECORD, " ").replace(UNIT, " ")
