"""The whole evaluation, against numbers known in closed form."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace

import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.base.metric import flat_results, read_tasks
from ropewalk.base.seal import write_sealed
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import evaluate, write_evaluation
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.results import read_documents, read_results, read_whole
from ropewalk.model.decoder import build
from ropewalk.store.manifest import read_manifest

from .tiny import CODE, PROSE, planned, small

SETTINGS = Evaluate(max_bytes=10**6, samples=4, prompt_tokens=6, max_new_tokens=8)
TEXT_BYTES = sum(len(text.encode()) for text in CODE + PROSE)


def evaluated(corpus, model):
    held_out = HeldOut(corpus, SETTINGS, seed=0)
    return evaluate(planned(model, held_out), held_out)


def measured(corpus, model):
    """The metrics of the task `held-out` over all documents, by name."""
    return {metric.name: metric for metric in evaluated(corpus, model).tasks["held-out"] if not metric.group}


@pytest.fixture
def model(corpus):
    spec = small(vocabulary=read_manifest(corpus).tokenizer.vocabulary, sequence_length=16, tie_embeddings=False)
    return build(spec, seed=0, dtype=torch.float64)


def test_a_uniform_model_costs_log_v_a_token(corpus, model):
    with torch.no_grad():
        model.head_weight.zero_()
    result = measured(corpus, model)
    manifest = read_manifest(corpus)
    tokens, vocabulary = manifest.tokens("validation"), manifest.tokenizer.vocabulary
    sizes = (result["loss"].n, result["bytes"].value, result["bits_per_byte"].n)
    assert sizes == (tokens, TEXT_BYTES, 16)
    assert result["bits_per_byte"].value == pytest.approx(math.log2(vocabulary) * tokens / TEXT_BYTES, rel=1e-12)
    assert result["loss"].value == pytest.approx(math.log(vocabulary), rel=1e-12)
    assert result["perplexity"].value == pytest.approx(vocabulary, rel=1e-12)


def test_a_unigram_model_costs_its_entropy(corpus, model):
    # A head that sees a constant: the norm gives 0 plus its bias, so that logits do not depend on the text.
    spec = small(vocabulary=model.spec.vocabulary, sequence_length=16, norm="layer", tie_embeddings=False)
    model = build(spec, seed=0, dtype=torch.float64)
    with torch.no_grad():
        model.norm.weight.zero_()
        model.norm.bias.fill_(1.0)
        model.head_weight.mul_(30)
        log_probabilities = model.head_weight.sum(1).log_softmax(0)
    result = measured(corpus, model)
    manifest = read_manifest(corpus)
    nats = -sum(float(log_probabilities[token]) for token in validation_tokens(corpus, manifest))
    assert result["bits_per_byte"].value == pytest.approx(nats / math.log(2) / TEXT_BYTES, rel=1e-12)
    favourite = int(log_probabilities.argmax())
    hits = sum(token == favourite for token in validation_tokens(corpus, manifest))
    assert result["accuracy"].value == hits / result["accuracy"].n


def validation_tokens(corpus, manifest) -> list[int]:
    from ropewalk.store.shards import Shard

    return [t for entry in manifest.shards_of("validation") for t in Shard(corpus / entry.file).tokens.tolist()]


def test_an_untrained_model_costs_about_log_v_a_token(corpus, model):
    result = measured(corpus, model)
    expected = math.log2(model.spec.vocabulary) * result["loss"].n / result["bytes"].value
    # Logits of the first values have a standard deviation of 0.02 sqrt(width) = 0.08: the loss is log V + 0.003.
    assert result["bits_per_byte"].value == pytest.approx(expected, rel=0.01)


def test_domains_add_up_and_compressors_see_each_domain_joined(corpus, model):
    metrics = evaluated(corpus, model).tasks["held-out"]
    found = {(metric.group, metric.name): metric for metric in metrics}
    sizes = {group: metric.value for (group, name), metric in found.items() if name == "bytes" and group}
    assert set(sizes) == {"code", "prose"}
    assert sum(sizes.values()) == found["", "bytes"].value
    for show in (lambda m: m.value, lambda m: m.references["zlib"], lambda m: m.references["xz"]):
        bits = sum(show(found[group, "bits_per_byte"]) * size for group, size in sizes.items())
        assert show(found["", "bits_per_byte"]) == pytest.approx(bits / found["", "bytes"].value)
    for group in ("", *sizes):
        low, high = found[group, "bits_per_byte"].interval
        assert low < found[group, "bits_per_byte"].value < high
    assert found["", "perplexity"].interval == pytest.approx([math.exp(end) for end in found["", "loss"].interval])
    joined = 8 * len(zlib.compress("".join(CODE).encode(), 9)) / sizes["code"]
    # The documents come in another order here.
    assert found["code", "bits_per_byte"].references["zlib"] == pytest.approx(joined, rel=0.05)


def test_results_and_samples_are_written(corpus, model, tmp_path):
    result = evaluated(corpus, model)
    metrics = measured(corpus, model)
    write_evaluation(tmp_path, result, step=7)
    written = json.loads((tmp_path / "evaluation/results.json").read_text())
    assert (written["format"], written["step"], set(written["tasks"])) == (3, 7, {"held-out", "completions"})
    bits = written["tasks"]["held-out"]["bits_per_byte"]
    assert (bits["value"], bits["n"], bits["better"]) == (metrics["bits_per_byte"].value, 16, "lower")
    for task, read in read_tasks(written).items():
        order = [(metric.name, metric.group) for metric in read]
        assert sorted(result.tasks[task], key=lambda metric: order.index((metric.name, metric.group))) == read
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[1:-1]
    assert [json.loads(line)["domain"] for line in lines] == ["code", "prose", "code", "prose"]
    assert set(json.loads(lines[0])) >= {"prompt", "completion", "domain", "source", "parses"}
    rows = read_documents(tmp_path)
    assert len(rows) == 16 == len({row["key"] for row in rows})
    totals = {name: sum(row[name] for row in rows) for name in ("bytes", "tokens", "nats", "correct")}
    assert (totals["bytes"], totals["tokens"]) == (TEXT_BYTES, metrics["loss"].n)
    assert totals["nats"] / totals["tokens"] == pytest.approx(metrics["loss"].value)
    assert totals["correct"] / totals["tokens"] == metrics["accuracy"].value
    low, high = bits["interval"]
    assert low < bits["value"] < high
    assert read_whole(tmp_path).items() <= written.items()


def test_results_of_older_formats_are_read_as_tasks(corpus, model, tmp_path):
    """Format 2 had the same numbers without tasks; `summary.json` still has its keys."""
    write_evaluation(tmp_path, evaluated(corpus, model), step=7)
    new = read_results(tmp_path)
    old = {key: value for key, value in flat_results(new).items() if key != "tasks"} | {"format": 2}
    assert (old["documents"], old["bytes"], old["intervals"].keys()) == (
        16,
        TEXT_BYTES,
        {"bits_per_byte", "loss", "perplexity", "accuracy"},
    )
    assert old["domains"]["code"].keys() == {
        "bits_per_byte",
        "accuracy",
        "bytes",
        "zlib_bits_per_byte",
        "xz_bits_per_byte",
    }
    write_sealed(tmp_path / "evaluation/results.json", {key: old[key] for key in old if key != "seal"})
    upgraded = read_results(tmp_path)
    assert (upgraded["format"], upgraded["step"]) == (3, 7)
    assert {**flat_results(upgraded), "tasks": None} == {**flat_results(new), "tasks": None}


def test_a_diverged_model_is_reported(corpus, model):
    with torch.no_grad():
        model.head_weight.fill_(float("nan"))
    with pytest.raises(UserError, match="diverged"):
        measured(corpus, model)


TASK = """
from ropewalk.evaluate.task import Rolling, Task

class Wrong(Task):
    name = "wrong"

    def requests(self):
        return [Rolling("a")]

    def metrics(self, answers):
        return {"share": 0.5}

class Unnamed(Wrong):
    name = ""

class Strings(Wrong):
    def requests(self):
        return ["a"]

def function(held_out):
    return 3
"""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Wrong", r"task `wrong`: `metrics` must return a list of `Metric`, not \{'share': 0\.5\}"),
        ("Unnamed", r'"mistakes:Unnamed" has no name; write `name = "\.\.\."` in `class Unnamed`'),
        ("Strings", r"task `wrong`: a request must be `Rolling\(text\)`, .*, not 'a'"),
        ("function", r'"mistakes:function" is no task; derive the class from `ropewalk\.evaluate\.task\.Task`'),
    ],
)
def test_a_mistake_in_a_task_is_named(corpus, model, tmp_path, monkeypatch, name, message):
    (tmp_path / "mistakes.py").write_text(TASK)
    monkeypatch.chdir(tmp_path)
    held_out = HeldOut(corpus, replace(SETTINGS, tasks=(f"mistakes:{name}",)), seed=0)
    with pytest.raises(UserError, match=message):
        evaluate(planned(model, held_out), held_out)
