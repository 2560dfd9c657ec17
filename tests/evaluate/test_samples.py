"""Completions and their judgement as Python."""

from __future__ import annotations

import pytest

from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.held_out import held_out_documents
from ropewalk.evaluate.samples import accepts, draw_samples, rate
from ropewalk.evaluate.text import Detokenizer
from ropewalk.store.manifest import read_manifest

from .tiny import small, vivid

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


def test_the_rate_counts_judged_samples_only():
    assert rate([True, None, False, None]) == 0.5
    assert rate([None]) is None


@pytest.fixture
def samples(corpus):
    manifest = read_manifest(corpus)
    detokenizer = Detokenizer(corpus, manifest.tokenizer)
    documents = held_out_documents(corpus, manifest, detokenizer, max_bytes=10**6, seed=0)
    model = vivid(small(vocabulary=manifest.tokenizer.vocabulary, sequence_length=32))
    settings = Evaluate(samples=9, prompt_tokens=10, max_new_tokens=24)
    return draw_samples(model, documents, detokenizer, settings=settings, end_of_text=0, seed=5)


def test_samples_take_the_domains_in_turn(samples):
    assert [sample.domain for sample in samples] == ["code", "prose"] * 4 + ["code"]
    assert len({sample.prompt for sample in samples}) > 5


def test_only_code_is_judged_and_the_truth_parses(samples):
    for sample in samples:
        assert (sample.parses is None) == (sample.domain == "prose")
        # Every true continuation in this corpus holds a whole function.
        assert sample.parses_reference is (True if sample.domain == "code" else None)
    # An untrained model writes no Python.
    assert rate([sample.parses for sample in samples]) == 0
