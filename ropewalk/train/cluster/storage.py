"""Checks that all ranks see one folder, how soon they see another host's writes, and its speed.

Rank 0 writes a file with a random token and replaces it by renaming another file over it, as checkpoints are committed;
every other rank must see the first token, then the second, and nothing else.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ropewalk.base.files import storage

from .brief import existing_folder
from .control import Control

FILE = "token"
VISIBLE_S = 10.0
"""Time limit for seeing rank 0's file. NFS shows other hosts' files after a few seconds, at worst a minute (acdirmax);
with a longer delay a rank misses a checkpoint."""
LOOK_EVERY_S = 0.01
BLOCK_BYTES = 16 << 20
MOST_BLOCKS = 32
COMMITS = 10


def probe_folder(
    folder: Path,
    control: Control,
    *,
    seconds: float,
    timeout_s: float,
    measures: bool,
    visible_s: float = VISIBLE_S,
) -> dict[str, Any]:
    """What this rank sees of the folder that rank 0 created in or next to the run `folder`; with `measures` also its
    speed. All ranks must call."""
    if control.rank == 0:
        return _lead(folder, control, seconds=seconds, timeout_s=timeout_s)
    told = control.wait("storage.token", timeout_s=timeout_s) or {}
    place = existing_folder(folder) / str(told.get("name", ""))
    seen, first_s, _ = _look(place / FILE, told.get("token", ""), visible_s)
    control.post(f"storage.seen.{control.rank}", seen)
    found: dict[str, Any] = {"path": str(existing_folder(folder)), "sees": seen, "seen_after_s": first_s}
    if seen:
        new = control.wait("storage.renamed", timeout_s=timeout_s) or {}
        renamed, rename_s, torn = _look(place / FILE, new.get("token", ""), visible_s, before=told["token"])
        found |= {"sees_rename": renamed, "rename_after_s": rename_s, "torn": torn}
        if measures:
            found |= measure_folder(place, name=str(control.rank), seconds=seconds)
    return found


def remove(folder: Path, control: Control) -> None:
    """Removes the test files; rank 0 only."""
    told = control.read("storage.token")
    if told:
        shutil.rmtree(existing_folder(folder) / told["name"], ignore_errors=True)


def measure_folder(place: Path, *, name: str, seconds: float) -> dict[str, Any]:
    """Bytes per second written (with fsync) and read back, seconds to commit a small file, free bytes."""
    with storage(f"writing {place}"):
        written, write_s = 0, 0.0
        block = secrets.token_bytes(BLOCK_BYTES)
        path = place / f"block-{name}"
        with open(path, "wb", buffering=0) as file:
            while written < MOST_BLOCKS * BLOCK_BYTES and (not written or write_s < seconds):
                start = time.perf_counter()
                file.write(block)
                os.fsync(file.fileno())
                write_s += time.perf_counter() - start
                written += BLOCK_BYTES
            if hasattr(os, "posix_fadvise"):
                # Reads must not come from the page cache; a file system may ignore this.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        with open(path, "rb", buffering=0) as file:
            while file.read(BLOCK_BYTES):
                pass
        read_s = time.perf_counter() - start
        path.unlink()
        commits = sorted(_commit(place / f"small-{name}") for _ in range(COMMITS))
    return {
        "write_bytes_per_s": written / write_s,
        "read_bytes_per_s": written / max(read_s, 1e-9),
        "commit_s": commits[COMMITS // 2],
        "free_bytes": shutil.disk_usage(place).free,
    }


def _lead(folder: Path, control: Control, *, seconds: float, timeout_s: float) -> dict[str, Any]:
    name, first, second = f".doctor-{secrets.token_hex(4)}", secrets.token_hex(), secrets.token_hex()
    root = existing_folder(folder)
    place = root / name
    with storage(f"writing {place}"):
        place.mkdir()
        _write(place / FILE, first)
    control.post("storage.token", {"name": name, "token": first})
    for rank in range(1, control.world):
        control.wait(f"storage.seen.{rank}", timeout_s=timeout_s)
    with storage(f"writing {place}"):
        _write(place / "next", second)
        os.replace(place / "next", place / FILE)
    control.post("storage.renamed", {"token": second})
    return {"path": str(root), "sees": True, **measure_folder(place, name="0", seconds=seconds)}


def _look(path: Path, wanted: str, limit_s: float, *, before: str = "") -> tuple[bool, float, bool]:
    """(whether the file came to hold `wanted`, seconds until then, whether it ever held anything but that and
    `before`)."""
    start, torn = time.monotonic(), False
    for text in _readings(path):
        if text == wanted:
            return True, time.monotonic() - start, torn
        torn = torn or bool(before and text is not None and text != before)
        if time.monotonic() - start > limit_s:
            break
        time.sleep(LOOK_EVERY_S)
    return False, time.monotonic() - start, torn


def _readings(path: Path) -> Iterator[str | None]:
    while True:
        try:
            # Listing the folder makes a network file system refresh its cached view.
            os.listdir(path.parent.parent)
            yield path.read_text("utf-8")
        except OSError:
            yield None


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _commit(path: Path) -> float:
    start = time.perf_counter()
    _write(path.with_name(path.name + ".partial"), "x")
    os.replace(path.with_name(path.name + ".partial"), path)
    return time.perf_counter() - start
