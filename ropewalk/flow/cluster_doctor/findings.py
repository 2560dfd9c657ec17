"""The finding of one check of `doctor cluster`, and how it names ranks and hosts."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Outcome = Literal["ok", "slow", "wrong", "missing"]
Table = Mapping[str, Any]
"""Measurements by step and rank (`train/cluster/examine.py`); ranks are strings, as in JSON."""
SLOW = 0.5
"""A rank or group below this share of the others' median is slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """The outcome of one check."""

    check: str
    outcome: Outcome
    found: str
    expected: str = ""
    remedy: str = ""
    ranks: tuple[int, ...] = ()
    """The ranks at fault."""

    @property
    def is_fatal(self) -> bool:
        """Whether the launch would fail, rather than be slow."""
        return self.outcome in ("wrong", "missing")

    def tree(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def values(table: Table, step: str) -> dict[int, Any]:
    """The ranks' values of a step."""
    return {int(rank): value for rank, value in table["steps"].get(step, {"values": {}})["values"].items()}


def listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-3, 7`."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    shown = [str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(shown[:8])}" + (" and more" if len(shown) > 8 else "")


def on_host(table: Table, rank: int) -> str:
    """A rank with its host."""
    return f"rank {rank} on {hosts_of(table, [rank])}"


def hosts_of(table: Table, ranks: Sequence[int]) -> str:
    """The hosts of these ranks."""
    known = {rank: value["host"] for rank, value in values(table, "ranks").items()}
    known |= {int(r): host for step in table["steps"].values() for r, host in step.get("error_hosts", {}).items()}
    hosts = list(dict.fromkeys(known[rank] for rank in ranks if rank in known)) or ["an unknown host"]
    return ", ".join(hosts[:4]) + more(hosts, 4)


def more(items: Sequence[Any], shown: int) -> str:
    """The number of items not shown, in words."""
    return f" and {len(items) - shown} more" if len(items) > shown else ""


def within(table: Table) -> str:
    """The time limit of a step, in words."""
    return f" within {table['timeout_s']:g} s"


def backend_of(table: Table) -> str:
    """The backend of the run's collectives; empty if the ranks did not get that far."""
    return next((value["backend"] for value in values(table, "process group").values()), "")


def median_of_others(figures: Mapping[int, float], rank: int) -> float:
    """The median of all figures but that of `rank`; 0 if there are no others."""
    others = [figure for other, figure in figures.items() if other != rank]
    return statistics.median(others) if others else 0.0
