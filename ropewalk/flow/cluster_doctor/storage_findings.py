"""Storage findings of `doctor cluster`: one folder for all ranks, consistent, fast and large enough."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ropewalk.base.progress import amount, counted

from .findings import SLOW, Finding, Table, hosts_of, listed, median_of_others, on_host, values

VISIBLE_S = 5.0
"""A file of another host that appears later than this shows a slow file system."""
COMMIT_S = 0.5
WRITE_BYTES_PER_S = 50e6
"""Slower writes, or commits above `COMMIT_S`, delay checkpoints; a single hard disk is faster."""


def judge_storage(table: Table) -> Iterator[Finding]:
    """Whether all ranks see one folder, how soon, its speed and its free space."""
    seen = values(table, "storage")
    if not seen:
        return
    problems = []
    blind = [rank for rank, value in seen.items() if not value["sees"]]
    if blind:
        paths = ", ".join(sorted({seen[rank]["path"] for rank in blind}))
        problems.append(
            Finding(
                check="storage",
                outcome="missing",
                ranks=tuple(blind),
                expected="one folder that all ranks see",
                found=f"{listed(blind)} ({hosts_of(table, blind)}) do not see in {paths} what rank 0 wrote there",
                remedy="mount the same file system on all hosts, start all ranks in the same folder, or name one with "
                "`--runs`",
            )
        )
    torn = [rank for rank, value in seen.items() if value.get("torn") or value.get("sees_rename") is False]
    if torn:
        problems.append(
            Finding(
                check="storage",
                outcome="wrong",
                ranks=tuple(torn),
                expected="the old or the new file, soon",
                found=f"{listed(torn)} ({hosts_of(table, torn)}) do not see a file that rank 0 replaced by renaming",
                remedy="a checkpoint is committed by renaming: use a file system where that is atomic for all hosts",
            )
        )
    late = {rank: _delay(value) for rank, value in seen.items() if value["sees"] and _delay(value) > VISIBLE_S}
    if late:
        problems.append(
            Finding(
                check="storage",
                outcome="slow",
                ranks=tuple(late),
                expected=f"within {VISIBLE_S:g} s",
                found=f"{listed(list(late))} see new files after {max(late.values()):.1f} s",
                remedy="mount with shorter attribute caching (NFS: `actimeo=1`)",
            )
        )
    measured = {rank: value for rank, value in seen.items() if "commit_s" in value}
    problems += _slow_storage(table, measured)
    if not problems:
        delay = max(map(_delay, seen.values()))
        yield Finding(
            check="storage",
            outcome="ok",
            expected="one folder, renames seen by all",
            found=f"{seen[0]['path']}: all {counted(len(seen), 'rank')} see it within {delay * 1e3:.2g} ms; "
            + _speed(measured),
        )
    yield from problems
    yield from _judge_space(table, measured)


def _delay(value: Mapping[str, Any]) -> float:
    return float(max(value.get("seen_after_s", 0.0), value.get("rename_after_s", 0.0)))


def _speed(measured: Mapping[int, Any]) -> str:
    write, read = (min(value[f"{kind}_bytes_per_s"] for value in measured.values()) for kind in ("write", "read"))
    commit = max(value["commit_s"] for value in measured.values())
    return f"writes {amount(write, 'B')}/s with fsync, reads {amount(read, 'B')}/s, commits in {commit * 1e3:.2g} ms"


def _slow_storage(table: Table, measured: Mapping[int, Any]) -> Iterator[Finding]:
    writes = {rank: value["write_bytes_per_s"] for rank, value in measured.items()}
    for rank, value in measured.items():
        relative = len(writes) > 1 and writes[rank] < SLOW * median_of_others(writes, rank)
        if relative or writes[rank] < WRITE_BYTES_PER_S or value["commit_s"] > COMMIT_S:
            others = f"; the others {amount(median_of_others(writes, rank), 'B')}/s" if relative else ""
            yield Finding(
                check="storage",
                outcome="slow",
                found=f"{on_host(table, rank)}: {_speed({rank: value})}{others}",
                expected=f"at least {amount(WRITE_BYTES_PER_S, 'B')}/s and commits within {COMMIT_S * 1e3:.0f} ms",
                remedy="check this host's connection to the storage, or choose another folder with `--runs`",
                ranks=(rank,),
            )


def _judge_space(table: Table, measured: Mapping[int, Any]) -> Iterator[Finding]:
    brief = table["brief"]
    need = brief["checkpoint_bytes"] * brief["checkpoints"]
    if not need or not measured:
        return
    free = min(value["free_bytes"] for value in measured.values())
    enough = free >= need
    size = amount(brief["checkpoint_bytes"], "B")
    yield Finding(
        check="space",
        outcome="ok" if enough else "wrong",
        found=f"{amount(free, 'B')} free",
        expected=f"{amount(need, 'B')}: {counted(brief['checkpoints'], 'checkpoint')} of {size}",
        remedy=""
        if enough
        else "free some space, choose another folder with `--runs`, or lower `checkpoint.keep_last`",
    )
