"""Raw files to token shards on one core: ours beside datatrove's stages for the same work.

    make bench NAME=prepare                books and poems; a minute and a half
    python benchmarks/prepare.py --quick   fewer documents

Corpora: English books cut into documents of about 4 kB and Chinese poems from ../shared/data when they are there (63
MB), else the sources of the standard library. Both sides read the same compressed JSON lines, apply the rules of Gopher
(quality and repetition), C4 (without terminal punctuation, as FineWeb does) and FineWeb with their papers' thresholds,
for poems, which these rules were not made for, with thresholds that let them pass. Then they remove near-duplicates by
MinHash (16 bands of 5 rows, word 5-grams) and encode what is left with the same tokenizer. Ours verifies every
near-duplicate, keeps all statistics, and writes a ledger, samples and a manifest besides. datatrove, whose words are
spaCy's (jieba's for Chinese), gets a seeded subset; a document that one of its filters removes goes no further, as in
its pipelines.

Seconds are CPU seconds of all processes, without imports and compilation: each contender prepares some documents first.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import gzip
import json
import os
import random
import resource
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT.parent / "shared" / "data"
PACKAGES = ["xxhash<4", "datatrove==0.10.1", "spacy==3.8.18", "jieba==0.42.1", "regex", "orjson", "tokenizers"]
LANGUAGES = {"books": "eng", "poems": "cmn", "code": "eng"}
"""datatrove's names of the languages: of Chinese, `cmn` alone is cut into words."""
SUBSETS = {"books": 200, "poems": 1500, "code": 150}
"""Documents that datatrove gets."""
BANDS, ROWS, WIDTH = 16, 5, 5
VOCABULARY = 16_000


# What is prepared -----------------------------------------------------------------------------------------------------


def books() -> Iterator[str]:
    """Books cut at paragraphs into documents of about 4 kB."""
    for book in _texts("classic-books-en"):
        document = ""
        for paragraph in book.replace("\r\n", "\n").split("\n\n"):
            document += paragraph + "\n\n"
            if len(document) > 4000:
                yield document.strip("\n")
                document = ""


def poems() -> Iterator[str]:
    """Poems, and some pieces of prose."""
    yield from _texts("chinese-poetry")


def code() -> Iterator[str]:
    """Sources of the standard library, where the others are not at hand."""
    if not DATA.exists():
        for path in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" not in path.parts:
                yield path.read_text("utf-8", errors="ignore")


