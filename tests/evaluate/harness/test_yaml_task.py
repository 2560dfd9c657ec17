"""Tasks written as YAML: questions, sampling, filters, metrics and what results say about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.base.errors import DataError
from ropewalk.evaluate.harness.yaml_task import YamlTask
from ropewalk.evaluate.task import Generation, Likelihood, LogLikelihood, Sampling
from tests.evaluate.harness.opened import FOLDER, opened, written

OPEN = """task: sums
dataset_path: json
dataset_kwargs:
  data_files: {test: test.jsonl}
test_split: test
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
"""
ROWS = [
    {"question": "1 + 1 =", "answer": "2", "kind": "small"},
    {"question": "9 + 9 =", "answer": "18", "kind": "large"},
    {"question": "8 + 8 =", "answer": "16", "kind": "large"},
]
CHOICES = OPEN.replace('"{{answer}}"', "right").replace("sums", "choosing") + (
    "output_type: multiple_choice\ndoc_to_choice: options\nmetric_list: [{metric: own_metrics:FirstIsRight}]\n"
)
ANSWERS = [{"question": "?", "options": ["a", "b"], "right": 1}, {"question": "!", "options": ["c", "d"], "right": "c"}]
FIRST_IS_RIGHT = '''
from dataclasses import dataclass
from ropewalk.evaluate.metrics.item_metric import ItemMetric

@dataclass(frozen=True)
class FirstIsRight(ItemMetric):
    """Whether the right choice is the most likely one."""

    delimiter: str = ""
    name = "acc"
    unit = "share"

    def statistics(self, item):
        likely = [each.log_probability for each in item.likelihoods]
        return float(likely.index(max(likely)) in item.question.gold), 1.0
'''


def sums(folder: Path, text: str = "") -> YamlTask:
    return opened(written(folder, "sums.yaml", OPEN + text, test=ROWS), trusted=[folder])


def choosing(folder: Path, text: str = "", rows: list[dict[str, object]] | None = None) -> YamlTask:
    (folder / "own_metrics.py").write_text(FIRST_IS_RIGHT)
    return opened(written(folder, "choosing.yaml", CHOICES + text, test=rows or ANSWERS))


def said(*texts: str) -> list[Generation]:
    return [Generation([], text) for text in texts]


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ("", Sampling(256, stop=("\n\n",))),
        ("{until: [a, b], max_gen_toks: 7}", Sampling(7, stop=("a", "b"))),
        ("{until: a, do_sample: true}", Sampling(256, temperature=1.0, stop=("a",))),
        (
            "{until: [], do_sample: true, temperature: 5e-1, top_k: 4, top_p: 0.9}",
            Sampling(256, temperature=0.5, top_k=4, top_p=0.9),
        ),
        ("{until: [], temperature: 0.3}", Sampling(256, temperature=0.3)),
        ("{until: [], do_sample: false, temperature: 0.3}", Sampling(256)),
    ],
)
def test_generation_settings_become_sampling(tmp_path: Path, kwargs: str, expected: Sampling) -> None:
    assert sums(tmp_path, f"generation_kwargs: {kwargs}\n" if kwargs else "").sampling == expected


def test_each_repeat_is_a_request_of_its_own(tmp_path: Path) -> None:
    task = sums(tmp_path, "repeats: 2\n")
    assert [request.repeat for request in task.requests()] == [0, 1, 0, 1, 0, 1]


def test_a_metric_is_named_by_its_filters_where_there_are_several(tmp_path: Path) -> None:
    task = sums(
        tmp_path,
        """filter_list:
  - {name: first, filter: [{function: take_first}]}
  - {name: number, filter: [{function: regex, regex_pattern: "(\\\\d+)"}, {function: take_first}]}
