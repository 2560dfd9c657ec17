"""Scores of documents against one token at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.evaluate.score import score_documents, windows

from .tiny import PLAN, one_device, small, vivid

END = 0


@given(tokens=st.integers(1, 200), length=st.integers(1, 40))
def test_windows_score_every_token_once_with_at_least_half_a_row_before_it(tokens, length):
    found = list(windows(0, tokens, length))
    scored = [place for window in found for place in range(window.fresh, window.stop)]
    assert scored == list(range(tokens))
    for window in found:
        assert 0 <= window.start <= window.fresh < window.stop <= window.start + length
        for place in range(window.fresh, window.stop):
            assert place - window.start >= min(place, length // 2)


@pytest.mark.parametrize("position", ["rope", "learned"])
def test_scores_equal_one_token_at_a_time(position):
    spec = small(position=position, sequence_length=8)
    model = vivid(spec)
    generator = np.random.default_rng(0)
    documents = [np.append(generator.integers(1, spec.vocabulary, n - 1), END) for n in (1, 2, 7, 8, 9, 12, 13, 31)]
    scores = score_documents(one_device(model), PLAN, documents, sequence_length=8, budget=32, before=END)
    for index, document in enumerate(documents):
        total, correct = one_by_one(model, document.tolist(), length=8)
        assert scores[index].log_probability == pytest.approx(total, rel=1e-12)
        assert scores[index].correct == correct
    assert [score.tokens for score in scores] == [len(document) for document in documents]


def one_by_one(model, document: list[int], *, length: int) -> tuple[float, int]:
    """Log-probability and first choices, each token from the text that its window (starts 4 apart) shows."""
    text = [END, *document]
    total, correct = 0.0, 0
    for place, token in enumerate(document):
        start = 0 if place < length else min((place - length // 2) // 4 * 4, len(document) - length)
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([text[start : place + 1]])))[0, -1]
        total += float(logits.log_softmax(-1)[token])
        correct += int(logits.argmax()) == token
    return total, correct


def test_rows_and_company_do_not_matter():
    model = vivid(small())
    documents = [np.array([4, 5, 6] * 9 + [END]), np.array([9, END]), np.array([8, 7] * 5 + [END])]
    options = {"sequence_length": 12, "before": END}
    together = score_documents(one_device(model), PLAN, documents, budget=60, **options)
    alone = [score_documents(one_device(model), PLAN, [d], budget=12, **options) for d in documents]
    apart = [score.log_probability for (score,) in alone]
    np.testing.assert_allclose([score.log_probability for score in together], apart, rtol=1e-12)
