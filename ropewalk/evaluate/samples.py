"""Completions of held-out beginnings, and whether the Python among them parses.

A completion is cut after a fixed number of tokens, in the middle of a line, a bracket or a block, where hardly any text
parses. So a completion is accepted when `ast.parse` takes the prompt and the completion together, cut after one of the
completion's lines, and at least half of the completion's non-blank lines (and at least one) stand before the cut. A
last line without a line end counts only if the end of text closed it. The true continuation of the same document, of as
many tokens, is judged by the same rule: the share of those that pass is what a perfect model can reach. It is below 1,
for example where the prompt ends inside a long docstring.
"""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass

from ropewalk.base.seeds import seed_for
from ropewalk.model.decoder import Decoder
from ropewalk.parallel.executor import Executor

from .config import Evaluate
from .generate import generate
from .held_out import Document
from .text import Detokenizer

CODE = "code"
"""The domain whose completions are parsed as Python."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion; what is not UTF-8 in it is shown as U+FFFD."""

    prompt: str
    completion: str
    domain: str
    source: str
    parses: bool | None
    """Whether the completion is accepted as Python; None outside domain `code`."""
    parses_reference: bool | None
    """The same of the document's true continuation."""


def draw_samples(
    model: Decoder | Executor,
    documents: list[Document],
    detokenizer: Detokenizer,
    *,
    settings: Evaluate,
    end_of_text: int,
    seed: int,
) -> list[Sample]:
    """`settings.samples` completions, the domains in turn.

    The prompt is an end-of-text token and the first `prompt_tokens` tokens of a document, at most half of it. With an
    executor all ranks must call.
    """
    chosen = _in_turn(documents, settings.samples, seed)
    begins = [_begin(document, settings.prompt_tokens) for document in chosen]
    completions = generate(
        model,
        [[end_of_text, *document.tokens[:begin].tolist()] for document, begin in zip(chosen, begins, strict=True)],
        new_tokens=settings.max_new_tokens,
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=seed_for(seed, "samples"),
        end=end_of_text,
        vocabulary=detokenizer.vocabulary,
    )
    return [
        _sample(document, begin, completion, detokenizer, settings.max_new_tokens)
        for document, begin, completion in zip(chosen, begins, completions, strict=True)
    ]


def accepts(prompt: bytes, completion: bytes, *, closed: bool) -> bool:
    """Whether the completion counts as Python, by the rule above; `closed` says that the end of text followed it."""
    lines = completion.splitlines(keepends=True)
    if lines and not closed and not lines[-1].endswith(b"\n"):
        lines.pop()
    written = kept = sum(1 for line in lines if line.strip())
    while kept and 2 * kept >= written:
        if _parses(prompt + b"".join(lines)):
            return True
        kept -= bool(lines.pop().strip())
    return False


def rate(marks: list[bool | None]) -> float | None:
    """Share of true marks among those that are set; None when none is."""
    judged = [mark for mark in marks if mark is not None]
    return sum(judged) / len(judged) if judged else None


def _in_turn(documents: list[Document], count: int, seed: int) -> list[Document]:
    """`count` documents, one of each domain in turn, in a seeded order; a short domain is gone through again."""
    domains: dict[str, list[Document]] = {}
    for _, document in sorted(enumerate(documents), key=lambda item: seed_for(seed, "sample", item[0])):
        domains.setdefault(document.domain, []).append(document)
    turns = [domains[name] for name in sorted(domains)]
    picks = (divmod(index, len(turns)) for index in range(count))
    return [turns[domain][place % len(turns[domain])] for place, domain in picks]


def _begin(document: Document, prompt_tokens: int) -> int:
    return min(prompt_tokens, (len(document.tokens) - 1) // 2)


def _sample(document: Document, begin: int, completion: list[int], detokenizer: Detokenizer, new_tokens: int) -> Sample:
    prompt, truth = document.tokens[:begin].tolist(), document.tokens[begin:-1].tolist()
    code = document.domain == CODE
    return Sample(
        prompt=detokenizer.text(prompt),
        completion=_behind(prompt, completion, detokenizer).decode(errors="replace"),
        domain=document.domain,
        source=document.source,
        parses=_judge(prompt, completion, detokenizer, new_tokens) if code else None,
        parses_reference=_judge(prompt, truth, detokenizer, new_tokens) if code else None,
    )


def _judge(prompt: list[int], rest: list[int], detokenizer: Detokenizer, new_tokens: int) -> bool:
    completion = _behind(prompt, rest[:new_tokens], detokenizer)
    return accepts(detokenizer.data(prompt), completion, closed=len(rest) < new_tokens)


def _behind(prompt: list[int], rest: list[int], detokenizer: Detokenizer) -> bytes:
    """The bytes of `rest`, cut out of the whole: a tokenizer may decode the first token of a text differently."""
    return detokenizer.data([*prompt, *rest])[len(detokenizer.data(prompt)) :]


def _parses(source: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        # ValueError: a null byte (before Python 3.12); the last two: nesting too deep for the parser.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
