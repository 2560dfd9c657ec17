"""Network findings of `doctor cluster`: latency and bandwidth per axis of the plan, and the slow group, host or link.

Bandwidths are bus bandwidths (formulas in `train/cluster/network.py`), so that groups of different sizes compare.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from ropewalk.base.progress import amount, counted

from .findings import SLOW, Finding, Table, backend_of, hosts_of, listed, median_of_others, values

FLOORS = {("nccl", "one host"): 4e9, ("nccl", "hosts"): 1e9, ("", "one host"): 1e8, ("", "hosts"): 1e8}
"""Bytes per second below which the network must be misconfigured, by backend ("" for others) and place: half of PCIe
3.0 x8; less than 10 Gb/s Ethernet (1.25 GB/s); less than 1 Gb/s Ethernet (0.125 GB/s)."""
LATE = 4.0
"""A group's latency above this multiple of the others' median is too high."""
NOTICED_S = {"nccl": 5e-5, "": 2e-3}
"""Latency that is never too high, by backend: NCCL's within a host; the delay of a message when processes share a core
(2 ms with four ranks on two cores)."""
LATENCY_S = 0.01
"""Latency that delays every step, whatever the others' is."""

Figures = dict[tuple[int, ...], dict[str, float]]
"""Latency and bandwidth by the ranks of a group, or by sender and receiver."""


def judge_network(table: Table) -> Iterator[Finding]:
    """A finding for the control group, for each axis and for the links of a ring over all ranks, in that order."""
    for step in table["steps"]:
        if step == "control" or step == "ring" or step.startswith("axis "):
            figures = figures_of(table, step)
            if figures:
                yield judge_figures(table, step, figures)


def figures_of(table: Table, step: str) -> Figures:
    """The measurement of each group by its slowest rank, or of each link by its sender."""
    found: Figures = {}
    for value in values(table, step).values():
        if value["operation"] == "send":
            found |= {(pair["source"], pair["target"]): pair for pair in value["pairs"]}
            continue
        group = tuple(value["ranks"])
        known = found.get(group, value)
        found[group] = {
            "latency_s": max(known["latency_s"], value["latency_s"]),
            "bytes_per_s": min(known["bytes_per_s"], value["bytes_per_s"]),
        }
    return found


def judge_figures(table: Table, step: str, figures: Figures) -> Finding:
    """The verdict on the groups of one axis, or on the links of a ring."""
    links = _operation(table, step) == "send"
    name = _name(table, step)
    slow = [group for group in figures if _is_slow(table, step, group, figures)]
    if not slow:
        return Finding(
            check=name,
            outcome="ok",
            found=_figures_line(table, step, figures),
            expected=f"at least {_rate(max(_floor(table, step, group) for group in figures))}",
        )
    rest = [figure for group, figure in figures.items() if group not in slow]
    worst = min(slow, key=lambda group: figures[group]["bytes_per_s"])
    beside = f"; the others {_rate(_median(rest, 'bytes_per_s'))}, {_time(_median(rest, 'latency_s'))}" if rest else ""
    shown = f"{_group(worst, links)}: {_rate(figures[worst]['bytes_per_s'])}, {_time(figures[worst]['latency_s'])}"
    count = f" ({len(slow)} of {len(figures)} are slow)" if len(slow) > 1 else ""
    return Finding(
        check=name,
        outcome="slow",
        found=shown + beside + count,
        expected=_expected(table, step, worst, rest),
        remedy=_remedy(table, slow, figures, links),
        ranks=tuple(sorted({rank for group in slow for rank in group})),
    )


def _is_slow(table: Table, step: str, group: tuple[int, ...], figures: Figures) -> bool:
    figure = figures[group]
    if figure["bytes_per_s"] < _floor(table, step, group) or figure["latency_s"] > LATENCY_S:
        return True
    if _backend(table, step) != "nccl" and _place(table, group) == "one host":
        return False  # the loopback has no slow part; differences come from sharing cores
    # Links within a host and between hosts do not compare.
    alike = {i: each for i, each in enumerate(figures) if _place(table, each) == _place(table, group)}
    here = next(i for i, each in alike.items() if each == group)
    speeds, delays = ({i: figures[each][key] for i, each in alike.items()} for key in ("bytes_per_s", "latency_s"))
    noticed = NOTICED_S["nccl" if _backend(table, step) == "nccl" else ""]
    others_delay = max(noticed, median_of_others(delays, here))
    late = len(alike) > 1 and figure["latency_s"] > LATE * others_delay
    return late or figure["bytes_per_s"] < SLOW * median_of_others(speeds, here)


def _expected(table: Table, step: str, group: tuple[int, ...], rest: list[dict[str, float]]) -> str:
    floor = f"at least {_rate(_floor(table, step, group))} and at most {_time(LATENCY_S)}"
    return f"{floor}; at least half of the others' bandwidth, at most {LATE:g} times their latency" if rest else floor


def _remedy(table: Table, slow: list[tuple[int, ...]], figures: Figures, links: bool) -> str:
    """Names the host that the slow links have in common, if there is one."""
    ranks = Counter(rank for link in slow for rank in link)
    fast = {rank for group in figures if group not in slow for rank in group}
    suspects = sorted(rank for rank in ranks if rank not in fast)
    hosts = hosts_of(table, suspects or sorted(ranks))
    if links and suspects:
        return f"all links of {listed(suspects)} are slow: check the network card and cable of {hosts}"
    spread = len({hosts_of(table, [rank]) for rank in ranks}) > 1
    if not spread:
        return f"check what else runs on {hosts}, and how its devices are connected (`nvidia-smi topo -m`)"
    return f"check the link of {hosts}; NCCL_DEBUG=INFO tells which network is used (NCCL_SOCKET_IFNAME, NCCL_IB_HCA)"


def _figures_line(table: Table, step: str, figures: Figures) -> str:
    rates = [figure["bytes_per_s"] for figure in figures.values()]
    delays = [figure["latency_s"] for figure in figures.values()]
    links = _operation(table, step) == "send"
    size = len(next(iter(figures)))
    what = counted(len(figures), "link") if links else f"{counted(len(figures), 'group')} of {size}"
    spread = _rate(min(rates)) if len(rates) == 1 else f"{_rate(min(rates))} to {_rate(max(rates))}"
    backend = _backend(table, step)
    return f"{spread}, {_time(max(delays))} ({what}, {_operation(table, step)}, {backend})"


def _name(table: Table, step: str) -> str:
    if step == "ring":
        return "links"
    if step == "control" or table["brief"]["recipe"]:
        return step
    return "axis world"


def _operation(table: Table, step: str) -> str:
    return str(next(iter(values(table, step).values()))["operation"])


def _backend(table: Table, step: str) -> str:
    backend = backend_of(table)
    return "gloo" if step == "control" and backend == "nccl" else backend


def _floor(table: Table, step: str, group: tuple[int, ...]) -> float:
    backend = _backend(table, step)
    return FLOORS[backend if backend == "nccl" else "", _place(table, group)]


def _place(table: Table, group: tuple[int, ...]) -> str:
    present: Mapping[int, Any] = values(table, "ranks")
    return "one host" if len({present[rank]["host"] for rank in group}) == 1 else "hosts"


def _group(ranks: tuple[int, ...], links: bool) -> str:
    return f"rank {ranks[0]} to rank {ranks[1]}" if links else listed(ranks)


def _median(figures: list[dict[str, float]], key: str) -> float:
    return statistics.median(figure[key] for figure in figures)


def _rate(bytes_per_s: float) -> str:
    return f"{amount(bytes_per_s, 'B')}/s"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
