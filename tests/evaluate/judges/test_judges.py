"""Judges: their scores, their agreement with people, and the service over a local server."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import krippendorff
import numpy as np
import pytest

from ropewalk.base.errors import DataError, MissingPackage, UserError
from ropewalk.config.api_keys import api_key
from ropewalk.evaluate.config import TASKS, Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.judges.judge import OpenJudge, interval_alpha, judge_agreement, spearman
from ropewalk.evaluate.judges.judge_table import JUDGES
from ropewalk.evaluate.judges.lexical import LexicalConsistency, LexicalRelevance
from ropewalk.evaluate.judges.perspective import Perspective
from ropewalk.evaluate.judges.profanity import Profanity
from ropewalk.evaluate.metrics.judged import JudgedMetric


class Shouting:
    """The share of capitals."""

    name, version = "shouting", "1"

    def __init__(self) -> None:
        self.seen: list[str] = []

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        self.seen += texts
        return [sum(letter.isupper() for letter in text) / len(text) for text in texts]


def sheet(folder: Path, text: str) -> str:
    (folder / "sheet.csv").write_text(text)
    return str(folder / "sheet.csv")


def test_agreement_with_people_is_a_rank_correlation_over_the_judges_own_rows(tmp_path: Path) -> None:
    rows = ["text,score,judge", "AAAA,5,shouting", "AAaa,4,", "AAaa,2,shouting", "aaaa,1,", "AAAa,2,", "zzz,9,other"]
    found = judge_agreement(Shouting(), sheet(tmp_path, "\n".join(rows)))
    # By hand: judge 1, .5, 0, .75 has ranks 4, 2, 1, 3; people 5, 3, 1, 2 ranks 4, 3, 1, 2: 1 - 6 * 2 / 60.
    assert found is not None
    assert (found.spearman, found.alpha, found.n) == (pytest.approx(0.8), None, 4)
    opened = OpenJudge(Shouting(), str(tmp_path / "sheet.csv"))
    assert opened.calibration == "Spearman 0.80 with people on 4 texts"
    assert OpenJudge(Shouting()).calibration == "uncalibrated"


def test_alpha_is_that_of_the_package_and_only_for_scores_on_the_same_scale(tmp_path: Path) -> None:
    draw = np.random.default_rng(1)
    first = draw.random(20)
    second = np.clip(first + draw.normal(0, 0.2, 20), 0, 1)
    wanted = krippendorff.alpha(np.array([first, second]), level_of_measurement="interval")
    assert interval_alpha(first, second) == pytest.approx(wanted, abs=1e-12)
    found = judge_agreement(Shouting(), sheet(tmp_path, "text,score\nAAAA,1\nAAaa,0.5\naaaa,0\n"))
    assert found is not None
    assert (found.alpha, found.spearman) == (1.0, pytest.approx(1.0))


def test_spearman_gives_ties_their_mean_rank() -> None:
    # scipy.stats.spearmanr([1, 2, 2, 4, 5], [2, 1, 3, 3, 9]) is 0.7631578947368421 (scipy 1.17.1).
    found = spearman(np.array([1.0, 2, 2, 4, 5]), np.array([2.0, 1, 3, 3, 9]))
    assert found == pytest.approx(0.7631578947368421)
    assert spearman(np.ones(4), np.arange(4.0)) == 0.0


def test_a_wrong_sheet_is_named_with_its_line(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"sheet.csv:3: the score `high` is no number"):
        judge_agreement(Shouting(), sheet(tmp_path, "text,score\na,1\nb,high\n"))
    with pytest.raises(DataError, match=r"no column `text` or `score`"):
        judge_agreement(Shouting(), sheet(tmp_path, "words,score\na,1\n"))
    with pytest.raises(DataError, match=r"nowhere.csv: No such file"):
        judge_agreement(Shouting(), tmp_path / "nowhere.csv")


def test_a_text_is_judged_once() -> None:
    judge = Shouting()
    opened = OpenJudge(judge)
    assert opened.scores(["A", "b", "A"], ["", "", ""]) == [1, 0, 1]
    assert opened.scores(["b"], [""]) == [0]
    assert judge.seen == ["A", "b"]


def test_a_judge_that_loses_scores_is_an_error() -> None:
    class Short(Shouting):
        def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
            return [0.0]

    with pytest.raises(UserError, match="gave 1 scores for 2 texts"):
        OpenJudge(Short()).scores(["a", "b"], ["", ""])


def test_relevance_is_the_cosine_of_content_words() -> None:
    found = LexicalRelevance().scores(
        ["The deposit is ten euros.", "I like cats.", "红烧鱼一点也不辣", ""],
        ["How much is the deposit?", "How much is the deposit?", "红烧鱼辣吗？", "x"],
    )
    # deposit, ten, euro against much, deposit: 1 / sqrt(3 * 2).
    assert found[0] == pytest.approx(1 / 6**0.5)
    assert found[1] == found[3] == 0
    assert 0 < found[2] < 1


@pytest.mark.parametrize(
    ("said", "reply", "wanted"),
    [
        ("The museum is open on Mondays.", "The museum is not open on Mondays.", 0.0),
        ("The museum is open on Mondays.", "Yes, the museum is open on Mondays.", 1.0),
        ("The deposit is 10 euros.", "The deposit is 20 euros. Bring a card.", 0.5),
        ("The deposit is 10 euros.", "I have 20 cats.", 1.0),
        ("Is the museum open on Mondays?", "The museum is not open on Mondays.", 1.0),
        ("图书馆周末开门。", "图书馆周末不开门。", 0.0),
        ("图书馆周末开门。", "图书馆周末开门。", 1.0),
    ],
)
def test_a_contradiction_repeats_a_sentence_with_a_negation_or_another_number(
    said: str, reply: str, wanted: float
) -> None:
    assert LexicalConsistency().scores([reply], [said]) == [wanted]


def test_without_its_package_the_linear_model_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "profanity_check", None)
    with pytest.raises(MissingPackage, match=r"alt-profanity-check.*toxicity"):
        Profanity()


def test_the_linear_model_tells_insults_from_other_texts() -> None:
    pytest.importorskip("profanity_check")
    clean, insult = Profanity().scores(["The rope is laid in strands.", "You are a stupid idiot."], ["", ""])
    assert clean < 0.1 < 0.9 < insult


Answers = list[tuple[int, dict[str, Any]]]


@pytest.fixture
def service() -> Iterator[tuple[str, Answers, list[tuple[str, dict[str, Any]]]]]:
    """A server that gives the answers of a list in turn, and notes what it was asked."""
    answers: Answers = []
    asked: list[tuple[str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.headers["x-goog-api-key"], body))
            status, answer = answers.pop(0)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1", answers, asked
    server.shutdown()
    thread.join()
    server.server_close()


def scored(value: float) -> tuple[int, dict[str, Any]]:
    return 200, {"attributeScores": {"TOXICITY": {"summaryScore": {"value": value}}}}


def perspective(url: str, **changes: Any) -> tuple[Perspective, list[float]]:
    """The judge under a clock that only its own waiting moves, and its pauses."""
    pauses: list[float] = []
    return Perspective(url=url, key="secret", sleep=pauses.append, clock=lambda: sum(pauses), **changes), pauses


def test_the_service_is_asked_no_faster_than_its_rate(service: Any) -> None:
    url, answers, asked = service
    judge, pauses = perspective(url, per_second=2)
    answers += [scored(0.1), scored(0.2), scored(0.9)]
    assert judge.scores(["a", " ", "b", "c"], [""] * 4) == [0.1, 0.0, 0.2, 0.9]
    assert pauses == [0.5, 0.5]
    assert asked[0] == (
        "secret",
        {"comment": {"text": "a"}, "requestedAttributes": {"TOXICITY": {}}, "doNotStore": True},
    )


def test_the_service_is_asked_again_after_overload_and_not_after_a_refusal(service: Any) -> None:
    url, answers, asked = service
    judge, pauses = perspective(url)
    answers += [(429, {}), (503, {}), scored(0.7)]
    assert judge.scores(["a"], [""]) == [0.7]
    assert pauses == [1, 3]
    answers += [(400, {"error": "language"})]
    with pytest.raises(UserError, match=r"status 400: .*language.*PERSPECTIVE_API_KEY") as refused:
        judge.scores(["b"], [""])
    assert "secret" not in str(refused.value)
    answers += [(500, {})] * 2
    with pytest.raises(UserError, match=r"status 500.*\(2 tries\)"):
        perspective(url, tries=2)[0].scores(["c"], [""])
    assert len(asked) == 6


def test_an_answer_without_a_score_is_an_error(service: Any) -> None:
    url, answers, _ = service
    answers += [(200, {"attributeScores": {}})]
    with pytest.raises(UserError, match="no score of TOXICITY"):
        perspective(url)[0].scores(["a"], [""])


def test_the_key_comes_from_the_environment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSPECTIVE_API_KEY", raising=False)
    with pytest.raises(UserError, match="needs a key in the environment variable PERSPECTIVE_API_KEY"):
        JUDGES["perspective"].load()()
    assert api_key("KEY", "x", {"KEY": " abc "}) == "abc"


def test_the_sheet_of_the_recipe_calibrates_the_judges_of_dialogue(tmp_path: Path) -> None:
    rows = "\n".join(["text,score", "a rope,1", "two ropes,2", "three,3", "hemp,0"])
    task = TASKS["dialogue"].load()(HeldOut(None, Evaluate(judge_sheet=sheet(tmp_path, rows)), seed=0))
    judges = [metric for metric in task.item_metrics if isinstance(metric, JudgedMetric)]
    assert len(judges) == 2
    assert all("with people on 4 texts" in f"{metric.note} {metric.signature}" for metric in judges)
