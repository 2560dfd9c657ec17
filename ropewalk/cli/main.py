"""The command line: finds the verb, runs it, prints errors.

A verb's file is imported only when the verb is used, so that `--help` answers at once.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ropewalk import __version__
from ropewalk.base.blame import explain, with_traceback
from ropewalk.base.errors import ConfigError, RopewalkError, UserError
from ropewalk.config.ranks import ranks

from .progress_lines import closing_consoles

VERBS = {
    "quickstart": "Run the whole path in minutes, on the Python sources of this machine.",
    "new": "Write a commented recipe for your own files.",
    "recipe": "Check, show, compare or upgrade recipes.",
    "run": "Run a recipe from raw files to the report: prepare, plan, train, evaluate.",
    "prepare": "Turn raw files into token shards; explain a document, try thresholds.",
    "plan": "Forecast memory, time and tokens of a recipe; draw its pipeline.",
    "model": "Describe a recipe's model; export, import or grow a trained one.",
    "train": "Train a recipe, preparing data first where needed.",
    "launch": "Write a job file for Slurm or Kubernetes.",
    "evaluate": "Evaluate a model: held-out text, benchmarks, robustness, bias; list tasks.",
    "score": "Score files of predictions against references: BLEU, ROUGE, METEOR and others.",
    "human": "Let people rate texts: write sheets, read ratings, agreement, HUSE.",
    "code": "Run generated code in a sandbox against tests: pass@k.",
    "generate": "Generate text with a trained model.",
    "chat": "Chat with a trained model in the terminal.",
    "checkpoint": "List, show, verify, reshard, export or prune checkpoints.",
    "doctor": "Find what limits a run; check a cluster before a launch.",
    "profile": "Profile the training step of a recipe's model.",
    "bench": "Benchmark training of well-known model sizes on this machine.",
    "chaos": "Test a run's recovery: kill it, fill its disk, flip bits, preempt it.",
    "monitor": "Show where a run stands; write its curves for TensorBoard or as CSV.",
    "compare": "Compare runs: settings, curves, results with intervals.",
    "report": "Write the HTML report of a run.",
}
"""Every verb with its line in `ropewalk --help`; `ropewalk/cli/VERB.py` defines it as `app`."""


CONTINUING = ("quickstart", "run", "prepare", "train", "evaluate")
"""Verbs whose work is kept, so that the same command continues."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: 128 plus the signal's number."""


class _Verbs(TyperGroup):
    """A group whose commands are imported on use."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            from .habits import meant_verb

            raise UserError(f"no verb `{cmd_name}`; {meant_verb(cmd_name, VERBS)}")
        module = importlib.import_module(f"ropewalk.cli.{cmd_name}")
        command = typer.main.get_command(module.app)
        command.name = cmd_name
        return command

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl(list(VERBS.items()))


HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(cls=_Verbs, rich_markup_mode=None, pretty_exceptions_enable=False, context_settings=HELP)


@app.callback(invoke_without_command=True)
def _root(ctx: typer.Context, version: bool = typer.Option(False, "--version", help="Print the version.")) -> None:
    """Train large models from end to end: raw corpus in, evaluated model out.

    Example: ropewalk quickstart

    One recipe describes the whole path, and the same command continues an interrupted run. `ropewalk VERB
    --help` explains a verb.
    """
    if version:
        typer.echo(__version__)
    elif ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help())


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and exits: 0 done, 2 the request cannot be met, 130 interrupted."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        with closing_consoles():
            status = app(args=given, standalone_mode=False)
    except RopewalkError as error:
        _fail(error, given)
    except BrokenPipeError:
        # The reader of our output has closed it; nothing more can be written, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except SystemExit:
        raise
    except KeyboardInterrupt:  # outside typer's own handling
        status = INTERRUPTED
    except BaseException as error:
        if hasattr(error, "format_message"):  # typer's own errors, whose classes are not public
            _misused(error, given)
        line = explain(error)
        if line is None:
            raise
        _fail(UserError(with_traceback(line, error)), given, kind=type(error).__name__)
    if status == INTERRUPTED:
        told = "; the same command continues" if given[:1] and given[0] in CONTINUING else ""
        typer.echo(f"\ninterrupted{told}", err=True)
    raise SystemExit(status if isinstance(status, int) else 0)


def _misused(error: Any, arguments: list[str]) -> NoReturn:
    """Reports wrong usage of a verb: an unknown option, too many or too few words."""
    if option := getattr(error, "possibilities", None) is not None and error.option_name:
        from .habits import meant_option

        if hint := meant_option(option):
            _fail(UserError(f"no option `{option}`; {hint}"), arguments, kind="UsageError")
    commands = getattr(error.ctx and error.ctx.command, "commands", {})
    if commands and "command" in error.message:
        error.message += f" There are: {', '.join(name for name, one in commands.items() if not one.hidden)}."
    if "--json" in arguments:
        typer.echo(json.dumps({"error": "UsageError", "message": error.format_message()}))
    error.show()
    raise SystemExit(error.exit_code)


def _fail(error: RopewalkError, arguments: list[str], *, kind: str = "") -> None:
    rank = ranks().rank
    if "--json" in arguments and rank == 0:
        typer.echo(json.dumps({"error": kind or type(error).__name__, "message": str(error)}))
    if not (rank and isinstance(error, ConfigError)):  # rank 0 reports it
        typer.echo(f"rank {rank}: {error}" if rank else str(error), err=True)
    raise SystemExit(error.exit_code)