""",
    )
    answers = said("2", "it is 18", "sixteen")
    found = {metric.name: metric.value for metric in task.metrics(answers)}
    assert found == {"exact_match,first": pytest.approx(1 / 3), "exact_match,number": pytest.approx(2 / 3)}
    # The headline over some of its items, such as those that no training document contains, has the same name.
    assert [(each.name, each.value) for each in task.measure(task.items(answers)[:1])] == [("exact_match,first", 1.0)]


def test_a_majority_of_repeats_decides(tmp_path: Path) -> None:
    task = sums(tmp_path, "repeats: 3\nfilter_list: [{name: vote, filter: [{function: majority_vote}]}]\n")
    found = task.metrics(said("3", "2", "2", "18", "18", "1", "0", "0", "16"))
    assert [(metric.name, metric.value) for metric in found] == [("exact_match", pytest.approx(2 / 3))]


def test_metrics_are_given_by_group_where_the_file_names_a_field(tmp_path: Path) -> None:
    task = sums(tmp_path, "metadata: {group_by: kind}\n")
    found = {metric.group: metric.value for metric in task.metrics(said("2", "18", "0"))}
    assert found == {"": pytest.approx(2 / 3), "large": 0.5, "small": 1.0}


def test_the_signature_says_task_shots_filter_and_data(tmp_path: Path) -> None:
    def signature(folder: Path, text: str, rows: list[dict[str, str]]) -> str:
        folder.mkdir()
        task = opened(written(folder, "sums.yaml", OPEN + text, test=rows))
        return task.metrics(said("2", "18", "16"))[0].signature

    first = signature(tmp_path / "a", "metadata: {version: 2.5}\n", ROWS)
    again = signature(tmp_path / "b", "metadata: {version: 2.5}\nnum_fewshot: 1\n", ROWS)
    other = signature(tmp_path / "c", "metadata: {version: 2.5}\n", [*ROWS[:2], {**ROWS[2], "answer": "17"}])
    assert "|task:sums|version:2.5|shots:0|data:" in first
    assert again == first.replace("shots:0", "shots:1")
    assert other.split("data:")[0] == first.split("data:")[0]
    assert other != first


def test_items_of_our_own_are_marked_in_the_headline(tmp_path: Path) -> None:
    assert sums(tmp_path).metrics(said("2", "18", "16"))[0].note == ""
    (metric,) = sums(tmp_path, "metadata: {ours: true}\n").metrics(said("2", "18", "16"))
    assert metric.note == "3 items of our own: a smoke test, not a benchmark"


def test_a_choice_is_right_by_its_index_or_its_text(tmp_path: Path) -> None:
    task = choosing(tmp_path)
    assert [question.gold for question in task.questions] == [(1,), (0,)]
    assert [question.references for question in task.questions] == [("b",), ("c",)]
    assert task.requests()[0] == LogLikelihood("?", " a")
    found = task.metrics([Likelihood(value, 1, 1) for value in (-3.0, -1.0, -3.0, -1.0)])
    assert (found[0].value, found[0].references) == (0.5, {"chance": 0.5})


@pytest.mark.parametrize("right", ["e", 2, -1, None])
def test_a_document_without_a_right_choice_is_named(tmp_path: Path, right: object) -> None:
    task = choosing(tmp_path, rows=[{"question": "?", "options": ["a", "b"], "right": right}])
    with pytest.raises(DataError, match=r"choosing\.yaml:7: `doc_to_target` gives .* which is none of the 2 choices"):
        _ = task.questions


def test_several_right_choices_are_a_list(tmp_path: Path) -> None:
    task = choosing(tmp_path, rows=[{"question": "?", "options": ["a", "b", "c"], "right": [0, 2]}])
    (question,) = task.questions
    assert (question.gold, task.chance) == ((0, 2), pytest.approx(2 / 3))


def test_choices_inside_the_question_become_contexts() -> None:
    task = opened(FOLDER / "gaps.yaml", shots=0)
    question = task.questions[1]
    assert question.contexts == ("Ann thanked Eve because Ann", "Ann thanked Eve because Eve")
    assert (question.choices, question.gold) == ((" had helped her.",) * 2, (1,))


def test_the_number_of_shots_is_overruled_except_where_the_task_fixes_none(tmp_path: Path) -> None:
    def shots(text: str, wanted: int) -> int:
        return opened(written(tmp_path, "sums.yaml", OPEN + text, test=ROWS), shots=wanted).shots

    assert [shots("", -1), shots("", 2), shots("num_fewshot: 1\n", 2), shots("num_fewshot: 0\n", 2)] == [0, 2, 2, 0]


def test_too_many_shots_are_an_error_with_file_and_line(tmp_path: Path) -> None:
    task = sums(tmp_path, "num_fewshot: 4\n")
    with pytest.raises(DataError, match=r"sums\.yaml:8: task `sums`: 4 few-shot examples are needed, and there are 3"):
        _ = task.questions


def test_the_decontamination_query_stands_with_the_question() -> None:
    assert opened(FOLDER / "cloze.yaml").questions[0].query.startswith("The sailors")


@pytest.mark.parametrize(
    ("entry", "what"),
    [
        ("{metric: exact_mach}", 'no metric "exact_mach"; did you mean "exact_match"'),
        ("{metric: exact_match, tokenise: zh}", "gives `exact_match` settings that it does not take"),
        ("{metric: exact_match, aggregation: median}", 'aggregates `exact_match` by "median"'),
        ("{name: exact_match}", "has an entry without `metric`"),
        ("{metric: exact_match}, {metric: exact_match}", "names a metric twice"),
        ("", "is empty"),
    ],
)
def test_a_wrong_metric_is_named_with_file_and_line(tmp_path: Path, entry: str, what: str) -> None:
    with pytest.raises(DataError) as error:
        sums(tmp_path, f"metric_list: [{entry}]\n").check_metrics()
    assert str(error.value).startswith(f"{tmp_path}/sums.yaml:8: `metric_list` ")
    assert what in str(error.value)


def test_a_metric_may_be_a_function_of_a_trusted_folder(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def close(references, predictions, within=1):\n"
        "    return {'close': abs(int(references[0]) - int(predictions[0])) <= within}\n"
    )
    task = sums(tmp_path, "metric_list: [{metric: !function own.close, within: 2, higher_is_better: false}]\n")
    (metric,) = task.metrics(said("3", "21", "14"))
    assert (metric.name, metric.value, metric.better) == ("close", pytest.approx(2 / 3), "lower")


def test_process_results_gives_the_values_of_the_metrics(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def scored(doc, results):\n    return {'length': len(results[0]), 'right': results[0] == doc['answer']}\n"
    )
    task = sums(
        tmp_path,
        "process_results: !function own.scored\nmetric_list: [{metric: length, aggregation: mean}, {metric: right}]\n",
    )
    found = {metric.name: metric.value for metric in task.metrics(said("2", "18", "seven"))}
    assert found == {"length": pytest.approx(8 / 3), "right": pytest.approx(2 / 3)}


def test_many_questions_with_choices_get_a_reliability_diagram(tmp_path: Path) -> None:
    rows = [{"question": f"{n}?", "options": ["a", "b"], "right": 1} for n in range(100)]
    task = choosing(tmp_path, rows=rows)
    likely = [Likelihood(value, 1, 0) for n in range(100) for value in (-1.0, -1.0 - (n % 2) + (n % 4))]
    drawn = [metric for metric in task.metrics(likely) if metric.name == "reliability"]
    assert (drawn[0].group, drawn[0].n, drawn[0].better) == ("", 100, "neither")
    assert sum(metric.n or 0 for metric in drawn[1:]) == 100
    assert len(drawn) > 2
    fewer = choosing(tmp_path, rows=rows[:99])
    assert {metric.name for metric in fewer.metrics(likely[:198])} == {"acc"}
