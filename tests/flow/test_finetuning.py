"""Fine-tuning with a recipe that has sources and `train.start_from`: shape and tokenizer come from there."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ropewalk import flow
from ropewalk.base.errors import ConfigError
from ropewalk.base.events import read_events
from ropewalk.base.progress import Silent
from ropewalk.checkpoint.format import list_checkpoints, read_checkpoint_manifest
from ropewalk.checkpoint.read.load import load_weights
from ropewalk.config.read import flatten, read
from ropewalk.config.resolved import load_resolved
from ropewalk.evaluate.from_checkpoint import load_model
from ropewalk.flow.recipe import Recipe
from ropewalk.flow.run_or_recipe import resolve_recipe
from ropewalk.flow.start_from.base_model import MOST_TOKENS, open_base
from ropewalk.load.loader import Loader
from ropewalk.model.loss import token_losses

from .tiny import write_tiny

TUNE = """\
name = "tune"

[[prepare.sources]]
name = "notes"
paths = ["corpus/*.txt"]

[train]
start_from = "runs/tiny"
steps = 4
batch_size = 4
precision = "fp32"
threads = 1
validation_sequences = 4

[prepare]
validation_share = 0.2
workers = 1

[evaluate]
prompt_tokens = 8
"""
GPT2 = [
    *("name=gpt2", "train.steps=3", "model.position=learned", "model.norm=layer", "model.mlp=gelu-tanh"),
    *("model.bias=true", "model.tie_embeddings=false"),
]


@pytest.fixture(scope="module")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run `runs/tiny`, its export `tiny-hf`, a GPT-2 with padding `gpt2-hf`, and `tune.toml`."""
    folder = tmp_path_factory.mktemp("finetuning")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_tiny(folder)
        flow.train("tiny.toml", ["train.precision=fp32"])
        flow.train("tiny.toml", GPT2)
        flow.export_model(Path("runs/tiny"), Path("tiny-hf"))
        flow.export_model(Path("runs/gpt2"), Path("gpt2-hf"))
        pad(Path("gpt2-hf"), to=320)
        (folder / "tune.toml").write_text(TUNE)
        flow.prepare("tune.toml")
        shutil.rmtree("runs/tune")
    return folder


