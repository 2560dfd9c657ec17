"""Text of a step measured by `bench train` or `profile`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ropewalk.base.progress import amount, counted

from .run_results import aligned


def setting_lines(found: dict[str, Any], *, name: str) -> list[str]:
    """The model, the batch and the device."""
    ceilings = found["ceilings"]
    sheets = [
        f" (data sheet {_speed(nominal, unit)})" if nominal else ""
        for nominal, unit in ((found["nominal_flops"], "FLOP/s"), (found["nominal_bytes"], "B/s"))
    ]
    parts = found["batch_size"] // found["microbatch_size"]
    compiled = ", compiled" if found["compile"] else ""
    imitated = " (imitated)" if found["precision"] == "fp8" and found["device"] == "cpu" else ""
    narrow = f", in 8 bits {_speed(ceilings['gemm_flops'], 'FLOP/s')}" if ceilings["gemm_flops"] else ""
    return [
        f"{name}: {amount(found['parameters'])} parameters, {counted(found['batch_size'], 'sequence')} of "
        f"{counted(found['sequence_length'], 'token')} in {parts} {'microbatch' if parts == 1 else 'microbatches'}, "
        f"{found['precision']}{imitated}, {found['optimizer']}{compiled}{_saved(found)}",
        f"{found['device']}, {found['device_name']}, torch {found['torch']}: matmuls "
        f"{_speed(ceilings['flops'], 'FLOP/s')}{sheets[0]}{narrow}, "
        f"copies {_speed(ceilings['bytes'], 'B/s')}{sheets[1]}",
    ]


def speed_lines(contenders: Sequence[dict[str, Any]], *, peak_flops: float, peak_from: str) -> list[str]:
    """Speed and memory, one line per contender, and how many times faster ropewalk is."""
    ours = contenders[0]
    head = ("", "tokens/s", "step ms", "MFU full", "MFU causal", "memory")
    compared = len(contenders) > 1
    rows = [
        (
            each["contender"],
            f"{each['tokens_per_s']:,.0f}",
            f"{each['step_ms']:.2f}",
            f"{each['mfu_full']:.1%}",
            f"{each['mfu_causal']:.1%}",
            amount(each["memory_bytes"], "B"),
            *([_ratio(ours["tokens_per_s"] / each["tokens_per_s"])] if compared else []),
        )
        for each in contenders
        if not each["error"]
    ]
    failed = [f"{each['contender']}: {each['error']}" for each in contenders if each["error"]]
    note = f"MFU of {_speed(peak_flops, 'FLOP/s')} ({peak_from}); full attention as PaLM counts, causal: pairs seen"
    return [*aligned([(*head, "ours is") if compared else head, *rows]), *failed, note]


def kind_lines(contenders: Sequence[dict[str, Any]]) -> list[str]:
    """Time per op class, beside the least time that this device needs for the same work."""
    sound = [each for each in contenders if not each["error"]]
    ours = sound[0]
    head = ["ms of a step", "least"]
    for each in sound:
        head += [each["contender"], "share", "distance"]
    rows = [tuple(head)]
    for number, kind in enumerate(ours["kinds"]):
        if kind["kind"] == "idle" and not any(each["kinds"][number]["ms"] for each in sound):
            continue  # a CPU is never idle; any other class without time is worth a look
        row = [kind["kind"], f"{kind['least_ms']:.2f}"]
        for each in sound:
            its = each["kinds"][number]
            row += [f"{its['ms']:.2f}", f"{its['share']:.1%}", _ratio(its["distance"])]
        rows.append(tuple(row))
    last = ["step", f"{ours['least_ms']:.2f}"]
    for each in sound:
        last += [f"{each['step_ms']:.2f}", "", _ratio(each["distance"])]
    return [line.rstrip() for line in aligned([*rows, tuple(last)])]


def _saved(found: dict[str, Any]) -> str:
    """How the step saves memory, comma-separated; a bench has recomputation only."""
    recomputed = {"none": "", "auto": "", "full": "blocks", "attention": "attention"}[found["recompute"]]
    if found["recompute"] == "auto" and found["blocks_again"]:
        recomputed = counted(found["blocks_again"], "block")
    activations, offload = found.get("activations", "whole"), found.get("offload", ())
    ways = [
        f"{recomputed} recomputed in the backward pass" if recomputed else "",
        f"{activations} activations" if activations != "whole" else "",
        f"{' and '.join(offload)} offloaded" if offload else "",
    ]
    return "".join(f", {way}" for way in ways if way)


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


def _speed(value: float, unit: str) -> str:
    return f"{amount(value)}{unit}"
