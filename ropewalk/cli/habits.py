"""Verbs, options and settings of other tools that have another name here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from ropewalk.config.synonyms import meant_by

_TUNE = (
    "fine-tuning is a run that starts from a model: `ropewalk new RECIPE DATA --start-from MODEL`, then `ropewalk run`"
)
_CONTINUE = "the same command continues a run: `ropewalk run RECIPE`, or `ropewalk run runs/NAME`"
_EXPORT = "`ropewalk model export RUN FOLDER` writes a Hugging Face directory; `ropewalk checkpoint export` is the same"
_IMPORT = (
    "`train.start_from` takes a local Hugging Face directory as it is; `ropewalk model import` makes a checkpoint of it"
)
_FETCH = "nothing is fetched from a hub; name a local Hugging Face directory in `train.start_from`"
_LOOK = "`ropewalk monitor RUN --follow` shows a run; `--to tensorboard=FOLDER` writes its curves"
_PREPARE = "`ropewalk prepare RECIPE` turns raw files into tokens; `ropewalk run` does so by itself"
_STOP = "press Ctrl-C, or send SIGTERM to the process; the same command continues"
_GENERATE = "`ropewalk generate RUN --prompt TEXT` continues a text, `ropewalk chat RUN` talks"
_JOBS = "`ropewalk launch slurm RECIPE` or `launch kubernetes` writes a job; `train --nproc N` starts N processes"
VERBS = {
    **dict.fromkeys(
        ("finetune", "fine_tune", "finetune_lora", "finetune_full", "sft", "lora", "tune_run", "instruct"), _TUNE
    ),
    **dict.fromkeys(("pretrain", "fit", "start", "go"), "`ropewalk run RECIPE` goes from raw files to a report"),
    **dict.fromkeys(("resume", "continue", "restart"), _CONTINUE),
    **dict.fromkeys(
        ("export", "convert", "convert_to_hf", "convert_from_litgpt", "merge_lora", "merge", "save"), _EXPORT
    ),
    **dict.fromkeys(("import", "convert_to_litgpt", "convert_hf_checkpoint", "load"), _IMPORT),
    **dict.fromkeys(("download", "pull", "fetch"), _FETCH),
    **dict.fromkeys(("sample", "inference", "complete", "predict"), _GENERATE),
    **dict.fromkeys(("eval", "test", "val", "validate", "lm_eval"), "`ropewalk evaluate RUN` measures a model"),
    **dict.fromkeys(
        ("benchmark", "speed"), "`ropewalk bench train` measures this machine, `ropewalk profile RECIPE` one step"
    ),
    **dict.fromkeys(("preprocess", "tokenize", "prepare_data", "process", "data", "dataset"), _PREPARE),
    **dict.fromkeys(("init", "create", "config", "setup"), "`ropewalk new RECIPE DATA` writes a recipe for your files"),
    **dict.fromkeys(("ls", "list", "runs", "ps"), "`ropewalk monitor` lists the newest runs"),
    **dict.fromkeys(("status", "logs", "log", "tensorboard", "wandb", "dashboard", "watch", "tail", "top"), _LOOK),
    **dict.fromkeys(("check", "lint", "dry_run"), "`ropewalk recipe check RECIPE` finds what is wrong with a recipe"),
    **dict.fromkeys(
        ("show", "print_config"), "`ropewalk recipe show RECIPE` prints every setting and where it comes from"
    ),
    **dict.fromkeys(("diff",), "`ropewalk recipe diff ONE OTHER` compares recipes, `ropewalk compare RUN RUN` runs"),
    **dict.fromkeys(("upgrade", "migrate"), "`ropewalk recipe upgrade RECIPE` renames what has a new name"),
    **dict.fromkeys(("estimate", "estimate_memory", "memory"), "`ropewalk plan RECIPE` forecasts memory and time"),
    **dict.fromkeys(("explain", "what_if"), "`ropewalk prepare explain RECIPE ID`, `ropewalk prepare what-if RECIPE`"),
    **dict.fromkeys(("verify", "reshard", "prune"), "it is a part of `ropewalk checkpoint`"),
    **dict.fromkeys(("grow", "describe", "params", "summary"), "it is a part of `ropewalk model`"),
    **dict.fromkeys(("slurm", "sbatch", "kubernetes", "submit", "torchrun", "distributed"), _JOBS),
    **dict.fromkeys(("kill", "stop"), _STOP),
    **dict.fromkeys(("serve", "deploy"), "`ropewalk model export RUN FOLDER` writes what servers of models load"),
    "help": "`ropewalk --help`, or `ropewalk VERB --help`",
    "version": "`ropewalk --version`",
}
"""Verbs of other tools -> what to do here."""
OPTIONS = {
    "config": "name the recipe without an option: `ropewalk run RECIPE`",
    "config_file": "name the recipe without an option: `ropewalk run RECIPE`",
    "job.config_file": "name the recipe without an option: `ropewalk run RECIPE`",
    "out": "`--runs FOLDER` is where runs lie; `name` names this one",
}


def meant_verb(word: str, verbs: Iterable[str]) -> str:
    """What to do instead of the unknown verb `word`."""
    if word.endswith(".toml"):
        return f"to run a recipe: `ropewalk run {word}`"
    if hint := VERBS.get(_plain(word)):
        return hint
    near = difflib.get_close_matches(word, verbs, n=1)
    return f"did you mean `{near[0]}`?" if near else f"there are: {', '.join(verbs)}"


def meant_option(option: str) -> str:
    """What to write instead of `--option`, if it is a setting or known from another tool; else empty."""
    name = _plain(option.lstrip("-"))
    if name in OPTIONS:
        return OPTIONS[name]
    from ropewalk.config.synonyms import settings_of
    from ropewalk.flow.recipe import Recipe

    if name in settings_of(Recipe):
        return _setting(name)
    meant = meant_by(Recipe, tuple(name.split(".")), on_command_line=True)
    if not meant.startswith("it is `"):
        return meant
    return _setting(meant.removeprefix("it is `").partition("`")[0])


def _setting(key: str) -> str:
    return f"settings have no dashes: write `{key}=VALUE` behind the recipe"


def _plain(word: str) -> str:
    return word.lower().replace("-", "_")
