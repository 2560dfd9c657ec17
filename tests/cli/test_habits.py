"""What users of other tools type is answered with what it is called here."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from ropewalk.cli import habits
from ropewalk.cli.main import VERBS
from ropewalk.config.synonyms import ADVICE, REMARKS, SETTINGS, meant_by, settings_of
from ropewalk.flow.recipe import Recipe

from .conftest import Call

ROOT = Path(__file__).parents[2]
SOURCE = '[[prepare.sources]]\nname = "a"\npaths = ["corpus/"]\n'

IN_A_RECIPE = [
    # nanoGPT: names without tables
    ("nanoGPT", "max_iters = 5000", "`max_iters`; it is `steps` in `[train]`"),
    ("nanoGPT", "learning_rate = 1e-3", "`learning_rate`; it is `peak_lr` in `[train.schedule]`"),
    ("nanoGPT", "batch_size = 12", "`batch_size`; it belongs in `[train]`"),
    ("nanoGPT", "block_size = 64", "`block_size`; it is `sequence_length` in `[load]`"),
    ("nanoGPT", "n_embd = 128", "`n_embd`; it is `width` in `[model]`"),
    ("nanoGPT", "min_lr = 1e-4", "`final_lr_ratio` in `[train.schedule]` (as a share of `peak_lr`)"),
    ("nanoGPT", "gradient_accumulation_steps = 4", "it follows from `train.batch_size`"),
    ("nanoGPT", 'init_from = "gpt2"', "it is `start_from` in `[train]`"),
    ("nanoGPT", 'out_dir = "out"', "a run lies in `runs/NAME`"),
    # litgpt
    ("litgpt", "[train]\nmicro_batch_size = 4", "`train.micro_batch_size`; it is `microbatch_size` in `[plan]`"),
    ("litgpt", "[train]\nlr_warmup_steps = 4", "it is `warmup_steps` in `[train.schedule]`"),
    ("litgpt", "[train]\nepochs = 3", "a run counts steps, not epochs"),
    ("litgpt", "[train]\nmax_norm = 1.0", "it is `clip_norm` in `[train]`"),
    ("litgpt", 'logger_name = "wandb"', "`ropewalk monitor RUN --to tensorboard=FOLDER`"),
    ("litgpt", "[model]\nn_query_groups = 2", "it is `kv_heads` in `[model]`"),
    # axolotl
    ("axolotl", 'base_model = "a"', "it is `start_from` in `[train]`"),
    ("axolotl", "sequence_len = 2048", "it is `sequence_length` in `[load]`"),
    ("axolotl", "lora_r = 8", "it is `rank` in `[train.lora]`"),
    ("axolotl", "val_set_size = 0.1", "it is `validation_share` in `[prepare]`"),
    ("axolotl", "load_in_8bit = true", "weights are not quantized"),
    ("axolotl", "gradient_checkpointing = true", "it is `recompute` in `[parallel]`"),
    ("axolotl", 'datasets = [{path = "a"}]', "it is `paths` in `[[prepare.sources]]`"),
    ("axolotl", "bf16 = true", 'it is `precision` in `[train]` (`precision = "bf16"`)'),
    # torchtitan
    ("torchtitan", "[training]\nseq_len = 2048", "`training.seq_len`; it is `sequence_length` in `[load]`"),
    ("torchtitan", "[training]\nsteps = 10", "`training`; did you mean `train`?"),
    ("torchtitan", "[optimizer]\nlr = 3e-4", "`optimizer.lr`; it is `peak_lr` in `[train.schedule]`"),
    ("torchtitan", '[optimizer]\nname = "AdamW"', "`optimizer.name`; it is `kind` in `[train.optimizer]`"),
    ("torchtitan", "[parallelism]\ntensor_parallel_degree = 2", "it is `tensor` in `[parallel]`"),
    ("torchtitan", "[parallelism]\ndata_parallel_shard_degree = 8", "it is `shard` in `[parallel]`"),
    ("torchtitan", '[activation_checkpoint]\nmode = "full"', "it is `recompute` in `[parallel]`"),
    ("torchtitan", "[checkpoint]\ninterval = 500", "it is `save_every_steps` in `[checkpoint]`"),
    ("torchtitan", "[metrics]\nlog_freq = 10", "it is `log_every_steps` in `[train]`"),
    # Right names in the wrong place
    ("ours", "layers = 4", "`layers`; it belongs in `[model]`"),
    ("ours", "[train]\npeak_lr = 1e-3", "`train.peak_lr`; it belongs in `[train.schedule]`"),
    ("ours", "[lora]\nrank = 4", "`lora.rank`; it belongs in `[train.lora]`"),
    ("ours", "[schedule]\nx = 4", "`schedule`; its table is `[train.schedule]`"),
]

ON_THE_COMMAND_LINE = [
    ("nanoGPT", ["train", "tiny.toml", "max_iters=5"], "it is `train.steps`"),
    (
        "nanoGPT",
        ["train", "tiny.toml", "--max_iters=5"],
        "no option `--max_iters`; settings have no dashes: write `train.steps=",
    ),
    ("litgpt", ["train", "tiny.toml", "--train.lr_warmup_steps", "4"], "write `train.schedule.warmup_steps=VALUE`"),
    ("litgpt", ["pretrain", "pythia-14m"], "`ropewalk run RECIPE` goes from raw files to a report"),
    ("litgpt", ["finetune_lora", "a"], "`ropewalk new RECIPE DATA --start-from MODEL`"),
    ("litgpt", ["convert_from_litgpt", "a", "b"], "`ropewalk model export RUN FOLDER`"),
    ("litgpt", ["download", "a"], "nothing is fetched from a hub"),
    ("axolotl", ["preprocess", "a.toml"], "`ropewalk prepare RECIPE`"),
    ("axolotl", ["merge-lora", "a.toml"], "`ropewalk model export RUN FOLDER`"),
    ("axolotl", ["inference", "a.toml"], "`ropewalk generate RUN --prompt TEXT`"),
    ("torchtitan", ["train", "--job.config_file", "tiny.toml"], "name the recipe without an option"),
    ("torchtitan", ["train", "tiny.toml", "--training.local_batch_size", "8"], "write `plan.microbatch_size=VALUE`"),
    ("transformers", ["train", "tiny.toml", "--num_train_epochs", "3"], "a run counts steps, not epochs"),
    (
        "any",
        ["train", "tiny.toml", "--train.steps=3"],
        "settings have no dashes: write `train.steps=VALUE` behind the recipe",
    ),
    ("any", ["resume", "tiny.toml"], "`ropewalk run RECIPE`, or `ropewalk run runs/NAME`"),
    ("any", ["export", "runs/tiny"], "`ropewalk checkpoint export` is the same"),
    ("any", ["train", "tiny.toml", "train.optimizer=muon"], "that is `train.optimizer.kind`"),
    ("any", ["train", "tiny.toml", "train.schedule=cosine"], "that is `train.schedule.shape`"),
    (
        "datatrove",
        ["train", "tiny.toml", "prepare.deduplicate.near.method=simhash"],
        "it is `prepare.deduplicate.near.kind`",
    ),
    ("any", ["train", "tiny.toml", "wandb.project=a"], "`ropewalk monitor RUN --to tensorboard=FOLDER`"),
    ("any", ["fine-tune", "a"], "`ropewalk new RECIPE DATA --start-from MODEL`"),
    ("any", ["tiny.toml"], "`ropewalk run tiny.toml`"),
]


@pytest.mark.parametrize(("tool", "text", "answer"), IN_A_RECIPE, ids=lambda value: str(value)[:30])
def test_a_setting_of_another_tool_is_answered_with_ours(
    tool: str, text: str, answer: str, tiny: Path, call: Call
) -> None:
    table = text.startswith("[")
    Path("other.toml").write_text(f'name = "other"\n{"" if table else text}\n{SOURCE}\n{text if table else ""}\n')
    ended = call("recipe", "check", "other.toml")
    assert ended.status == 2
    (line,) = ended.err.splitlines()
    number = next(n for n, one in enumerate(Path("other.toml").read_text().splitlines(), 1) if one and one in text)
    assert line.startswith((f"other.toml:{number}: unknown key ", f"other.toml:{number + 1}: unknown key "))
    assert answer in line


@pytest.mark.parametrize(("tool", "words", "answer"), ON_THE_COMMAND_LINE, ids=lambda value: str(value)[:40])
def test_a_command_of_another_tool_is_answered_with_ours(
    tool: str, words: list[str], answer: str, tiny: Path, call: Call
) -> None:
    ended = call(*words)
    assert ended.status == 2
    assert answer in ended.err
    assert len(ended.err.splitlines()) == 1
    told = json.loads(call(*words, "--json").out)
    assert answer in told["message"]


def test_the_tables_name_settings_that_there_are_and_each_name_once() -> None:
    ours = settings_of(Recipe)
    assert [key for key in SETTINGS if key not in ours] == []
    names = [name for others in SETTINGS.values() for name in others]
    assert sorted(names) == sorted(set(names))
    assert set(names) & set(ADVICE) == set()
    assert set(REMARKS) <= set(names)
    assert set(habits.VERBS) & set(VERBS) == set()


def test_the_page_for_users_of_other_tools_says_what_the_messages_say() -> None:
    page = (ROOT / "docs/guides/other-tools.md").read_text("utf-8")
    settings, verbs = page.split("| verb there | here |")
    rows = re.findall(r"^\| (`[^|]+) \| ([^|]+) \|$", settings, flags=re.MULTILINE)
    assert len(rows) >= 25
    for there, here in rows:
        for name in re.findall(r"`(\w+)`", there):
            meant = meant_by(Recipe, (name,), on_command_line=True)
            key = re.match(r"it is `([\w.]+)`|it is `(\w+)` in `\[\[([\w.]+)", meant)
            assert name in ADVICE or (key and (key[1] or f"{key[3]}.{key[2]}") in here), f"{name}: {meant}"
    for there in re.findall(r"^\| (`[^|]+) \|", verbs, flags=re.MULTILINE):
        assert all(verb.replace("-", "_") in habits.VERBS for verb in re.findall(r"`([\w-]+)`", there)), there


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "Missing argument 'recipe'."),
        (["monitor", "--bogus"], "No such option: --bogus"),
        (["train", "tiny.toml", "--nproc", "x"], "Invalid value for '--nproc'"),
        (["checkpoint", "ls", "runs/x"], "There are: list, show, verify, reshard, export, prune."),
        (["recipe", "x"], "No such command 'x'. There are: check, show, diff, upgrade."),
    ],
)
def test_a_wrong_use_of_a_verb_is_json_too(words: list[str], message: str, tiny: Path, call: Call) -> None:
    ended = call(*words, "--json")
    assert ended.status == 2
    assert message in json.loads(ended.out)["message"]
    assert json.loads(ended.out)["error"] == "UsageError"
    assert message in call(*words).err
    assert call(*words).out == ""


@pytest.mark.parametrize("words", [[], ["run"], ["checkpoint", "list"]])
def test_h_is_help(words: list[str], call: Call) -> None:
    assert call(*words, "-h").out == call(*words, "--help").out


def test_an_interrupt_while_modules_are_imported_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "ropewalk", "monitor"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=tmp_path, preexec_fn=_interruptible
    )
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def _interruptible() -> None:
    """What a shell starts in the background ignores interrupts, and so does all that it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_the_installed_command_begins_where_an_interrupt_is_minded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"] == {"ropewalk": "ropewalk.__main__:start"}