def _texts(name: str) -> Iterator[str]:
    for path in sorted(DATA.glob(f"{name}/*.jsonl.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as file:
            yield from (json.loads(line)["text"] for line in file)


CORPORA: dict[str, Callable[[], Iterator[str]]] = {"books": books, "poems": poems, "code": code}


def write(texts: list[str], folder: Path) -> None:
    """Commits `texts` as compressed JSON lines, in files of about 8 MB of text."""
    folder.mkdir(parents=True)
    start, number = 0, 0
    while start < len(texts):
        stop, size = start, 0
        while stop < len(texts) and size < 8_000_000:
            size += len(texts[stop].encode())
            stop += 1
        with gzip.open(folder / f"{number:03}.jsonl.gz", "wt", encoding="utf-8", compresslevel=6) as file:
            for place in range(start, stop):
                file.write(json.dumps({"text": texts[place], "id": str(place)}, ensure_ascii=False) + "\n")
        start, number = stop, number + 1


# Who prepares ---------------------------------------------------------------------------------------------------------


def ropewalk(source: Path, work: Path, corpus: str, tokenizer: Path) -> dict[str, Any]:
    """The whole recipe with one worker; what is left, and what the stages say."""
    from ropewalk.prepare.config import (
        C4,
        Deduplicate,
        Filter,
        FineWeb,
        Gopher,
        Near,
        Prepare,
        Repetition,
        Source,
        Tokenizer,
    )
    from ropewalk.prepare.pipeline import prepare

    simple = {"min_characters": 0, "max_characters": 0, "max_mean_line_length": 0.0, "min_letter_share": 0.0}
    rules = Filter(
        **simple,
        max_duplicate_line_share=1.0,
        gopher=Gopher(),
        repetition=Repetition(),
        c4=C4(terminal_punctuation=False),
        fineweb=FineWeb(),
    )
    if corpus == "poems":
        rules = Filter(
            **simple,
            max_duplicate_line_share=1.0,
            gopher=Gopher(min_words=1, min_mean_word_length=0, min_stop_words=0, min_alphabetic_share=0),
            repetition=Repetition(**{field.name: 1.0 for field in dataclasses.fields(Repetition)}),
            c4=C4(terminal_punctuation=False, min_line_words=1, min_sentences=1),
            fineweb=FineWeb(
                min_terminal_line_share=0,
                max_short_line_share=1,
                max_duplicate_character_share=1,
                max_line_ends_per_word=0,
            ),
        )
    settings = Prepare(
        sources=(Source(name=corpus, paths=(f"{source}/*.jsonl.gz",)),),
        filter=rules,
        deduplicate=Deduplicate(near=Near(bands=BANDS, rows=ROWS, shingle_words=WIDTH)),
        tokenizer=Tokenizer(file=str(tokenizer)),
        workers=1,
        folder=str(work),
    )
    made = prepare(settings, seed=0)
    (entry,) = made.manifest.sources
    return {
        "left": entry.steps[-1].documents_out,
        "tokens": made.manifest.tokens("train") + made.manifest.tokens("validation"),
        "removed": {step.step: sum(step.removed.values()) for step in entry.steps if step.removed},
    }


def datatrove(source: Path, work: Path, corpus: str, tokenizer: Path) -> dict[str, Any]:
    """Its filters, its four stages of MinHash and its tokenization, one after the other."""
    from datatrove.pipeline.dedup import MinhashDedupSignature
    from datatrove.pipeline.dedup.minhash import (
        MinhashConfig,
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
    )
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer
    from datatrove.pipeline.writers import JsonlWriter
    from datatrove.utils.hashing import HashConfig

    language = LANGUAGES[corpus]
    names = ("filtered", "signatures", "buckets", "remove", "kept", "tokens", "local")
    place = {name: str(work / name) for name in names}
    config = MinhashConfig(
        hash_config=HashConfig(precision=64), num_buckets=BANDS, hashes_per_bucket=ROWS, n_grams=WIDTH
    )
    loose: dict[Any, dict[str, Any]] = {
        GopherRepetitionFilter: {
            **dict.fromkeys(("dup_line_frac", "dup_para_frac", "dup_line_char_frac", "dup_para_char_frac"), 1.0),
            "top_n_grams": tuple((n, 10.0) for n in (2, 3, 4)),
            "dup_n_grams": tuple((n, 10.0) for n in range(5, 11)),
        },
        GopherQualityFilter: {
            "min_doc_words": 1,
            "min_avg_word_length": 0,
            "min_stop_words": 0,
            "max_non_alpha_words_ratio": 0.0,
        },
        C4QualityFilter: {"filter_no_terminal_punct": False, "min_words_per_line": 1, "min_num_sentences": 1},
        FineWebQualityFilter: {
            "line_punct_thr": 0.0,
            "short_line_thr": 1.0,
            "char_duplicates_ratio": 1.0,
            "new_line_ratio": 10.0,
        },
    }
    strict = {**{rule: {} for rule in loose}, C4QualityFilter: {"filter_no_terminal_punct": False}}
    filters = [rule(language=language, **(loose if corpus == "poems" else strict)[rule]) for rule in loose]
    filtered = JsonlReader(place["filtered"])
    stages: list[tuple[list[Any], int]] = [
        (
            [
                JsonlReader(str(source)),
                *filters,
                JsonlWriter(place["filtered"], compression=None),
            ],
            1,
        ),
        ([filtered, MinhashDedupSignature(output_folder=place["signatures"], config=config, language=language)], 1),
        ([MinhashDedupBuckets(input_folder=place["signatures"], output_folder=place["buckets"], config=config)], BANDS),
        ([MinhashDedupCluster(input_folder=place["buckets"], output_folder=place["remove"], config=config)], 1),
        (
            [
                filtered,
                MinhashDedupFilter(input_folder=place["remove"]),
                JsonlWriter(place["kept"], compression=None),
            ],
            1,
        ),
        (
            [
                JsonlReader(place["kept"]),
                DocumentTokenizer(
                    output_folder=place["tokens"],
                    local_working_dir=place["local"],
                    tokenizer_name_or_path=str(tokenizer),
                    eos_token="<|endoftext|>",
                    shuffle_documents=False,
                ),
            ],
            1,
        ),
    ]
    with _quiet():
        for pipeline, tasks in stages:
            for rank in range(tasks):
                # What its executors do, without their copies of the steps: jieba's words cannot be copied.
                data = None
                for step in pipeline:
                    data = step(data, rank, tasks)
                collections.deque(data or (), maxlen=0)
    kept = sum(1 for path in Path(place["kept"]).glob("*.jsonl") for _ in path.open())
    tokens = sum(path.stat().st_size // 2 for path in Path(place["tokens"]).glob("*.ds"))
    return {"left": kept, "tokens": tokens}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Nothing is written to the terminal, by whatever means."""
    terminal = os.dup(2)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(terminal, 2)


CONTENDERS = {who.__name__: who for who in (ropewalk, datatrove)}


def measured(who: str, folder: Path, corpus: str, tokenizer: Path, warm: Path) -> dict[str, Any]:
    """CPU seconds of one contender on the documents in `folder`, after it has done those in `warm`."""
    with tempfile.TemporaryDirectory() as place:
        CONTENDERS[who](warm, Path(place) / "warm", corpus, tokenizer)
        before = _spent()
        found = CONTENDERS[who](folder, Path(place) / "work", corpus, tokenizer)
        return {**found, "seconds": _spent() - before}


def _spent() -> float:
    usage = [resource.getrusage(kind) for kind in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in usage)


def _train(texts: list[str], path: Path) -> None:
    """A byte-level BPE tokenizer, the same for both."""
    from ropewalk.prepare import tokenizer

    sample = random.Random(1).sample(texts, min(len(texts), 4000))
    path.write_text(tokenizer.train(iter(sample), vocabulary=VOCABULARY).to_str(), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--contender", nargs=5, metavar=("WHO", "FOLDER", "CORPUS", "TOKENIZER", "WARM"))
    options = parser.parse_args()
    if options.contender:
        who, folder, corpus, tokenizer, warm = options.contender
        print(json.dumps(measured(who, Path(folder), corpus, Path(tokenizer), Path(warm))))
        return

    from harness import call, environment, finish

    python = environment("prepare-datatrove", PACKAGES, constrained=False)
    ours: dict[str, float] = {}
    peer: dict[str, float] = {}
    quality: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, corpus in CORPORA.items():
            texts = list(corpus())
            if not texts:
                continue
            draw = random.Random(0)
            texts = draw.sample(texts, len(texts) // (10 if options.quick else 1))
            few = draw.sample(texts, min(len(texts), SUBSETS[name] // (5 if options.quick else 1)))
            folders = {kind: Path(place) / name / kind for kind in ("all", "few", "warm")}
            for kind, some in (("all", texts), ("few", few), ("warm", texts[:40])):
                write(some, folders[kind])
            tokenizer = Path(place) / name / "tokenizer.json"
            _train(texts, tokenizer)
            found = {}
            for who, interpreter, kind in (("ropewalk", sys.executable, "all"), ("datatrove", python, "few")):
                arguments = [who, str(folders[kind]), name, str(tokenizer), str(folders["warm"])]
                found[who] = call(interpreter, __file__, "--contender", *arguments)
            size = {"ropewalk": _megabytes(texts), "datatrove": _megabytes(few)}
            count = {"ropewalk": len(texts), "datatrove": len(few)}
            ours[f"{name}_docs_per_s"] = len(texts) / found["ropewalk"]["seconds"]
            peer[f"{name}_docs_per_s"] = len(few) / found["datatrove"]["seconds"]
            ours[f"{name}_mb_per_s"] = size["ropewalk"] / found["ropewalk"]["seconds"]
            peer[f"{name}_mb_per_s"] = size["datatrove"] / found["datatrove"]["seconds"]
            quality[name] = {
                who: {"documents": count[who], "megabytes": round(size[who], 2), **found[who]} for who in found
            }
    ratio = min(ours[key] / peer[key] for key in ours if key.endswith("mb_per_s"))
    finish("prepare", ours=ours, peers={"datatrove": peer}, ratios={"datatrove": ratio}, quality=quality)


def _megabytes(texts: list[str]) -> float:
    return sum(len(text.encode()) for text in texts) / 1e6


if __name__ == "__main__":
    main()
