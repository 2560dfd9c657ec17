"""Answers are kept: what is killed continues with the same bits, and metrics need no model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ropewalk.base.metric import SHARE
from ropewalk.evaluate.answers import ANSWERS, Answers, request_key
from ropewalk.evaluate.ask_model import ask_model
from ropewalk.evaluate.config import TASKS, Evaluate
from ropewalk.evaluate.evaluation import evaluate, write_evaluation
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.metrics.exact import ExactMatch
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.question_task import Question, QuestionTask
from ropewalk.evaluate.results import read_items, read_results
from ropewalk.evaluate.task import Generate, Generation, Likelihood, LogLikelihood, Rolling, Sampling

from .tiny import planned, small, vivid

IDENTITY = {"model": "abc", "precision": "fp32", "seed": 3}
SETTINGS = Evaluate(
    tasks=("held-out", "completions", "tests.evaluate.test_answers:Strands", "tests.evaluate.test_answers:Words"),
    max_bytes=3000,
    samples=5,
    max_new_tokens=6,
)


class Likely(ItemMetric):
    """Whether the likeliest choice is right."""

    name, unit = "acc", SHARE

    def statistics(self, item):
        found = [each.log_probability for each in item.likelihoods]
        return float(found.index(max(found)) in item.question.gold), 1.0


class Longest(Likely):
    name = "longest"

    def statistics(self, item):
        return max(each.tokens for each in item.likelihoods), 1.0


class Strands(QuestionTask):
    """Twelve questions of three choices."""

    name, ask, item_metrics = "strands", "multiple_choice", (Likely(),)

    def load_questions(self):
        return [
            Question(prompt=f"Strand {n} is", choices=(" hemp", " of fibre", f" {n}"), gold=(n % 3,)) for n in range(12)
        ]


class Measured(Strands):
    item_metrics = (Likely(), Longest())


class Words(QuestionTask):
    """Four prompts, completed twice each."""

    name, ask, item_metrics, repeats = "words", "generate_until", (ExactMatch(),), 2
    sampling = Sampling(max_new_tokens=5, temperature=1.0)

    def load_questions(self):
        return [Question(prompt=f"Rope {n}", references=("x",)) for n in range(4)]


class Killed(BaseException):
    """As SIGKILL: nothing catches it."""


class Counting:
    """A model that counts requests and dies after some calls."""

    chunk_tokens = 60

    def __init__(self, model, calls=10**9):
        self.model, self.calls, self.asked = model, calls, 0

    def _ask(self, name, requests, *rest, **named):
        if not self.calls:
            raise Killed
        self.calls, self.asked = self.calls - 1, self.asked + len(requests)
        return getattr(self.model, name)(requests, *rest, **named)

    def rolling(self, documents):
        return self._ask("rolling", documents)

    def loglikelihood(self, pairs):
        return self._ask("loglikelihood", pairs)

    def generate(self, prompts, sampling, *, seeds):
        return self._ask("generate", prompts, sampling, seeds=seeds)


class Absent:
    """No weights: any request fails."""

    chunk_tokens = 60

    def rolling(self, documents):
        raise AssertionError("the model was loaded")

    loglikelihood = generate = rolling


@pytest.fixture
def held_out(corpus):
    return HeldOut(corpus, SETTINGS, seed=3)


@pytest.fixture
def model(held_out):
    return planned(vivid(small(vocabulary=held_out.detokenizer.vocabulary, sequence_length=16)), held_out)


def written(held_out, model, folder):
    found = evaluate(model, held_out, answers=Answers(folder, IDENTITY))
    write_evaluation(folder, found, step=1)
    return found


def lines(folder):
    return (folder / ANSWERS).read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("calls", [2, 3, 5, 7])
def test_a_killed_evaluation_continues_with_what_is_missing_and_has_the_same_bits(held_out, model, tmp_path, calls):
    whole, half = tmp_path / "whole", tmp_path / "half"
    counting = Counting(model)
    expected = written(held_out, counting, whole)
    with pytest.raises(Killed):
        written(held_out, Counting(model, calls), half)
    # Killed in the middle of a line too.
    data = (half / ANSWERS).read_bytes()
    (half / ANSWERS).write_bytes(data[:-30])
    rest = Counting(model)
    assert written(held_out, rest, half) == expected
    assert 0 < rest.asked < counting.asked
    sound = [line for line in lines(half) if line.endswith(b"}\n")]
    assert set(lines(whole)) <= set(sound)
    for file in ("samples.jsonl", "evaluation/items.jsonl", "evaluation/results.json", "evaluation/documents.jsonl"):
        assert (half / file).read_bytes() == (whole / file).read_bytes()


def test_metrics_and_tasks_are_added_without_the_model(held_out, model, corpus, tmp_path):
    before = written(held_out, model, tmp_path)
    again = HeldOut(corpus, replace(SETTINGS, tasks=("tests.evaluate.test_answers:Measured", "held-out")), seed=3)
    found = written(again, Absent(), tmp_path)
    assert [metric.name for metric in found.tasks["strands"]] == ["acc", "longest"]
    assert found.tasks["strands"][0] == before.tasks["strands"][0]
    assert found.tasks["held-out"] == before.tasks["held-out"]
    items = read_items(tmp_path)
    assert len(items) == 12
    assert items[0].keys() == {"task", "key", "group", "prompt", "prediction", "reference", "scores"}
    assert items[0]["scores"].keys() == {"acc", "longest"}


def test_answers_of_another_model_are_not_taken(held_out, model, tmp_path):
    written(held_out, model, tmp_path)
    count = len(lines(tmp_path))
    assert not len(Answers(tmp_path, {**IDENTITY, "model": "other"}))
    assert not len(Answers(tmp_path, {**IDENTITY, "seed": 4}))
    other = Answers(tmp_path, {**IDENTITY, "model": "other"})
    other.add([("k", "task", Likelihood(-1.5, 2, 1))])
    assert len(lines(tmp_path)) == 2 < count
    assert Answers(tmp_path, {**IDENTITY, "model": "other"})["k"] == Likelihood(-1.5, 2, 1)


def test_damaged_lines_are_named_and_asked_again(held_out, model, tmp_path, caplog):
    expected = written(held_out, model, tmp_path)
    before = lines(tmp_path)
    damaged = [*before[:4], before[4].replace(b'"tokens": ', b'"tokens": 1'), *before[5:]]
    (tmp_path / ANSWERS).write_bytes(b"".join(damaged))
    assert written(held_out, model, tmp_path) == expected
    assert "answers.jsonl: damaged in line 5; the model is asked these requests again" in caplog.text
    assert set(before) <= set(lines(tmp_path))


def test_an_answer_of_any_kind_is_read_as_it_was_written(tmp_path):
    found = {
        "a": Likelihood(-0.1 - 0.2, 3, 2),
        "b": Generation([1, 2], "line \n\u2028 \ufffd 绳"),
        "c": Generation([], ""),
        "d": Likelihood(float("-inf"), 1, 0),
    }
    Answers(tmp_path, IDENTITY).add((key, "t", answer) for key, answer in found.items())
    again = Answers(tmp_path, IDENTITY)
    assert {key: again[key] for key in "abc"} == {key: found[key] for key in "abc"}
    assert "d" not in again  # JSON has no infinity: asked again


def test_a_key_tells_apart_what_differs_and_nothing_else():
    greedy, drawn = Sampling(8), Sampling(8, temperature=1.0)
    requests = [
        Rolling("a"),
        Rolling(np.array([1, 2])),
        LogLikelihood("a", "b"),
        LogLikelihood("ab", ""),
        LogLikelihood("", "ab"),
        Generate("a", greedy),
        Generate("a", drawn),
        Generate("a", drawn, 1),
        Generate("a", replace(drawn, stop=("\n",))),
    ]
    assert len({request_key(request) for request in requests}) == len(requests)
    assert request_key(Rolling(np.array([1, 2], np.uint16))) == request_key(Rolling(np.array([1, 2])))
    assert request_key(Generate("a", Sampling(8, 1.0))) == request_key(requests[6])


def test_a_limit_asks_the_first_questions(corpus, model):
    limited = HeldOut(corpus, replace(SETTINGS, limit=2), seed=3)
    task = Strands(limited)
    assert [question.prompt for question in task.questions] == ["Strand 0 is", "Strand 1 is"]


def test_an_answer_ends_before_its_stop_string(corpus):
    held_out = HeldOut(corpus, SETTINGS, seed=3)

    class Talks:
        chunk_tokens = 100

        def generate(self, prompts, sampling, *, seeds):
            return [held_out.detokenizer.encode("hemp.\nWire") for _ in prompts]

    request, answers = Generate("Rope is", Sampling(9, stop=(".\n",))), Answers(None, {})
    ask_model(Talks(), held_out, {"key": ("task", request)}, answers, share=lambda value: value)
    assert answers["key"].text == "hemp"


def test_random_numbers_belong_to_the_request_and_the_seed_of_the_run(corpus):
    def seeds_of(*requests, seed):
        drawn = {}

        class Draws:
            chunk_tokens = 100

            def generate(self, prompts, sampling, *, seeds):
                drawn.update(zip(map(tuple, prompts), seeds, strict=True))
                return [[] for _ in prompts]

        held_out = HeldOut(corpus, SETTINGS, seed=seed)
        asked = {request_key(request): ("task", request) for request in requests}
        ask_model(Draws(), held_out, asked, Answers(None, {}), share=lambda value: value)
        return [*drawn.values()]

    one, other = Generate("Rope", Sampling(4, 1.0)), Generate("Hemp", Sampling(4, 1.0))
    first, second = seeds_of(one, other, seed=3)
    again = Generate("Rope", Sampling(4, 1.0), repeat=1)
    assert len({first, second, *seeds_of(again, seed=3), *seeds_of(one, seed=4)}) == 4
    assert seeds_of(one, seed=3)[0] in (first, second)


def test_tasks_that_draw_take_every_setting_of_sampling_from_the_recipe():
    drawn = {"max_new_tokens": 7, "temperature": 0.3, "top_k": 5, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.2}
    for name in ("open-prompts", "dialogue"):
        found = TASKS[name].load()(HeldOut(None, Evaluate(**drawn), seed=0)).sampling
        assert {key: getattr(found, key) for key in drawn} == drawn, name
    assert TASKS["open-prompts"].load()(HeldOut(None, Evaluate(temperature=0), seed=0)).sampling.temperature == 1.0


def test_questions_are_looked_for_in_the_corpus_unless_the_recipe_says_no(corpus, model, tmp_path):
    for contamination, expected in ((True, ["strands"]), (False, [])):
        settings = replace(SETTINGS, tasks=SETTINGS.tasks[2:3], contamination=contamination)
        held_out = HeldOut(corpus, settings, seed=3)
        write_evaluation(tmp_path, evaluate(model, held_out))
        assert [*read_results(tmp_path).get("contamination", ())] == expected


def test_a_task_without_corpus_says_so_and_needs_no_tokenizer():
    from ropewalk.base.errors import UserError

    bare = HeldOut(None, SETTINGS, seed=0)
    assert len(Strands(bare).requests()) == 36
    with pytest.raises(UserError, match="without a corpus"):
        _ = bare.documents
