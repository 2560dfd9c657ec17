"""Tasks of evaluate.py for our side: `yaml_task` reads one of its YAML files.

Read here, with the few keys that these files use.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from ropewalk.base.metric import SHARE
from ropewalk.evaluate.metrics.item_metric import ItemMetric
from ropewalk.evaluate.question_task import Item, Question, QuestionTask

folder = Path()
"""Where the YAML files are."""


class Likeliest(ItemMetric):
    """Whether the likeliest choice is right; `acc_norm` divides by characters; of a cloze whether it is greedy."""

    unit = SHARE

    def __init__(self, name: str) -> None:
        self.name = name

    def statistics(self, item: Item) -> tuple[float, float]:
        if not item.question.gold:
            return float(item.likelihoods[0].greedy), 1.0
        sizes = [len(choice) - 1 if self.name == "acc_norm" else 1 for choice in item.question.choices]
        found = [each.log_probability / size for each, size in zip(item.likelihoods, sizes, strict=True)]
        return float(found.index(max(found)) in item.question.gold), 1.0


class Perplexity(ItemMetric):
    """exp of the mean negative log-likelihood."""

    name, better = "perplexity", "lower"

    def statistics(self, item: Item) -> tuple[float, float]:
        return -item.likelihoods[0].log_probability, 1.0

    def value(self, sums_K: Any) -> Any:
        import numpy as np

        return np.exp(sums_K[..., 0] / sums_K[..., 1])


class YamlQuestions(QuestionTask):
    """Questions of one YAML file."""

    def __init__(self, held_out: Any) -> None:
        super().__init__(held_out)
        self.tree = json.loads((folder / f"{self.name}.yaml").read_text(encoding="utf-8"))
        self.ask = self.tree["output_type"]

    @property
    def item_metrics(self) -> Sequence[ItemMetric]:
        names = [each["metric"] for each in self.tree["metric_list"]]
        return [Perplexity() if name == "perplexity" else Likeliest(name) for name in names]

    def load_questions(self) -> list[Question]:
        data = Path(self.tree["dataset_kwargs"]["data_files"]["test"]).read_text(encoding="utf-8")
        return [self._question(json.loads(line)) for line in data.splitlines()]

    def _question(self, row: dict[str, Any]) -> Question:
        prompt = _render(self.tree["doc_to_text"], row)
        target = _render(self.tree["doc_to_target"], row)
        if self.ask == "loglikelihood":
            return Question(prompt=prompt, choices=(target,), document=row)
        choices = _render(self.tree["doc_to_choice"], row)
        return Question(prompt=prompt, choices=tuple(f" {each}" for each in choices), gold=(int(target),), document=row)


def _render(template: Any, row: dict[str, Any]) -> Any:
    if not isinstance(template, str):
        return template
    return row[template] if template in row else _compiled(template)(**row)


@functools.cache
def _compiled(template: str) -> Any:
    """A list where the template is one expression that gives a list, else text."""
    if template.startswith("{{[") or template in ("{{endings}}", "{{choices.text}}"):
        return jinja2.Environment().compile_expression(template[2:-2])
    return jinja2.Environment(keep_trailing_newline=True).from_string(template).render


def __getattr__(name: str) -> type[YamlQuestions]:
    if name.startswith("_"):
        raise AttributeError(name)
    return type(name, (YamlQuestions,), {"name": name})
