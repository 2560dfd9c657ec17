"""Checkpoints as a stranger would make them: a good one with one thing changed, sealed again.

`mutate(folder, seed)` changes a copy and says what it did; the seed decides all of it. `watched` runs a reader under an
alarm and notes every file that it opens.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import random
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

SEAL, END = b',\n "checksum": "', b'"\n}\n'
KEEP = object()
VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 1 << 31, 1 << 62, 1 << 80, -(1 << 70), 0.5, 1e300, float("nan"), float("inf"),
    "", "x", "..", "../../secret.txt", "/etc/passwd", "a/b", "\ud800", "\x00", "x" * 100_000, "float99", "bfloat16",
    [], [[]], [-1], [1 << 62], [1, 2, 3], {}, {"a": 1}, {"..": {}}, [None] * 1000,
)  # fmt: skip
TREE_KINDS = ("value", "missing", "renamed", "doubled", "deep", "shared", "number", "swapped", "old format")
FILE_KINDS = (
    *("fifo", "link outside", "link to zero", "link inside", "folder", "gone", "cut", "grown", "sparse", "flipped"),
    *("flipped and hashed", "manifest fifo", "manifest zero", "manifest huge", "tokenizer regex", "tokenizer other"),
)
KINDS = (*TREE_KINDS, *FILE_KINDS, *TREE_KINDS, *TREE_KINDS)


def mutate(folder: Path, seed: int, secret: Path) -> str:
    """Changes the checkpoint in `folder` by the kind and the place that `seed` says; what was done."""
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    if kind in FILE_KINDS:
        return f"{kind}: {_change_file(folder, kind, draw, secret)}"
    tree = unsealed(folder)
    told = _change_tree(folder, tree, kind, draw)
    return f"{kind}: {told}"


def unsealed(folder: Path) -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    tree.pop("checksum")
    return tree


def seal(folder: Path, tree: Any, *, change: Callable[[str], str] = str) -> None:
    """Writes the manifest with a sound seal, as an attacker would."""
    text = change(json.dumps(tree, indent=1, ensure_ascii=True))
    body = text.removesuffix("\n}").encode() + SEAL
    (folder / "manifest.json").write_bytes(body + xxhash.xxh3_64_hexdigest(body).encode() + END)


def rehash(folder: Path, tree: dict[str, Any], name: str) -> None:
    """Makes the manifest say what the file is now."""
    entry, data = tree["files"][name], (folder / name).read_bytes()
    size = entry["chunk_bytes"]
    entry["bytes"] = len(data)
    entry["chunks"] = [xxhash.xxh3_64_hexdigest(data[i : i + size]) for i in range(0, len(data), size)]
    seal(folder, tree)


def expected(folder: Path) -> dict[str, bytes]:
    """The weights of an accepted checkpoint by an independent reading of its files; every byte must be somewhere."""
    tree, sizes = unsealed(folder), {"float32": 4, "float64": 8, "bfloat16": 2, "float16": 2}
    found = {}
    for name, entry in tree["tensors"]["model"].items():
        item = sizes[entry["dtype"]]
        whole = np.zeros((*entry["shape"], item), np.uint8)
        seen = np.zeros(entry["shape"], np.int64)
        for piece in entry["pieces"]:
            data = _unpacked(folder, tree["files"][piece["file"]], piece["file"])
            assert 0 <= piece["begin"] <= len(data) - math.prod(piece["shape"]) * item, "outside its file"
            part = np.frombuffer(data, np.uint8, math.prod(piece["shape"]) * item, piece["begin"])
            place = tuple(slice(o, o + s) for o, s in zip(piece["offset"], piece["shape"], strict=True))
            whole[place] = part.reshape(*piece["shape"], item)
            seen[place] += 1
        assert (seen == 1).all(), f"{name}: gaps or overlaps"
        found[name] = whole.tobytes()
    return found


def _unpacked(folder: Path, entry: dict[str, Any], name: str) -> bytes:
    """The bytes of a file before it was packed, by the description of the format."""
    data, raw = (folder / name).read_bytes(), b""
    for size in entry.get("frames", []):
        frame, data = data[:size], data[size:]
        planes, count = frame[0], int.from_bytes(frame[1:5], "little")
        part = frame[5:] if not planes else pa.decompress(frame[5:], count, codec="zstd", asbytes=True)
        whole = count - count % max(1, planes)
        if planes > 1:
            part = (
                bytes(part[p * (whole // planes) + n] for n in range(whole // planes) for p in range(planes))
                + part[whole:]
            )
        raw += part
    return raw or data


def _places(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, child in items:
        yield from _places(child, (*path, key))


def _pick(tree: Any, draw: random.Random) -> tuple[Any, Any, tuple[Any, ...]]:
    """A place: its parent, its key there, its path. All top-level fields are as likely as all tensors."""
    places = list(_places(tree))
    first = draw.choice(sorted({str(path[0]) for path in places}))
    path = draw.choice([path for path in places if path[0] == first])
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    return parent, path[-1], path


def _change_tree(folder: Path, tree: dict[str, Any], kind: str, draw: random.Random) -> str:
    parent, key, path = _pick(tree, draw)
    if kind == "old format":
        tree["format"] = draw.choice([1, 2, 0, -1, 99, "3"])
        if tree["format"] in (1, 2):
            # Sealed as these were: the hash of the sorted tree.
            text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
            (folder / "manifest.json").write_text(json.dumps({**tree, "checksum": xxhash.xxh3_64_hexdigest(text)}))
            return str(tree["format"])
        path = ("format",)
    elif kind == "value":
        parent[key] = draw.choice(VALUES)
    elif kind == "missing":
        del parent[key]
    elif kind == "renamed" and isinstance(parent, dict):
        new = draw.choice(["x", "../x", "/etc/passwd", "", "a/b", "manifest.json", str(key) + "x", "x" * 5000])
        parent[new] = parent.pop(key)
    elif kind == "number":
        numbers = [p for p in _places(tree) if type(_at(tree, p)) is int]
        path = draw.choice(numbers)
        old = _at(tree, path)
        _at(tree, path[:-1])[path[-1]] = draw.choice([old + 1, old - 1, old * 2, -old - 1, old + (1 << 40), 0])
    elif kind == "shared":
        entries = draw.choice([e for e in tree["tensors"].values() if len(e) > 1])
        one, other = draw.sample(sorted(entries), 2)
        entries[one] = copy.deepcopy(entries[other])
        path = (one, other)
    elif kind == "swapped":
        # Sound as far as the manifest goes when the shapes are the same: other weights, which are read as they are.
        entries = tree["tensors"]["model"]
        one, other = draw.sample(sorted(entries), 2)
        entries[one], entries[other] = entries[other], entries[one]
        path = (one, other)
    if kind == "doubled":
        line = draw.choice(
            [line for line in json.dumps(tree, indent=1).splitlines() if line.endswith(",") and ":" in line]
        )
        seal(folder, tree, change=lambda text: text.replace(line, f"{line}\n{line}", 1))
        return line.strip()
    if kind == "deep":
        depth = draw.choice([40, 900, 5000, 100_000])
        parent[key] = "@@"
        seal(folder, tree, change=lambda text: text.replace('"@@"', "[" * depth + "]" * depth))
        return f"{path} {depth}"
    seal(folder, tree)
    return repr(path)[:120]


def _at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _change_file(folder: Path, kind: str, draw: random.Random, secret: Path) -> str:
    tree = unsealed(folder)
    name = draw.choice(sorted(tree["files"]))
    path = folder / (
        "manifest.json" if kind.startswith("manifest") else "tokenizer.json" if "tokenizer" in kind else name
    )
    data = path.read_bytes()
    if kind.endswith("fifo"):
        path.unlink()
        os.mkfifo(path)
    elif kind in ("link to zero", "manifest zero"):
        path.unlink()
        path.symlink_to("/dev/zero")
    elif kind == "link outside":
        # Of the right size and with the right hashes: only the place is wrong.
        path.unlink()
        path.symlink_to(secret)
        tree["files"][name] = {**tree["files"][name], "bytes": secret.stat().st_size, "chunk_bytes": 1 << 22}
        tree["files"][name]["chunks"] = [xxhash.xxh3_64_hexdigest(secret.read_bytes())]
        tree["files"][name].pop("frames", None)
        seal(folder, tree)
    elif kind == "link inside":
        path.rename(folder / "beside")
        path.symlink_to("beside")
    elif kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "gone":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[: draw.randrange(max(1, len(data)))])
        if draw.random() < 0.5:
            rehash(folder, tree, name)
    elif kind == "grown":
        path.write_bytes(data + bytes(draw.randrange(1, 5000)))
        if draw.random() < 0.5:
            rehash(folder, tree, name)
    elif kind == "sparse":
        os.truncate(path, 1 << 40)
        if draw.random() < 0.5:
            tree["files"][name]["bytes"] = 1 << 40
            seal(folder, tree)
    elif kind == "manifest huge":
        os.truncate(path, 1 << 36)
    elif kind.startswith("flipped"):
        position = draw.randrange(len(data)) if data else 0
        path.write_bytes(data[:position] + bytes([data[position] ^ 1 << draw.randrange(8)]) + data[position + 1 :])
        if kind == "flipped and hashed":
            rehash(folder, tree, name)
    else:
        _change_tokenizer(path, kind, draw)
        rehash(folder, tree, "tokenizer.json")
    return path.name


def _change_tokenizer(path: Path, kind: str, draw: random.Random) -> None:
    tokenizer = json.loads(path.read_bytes())
    if kind == "tokenizer regex":
        split = {"type": "Split", "pattern": {"Regex": draw.choice([r"(a+)+$", r"(0|00)+$", "("])}, "invert": False}
        tokenizer["pre_tokenizer"] = {**split, "behavior": "Isolated"}
    else:
        key = draw.choice(sorted(tokenizer))
        tokenizer[key] = draw.choice([None, 1, [], {}, {"type": "Replace"}, "x", {"type": "BPE", "vocab": {}}])
    path.write_text(json.dumps(tokenizer))


# Watching a reader


class Hang(BaseException):
    """A reader took too long."""


_opened: list[str] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(args[0], (str, bytes)):
        _opened.append(os.fsdecode(args[0]))


sys.addaudithook(_hook)


@contextlib.contextmanager
def watched(*, inside: Path, around: Path, seconds: float = 60.0) -> Iterator[list[str]]:
    """Raises Hang after so long; the list gets what was opened `around` but not `inside`, or is no regular file."""
    global _opened

    def expire(*_: Any) -> None:
        raise Hang

    wrong: list[str] = []
    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    _opened = []
    try:
        yield wrong
    finally:
        opened, _opened = _opened, None
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        for path in opened:
            real = Path(os.path.realpath(path))
            outside = real.is_relative_to(around) and not real.is_relative_to(inside)
            special = real.exists() and not stat.S_ISREG(real.stat().st_mode) and not real.is_dir()
            if outside or (special and str(real) != os.devnull) or real.is_relative_to("/etc/passwd"):
                wrong.append(str(real))


def copied(source: Path, target: Path) -> Path:
    """A fresh copy to be changed."""
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return target
