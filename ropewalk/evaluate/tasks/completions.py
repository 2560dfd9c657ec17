"""The task `completions`: continues the beginnings of held-out documents; how many of those in domain `code` parse.

A completion ends after a fixed number of tokens, in the middle of a line, a bracket or a block, where hardly any text
parses. So a completion is accepted if `ast.parse` accepts the prompt and the completion together, cut after one of the
completion's lines such that at least half of the completion's non-blank lines (and at least one) remain. A last line
without a line end counts only if the end of text closed it. The true continuation of the same document, of as many
tokens, is judged by the same rule: its rate is what a perfect model can reach. It is below 1, for example where the
prompt ends inside a long docstring.
"""

from __future__ import annotations

import ast
import functools
import warnings
from collections import Counter
from collections.abc import Sequence

import numpy as np

from ropewalk.base.metric import Metric
from ropewalk.base.seeds import seed_for

from ..held_out import Document
from ..intervals import proportion
from ..task import Generate, Generation, Sample, Task, sampling_of

CODE = "code"
"""The domain whose completions are parsed as Python."""


class Completions(Task):
    """`evaluate.samples` completions, the domains in turn."""

    name = "completions"

    def requests(self) -> list[Generate]:
        sampling = sampling_of(self.held_out.settings)
        seen: Counter[bytes] = Counter()
        requests = []
        for prompt, _ in self._texts:
            # A short domain is gone through again: the same prompt, another completion.
            requests.append(Generate(prompt, sampling, repeat=seen[prompt.tobytes()]))
            seen[prompt.tobytes()] += 1
        return requests

    def metrics(self, answers: Sequence[Generation]) -> list[Metric]:
        code = [sample for sample in self.records(answers) if sample.parses is not None]
        if not code:
            return []
        return [
            proportion(
                "parse_rate",
                sum(sample.parses is True for sample in code),
                len(code),
                of="code completion",
                references={"true continuations": sum(sample.parses_reference is True for sample in code) / len(code)},
                note="accepted as Python",
            )
        ]

    def records(self, answers: Sequence[Generation]) -> list[Sample]:
        """The samples: what is not UTF-8 in them is shown as U+FFFD."""
        return [
            self._sample(document, prompt.tolist(), truth.tolist(), answer)
            for document, (prompt, truth), answer in zip(self._chosen, self._texts, answers, strict=True)
        ]

    @functools.cached_property
    def _chosen(self) -> list[Document]:
        return _in_turn(self.held_out.documents, self.held_out.settings.samples, self.held_out.seed)

    @property
    def _texts(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """(prompt, true continuation) of each chosen document: its first `prompt_tokens` tokens, at most half of it."""
        least = self.held_out.settings.prompt_tokens
        return [
            (tokens[:begin], tokens[begin:-1])
            for tokens in (document.tokens for document in self._chosen)
            for begin in [min(least, (len(tokens) - 1) // 2)]
        ]

    def _sample(self, document: Document, prompt: list[int], truth: list[int], answer: Generation) -> Sample:
        code = document.domain == CODE
        beginning = truth[: self.held_out.settings.max_new_tokens]
        return Sample(
            prompt=self.held_out.detokenizer.text(prompt),
            completion=answer.text,
            domain=document.domain,
            source=document.source,
            parses=self._judge(prompt, answer.tokens) if code else None,
            parses_reference=self._judge(prompt, truth) if code else None,
            reference=self.held_out.detokenizer.continuation(prompt, beginning).decode(errors="replace"),
        )

    def _judge(self, prompt: list[int], rest: list[int]) -> bool:
        most, detokenizer = self.held_out.settings.max_new_tokens, self.held_out.detokenizer
        completion = detokenizer.continuation(prompt, rest[:most])
        return accepts(detokenizer.data(prompt), completion, closed=len(rest) < most)


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


def _in_turn(documents: list[Document], count: int, seed: int) -> list[Document]:
    """`count` documents, one of each domain in turn, in a seeded order; a short domain is gone through again."""
    domains: dict[str, list[Document]] = {}
    for _, document in sorted(enumerate(documents), key=lambda item: seed_for(seed, "sample", item[0])):
        domains.setdefault(document.domain, []).append(document)
    turns = [domains[name] for name in sorted(domains)]
    picks = (divmod(index, len(turns)) for index in range(count))
    return [turns[domain][place % len(turns[domain])] for place, domain in picks]


def _parses(source: bytes) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            ast.parse(source)
        # ValueError: a null byte (before Python 3.12); the last two: nesting too deep for the parser.
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    return True
