"""Near-duplicates end to end from Parquet on one core: ours with exact verification, and four peers as people use them.

    make bench NAME=dedup                  three corpora, five contenders; about six minutes
    python benchmarks/dedup.py --quick     a tenth of it
    python benchmarks/dedup.py --ours      MinHash and SimHash of ropewalk side by side, without peers

Corpora: Python sources at hand; English books and Chinese poems from ../shared/data when they are there. Each gets a
quarter of planted copies: 0.5, 2 or 5 % of the words replaced, the text wrapped in pieces of itself, or its end cut
off. Documents have shingles of five words (letters in Chinese), and everybody has 16 bands of 5 rows; words and hashes
are each contender's own. Ours alone verifies what the bands propose; gaoya compares signatures, the others nothing. Our
SimHash runs at its defaults beside them.

The truth is the exact Jaccard similarity of all pairs at or above 0.7, from strings, by prefix filtering. Recall: pairs
at or above 0.8 of which at least one goes. Precision: documents that go which resemble any other by 0.7 or more;
`exact`: by 0.8 or more.
Seconds are CPU seconds of the contender's process from reading the file to knowing what goes, without imports and
compilation; the median of three runs (one of datasketch, and one of datatrove on a subset).
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import json
import os
import random
import re
import resource
import shutil
import statistics
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
BANDS, ROWS, WIDTH, THRESHOLD = 16, 5, 5, 0.8
COPIES = 0.25
DOCUMENTS = 60_000
"""Most originals of a corpus."""
SUBSETS = {"code": 1200, "prose": 1200, "chinese": 12_000}
"""Documents for datatrove, which needs minutes for more."""
SLOW = ("datasketch", "datatrove")
"""Contenders that run once."""

Pairs = tuple[np.ndarray, np.ndarray, np.ndarray]


# What is compared -----------------------------------------------------------------------------------------------------


def code() -> Iterator[str]:
    """Python files of 0.6 to 24 kB."""
    for root in (sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")):
        for path in sorted(Path(root).rglob("*.py")):
            text = path.read_text("utf-8", errors="ignore")
            if 600 <= len(text) <= 24_000:
                yield text


def prose() -> Iterator[str]:
    """Books cut at paragraphs into documents of about 4 kB."""
    for path in sorted(DATA.glob("classic-books-en/*.jsonl.gz")):
        for book in lines(path):
            document = ""
            for paragraph in book.split("\r\n\r\n"):
                document += paragraph + "\n\n"
                if len(document) > 4000:
                    yield document
                    document = ""


def chinese() -> Iterator[str]:
    """Poems, mostly of 50 to 100 characters."""
    for path in sorted(DATA.glob("chinese-poetry/*.jsonl.gz")):
        yield from lines(path)


def lines(path: Path) -> Iterator[str]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


CORPORA: dict[str, Callable[[], Iterator[str]]] = {"code": code, "prose": prose, "chinese": chinese}


def with_copies(originals: list[str], *, chinese: bool) -> tuple[list[str], list[int]]:
    """(documents in random order, the place of each copy's original or -1)."""
    draw = random.Random(0)
    documents, origins = list(originals), [-1] * len(originals)
    for _ in range(int(COPIES * len(originals))):
        origin = draw.randrange(len(originals))
        parts = list(originals[origin]) if chinese else re.findall(r"\w+|\W+", originals[origin])
        kind = draw.randrange(5)
        if kind < 3:
            rate = (0.005, 0.02, 0.05)[kind]
            parts = [draw.choice(parts) if draw.random() < rate else part for part in parts]
        elif kind == 3:
            piece = max(1, len(parts) // 20)
            parts = parts[-piece:] + parts + parts[:piece]
        else:
            parts = parts[: int(0.85 * len(parts))]
        documents.append("".join(parts))
        origins.append(origin)
    order = list(range(len(documents)))
    draw.shuffle(order)
    place = {number: at for at, number in enumerate(order)}
    return [documents[number] for number in order], [place.get(origins[number], -1) for number in order]


def subset(origins: list[int], size: int) -> np.ndarray:
    """Rows of about `size` documents: a fifth copies, a fifth their originals, the rest any others."""
    draw = random.Random(1)
    copies = draw.sample([row for row, origin in enumerate(origins) if origin >= 0], size // 5)
    chosen = {*copies, *(origins[row] for row in copies)}
    others = [row for row in range(len(origins)) if row not in chosen]
    return np.array(sorted({*chosen, *draw.sample(others, min(len(others), size - len(chosen)))}))


# The truth ------------------------------------------------------------------------------------------------------------


def words_of(text: str, *, chinese: bool) -> list[str]:
    """Runs of letters and digits in lower case; of Chinese each one."""
    return re.findall(r"[^\W_]" if chinese else r"[^\W_]+", text.lower())


def shingle_sets(texts: list[str], *, chinese: bool) -> list[np.ndarray]:
    """Sorted shingles as numbers: a polynomial of the words' numbers. 15 million meet with a chance of 1e-5."""
    numbers: dict[str, int] = {}
    found = []
    for text in texts:
        words = [numbers.setdefault(word, len(numbers) + 1) for word in words_of(text, chinese=chinese)]
        row = np.array(words, np.uint64)
        runs = max(1, len(row) - WIDTH + 1) if len(row) else 0
        total = np.zeros(runs, np.uint64)
        for offset in range(min(WIDTH, len(row))):
            total = (total ^ total >> np.uint64(29)) * np.uint64(0x9E3779B97F4A7C15) + row[offset : offset + runs]
        found.append(np.unique(total))
    return found


def truth(texts: list[str], *, chinese: bool, least: float = 0.7) -> Pairs:
    """(one, two, similarity) of all pairs of at least `least`.

    Such a pair shares one of the rarest n - ceil(least n) + 1 shingles of each (prefix filtering, Chaudhuri 2006).
    """
    sets = shingle_sets(texts, chinese=chinese)
    _, inverse, counts = np.unique(np.concatenate(sets), return_inverse=True, return_counts=True)
    edges = np.cumsum([0, *map(len, sets)])
    by_shingle: dict[int, list[int]] = {}
    for row, (start, stop) in enumerate(pairwise(edges)):
        own = inverse[start:stop]
        rarest = own[np.lexsort((own, counts[own]))]
        prefix = rarest[: len(own) - int(np.ceil(least * len(own))) + 1]
        for shingle in prefix[counts[prefix] > 1].tolist():
            by_shingle.setdefault(shingle, []).append(row)
    candidates = {(a, b) for rows in by_shingle.values() for at, b in enumerate(rows) for a in rows[:at]}
    close = []
    for a, b in sorted(candidates):
        small, large = sorted((len(sets[a]), len(sets[b])))
        if small < least * large:
            continue
        common = len(np.intersect1d(sets[a], sets[b], assume_unique=True))
        similarity = common / (small + large - common)
        if similarity >= least:
            close.append((a, b, similarity))
    one, two, similarity = zip(*close, strict=True)
    return np.array(one), np.array(two), np.array(similarity)


def judged(gone: np.ndarray, pairs: Pairs) -> dict[str, float]:
    """Recall at 0.8, precision at 0.7 and 0.8 of a contender that removes the rows where `gone` is true."""
    one, two, similarity = pairs
    alike = similarity >= THRESHOLD
    similar, close = np.zeros(len(gone), bool), np.zeros(len(gone), bool)
    similar[one] = similar[two] = True
    close[one[alike]] = close[two[alike]] = True
    found = (gone[one] | gone[two])[alike]
    return {
        "recall": float(found.mean()),
        "precision": float(similar[gone].mean()) if gone.any() else 1.0,
        "exact": float(close[gone].mean()) if gone.any() else 1.0,
        "removed": int(gone.sum()),
    }


# Who competes: (file, folder, corpus) -> rows that go -----------------------------------------------------------------


def ropewalk(file: Path, folder: Path, corpus: str) -> np.ndarray:
    return ours(file, folder, bands=BANDS, rows=ROWS, shingle_words=WIDTH, threshold=THRESHOLD)


def simhash(file: Path, folder: Path, corpus: str) -> np.ndarray:
    return ours(file, folder, kind="simhash", shingle_words=WIDTH)


def ours(file: Path, folder: Path, **settings: Any) -> np.ndarray:
    from ropewalk.prepare.config import Near
    from ropewalk.prepare.near.corpus import near_duplicates

    def read() -> Iterator[pa.LargeStringArray]:
        source = pq.ParquetFile(file)
        for group in range(source.num_row_groups):
            yield source.read_row_group(group, columns=["text"], use_threads=False)["text"].combine_chunks()

    return near_duplicates(read, Near(**settings), scratch=folder).document


def texts_of(file: Path) -> list[str]:
    return pq.read_table(file, columns=["text"], use_threads=False)["text"].to_pylist()


def shingles_of(text: str, chinese: bool) -> list[str]:
    """The quickest way in plain Python."""
    words = re.findall(r"\w", text) if chinese else re.findall(r"\w+", text.lower())
    joined = list(map(" ".join, zip(*(words[offset:] for offset in range(WIDTH)), strict=False)))
    return joined or [" ".join(words)]


def rensa(file: Path, folder: Path, corpus: str) -> np.ndarray:
    """Full sets. Its flags mark both of a pair; which one goes would be more work."""
    import rensa

    sets = [shingles_of(text, corpus == "chinese") for text in texts_of(file)]
    matrix = rensa.RMinHash.digest_matrix_from_token_sets(sets, BANDS * ROWS, 42)
    index = rensa.RMinHashLSH(THRESHOLD, BANDS * ROWS, BANDS)
    return np.flatnonzero(index.query_duplicate_flags_matrix_one_shot(matrix))


def gaoya(file: Path, folder: Path, corpus: str) -> np.ndarray:
    """The first of similar documents stays; words, shingles and signatures are made in Rust."""
    from gaoya.minhash import MinHashStringIndex

    unit = "char" if corpus == "chinese" else "word"
    index = MinHashStringIndex(32, THRESHOLD, BANDS, ROWS, None, unit, True, (WIDTH, WIDTH))
    gone = []
    for row, text in enumerate(texts_of(file)):
        if index.query(text):
            gone.append(row)
        else:
            index.insert_document(row, text)
    return np.array(gone)


def datasketch(file: Path, folder: Path, corpus: str) -> np.ndarray:
    """The first of similar documents stays."""
    import xxhash
    from datasketch import MinHash, MinHashLSH

    index = MinHashLSH(params=(BANDS, ROWS), num_perm=BANDS * ROWS)
    gone = []
    for row, text in enumerate(texts_of(file)):
        signature = MinHash(num_perm=BANDS * ROWS, hashfunc=xxhash.xxh32_intdigest)
        signature.update_batch([shingle.encode() for shingle in shingles_of(text, corpus == "chinese")])
        if index.query(signature):
            gone.append(row)
        else:
            index.insert(row, signature, check_duplication=False)
    return np.array(gone)


def datatrove(file: Path, folder: Path, corpus: str) -> np.ndarray:
    """Its four stages; words by spaCy (jieba for Chinese), as its defaults say."""
    from datatrove.executor.local import LocalPipelineExecutor
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
    )
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    work = Path(tempfile.mkdtemp(dir=folder))
    config = MinhashConfig(
        hash_config=HashConfig(precision=64), num_buckets=BANDS, hashes_per_bucket=ROWS, n_grams=WIDTH
    )
    reader = ParquetReader(str(file.parent), glob_pattern=file.name)
    language = "cmn" if corpus == "chinese" else "eng"
    signatures, buckets, remove, removed = (str(work / name) for name in ("signatures", "buckets", "remove", "removed"))
    stages: list[tuple[list[Any], int]] = [
        ([reader, MinhashDedupSignature(output_folder=signatures, config=config, language=language)], 1),
        ([MinhashDedupBuckets(input_folder=signatures, output_folder=buckets, config=config)], BANDS),
        ([MinhashDedupCluster(input_folder=buckets, output_folder=remove, config=config)], 1),
        (
            [
                reader,
                MinhashDedupFilter(input_folder=remove, exclusion_writer=JsonlWriter(removed, compression=None)),
                JsonlWriter(str(work / "kept"), compression=None),
            ],
            1,
        ),
    ]
    with quiet():
        for number, (pipeline, tasks) in enumerate(stages):
            log = str(work / f"log{number}")
            LocalPipelineExecutor(pipeline=pipeline, tasks=tasks, workers=1, logging_dir=log).run()
    return np.array([int(json.loads(line)["id"]) for path in Path(removed).glob("*.jsonl") for line in path.open()])


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is written to the terminal, by whatever means."""
    terminal = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)


CONTENDERS = {who.__name__: who for who in (ropewalk, simhash, rensa, gaoya, datasketch, datatrove)}
PACKAGES = {
    "rensa": ["numpy", "pyarrow", "rensa==0.5.0"],
    "gaoya": ["numpy", "pyarrow", "gaoya==0.2.2"],
    "datasketch": ["numpy", "pyarrow", "xxhash", "datasketch==2.0.0"],
    "datatrove": [
        "pyarrow",
        "orjson",
        "nltk",
        "regex",
        "xxhash<4",
        "tokenizers",
        "spacy",
        "jieba",
        "datatrove==0.10.1",
    ],
}


def cpu_s() -> float:
    """CPU seconds of this process and its children so far."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def compete(who: str, folder: Path, corpus: str) -> dict[str, Any]:
    """Seconds of each run and what goes, the same every time."""
    os.environ |= {"RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    part = "subset" if who == "datatrove" else "all"
    contender = CONTENDERS[who]
    # Imports, compilation and models are paid once, on a few documents.
    contender(folder / f"{corpus}-few.parquet", folder, corpus)
    seconds, gone = [], np.empty(0, np.int64)
    for _ in range(1 if who in SLOW else 3):
        start = cpu_s()
        gone = contender(folder / f"{corpus}-{part}.parquet", folder, corpus)
        seconds.append(cpu_s() - start)
    status = Path("/proc/self/status").read_text()
    peak = re.search(r"VmHWM:\s*(\d+) kB", status)
    return {"seconds": seconds, "gone": gone.tolist(), "peak_mb": int(peak[1]) // 1024 if peak else 0}


# The comparison -------------------------------------------------------------------------------------------------------


def write(path: Path, texts: list[str]) -> None:
    ids = pa.array([str(row) for row in range(len(texts))])
    pq.write_table(
        pa.table({"id": ids, "text": pa.array(texts, pa.large_string())}), path, compression="zstd", row_group_size=4096
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--contender", choices=CONTENDERS)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--corpus", choices=CORPORA)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps(compete(options.contender, options.folder, options.corpus)))
        return

    from harness import call, environment, finish

    pythons: dict[str, Any] = {"ropewalk": sys.executable, "simhash": sys.executable}
    if not options.ours:
        pythons |= {
            # datatrove needs an older xxhash than ours.
            name: environment(f"dedup-{name}", packages, constrained=name != "datatrove")
            for name, packages in PACKAGES.items()
        }
    folder = Path(tempfile.mkdtemp())
    speed: dict[str, dict[str, float]] = {name: {} for name in pythons}
    quality: dict[str, Any] = {name: {} for name in pythons}
    try:
        for corpus, read in CORPORA.items():
            originals = list(dict.fromkeys(read()))[:: 10 if options.quick else 1][:DOCUMENTS]
            if not originals:
                print(f"{corpus}: no data at hand, left out", file=sys.stderr)
                continue
            texts, origins = with_copies(originals, chinese=corpus == "chinese")
            rows = subset(origins, SUBSETS[corpus] // (6 if options.quick else 1))
            write(folder / f"{corpus}-all.parquet", texts)
            write(folder / f"{corpus}-subset.parquet", [texts[row] for row in rows])
            write(folder / f"{corpus}-few.parquet", texts[:20])
            pairs = truth(texts, chinese=corpus == "chinese")
            within = np.isin(pairs[0], rows) & np.isin(pairs[1], rows)
            few = (np.searchsorted(rows, pairs[0][within]), np.searchsorted(rows, pairs[1][within]), pairs[2][within])
            size = sum(len(text.encode()) for text in texts) / 1e6
            part = sum(len(texts[row].encode()) for row in rows) / 1e6
            print(
                f"{corpus}: {len(texts):,} documents, {size:.1f} MB, {(pairs[2] >= THRESHOLD).sum():,} pairs at 0.8; "
                f"datatrove {len(rows):,} documents, {part:.1f} MB",
                flush=True,
            )
            for who, python in pythons.items():
                flags = ["--folder", str(folder), "--corpus", corpus]
                result = call(python, __file__, "--contender", who, *flags)
                whole = who != "datatrove"
                gone = np.zeros(len(texts) if whole else len(rows), bool)
                gone[np.array(result["gone"], np.int64)] = True
                median = statistics.median(result["seconds"])
                speed[who][f"{corpus}_mb_per_s"] = (size if whole else part) / median
                quality[who][corpus] = {**judged(gone, pairs if whole else few), "peak_mb": result["peak_mb"]}
                figures = "  ".join(f"{key} {value:,.4g}" for key, value in quality[who][corpus].items())
                spread = f"{min(result['seconds']):.2f} to {max(result['seconds']):.2f} s"
                print(f"  {who:<11} {speed[who][f'{corpus}_mb_per_s']:8.2f} MB/s ({spread})  {figures}", flush=True)
    finally:
        shutil.rmtree(folder)
    mine, _ = speed.pop("ropewalk"), speed.pop("simhash")
    ratios = {who: min(mine[key] / value for key, value in figures.items()) for who, figures in speed.items()}
    finish("dedup", ours=mine, peers=speed, ratios=ratios, quality=quality)


if __name__ == "__main__":
    main()