@pytest.fixture
def place(made_once: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which we stand."""
    copy = tmp_path / "place"
    shutil.copytree(made_once, copy)
    monkeypatch.chdir(copy)
    return copy


def pad(folder: Path, *, to: int) -> None:
    """Gives the model of a directory more rows than its tokenizer has tokens, as models in use have."""
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name in ("transformer.wte.weight", "lm_head.weight"):
        more = torch.randn(to - len(weights[name]), weights[name].shape[1], generator=torch.Generator().manual_seed(0))
        weights[name] = torch.cat([weights[name], more])
    safetensors.torch.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": to}))


def newest(run: str) -> Path:
    return list_checkpoints(Path("runs", run, "checkpoints"))[-1]


def first_loss(run: str) -> float:
    events = list(read_events(Path("runs", run, "events.jsonl")))
    return float(next(event["loss"] for event in events if event["kind"] == "step"))


def loss_of_base(base: Path, *, data: Path, rows: int = 4) -> float:
    """The loss of the model in a checkpoint on the first batch of a run that has not changed its seed."""
    model, _, _ = load_model(base, device=torch.device("cpu"))
    loader = Loader(data, sequence_length=32, batch_size=rows, seed=0)
    batch = loader.batch(0, rows)
    with torch.no_grad():
        hidden = model(batch.tokens)
        return token_losses(hidden.flatten(0, 1), model.head_weight, batch.targets.flatten()).mean().item()


def prepared_by(run: str) -> Path:
    record = json.loads(Path("runs", run, "stages", "prepare.json").read_text())
    return Path(record["result"]["folder"])


def problems(overrides: Sequence[str] = (), recipe: str = "tune.toml") -> list[str]:
    """Each line of what a run of the recipe is refused with; nothing may have been made."""
    before = sorted(Path().rglob("*"))
    with pytest.raises(ConfigError) as refused:
        flow.run(recipe, overrides)
    assert sorted(Path().rglob("*")) == before
    return str(refused.value).splitlines()


STARTS = {
    "run": ["train.start_from=runs/tiny"],
    "checkpoint": ["train.start_from=runs/tiny/checkpoints/step-00000006"],
    "directory": ["train.start_from=tiny-hf"],
    "adapters": ["train.start_from=tiny-hf", "train.lora.rank=2"],
}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_recipe_with_sources_and_a_start_trains_the_model_that_is_there(place: Path, start: list[str]) -> None:
    flow.train("tune.toml", [*start, "train.steps=1", "train.log_every_steps=1"])
    base = newest("tiny")
    here, there = load_weights(newest("tune")), load_weights(base)
    adapters = {"lora_rank": 2} if "train.lora.rank=2" in start else {"lora_rank": 0}
    for name in there.spec.__dataclass_fields__:
        expected = adapters.get(name, getattr(there.spec, name))
        assert getattr(here.spec, name) == expected or name in ("init", "positions"), name
    assert json.loads(here.tokenizer) == json.loads(there.tokenizer)
    # Its own model on the same rows, without anything of training.
    assert first_loss("tune") == pytest.approx(loss_of_base(base, data=prepared_by("tune")), abs=1e-5)
    assert first_loss("tune") != pytest.approx(torch.tensor(300.0).log().item(), abs=0.01), "an untrained model"


def test_a_gpt2_with_padding_and_its_own_head_is_trained_on_shorter_rows(place: Path) -> None:
    quick = ["train.steps=1", "evaluate.samples=1", "evaluate.max_bytes=2000"]
    assert flow.run("tune.toml", ["train.start_from=gpt2-hf", "load.sequence_length=16", *quick])["bits_per_byte"]
    spec = load_weights(newest("tune")).spec
    assert (spec.vocabulary, spec.learned_positions, spec.sequence_length, spec.tie_embeddings) == (320, 32, 16, False)
    # The rows of padding are the largest by far, and are never drawn: they have no text.
    assert "".join(flow.generate(Path("runs/tune"), prompt="rope", tokens=8))
    assert flow.export_model(Path("runs/tune"), Path("back"))["layout"] == "gpt2"
    assert json.loads(Path("back/config.json").read_text())["n_positions"] == 32


def test_rows_longer_than_learned_positions_are_refused_with_the_line(place: Path) -> None:
    recipe = Path("tune.toml")
    recipe.write_text(recipe.read_text().replace("runs/tiny", "gpt2-hf") + "[load]\nsequence_length = 64\n")
    (line,) = problems()
    assert line.startswith("tune.toml:22: `load.sequence_length`: 64 tokens")
    assert "32 learned positions" in line


def test_contradictions_are_reported_together_before_anything_is_made(place: Path) -> None:
    recipe = Path("tune.toml")
    recipe.write_text(f'{TUNE}\n[model]\nwidth = 512\nnorm = "layer"\n[prepare.tokenizer]\nvocab_size = 500\n')
    width, norm, tokenizer = problems()
    assert width.startswith("tune.toml:23: `model.width` is 512, runs/tiny has 32; ")
    assert "ropewalk model grow runs/tiny GROWN model.width=512" in width
    assert norm.startswith('tune.toml:24: `model.norm` is "layer", runs/tiny has "rms"; remove it')
    assert tokenizer.startswith(
        "tune.toml:26: `prepare.tokenizer.vocab_size` is 500, runs/tiny has its own tokenizer with 300"
    )


def test_what_has_no_weights_may_be_changed(place: Path) -> None:
    changed = ["model.dropout=0.1", "model.documents=separate", "model.rope_scaling=linear", "model.rope_factor=2.0"]
    flow.train("tune.toml", [*changed, "load.sequence_length=16", "model.width=32", "train.steps=1"])
    spec = load_weights(newest("tune")).spec
    assert (spec.dropout, spec.documents, spec.rope_factor, spec.sequence_length) == (0.1, "separate", 2.0, 16)


def test_another_tokenizer_is_refused_and_the_same_one_is_not(place: Path) -> None:
    tree = json.loads((newest("tiny") / "tokenizer.json").read_text())
    ids = tree["model"]["vocab"]
    one, two = [*ids][10:12]
    ids[one], ids[two] = ids[two], ids[one]
    Path("other.json").write_text(json.dumps(tree))
    (line,) = problems(["prepare.tokenizer.file=other.json"])
    assert '`prepare.tokenizer.file`: "other.json" is another tokenizer than that of runs/tiny' in line
    assert 'set it to "runs/tiny"' in line
    flow.check(Path("tune.toml"), ["prepare.tokenizer.file=tiny-hf"])


def test_every_verb_sees_the_same_model(place: Path) -> None:
    parameters = flow.describe(Path("tune.toml"))["parameters"]
    assert parameters == flow.describe(Path("tiny.toml"))["parameters"]
    assert flow.plan("tune.toml")["phases"][0]["derived"]["parameters"] == parameters
    shown = flow.show(Path("tune.toml"))
    assert shown.origin("model.width") == "from runs/tiny"
    assert shown.origin("load.sequence_length") == "from runs/tiny"
    assert shown.value.prepare.tokenizer.file == str(newest("tiny") / "tokenizer.json")
    assert shown.value.train.start_from == str(newest("tiny"))
    assert shown.origin("train.start_from") == "tune.toml:8"
    flow.prepare("tune.toml")
    assert load_resolved(Path("runs/tune"), Recipe) == shown
    # A recipe from Python, of which nothing is known but what differs from the defaults.
    made = flow.recipe_from(read(Recipe, Path("tune.toml")).value)
    assert resolve_recipe(made).value == shown.value


def test_a_run_goes_on_without_its_base_and_ends_with_the_same_bits(place: Path) -> None:
    settings = ["checkpoint.save_every_steps=2"]
    flow.train("tune.toml", settings)
    wanted = (newest("tune") / "model.safetensors").read_bytes()
    for gone in (newest("tune"), Path("runs/tune/stages/train.json"), Path("runs/tiny"), Path("prepared")):
        shutil.rmtree(gone) if gone.is_dir() else gone.unlink()
    assert newest("tune").name == "step-00000002"
    flow.train("tune.toml", settings)
    assert (newest("tune") / "model.safetensors").read_bytes() == wanted
    # Without a checkpoint of its own it needs the base.
    (line,) = problems(["name=another"])
    assert line.startswith("tune.toml:8: `train.start_from`: runs/tiny: no such folder")


def test_a_run_that_has_begun_stays_with_the_checkpoint_it_began_with(place: Path) -> None:
    later, aside = newest("tiny"), Path("aside")
    later.rename(aside)
    first = newest("tiny")
    flow.prepare("tune.toml")
    aside.rename(later)
    flow.train("tune.toml")
    (began,) = (e for e in read_events(Path("runs/tune/events.jsonl")) if e["kind"] == "phase_started")
    assert began["start_from"] == str(first)
    assert flow.show(Path("tune.toml")).value.train.start_from == str(first)
    assert resolve_recipe("tune.toml", new=True).value.train.start_from == str(later)


class Listener(Silent):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)


def test_a_base_that_has_changed_is_told_and_the_run_kept(place: Path) -> None:
    flow.train("tune.toml", ["train.start_from=tiny-hf"])
    trained, listener = newest("tune").stat().st_mtime_ns, Listener()
    os.utime("tiny-hf/model.safetensors", ns=(1, 1))
    flow.train("tune.toml", ["train.start_from=tiny-hf"], progress=listener)
    assert any("tiny-hf has changed since this run started from it" in text for text in listener.said)
    assert newest("tune").stat().st_mtime_ns == trained


def test_a_phase_may_start_from_a_base_and_bases_must_agree(place: Path) -> None:
    phases = '\n[[train.phases]]\nsteps = 1\n[[train.phases]]\nsteps = 1\nstart_from = "runs/tiny"\n'
    recipe = Path("tune.toml")
    recipe.write_text(TUNE.replace('start_from = "runs/tiny"\nsteps = 4\n', "") + phases)
    assert flow.show(recipe).origin("model.width") == "from runs/tiny"
    flow.train("tune.toml")
    assert load_weights(newest("tune")).spec == load_weights(newest("tiny")).spec
    recipe.write_text(recipe.read_text().replace("steps = 1\n[[", 'steps = 1\nstart_from = "gpt2-hf"\n[['))
    (line,) = problems(["name=another"])
    assert line.startswith(
        "tune.toml:25: `train.phases.1.start_from`: runs/tiny is another model than gpt2-hf: it has "
    )
    assert '`model.norm` "rms", not "layer"' in line


def test_damage_of_a_base_is_found_before_anything_is_made(place: Path) -> None:
    with open("tiny-hf/model.safetensors", "r+b") as file:
        file.truncate(5000)
    (line,) = problems(["train.start_from=tiny-hf"])
    assert "tiny-hf/model.safetensors: this file of weights is damaged" in line
    weights = newest("tiny") / "model.safetensors"
    with open(weights, "r+b") as file:
        file.truncate(5000)
    (line,) = problems()
    assert line.startswith(f"tune.toml:8: `train.start_from`: {weights}: damaged checkpoint: 5000 bytes")
    assert "use an older checkpoint" in line
    os.remove("tiny-hf/tokenizer.json")
    shutil.copy("runs/tiny/checkpoints/step-00000004/model.safetensors", "tiny-hf/model.safetensors")
    (line,) = problems(["train.start_from=tiny-hf"])
    assert "tiny-hf/tokenizer.json: no such tokenizer" in line


def test_a_folder_without_a_model_is_no_start(place: Path) -> None:
    (line,) = problems(["train.start_from=corpus"])
    assert "corpus: no checkpoint here" in line
    (line,) = problems(["train.start_from=meta-llama/Llama-3.2-1B"])
    assert "no such folder" in line
    assert "nothing is fetched from a hub" in line


def test_long_contexts_of_a_directory_are_not_trained_on_unasked(place: Path) -> None:
    config = json.loads(Path("tiny-hf/config.json").read_text())
    Path("tiny-hf/config.json").write_text(json.dumps({**config, "max_position_embeddings": 131072}))
    assert open_base("tiny-hf").sequence_length == MOST_TOKENS


@pytest.fixture
def dialogues(place: Path) -> list[str]:
    """Settings that add a source of dialogues."""
    turns = [{"role": "user", "content": "What is a rope?"}, {"role": "assistant", "content": "Strands, laid."}]
    Path("talk.jsonl").write_text("".join(json.dumps({"messages": turns * n}) + "\n" for n in range(2, 6)))
    sources = '{name = "notes", paths = ["corpus/*.txt"]}, {name = "talk", paths = ["talk.jsonl"], format = "chat"}'
    return [f"prepare.sources=[{sources}]"]


def test_a_template_that_the_tokenizer_cannot_represent_is_replaced_or_reported(
    dialogues: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    resolved = flow.check(Path("tune.toml"), dialogues).resolved
    assert resolved.value.prepare.chat.template == "plain"
    assert resolved.origin("prepare.chat.template").endswith("no <|im_start|> and no <|im_end|>")
    assert "has no special token <|im_start|> and no <|im_end|>" in caplog.text
    (line,) = problems([*dialogues, "prepare.chat.template=chatml"])
    assert line.startswith("command line: prepare.chat.template=chatml: `prepare.chat.template` is")
    assert line.endswith('set it to "plain"')
    # So it is for a tokenizer that is given, without a start.
    recipe = Path("tune.toml")
    recipe.write_text(TUNE.replace('start_from = "runs/tiny"\n', ""))
    given = [*dialogues, "prepare.tokenizer.file=tiny-hf"]
    assert flow.check(recipe, given).resolved.value.prepare.chat.template == "plain"
    assert len(problems([*given, "prepare.chat.template=chatml"])) == 1
    assert flow.check(recipe, dialogues).resolved.value.prepare.chat.template == "chatml"


def test_a_model_of_dialogues_keeps_its_template(dialogues: list[str]) -> None:
    flow.train("tune.toml", [*dialogues, "name=plain", "train.steps=1"])
    assert read_checkpoint_manifest(newest("plain")).chat == "plain"
    own = [*dialogues, "name=own", "train.steps=1", "load.sequence_length=32", "prepare.tokenizer.vocab_size=300"]
    Path("own.toml").write_text(TUNE.replace('start_from = "runs/tiny"\n', ""))
    flow.train("own.toml", [*own, "model.layers=1", "model.width=32"])
    kept = {
        start: flow.show(Path("tune.toml"), [*dialogues, f"train.start_from=runs/{start}"])
        for start in ("plain", "own")
    }
    assert kept["plain"].value.prepare.chat.template == "plain"
    assert kept["own"].value.prepare.chat.template == "chatml"
    assert kept["own"].origin("prepare.chat.template").startswith("from runs/own")


def test_a_recipe_that_starts_nowhere_is_read_as_ever(place: Path) -> None:
    plain = read(Recipe, Path("tiny.toml"))
    assert resolve_recipe("tiny.toml") == plain
    assert dict(flatten(flow.show(Path("tiny.toml")).value)) == dict(flatten(plain.value))


def test_a_recipe_cannot_start_from_its_own_run(place: Path) -> None:
    (line,) = problems(["name=tiny"])
    assert (
        line
        == "tune.toml:8: `train.start_from`: runs/tiny is the run of this recipe itself; give the recipe another `name`"
    )


@pytest.mark.slow  # transformers takes ten seconds to import; the quick tests above compare with our own model
@pytest.mark.parametrize("layout", ["llama", "gpt2"])
def test_the_first_loss_is_the_one_that_transformers_computes(place: Path, layout: str) -> None:
    import transformers

    torch.manual_seed(0)
    if layout == "llama":
        # Heads of a size of their own, grouped queries, padding, another base and epsilon than ours.
        config = transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=12,
            vocab_size=352,
            max_position_embeddings=64,
            rope_theta=500_000.0,
            rms_norm_eps=1e-5,
        )
        theirs: torch.nn.Module = transformers.LlamaForCausalLM(config)
    else:
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 352}
        theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    theirs.eval().save_pretrained("theirs")  # type: ignore[operator]
    shutil.copy("tiny-hf/tokenizer.json", "theirs/tokenizer.json")
    settings = ["train.start_from=theirs", "load.sequence_length=32", "train.steps=1", "train.log_every_steps=1"]
    flow.run("tune.toml", [*settings, "evaluate.samples=1", "evaluate.max_bytes=3000"])
    batch = Loader(prepared_by("tune"), sequence_length=32, batch_size=4, seed=0).batch(0, 4)
    with torch.no_grad():
        logits = theirs(batch.tokens.long()).logits
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten().long()).item()
    assert first_loss("tune") == pytest.approx(wanted, abs=1e-5)
    assert flow.export_model(Path("runs/tune"), Path("back"))["layout"] == layout
    assert transformers.AutoModelForCausalLM.from_pretrained("back").config.vocab_size == 352
