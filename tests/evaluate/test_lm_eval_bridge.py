"""The bridge against lm-evaluation-harness's own Hugging Face model, where both are installed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ropewalk.model.hugging_face.directory import write_directory

from .tiny import CODE, PROSE, small, train_tokenizer, vivid

lm_eval = pytest.importorskip("lm_eval", reason="lm-eval is not installed")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "model"
    tokenizer = train_tokenizer(CODE + PROSE, end="<|endoftext|>")
    spec = small(vocabulary=tokenizer.get_vocab_size(), sequence_length=48)
    weights = {name: value.float() for name, value in vivid(spec).state_dict().items()}
    write_directory(folder, spec=spec, weights=weights, tokenizer=tokenizer.to_str().encode(), layout="llama")
    return folder


@pytest.fixture(scope="module")
def both(directory: Path):
    from lm_eval.models.huggingface import HFLM

    from ropewalk.evaluate.lm_eval_bridge import BridgedModel

    torch.set_num_threads(1)
    theirs = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=4)
    return BridgedModel(directory), theirs


def requests(*arguments: tuple) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=each, arguments=each) for each in arguments]


def test_log_likelihoods_are_those_of_the_peer(both):
    asked = requests(
        ("The rope is", " laid"),
        ("The rope is", " laid in strands"),
        ("The rope is ", "laid"),  # the space moves
        ("The rope is \n", "spun"),
        ("", "Chapter 3."),
        ("", "绳索 🪢"),
        (PROSE[0] * 3, " and the end"),  # too long: the beginning is dropped
        (CODE[0], "def"),
    )
    ours, theirs = both
    found, expected = ours.loglikelihood(asked), theirs.loglikelihood(asked)
    for mine, their in zip(found, expected, strict=True):
        assert mine[0] == pytest.approx(their[0], abs=1e-4 * max(1, abs(their[0]) / 10))
        assert mine[1] == their[1]


def test_rolling_log_likelihoods_are_those_of_the_peer(both):
    asked = requests(("short",), (PROSE[1] * 4,), (CODE[1],))
    ours, theirs = both
    assert ours.loglikelihood_rolling(asked) == pytest.approx(theirs.loglikelihood_rolling(asked), rel=1e-5)


def test_greedy_completions_are_those_of_the_peer(both):
    options = {"until": ["\n"], "max_gen_toks": 8, "do_sample": False}
    asked = requests(("The rope is", options), ("def area", options))
    ours, theirs = both
    assert ours.generate_until(asked) == theirs.generate_until(asked)


def test_the_harness_runs_a_task_with_our_model(both, tmp_path):
    from lm_eval.tasks import TaskManager

    (tmp_path / "rows.jsonl").write_text('{"q": "The rope is", "a": 1}\n{"q": "A strand is", "a": 0}\n')
    (tmp_path / "ropes.yaml").write_text(
        f"task: ropes\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {tmp_path}/rows.jsonl}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{q}}"\ndoc_to_choice: [laid, spun]\n'
        "doc_to_target: a\nmetric_list: [{metric: acc}]\n"
    )
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    ours, theirs = (
        lm_eval.simple_evaluate(model, tasks=["ropes"], task_manager=manager, bootstrap_iters=0)["results"]["ropes"]
        for model in both
    )
    assert ours["acc,none"] == theirs["acc,none"]
