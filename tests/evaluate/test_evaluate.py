"""The whole evaluation, against numbers known in closed form."""

from __future__ import annotations

import json
import math
import zlib

import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import evaluate, write_evaluation
from ropewalk.evaluate.results import read_documents, read_whole
from ropewalk.model.decoder import build
from ropewalk.store.manifest import read_manifest

from .tiny import CODE, PROSE, one_device, small

SETTINGS = Evaluate(max_bytes=10**6, samples=4, prompt_tokens=6, max_new_tokens=8)
TEXT_BYTES = sum(len(text.encode()) for text in CODE + PROSE)


def measured(corpus, model):
    return evaluate(one_device(model), model, folder=corpus, settings=SETTINGS, sequence_length=16, rows=4, seed=0)


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
    assert (result.tokens, result.bytes, result.documents) == (tokens, TEXT_BYTES, 16)
    assert result.bits_per_byte == pytest.approx(math.log2(vocabulary) * tokens / TEXT_BYTES, rel=1e-12)
    assert result.loss == pytest.approx(math.log(vocabulary), rel=1e-12)
    assert result.perplexity == pytest.approx(vocabulary, rel=1e-12)


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
    assert result.bits_per_byte == pytest.approx(nats / math.log(2) / TEXT_BYTES, rel=1e-12)
    favourite = int(log_probabilities.argmax())
    hits = sum(token == favourite for token in validation_tokens(corpus, manifest))
    assert result.accuracy == hits / result.tokens


def validation_tokens(corpus, manifest) -> list[int]:
    from ropewalk.store.shards import Shard

    return [t for entry in manifest.shards_of("validation") for t in Shard(corpus / entry.file).tokens.tolist()]


def test_an_untrained_model_costs_about_log_v_a_token(corpus, model):
    result = measured(corpus, model)
    expected = math.log2(model.spec.vocabulary) * result.tokens / result.bytes
    # Logits of the first values have a standard deviation of 0.02 sqrt(width) = 0.08: the loss is log V + 0.003.
    assert result.bits_per_byte == pytest.approx(expected, rel=0.01)


def test_domains_add_up_and_compressors_see_each_domain_joined(corpus, model):
    result = measured(corpus, model)
    assert set(result.domains) == {"code", "prose"}
    assert sum(part.bytes for part in result.domains.values()) == result.bytes
    for name in ("bits_per_byte", "zlib_bits_per_byte", "xz_bits_per_byte"):
        bits = sum(getattr(part, name) * part.bytes for part in result.domains.values())
        assert getattr(result, name) == pytest.approx(bits / result.bytes)
    code = result.domains["code"]
    joined = 8 * len(zlib.compress("".join(CODE).encode(), 9)) / code.bytes
    # The documents come in another order here.
    assert code.zlib_bits_per_byte == pytest.approx(joined, rel=0.05)


def test_results_and_samples_are_written(corpus, model, tmp_path):
    result = measured(corpus, model)
    write_evaluation(tmp_path, result, step=7)
    written = json.loads((tmp_path / "evaluation/results.json").read_text())
    assert list(written)[:2] == ["format", "step"]
    assert (written["format"], written["step"]) == (2, 7)
    assert written["bits_per_byte"] == result.bits_per_byte
    assert written["domains"]["code"]["bytes"] == result.domains["code"].bytes
    assert "samples" not in written
    lines = (tmp_path / "samples.jsonl").read_text(encoding="utf-8").split("\n")[1:-1]
    assert [json.loads(line)["domain"] for line in lines] == ["code", "prose", "code", "prose"]
    assert set(json.loads(lines[0])) >= {"prompt", "completion", "domain", "source", "parses"}
    rows = read_documents(tmp_path)
    assert len(rows) == result.documents == len({row["key"] for row in rows})
    totals = {name: sum(row[name] for row in rows) for name in ("bytes", "tokens", "nats", "correct")}
    assert (totals["bytes"], totals["tokens"]) == (result.bytes, result.tokens)
    assert totals["nats"] / totals["tokens"] == pytest.approx(result.loss)
    assert totals["correct"] / totals["tokens"] == result.accuracy
    low, high = written["intervals"]["bits_per_byte"]
    assert low < result.bits_per_byte < high
    assert read_whole(tmp_path).items() <= written.items()


def test_a_diverged_model_is_reported(corpus, model):
    with torch.no_grad():
        model.head_weight.fill_(float("nan"))
    with pytest.raises(UserError, match="diverged"):
        measured(corpus, model)
