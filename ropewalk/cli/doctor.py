"""`ropewalk doctor data`, `ropewalk doctor cluster`"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ropewalk import flow
from ropewalk.base.errors import UserError
from ropewalk.base.progress import amount

from .options import MOST_RANKS, Json, Overrides, RecipeOrRun, Runs, verb
from .progress_lines import Console, emit, table
from .run_results import aligned

app = verb(
    help="""Find what limits a run or would make a launch fail, with remedies.

    Example: ropewalk doctor data recipes/books.toml"""
)


@app.command()
def data(
    recipe: RecipeOrRun,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    cores: Annotated[
        int | None, typer.Option("--cores", min=1, max=MOST_RANKS, help="Predict the speed with this many cores.")
    ] = None,
    gpu_speed: Annotated[
        float, typer.Option("--gpu-speed", min=0.001, help="Predict the speed with a step this many times as fast.")
    ] = 1.0,
    medium: Annotated[
        str | None, typer.Option("--medium", help="Predict the speed with data on hdd, ssd, nvme, nfs or object.")
    ] = None,
    tokens_per_s: Annotated[
        float | None,
        typer.Option("--tokens-per-s", min=1e-9, help="Step speed. Default: that of the last run, or measured."),
    ] = None,
    samples_per_s: Annotated[
        float | None,
        typer.Option("--samples-per-s", min=1e-9, help="Speed of a step on images or sound, for `load.media`."),
    ] = None,
    memory_bytes: Annotated[
        int | None, typer.Option("--memory-bytes", min=0, help="Memory for caches. Default: what is free here.")
    ] = None,
    data_bytes: Annotated[
        int | None, typer.Option("--data-bytes", min=1, help="Size of the data to cache. Default: the recipe's.")
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure other settings of `load` and write the best ones into the recipe.")
    ] = False,
    json: Json = False,
) -> None:
    """Measure why steps wait for data, and what would help.

    Example: ropewalk doctor data recipes/books.toml --medium object

    Measures batches per second from memory and from the store, and the speed of the step; names the stage that
    limits the run, predicts its speed with other cores, stores and GPUs, and lists remedies with their gains. The
    next call reports the error of the last prediction. --tune applies the remedy. Also reports the share of an
    epoch's reads served from memory by the page cache, by LRU, and by a cache that never evicts.
    """
    settings = overrides or ()
    if tune and (cores or medium or gpu_speed != 1.0):
        raise UserError("--tune measures this machine; leave --cores, --gpu-speed and --medium out")
    if tune:
        tuned = flow.tune_data(recipe, settings, runs=runs, tokens_per_s=tokens_per_s, progress=Console())
        emit(tuned, as_json=json, text=_tuned_text(tuned))
        return
    found = flow.doctor_data(
        recipe,
        settings,
        runs=runs,
        cores=cores,
        step_speed=gpu_speed,
        medium=medium,
        tokens_per_s=tokens_per_s,
        samples_per_s=samples_per_s,
        memory_bytes=memory_bytes,
        data_bytes=data_bytes,
        progress=Console(),
    )
    emit(found, as_json=json, text=_text(found))


@app.command()
def cluster(
    recipe: Annotated[
        Path | None,
        typer.Argument(help="A recipe or a run directory. Default: one axis of all ranks.", show_default=False),
    ] = None,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc",
            min=1,
            help="Number of processes on this machine. Default: as many as [parallel] asks for.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=0.001, help="Time for each measurement.")] = 0.5,
    timeout: Annotated[
        float, typer.Option("--timeout", min=1, help="Seconds without an answer before a rank is reported.")
    ] = 60.0,
    json: Json = False,
) -> None:
    """Check a launch: ranks, devices, network, storage.

    Example: ropewalk doctor cluster recipes/tiny-cpu.toml --nproc 2

    Checks versions and clocks, latency and bandwidth on every axis of the plan, and the storage of the run; names
    what is slow, wrong or missing, with a remedy. Under torchrun, srun or mpirun it uses the processes they
    launched. Exits with 1 when something is wrong or missing, with 0 otherwise.
    """
    found = flow.doctor_cluster(
        recipe, overrides or (), runs=runs, nproc=nproc, seconds=seconds, timeout_s=timeout, progress=Console()
    )
    if "findings" in found:
        emit(found, as_json=json, text=_cluster_text(found))
    if found["stuck"]:
        # A thread still waits in a collective; a normal exit of the interpreter would wait for it.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    if not found.get("ok", True):
        raise typer.Exit(1)


STAGES = {
    "compute": "the step itself",
    "prepare": "preparing batches",
    "fetch": "the store",
    "copy": "handing batches to the device",
    "queue": "too few batches in flight",
}
"""What limits the speed, in words."""


def _text(found: dict[str, Any]) -> str:
    rates = found["rates"]
    store = _speed(rates["fetch"]) if rates["fetch"] else "hidden by preparing"
    lines = table(
        [
            ("step", f"{_speed(rates['compute'])} alone ({rates['step_from']}, {found['device']})"),
            ("prepare", f"{_speed(rates['prepare'])} a core, from memory"),
            ("fetch", f"{store} a request" if rates["fetch"] and found["store_measured"] else _unseen(found)),
            ("hand over", f"{_speed(rates['copy'])} to the device"),
            ("forecast", _forecast_line(found["forecast"])),
            *(("reading" if number == 0 else "", line) for number, line in enumerate(found["reading"])),
            *(("caches" if number == 0 else "", line) for number, line in enumerate(_caches(found["caches"]))),
            ("last time", _last(found["last_prediction"])),
        ]
    ).splitlines()
    if found["tuning_is_stale"]:
        lines.append("the step's speed has changed since the settings were tuned; run --tune again")
    if found["asked"]:
        lines += ["", f"as asked: {_forecast_line(found['asked'])}"]
    lines += ["", *aligned([("what if", "tokens/s", "waits", "decided by"), *map(_what_if, found["what_ifs"])])]
    lines += ["", _remedies(found), *map(_media, found["media"])]
    return "\n".join(lines)


def _forecast_line(made: dict[str, Any]) -> str:
    return f"{_speed(made['tokens_per_s'])}, decided by {STAGES[made['binding']]}; steps wait {made['stall']:.1%}"


def _unseen(found: dict[str, Any]) -> str:
    if found["store_measured"]:
        return "hidden by preparing"
    return "not measured: the data stayed in the page cache"


def _caches(found: dict[str, float]) -> list[str]:
    memory, data = found["memory_bytes"], found["data_bytes"]
    sizes = f"{amount(data, 'B')} of data, {amount(memory, 'B')} of memory"
    if memory >= data:
        return [f"{sizes}: all fit; from the second epoch on memory serves every read"]
    return [
        f"{sizes}: of an epoch's reads the page cache serves {found['page_cache']:.0%}, LRU {found['lru']:.0%}, a "
        f"cache that never evicts {found['keep']:.0%}",
        "each epoch reads all data in another order, so the operating system evicts much of what is read next; "
        'a cache that never evicts does not (`load.cache.policy = "keep"`, for shards that are not memory-mapped)',
    ]


def _last(last: dict[str, float] | None) -> str:
    if last is None:
        return "no earlier prediction to compare with steps"
    return f"predicted {_speed(last['predicted'])}, measured {_speed(last['measured'])}: {last['error']:+.1%}"


def _what_if(row: dict[str, Any]) -> tuple[str, str, str, str]:
    return row["what"], amount(row["tokens_per_s"]), f"{row['stall']:.1%}", row["binding"]


def _remedies(found: dict[str, Any]) -> str:
    if not found["remedies"]:
        return "no remedy helps: the step is the limit"
    best = found["cheapest"]
    rows = [("remedy", "tokens/s", "gain", "costs")]
    rows += [
        (row["what"], amount(row["tokens_per_s"]), f"{row['gain']:+.0%}", row["price"]) for row in found["remedies"]
    ]
    settings = " ".join(f"{key}={value}" for key, value in best["settings"].items())
    advice = f"cheapest: {best['what']} ({best['gain']:+.0%})" + (f": {settings}" if settings else "")
    return "\n".join([*aligned(rows), advice])


def _media(source: dict[str, Any]) -> str:
    stages = ", ".join(f"{name} {ms:.3g} ms" for name, ms in source["core_ms"].items())
    supply = source["cpu_samples_per_s"]
    text = f"\n{source['name']}: a sample takes a core {stages}"
    text += f"; the CPU makes {amount(supply)} samples/s" if supply else ""
    if placed := source["placement"]:
        where = f"on the device: {', '.join(placed['on_device'])}" if placed["on_device"] else "all on the CPU"
        text += f"; best {where}: {amount(placed['samples_per_s'])} samples/s, decided by {STAGES[placed['binding']]}"
    return text


def _tuned_text(tuned: dict[str, Any]) -> str:
    if not tuned["tried"]:
        return f"nothing to tune: steps wait {tuned['stall']:.1%} of the time, decided by {STAGES[tuned['binding']]}"
    rows = [("tried", "tokens/s")]
    rows += [
        (f"{row['key']}={row['value']}" if row["key"] else "as it was", amount(row["tokens_per_s"]))
        for row in tuned["tried"]
    ]
    changes = [
        f"{tuned['recipe']}: {change['key']} {change['before']} -> {change['after']} ({change['gain']:+.0%})"
        for change in tuned["changes"]
    ]
    return "\n".join([*aligned(rows), "", *(changes or ["no setting was faster; the recipe is unchanged"])])


def _cluster_text(found: dict[str, Any]) -> str:
    """The findings as a table, each problem with its remedy, and the verdict."""
    rows = [(each["check"], each["outcome"], each["found"]) for each in found["findings"]]
    first, second = (max(len(row[column]) for row in rows) for column in (0, 1))
    indent = " " * (first + second + 4)
    lines = []
    for (check, outcome, text), each in zip(rows, found["findings"], strict=True):
        expected = f"; expected {each['expected']}" if outcome == "ok" and each["expected"] else ""
        lines.append(f"{check:<{first}}  {outcome:<{second}}  " + text.replace("\n", f"\n{indent}  ") + expected)
        if outcome != "ok":
            lines += [f"{indent}{name}: {each[name]}" for name in ("expected", "remedy") if each[name]]
    return "\n".join([*lines, "", _cluster_verdict(found)])


def _cluster_verdict(found: dict[str, Any]) -> str:
    outcomes = [each["outcome"] for each in found["findings"]]
    counts = ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("missing", "wrong", "slow") if kind in outcomes)
    if not counts:
        return f"all {len(outcomes)} checks are ok"
    return f"{counts}: " + ("the launch can start" if found["ok"] else "do not launch yet")


def _speed(value: float) -> str:
    return f"{amount(value)} tokens/s"
