"""Exact repeated spans of 200 bytes and more: ours, and a suffix array of the whole text in memory (pydivsufsort).

    make bench NAME=substring                       40 MB, with the peer; a minute
    python benchmarks/substring.py --quick          10 MB
    python benchmarks/substring.py --gigabyte       1 GB, ours alone: time, disk, memory beyond the text
    python benchmarks/substring.py --gigabyte --method suffix-array

The corpus is real text at hand (classic books and Chinese poems from ../shared/data when it is there, the sources of
the running Python), then as much as is asked of text drawn from a chain over the words of the real. Into it are
planted: copies of earlier documents (5 % of documents), such copies with a word put in every 1000 characters (5 %), and
one of 50 paragraphs of boilerplate (30 %). All contenders read the same Parquet files and must agree on every repeated
byte. Speed is megabytes of text for a second of CPU time. Of the peer only its own compiled part counts, suffix array
and LCP, in time and in memory; `cpu_s_with_numpy` adds the time of what turns them into spans.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import random
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
LENGTH = 200
DOCUMENT_BYTES = 5000
PART_BYTES = 32_000_000


def real_texts() -> Iterator[str]:
    """Documents of a few kilobytes: books, poems, sources of Python."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        yield from pieces(path.read_text(encoding="utf-8", errors="ignore"))
    for path in sorted(DATA.glob("classic-books-en/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield from pieces(json.loads(line)["text"])
    for path in sorted(DATA.glob("chinese-poetry/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)


def pieces(text: str) -> Iterator[str]:
    """`text` cut at empty lines."""
    run: list[str] = []
    size = 0
    for paragraph in text.replace("\r\n", "\n").split("\n\n"):
        run.append(paragraph)
        size += len(paragraph)
        if size >= DOCUMENT_BYTES:
            yield "\n\n".join(run)
            run, size = [], 0
    yield "\n\n".join(run)


class Chain:
    """Draws words, each among those that follow the one before it in `texts`."""

    def __init__(self, texts: list[str]) -> None:
        words = pa.array(" ".join(texts).split(" ")).dictionary_encode()
        self.words = words.dictionary
        ids = words.indices.to_numpy()
        self.next = np.append(ids[1:], ids[0])[np.argsort(ids, kind="stable")]
        self.first = np.searchsorted(np.sort(ids), np.arange(len(self.words) + 1))

    def draw(self, documents: int, words: int, rng: np.random.Generator) -> list[str]:
        ids = np.empty((documents, words), np.int64)
        ids[:, 0] = self.next[rng.integers(0, len(self.next), documents)]
        for place in range(1, words):
            low, high = self.first[ids[:, place - 1]], self.first[ids[:, place - 1] + 1]
            ids[:, place] = self.next[(low + rng.random(documents) * (high - low)).astype(np.int64)]
        values = self.words.take(pa.array(ids.ravel()))
        lists = pa.ListArray.from_arrays(pa.array(np.arange(documents + 1, dtype=np.int32) * words), values)
        drawn: list[str] = pc.binary_join(lists, " ").to_pylist()
        return drawn


def documents(size: int) -> Iterator[str]:
    """Documents of `size` bytes in all, the same for the same size: a third real at most, and the planted repeats."""
    dice, rng = random.Random(1), np.random.default_rng(1)
    real = [text for text in real_texts() if text]
    dice.shuffle(real)
    chain = Chain(real[: len(real) // 2 + 1])
    boilerplate = [text[: dice.randrange(300, 2000)] for text in chain.draw(50, 400, rng)]
    earlier: list[str] = []
    drawn: list[str] = []
    done = 0
    while done < size:
        if not drawn:
            drawn = chain.draw(2000, DOCUMENT_BYTES // 6, rng)
        text = real.pop() if real and dice.random() < 1 / 3 else drawn.pop()
        chance = dice.random()
        if chance < 0.1 and earlier:
            text = dice.choice(earlier)
            if chance < 0.05:
                text = " changed ".join(text[at : at + 1000] for at in range(0, len(text), 1000))
        elif chance < 0.4:
            middle = len(text) // 2
            text = f"{text[:middle]}\n{dice.choice(boilerplate)}\n{text[middle:]}"
        elif len(earlier) < 20_000:
            earlier.append(text)
        yield text
        done += len(text.encode())


def write_corpus(size: int, folder: Path) -> list[Path]:
    """The Parquet files of the corpus."""
    paths: list[Path] = []
    run: list[str] = []
    held = 0
    for text in documents(size):
        run.append(text)
        held += len(text)
        if held >= PART_BYTES:
            paths.append(write_part(run, folder, len(paths)))
            run, held = [], 0
    if run:
        paths.append(write_part(run, folder, len(paths)))
    return paths


def write_part(texts: list[str], folder: Path, index: int) -> Path:
    path = folder / f"{index:05d}.parquet"
    pq.write_table(pa.table({"text": pa.array(texts, pa.large_string())}), path, row_group_size=2000)
    return path


def ours(paths: list[Path], *, method: str, memory_bytes: int) -> dict[str, Any]:
    from ropewalk.base.progress import Silent
    from ropewalk.prepare.config import Substring
    from ropewalk.prepare.substring.corpus import read_texts
    from ropewalk.prepare.substring.find import find_repeats
    from ropewalk.prepare.workers import Workers

    class Watch(Silent):
        """Notes the disk that is used whenever a step ends, and says on stderr how long it took."""

        disk = 0

        def begin(self, task: str, total: float | None, unit: str) -> None:
            self.task, self.start = task, time.process_time()

        def end(self, note: str = "") -> None:
            self.disk = max(self.disk, sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()))
            print(f"{self.task}: {time.process_time() - self.start:.1f} s", file=sys.stderr)

    folder = paths[0].parent / method
    shutil.rmtree(folder, ignore_errors=True)
    settings = Substring(action="remove", length=LENGTH, method=method, memory_bytes=memory_bytes)
    warm = Path(tempfile.mkdtemp())
    watch = Watch()
    with Workers(1) as workers:
        # Compiled code is cached from run to run; loading it is not what is measured.
        few = [pa.array(["a few words, and again " * 40] * 3, pa.large_string())]
        find_repeats(few, settings=settings, folder=warm, workers=workers)
        start = time.process_time()
        found = find_repeats(read_texts(paths), settings=settings, folder=folder, workers=workers, progress=watch)
        seconds = time.process_time() - start
    shutil.rmtree(warm)
    rows = zip(*(found.spans[name].to_pylist() for name in ("document", "start", "stop")), strict=True)
    text_bytes = int(found.documents["bytes"].to_numpy().sum())
    return {
        "cpu_s": seconds,
        "text_bytes": text_bytes,
        "repeated_bytes": int(found.documents["repeated_bytes"].to_numpy().sum()),
        "peak_rss": peak_rss(),
        "disk_bytes": watch.disk,
        "spans": len(found.spans),
        "marked": digest(rows),
    }


def whole(paths: list[Path]) -> dict[str, Any]:
    """What one writes with pydivsufsort: suffix array and LCP of all text in memory, then NumPy."""
    import pydivsufsort

    columns = [pq.read_table(path, columns=["text"])["text"].combine_chunks() for path in paths]
    texts = pa.chunked_array([pa.array(column, pa.large_string()) for column in columns]).to_pylist()
    start = time.process_time()
    encoded = [text.encode() for text in texts]
    bounds = np.cumsum([0, *map(len, encoded)])
    data = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
    sorting = time.process_time()
    array = pydivsufsort.divsufsort(data)
    common = pydivsufsort.kasai(data, array)[:-1]
    sorting = time.process_time() - sorting
    peak = peak_rss()
    inside = np.append(data & 0xC0 == 0x80, False)
    sizes = np.full(len(data), LENGTH, np.int32)  # of the window at each place: whole characters
    for _ in range(3):
        stops = np.minimum(np.arange(len(data)) + sizes, len(data))
        sizes += inside[stops]
    ends = np.repeat(bounds[1:], np.diff(bounds))
    sizes[inside[:-1] | (np.arange(len(data)) + sizes > ends)] = 0  # no window begins here
    ranked = sizes[array]
    valid = np.flatnonzero(ranked)
    # The least LCP between one suffix with a window and the next such.
    between = np.minimum.reduceat(np.append(common, 0), valid)[:-1] if len(valid) > 1 else np.zeros(0, np.int32)
    new = np.append(True, between < ranked[valid][1:])
    groups = np.flatnonzero(new)
    places = array[valid]
    firsts = np.repeat(np.minimum.reduceat(places, groups), np.diff(np.append(groups, len(places))))
    copies = firsts + ranked[valid] <= places
    change = np.zeros(len(data) + 1, np.int32)
    np.add.at(change, places[copies], 1)
    np.add.at(change, places[copies] + ranked[valid][copies], -1)
    repeated = np.cumsum(change[:-1]) > 0
    seconds = time.process_time() - start
    rows = []
    for document, (low, high) in enumerate(itertools.pairwise(bounds.tolist())):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], repeated[low:high], [0]])))
        rows += [(document, int(a), int(b)) for a, b in edges.reshape(-1, 2)]
    return {
        "cpu_s": sorting,
        "cpu_s_with_numpy": seconds,
        "text_bytes": len(data),
        "repeated_bytes": int(repeated.sum()),
        "peak_rss": peak,
        "marked": digest(rows),
    }


def peak_rss() -> int:
    """Most memory this process held, in bytes. (`ru_maxrss` would count what the parent held when it started us.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def digest(rows: Any) -> str:
    """A hash of the repeated bytes: (document, start, stop) in order, touching spans joined."""
    import hashlib

    hasher = hashlib.sha256()
    last = (-1, -1, -1)
    for row in rows:
        if row[:2] == (last[0], last[2]):
            last = (last[0], last[1], row[2])
        else:
            hasher.update(repr(last).encode())
            last = row
    hasher.update(repr(last).encode())
    return hasher.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--gigabyte", action="store_true")
    parser.add_argument("--method", choices=["windows", "suffix-array"], default="windows")
    parser.add_argument("--memory-bytes", type=int, default=1_000_000_000)
    parser.add_argument("--contender", choices=["ropewalk", "ropewalk-suffix-array", "pydivsufsort"])
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    if options.contender:
        paths = sorted(options.folder.glob("*.parquet"))
        if options.contender == "pydivsufsort":
            result = whole(paths)
        else:
            method = "suffix-array" if options.contender.endswith("array") else "windows"
            result = ours(paths, method=method, memory_bytes=options.memory_bytes)
        print(json.dumps(result))
        return

    from harness import call, environment, finish

    size = 1_000_000_000 if options.gigabyte else 10_000_000 if options.quick else 40_000_000
    own = f"ropewalk{'-suffix-array' if options.method == 'suffix-array' else ''}"
    contenders = {own: sys.executable}
    if not options.gigabyte:
        contenders = {
            "ropewalk": sys.executable,
            "ropewalk-suffix-array": sys.executable,
            "pydivsufsort": environment("pydivsufsort", ["pydivsufsort==0.0.20", "numpy", "pyarrow"]),
        }
    folder = options.folder or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    if not sorted(folder.glob("*.parquet")):
        write_corpus(size, folder)
    flags = ["--folder", str(folder), "--memory-bytes", str(options.memory_bytes)]
    found = {who: call(python, __file__, "--contender", who, *flags) for who, python in contenders.items()}
    if not options.folder:
        shutil.rmtree(folder)
    figures = {
        who: {
            "MB_per_cpu_s": result["text_bytes"] / 1e6 / result["cpu_s"],
            "cpu_s": result["cpu_s"],
            "MB_beyond_text": (result["peak_rss"] - result["text_bytes"]) / 1e6,
            **({"MB_disk": result["disk_bytes"] / 1e6} if "disk_bytes" in result else {}),
            **({"cpu_s_with_numpy": result["cpu_s_with_numpy"]} if "cpu_s_with_numpy" in result else {}),
        }
        for who, result in found.items()
    }
    mine = figures.pop(own)
    reference = figures.pop("ropewalk-suffix-array", {})
    ratios = {who: mine["MB_per_cpu_s"] / peer["MB_per_cpu_s"] for who, peer in figures.items()}
    first = found[own]
    quality: dict[str, Any] = {
        "text_bytes": first["text_bytes"],
        "repeated_share": round(first["repeated_bytes"] / first["text_bytes"], 4),
        "spans": first["spans"],
    }
    if len(found) > 1:
        quality["same_repeated_bytes"] = all(result["marked"] == first["marked"] for result in found.values())
    if reference:
        quality["our_suffix_array"] = {key: round(value, 3) for key, value in reference.items()}
    finish("substring", ours=mine, peers=figures, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
