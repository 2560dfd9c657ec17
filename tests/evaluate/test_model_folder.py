"""Models in folders: checkpoints and Hugging Face directories, without run and corpus."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.cli.main import main
from ropewalk.evaluate import model_folder
from ropewalk.evaluate.answers import ANSWERS
from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.evaluation import open_tasks
from ropewalk.evaluate.model_folder import evaluate_folder, open_model
from ropewalk.evaluate.results import read_items, read_results
from ropewalk.model.hugging_face.directory import write_directory
from ropewalk.model.spec import Spec
from tests.tiny import byte_tokenizer

from .test_ranks import write_checkpoint
from .tiny import CODE, PROSE, small, train_tokenizer, vivid

TASK = "tests.evaluate.test_answers:Strands"
SETTINGS = Evaluate(tasks=(TASK,))
END = "<|endoftext|>"


def spec_of(vocabulary: int) -> Spec:
    return small(vocabulary=vocabulary, sequence_length=32)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = train_tokenizer(CODE + PROSE, end=END)
    spec = spec_of(tokenizer.get_vocab_size())
    weights = {name: value.float() for name, value in vivid(spec).state_dict().items()}
    write_directory(
        tmp_path / "export", spec=spec, weights=weights, tokenizer=tokenizer.to_str().encode(), layout="llama"
    )
    return tmp_path / "export"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "runs" / "ropes", spec_of(byte_tokenizer().get_vocab_size()))


def by_hand(path: Path, context: list[int], continuation: list[int]) -> float:
    """From the weights alone."""
    found = model_folder.open_model_folder(path)
    model = found.load(torch.device("cpu"))
    text = torch.tensor([[*context, *continuation]])
    with torch.no_grad():
        likely = model.logits(model(text[:, :-1]))[0, len(context) - 1 :].log_softmax(-1)
    return float(likely[range(len(continuation)), continuation].sum())


def test_a_checkpoint_reads_contexts_after_an_end_of_text_and_a_directory_as_they_are(directory, checkpoint):
    for path, start in ((checkpoint, [byte_tokenizer().token_to_id("<|endoftext|>")]), (directory, [])):
        model, held_out = open_model(path)
        texts = held_out.texts
        (pair,) = texts.pairs([("Rope is", " laid")])
        ids = texts.detokenizer.encode("Rope is laid")
        cut = len(texts.detokenizer.encode("Rope is"))
        assert pair == ([*start, *ids[:cut]], ids[cut:])
        (found,) = model.loglikelihood([pair])
        assert found.log_probability == pytest.approx(by_hand(path, *pair), rel=1e-5)


def test_spaces_of_a_context_move_and_an_empty_context_is_the_end_of_text(directory):
    _, held_out = open_model(directory)
    texts = held_out.texts
    moved, same, empty, ids = texts.pairs(
        [
            ("Rope is ", "laid"),
            ("Rope is", " laid"),
            ("", "Rope"),
            (torch.tensor([5]).numpy(), torch.tensor([7]).numpy()),
        ]
    )
    assert moved == same
    assert empty == ([held_out.end_of_text], texts.detokenizer.encode("Rope"))
    assert ids == ([5], [7])
    assert texts.prompts(["", "Rope"]) == [[held_out.end_of_text], texts.detokenizer.encode("Rope")]


def test_a_tokenizer_that_adds_a_beginning_keeps_it(directory):
    from tokenizers import Tokenizer, processors

    file = directory / "tokenizer.json"
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{END} $A", special_tokens=[(END, tokenizer.token_to_id(END))]
    )
    tokenizer.save(str(file))
    _, held_out = open_model(directory)
    end, encode = held_out.end_of_text, held_out.detokenizer.encode
    (pair, empty) = held_out.texts.pairs([("Rope", " is"), ("", "Rope")])
    assert pair == ([end, *encode("Rope")], encode(" is"))
    assert empty == ([end], encode("Rope"))


def test_a_whole_text_follows_the_beginning_of_text_of_its_tokenizer(directory):
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "bos_token": {"content": "A"}}))
    model, held_out = open_model(directory)
    begin, ids = held_out.detokenizer.encode("A"), held_out.detokenizer.encode("Rope is laid")
    assert [held_out.texts.before] == begin != [held_out.end_of_text]
    (found,) = model.rolling([held_out.texts.document("Rope is laid")])
    assert found.log_probability == pytest.approx(by_hand(directory, begin, ids), rel=1e-5)


def test_a_directory_is_asked_in_its_own_chat_template(directory, tmp_path):
    file = directory / "tokenizer_config.json"
    described = json.loads(file.read_bytes())
    marks = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )
    several = [{"name": "tools", "template": "?"}, {"name": "default", "template": marks}]
    task = "output_type: generate_until\ndataset_path: json\ntest_split: test\ndoc_to_text: '{{q}}'\ndoc_to_target: b\n"
    (tmp_path / "asks.yaml").write_text(task + "dataset_kwargs: {data_files: {test: asks.jsonl}}\n")
    (tmp_path / "asks.jsonl").write_text('{"q": "laid?"}\n')
    settings = Evaluate(tasks=(str(tmp_path / "asks.yaml"),), chat_template="multi-turn")

    def prompt() -> str:
        (asked,) = open_tasks(open_model(directory, settings=settings)[1])[0].requests()
        return asked.prompt

    with pytest.raises(UserError, match="no chat template"):
        prompt()
    for template in (marks, several):
        file.write_text(json.dumps({**described, "chat_template": template}))
        assert prompt() == "<user>laid?<me>"
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    assert prompt() == "laid?!"


def test_metrics_of_a_folder_are_computed_again_without_reading_weights(directory, tmp_path, monkeypatch):
    out = tmp_path / "out"
    first = evaluate_folder(directory, out=out, settings=SETTINGS, seed=0)
    assert (first["model"], first["tasks"]["strands"]["acc"]["n"]) == (str(directory), 12)

    def absent(*_, **__):
        raise AssertionError("weights were read")

    monkeypatch.setattr(model_folder, "read_directory", absent)
    more = Evaluate(tasks=("tests.evaluate.test_answers:Measured",))
    again = evaluate_folder(directory, out=out, settings=more, seed=0)
    assert again["tasks"]["strands"]["acc"] == first["tasks"]["strands"]["acc"]
    assert "longest" in again["tasks"]["strands"]
    assert len(read_items(out)) == 12
    # Other weights are another model.
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-3] ^= 1
    weights.write_bytes(data)
    with pytest.raises(AssertionError, match="weights were read"):
        evaluate_folder(directory, out=out, settings=SETTINGS, seed=0)


def test_a_task_over_documents_asks_for_a_corpus(checkpoint, tmp_path):
    with pytest.raises(UserError, match="without a corpus"):
        evaluate_folder(checkpoint, out=tmp_path / "out", settings=Evaluate(), seed=0)


def called(words: list[str]) -> int:
    with pytest.raises(SystemExit) as stop:
        main(words)
    return int(stop.value.code or 0)


def test_the_verb_evaluates_both_and_names_their_results(directory, checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = [f'evaluate.tasks=["{TASK}"]', "--limit", "5", "--json"]
    assert called(["evaluate", "export", *words]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["strands"]["acc"]["n"] == 5
    assert read_results(tmp_path / "runs/evaluation/export")["model"] == "export"
    assert "strands" in (tmp_path / "runs/evaluation/export/report.html").read_text("utf-8")
    assert called(["evaluate", str(checkpoint), *words]) == 0
    assert read_results(tmp_path / "runs/evaluation/ropes-step-00000007")["step"] == 7
    assert called(["evaluate", str(checkpoint), *words, "--out", "here"]) == 0
    assert (tmp_path / "here" / ANSWERS).exists()
    capsys.readouterr()
    assert called(["evaluate", "export", "train.steps=3"]) == 2
    assert "train" in capsys.readouterr().err


@pytest.mark.slow
def test_several_processes_answer_as_one_does(directory, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "export", f'evaluate.tasks=["{TASK}"]']
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).resolve().parents[2]))
    assert called([*words, "--out", "one"]) == 0
    assert called([*words, "--out", "two", "--nproc", "2"]) == 0
    one, two = (
        {tree["key"]: tree["log_probability"] for tree in model_answers(tmp_path / name)} for name in ("one", "two")
    )
    assert two == pytest.approx(one, abs=1e-4)
    # One process, then two, continue what one began.
    shutil.copytree("one", "half")
    lines = (tmp_path / "half" / ANSWERS).read_bytes().splitlines(keepends=True)
    (tmp_path / "half" / ANSWERS).write_bytes(b"".join(lines[:9]) + lines[9][:20])
    assert called([*words, "--out", "half", "--nproc", "2"]) == 0
    half = {tree["key"]: tree["log_probability"] for tree in model_answers(tmp_path / "half")}
    assert half == pytest.approx(one, abs=1e-4)


def model_answers(folder: Path) -> list[dict]:
    from ropewalk.evaluate.answers import read_lines

    return read_lines(folder / ANSWERS)[1:]
