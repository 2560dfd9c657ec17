"""Scores of sequences that share rows, against one sequence at a time."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.score import score_continuations
from ropewalk.evaluate.sequence_scores import Scored, arrange, can_share, score_sequences
from ropewalk.evaluate.sharded_model import PlannedModel
from ropewalk.evaluate.task import Sampling
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve

from .tiny import PLAN, one_device, small, vivid


def one_by_one(model, context: list[int], continuation: list[int]) -> tuple[float, int]:
    """Log-probability and first choices of the continuation, from the model alone."""
    text = [*context, *continuation]
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([text[:-1]])))[0, len(context) - 1 :]
    likely = logits.log_softmax(-1)[range(len(continuation)), continuation]
    return float(likely.sum()), int((logits.argmax(-1) == torch.tensor(continuation)).sum())


PAIRS = [
    *[([0, 5, 9, 2, 2, 7], [choice]) for choice in (3, 4, 5)],
    *[([0, 5, 9, 2, 2, 7], choice) for choice in ([3, 8], [3, 8, 1], [3, 8], [6])],
    *[([0, 5, 9, 2, 2, 7, 7, 1], choice) for choice in ([3, 8], [2])],
    ([0], [5, 9, 2, 2, 8]),
    ([0], [5, 9, 2, 2, 7, 3]),
    ([0, 11, 12], [13]),
    ([44], [4]),
]
"""Equal contexts, contexts that begin alike, equal pairs, counted tokens inside the shared beginning."""


@pytest.mark.parametrize("changes", [{}, {"position": "learned"}, {"kv_heads": 2, "documents": "separate"}])
def test_shared_rows_score_what_the_model_scores_one_by_one(changes):
    model = vivid(small(**changes))
    rows = arrange([Scored(np.array(a + b), len(a)) for a, b in PAIRS], shares=True)
    assert sum(row.length for row in rows) < sum(len(a + b) - 1 for a, b in PAIRS) / 1.5
    assert can_share(model.spec)
    found = score_continuations(one_device(model), PLAN, PAIRS, sequence_length=12, budget=40)
    for (context, continuation), likelihood in zip(PAIRS, found, strict=True):
        expected, correct = one_by_one(model, context, continuation)
        assert likelihood.log_probability == pytest.approx(expected, abs=1e-10)
        assert (likelihood.tokens, likelihood.correct) == (len(continuation), correct)


@pytest.mark.parametrize("changes", [{"position": "alibi"}, {"window": 4}])
def test_models_that_count_distances_in_rows_share_none(changes):
    model = vivid(small(**changes))
    assert not can_share(model.spec)
    found = score_continuations(one_device(model), PLAN, PAIRS, sequence_length=12, budget=40)
    for (context, continuation), likelihood in zip(PAIRS, found, strict=True):
        assert likelihood.log_probability == pytest.approx(one_by_one(model, context, continuation)[0], abs=1e-10)


def test_a_component_of_the_users_own_keeps_rows_apart():
    plain = resolve(Model(layers=1, width=16, heads=2), vocabulary=20, sequence_length=8)
    assert can_share(plain)
    object.__setattr__(plain, "mlp", "own:TokenShift")
    assert not can_share(plain)


TEXTS = st.lists(st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=9), st.integers(1, 8)), max_size=12)


@settings(max_examples=60, deadline=None)
@given(TEXTS)
def test_every_counted_token_is_scored_once_whatever_begins_alike(texts):
    """A model that says 1 nat per token and likes token 1: sums are counts."""
    sequences = [Scored(np.array([0, *tokens]), min(first, len(tokens))) for tokens, first in texts]
    found = score_sequences(_Counts(), PLAN, sequences, budget=30)
    for scored, likelihood in zip(sequences, found, strict=True):
        counted = scored.tokens[scored.first :]
        assert likelihood.log_probability == -sum(7.0**place for place in range(scored.first, len(scored.tokens)))
        assert (likelihood.tokens, likelihood.correct) == (len(counted), int((counted == 1).sum()))


class _Counts:
    """In place of an executor: the score of a target is its place in its text, as a power."""

    spec = small()

    def score(self, batch, **_):
        from ropewalk.parallel.executor import Scores

        return Scores(-(7.0 ** (batch.positions.double() + 1)), batch.targets == 1)


def test_a_context_that_is_too_long_loses_its_beginning():
    model = vivid(small())
    context, continuation = [*range(1, 31)], [7, 8, 9]
    (found,) = score_continuations(one_device(model), PLAN, [(context, continuation)], sequence_length=12, budget=40)
    # 12 inputs: ten tokens of the context, two of the continuation.
    assert found.log_probability == pytest.approx(one_by_one(model, context[-10:], continuation)[0], abs=1e-10)


def test_a_continuation_that_is_longer_than_a_sequence_is_scored_in_windows():
    model = vivid(small())
    whole = [(7 * place) % 18 + 1 for place in range(40)]
    (found,) = score_continuations(one_device(model), PLAN, [(whole[:20], whole[20:])], sequence_length=12, budget=40)
    # Six tokens of context are kept: windows begin at tokens 14, 20, 26 and, to end with the text, 27.
    ends = [(14, 20, 27), (20, 27, 33), (26, 33, 39), (27, 39, 40)]
    expected = sum(one_by_one(model, whole[begin:fresh], whole[fresh:end])[0] for begin, fresh, end in ends)
    assert (found.log_probability, found.tokens) == (pytest.approx(expected, abs=1e-10), 20)


def test_nothing_to_predict_has_probability_one():
    found = score_continuations(one_device(vivid(small())), PLAN, [([1], [])], sequence_length=12, budget=40)
    assert [(each.log_probability, each.tokens, each.greedy) for each in found] == [(0.0, 0, True)]


def test_compiled_blocks_see_one_shape_whatever_is_scored():
    model = vivid(small())
    executor, shapes = one_device(model), []
    score = executor.score

    def watched(batch, **options):
        shapes.append((tuple(batch.tokens.shape), options["attention"]))
        return score(batch, **options)

    executor.score = watched
    compiled = replace(PLAN, compile=True)
    found = score_continuations(executor, compiled, PAIRS, sequence_length=12, budget=40)
    found += score_continuations(executor, compiled, PAIRS[:1], sequence_length=12, budget=40)
    assert {*shapes} == {((PLAN.microbatch_size, 12), None)}
    for (context, continuation), likelihood in zip([*PAIRS, PAIRS[0]], found, strict=True):
        assert likelihood.log_probability == pytest.approx(one_by_one(model, context, continuation)[0], abs=1e-10)
        assert likelihood.tokens == len(continuation)


def test_compiled_blocks_compile_once_for_scores_and_never_for_generation(corpus):
    compiled = []

    def counting(graph, inputs):
        compiled.append([tuple(each.shape) for each in inputs if each.dim() == 3])
        return graph.forward

    torch._dynamo.reset()
    held_out = HeldOut(corpus, Evaluate(), seed=0)
    model = vivid(small(vocabulary=held_out.detokenizer.vocabulary, layers=1))
    model.compile_blocks(functools.partial(torch.compile, backend=counting, dynamic=False))
    executor = one_device(model)
    asked = PlannedModel(replace(PLAN, compile=True), lambda plan: executor, spec=model.spec, held_out=held_out)
    asked.generate([[1, 2, 3], [4] * 6], Sampling(3), seeds=[0, 1])
    assert compiled == []
    asked.loglikelihood(PAIRS)
    first = len(compiled)
    asked.loglikelihood(PAIRS[:2])
    assert len(compiled) == first > 0
