"""Completions and their judgement as Python."""

from __future__ import annotations

import pytest

from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.tasks.completions import accepts

from .tiny import planned, small, vivid

ACCEPTED = {
    "a whole statement": ("x = ", "1\n"),
    "a line cut at the end": ("x = ", "1\ny = (2"),
    "an open bracket in the last lines": ("def f(a", "):\n    return a\n\nx = [\n    1,\n"),
    "a block header at the end": ("", "x = 1\ny = 2\nif x:\n"),
    "an odd escape": ("x = ", "'\\d'\n"),
}
REFUSED = {
    "nothing": ("x = 1\n", ""),
    "no whole line": ("x = ", "1 + 2"),
    "blank lines only": ("x = 1\n", "\n\n   \n"),
    "an error in the first half": ("", "x = 1\ny = = 2\nz = 3\nw = 4\n"),
    "a docstring that never ends": ('"""Opened', "\nthe text goes\non and on\n"),
    "a null byte": ("x = ", "1\0\n"),
    "not utf-8": ("x = '", b"\xf0\x9f'\n"),
    "nested too deeply": ("x = ", "(" * 5000 + ")" * 5000 + "\n"),
    "a long chain": ("x = ", "-" * 200_000 + "1\n"),
}


def judge(prompt: str, completion: str | bytes, *, closed: bool = False) -> bool:
    rest = completion if isinstance(completion, bytes) else completion.encode()
    return accepts(prompt.encode(), rest, closed=closed)


@pytest.mark.parametrize("case", ACCEPTED)
def test_valid_beginnings_are_accepted(case, recwarn):
    assert judge(*ACCEPTED[case])
    assert not recwarn


@pytest.mark.parametrize("case", REFUSED)
def test_other_text_is_refused(case):
    assert not judge(*REFUSED[case])


def test_the_last_line_counts_when_the_text_ended_there():
    assert judge("x = ", "1 + 2", closed=True)
    assert not judge("x = ", "1 +", closed=True)


def measured(corpus, **settings):
    held_out = HeldOut(corpus, Evaluate(tasks=("completions",), **settings), seed=5)
    model = vivid(small(vocabulary=held_out.detokenizer.vocabulary, sequence_length=32))
    return evaluate(planned(model, held_out, length=32), held_out)


def test_samples_take_the_domains_in_turn_and_only_code_is_judged(corpus):
    found = measured(corpus, samples=9, prompt_tokens=10, max_new_tokens=24)
    assert [sample.domain for sample in found.samples] == ["code", "prose"] * 4 + ["code"]
    assert len({sample.prompt for sample in found.samples}) > 5
    texts = [document.data.decode() for document in HeldOut(corpus, Evaluate(), seed=5).documents]
    assert any("\ufffd" not in sample.prompt + sample.reference for sample in found.samples)
    for sample in found.samples:
        assert (sample.parses is None) == (sample.domain == "prose")
        beginning = sample.prompt + sample.reference
        # A cut within a character is shown as U+FFFD.
        assert sample.reference
        assert "\ufffd" in beginning or any(text.startswith(beginning) for text in texts)
        # Every true continuation in this corpus holds a whole function.
        assert sample.parses_reference is (True if sample.domain == "code" else None)
    (rate,) = found.tasks["completions"]
    # An untrained model writes no Python.
    assert (rate.name, rate.value, rate.n, rate.references) == ("parse_rate", 0, 5, {"true continuations": 1})
    assert rate.interval == (0, pytest.approx(0.434, abs=1e-3))  # Wilson, 0 of 5


def test_without_samples_nothing_is_measured(corpus):
    found = measured(corpus, samples=0)
    assert (found.tasks, found.samples) == ({"completions": []}, [])
