"""Text shards -> token shards on one core: ours and Hugging Face tokenizers, same files, same vocabulary.

    make bench NAME=tokenize                 all documents; about two minutes
    python benchmarks/tokenize.py --quick    a tenth of them

Corpora: Python files at hand; English books and Chinese poems from ../shared/data when they are there, else texts
of Python's documentation and random Chinese. One byte-level BPE vocabulary of 16,384 tokens is trained on a sample of
each. Every corpus lies in files of about 4 MB as `prepare` keeps them between reading and encoding (Arrow, lz4). Ours
is `encode_chunk`, the step of `prepare` from such a file to a committed shard with document offsets, keys and
checksums, and with the check of 512 bytes a file against Hugging Face. The peer reads the same files, calls
`encode_batch_fast`, and writes bare tokens and lengths, no index and no checksum. No text is seen twice by either.

Seconds are CPU seconds of the process, without imports, compilation, and loading of the vocabulary: of ours the median
of three processes, each over all files; of the peer the sum of three, each over a third, in turns with ours. The tokens
of all documents are compared.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
VOCABULARY = 16_384
CHUNK_BYTES, BATCH_BYTES = 4 << 20, 1 << 20
CODE_BYTES = 80_000_000
SAMPLE = 7
"""Every seventh document trains the tokenizer."""
END = 0
ROUNDS = 3
READY = "ready"
"""A corpus of two words, for a contender to make itself ready."""

os.environ |= {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}


def code() -> Iterator[str]:
    """Python files: the standard library's, then those of installed packages."""
    library = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in library.rglob("*.py") if "site-packages" not in path.parts)
    files += sorted(Path(sysconfig.get_path("purelib")).rglob("*.py"))
    size = 0
    for path in files:
        text = path.read_text("utf-8", errors="ignore")
        size += len(text)
        if size > CODE_BYTES:
            return
        yield text


def english() -> Iterator[str]:
    """Books, cut into documents of about 6 kB."""
    files = sorted(DATA.glob("classic-books-en/*.jsonl.gz"))
    if not files:
        from pydoc_data.topics import topics

        yield from topics.values()
    for text in lines(files):
        yield from (text[start : start + 6000] for start in range(0, len(text), 6000))


def chinese() -> Iterator[str]:
    """Poems, or random characters: the k-th is drawn as often as Zipf's law has it."""
    files = sorted(DATA.glob("chinese-poetry/*.jsonl.gz"))
    yield from lines(files)
    if not files:
        draw = random.Random(0)
        characters = [chr(0x4E00 + draw.randrange(20_000)) for _ in range(5000)]
        weights = [1 / (rank + 10) for rank in range(len(characters))]
        for _ in range(20_000):
            verses = ("".join(draw.choices(characters, weights, k=draw.choice((5, 7)))) for _ in range(8))
            yield "".join(verse + draw.choice(("，", "。\n")) for verse in verses)


def lines(files: list[Path]) -> Iterator[str]:
    for path in files:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                yield json.loads(line)["text"]


CORPORA = {"code": code, "english": english, "chinese": chinese}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tenth of the documents")
    parser.add_argument("--contender", choices=["ours", "peer"], help="internal: run one of them")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--part", type=int, default=0)
    options = parser.parse_args()
    if options.contender:
        print(json.dumps({"ours": ours, "peer": peer}[options.contender](options.folder, options.part)))
        return
    with tempfile.TemporaryDirectory() as place:
        compare(Path(place), quick=options.quick)


def compare(folder: Path, *, quick: bool) -> None:
    from harness import call, environment, finish

    sizes = write_corpora(folder, quick=quick)
    python = environment("tokenizers", ["tokenizers", "numpy", "pyarrow"])
    rounds: dict[str, list[Any]] = {"ropewalk": [], "tokenizers": []}
    for part in range(ROUNDS):
        # In turns: on a machine with other work, both meet the same weather.
        asked = ("--folder", str(folder), "--part", str(part))
        rounds["ropewalk"].append(call(sys.executable, __file__, "--contender", "ours", *asked))
        rounds["tokenizers"].append(call(python, __file__, "--contender", "peer", *asked))
    seconds = {
        "ropewalk": {name: median(found["seconds"][name] for found in rounds["ropewalk"]) for name in CORPORA},
        "tokenizers": {name: sum(found["seconds"][name] for found in rounds["tokenizers"]) for name in CORPORA},
    }
    figures = {
        name: {f"{corpus}_mb_per_s": sizes[corpus] / 1e6 / spent for corpus, spent in found.items()}
        for name, found in seconds.items()
    }
    ratios = {corpus: seconds["tokenizers"][corpus] / seconds["ropewalk"][corpus] for corpus in CORPORA}
    for corpus, ratio in ratios.items():
        print(f"{corpus:<10} {sizes[corpus] / 1e6:6.1f} MB  ours / tokenizers {ratio:.1f}")
    identical = {corpus: identical_documents(folder, corpus) for corpus in CORPORA}
    finish(
        "tokenize",
        ours=figures["ropewalk"],
        peers={"tokenizers": figures["tokenizers"]},
        ratios={"tokenizers": min(ratios.values())},
        quality={
            "ratios": ratios,
            "documents": {corpus: total for corpus, (_, total) in identical.items()},
            "identical": {corpus: same for corpus, (same, _) in identical.items()},
            "encoders": rounds["ropewalk"][0]["encoders"],
        },
    )


def write_corpora(folder: Path, *, quick: bool) -> dict[str, int]:
    """Trains the vocabulary, writes the files; bytes of text by corpus."""
    import pyarrow as pa

    from ropewalk.prepare import tokenizer
    from ropewalk.prepare.documents import DOCUMENTS
    from ropewalk.prepare.stages import batch_writer

    texts = {name: list(corpus())[:: 10 if quick else 1] for name, corpus in CORPORA.items()}
    texts[READY] = ["绳索，" * 9, "x"]
    trained = tokenizer.train((text for corpus in texts.values() for text in corpus[::SAMPLE]), vocabulary=VOCABULARY)
    trained.save(str(folder / "tokenizer.json"))
    for name, corpus in texts.items():
        for number, chunk in enumerate(runs(list(enumerate(corpus)), CHUNK_BYTES)):
            with batch_writer(folder / name / f"{number:05d}.arrow", DOCUMENTS) as writer:
                for run in runs(chunk, BATCH_BYTES):
                    columns = {
                        "id": pa.array([f"{name}:files/part-{place // 1000}.jsonl:{place}" for place, _ in run]),
                        "text": pa.array([text for _, text in run], pa.large_string()),
                    }
                    nothing = pa.nulls(len(run))
                    writer.write_batch(
                        pa.record_batch([columns.get(f.name, nothing).cast(f.type) for f in DOCUMENTS], DOCUMENTS)
                    )
    return {name: sum(len(text.encode()) for text in corpus) for name, corpus in texts.items()}


def runs(documents: list[tuple[int, str]], limit: int) -> Iterator[list[tuple[int, str]]]:
    run: list[tuple[int, str]] = []
    size = 0
    for place, text in documents:
        run.append((place, text))
        size += len(text.encode())
        if size >= limit:
            yield run
            run, size = [], 0
    if run:
        yield run


def chunks(folder: Path, corpus: str) -> list[Path]:
    return sorted((folder / corpus).glob("*.arrow"))


def ours(folder: Path, part: int) -> dict[str, Any]:
    """All files, in every round from the beginning."""
    from ropewalk.prepare.encode import EncodeTask, choose_encoder, encode_chunk
    from ropewalk.prepare.texts import Texts, read_texts

    tokenizer = folder / "tokenizer.json"
    everything = [Texts(path) for corpus in CORPORA for path in chunks(folder, corpus)]
    choice = choose_encoder(tokenizer, everything, corpus_bytes=1 << 40)

    def task(path: Path, wanted: np.ndarray) -> EncodeTask:
        return EncodeTask(
            texts=Texts(path),
            wanted=wanted,
            bytes=0,
            tokenizer=tokenizer,
            end_of_text=END,
            dtype="uint16",
            target=path.with_suffix(".tokens"),
            encoder=choice.algorithm,
        )

    for path in folder.glob("*/*.tokens"):
        path.unlink()  # of the round before: `prepare` never writes over a file, nor does the peer

    def encode_all(corpus: str) -> None:
        for path in chunks(folder, corpus):
            encode_chunk(task(path, masks[path]))

    masks = {
        path: np.ones(sum(len(batch) for batch in read_texts(Texts(path), ["text"])), bool)
        for corpus in (READY, *CORPORA)
        for path in chunks(folder, corpus)
    }
    encode_all(READY)  # loads and compiles what is needed
    seconds = {}
    for corpus in CORPORA:
        start = time.process_time()
        encode_all(corpus)
        seconds[corpus] = time.process_time() - start
    return {"seconds": seconds, "encoders": choice.algorithm}


def peer(folder: Path, part: int) -> dict[str, Any]:
    """Every third file, in each round others."""
    import pyarrow as pa
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    seconds = {}
    for corpus in CORPORA:
        start = time.process_time()
        for path in chunks(folder, corpus)[part::ROUNDS]:
            tokens, lengths = [], []
            with pa.memory_map(str(path)) as file:
                reader = pa.ipc.open_file(file)
                for index in range(reader.num_record_batches):
                    texts = reader.get_batch(index)["text"].to_pylist()
                    for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                        tokens.append(np.array([*encoding.ids, END], np.uint16))
                        lengths.append(len(tokens[-1]))
            np.save(path.with_suffix(".tokens.npy"), np.concatenate(tokens))
            np.save(path.with_suffix(".lengths.npy"), np.array(lengths))
        seconds[corpus] = time.process_time() - start
    return {"seconds": seconds}


def identical_documents(folder: Path, corpus: str) -> tuple[int, int]:
    """(documents whose tokens are the same, all documents)."""
    from ropewalk.store.shards import Shard

    same = total = 0
    for path in chunks(folder, corpus):
        shard = Shard(path.with_suffix(".tokens"))
        shard.verify()
        tokens, lengths = np.load(path.with_suffix(".tokens.npy")), np.load(path.with_suffix(".lengths.npy"))
        borders = np.cumsum(lengths)
        for index, (start, stop) in enumerate(zip([0, *borders[:-1].tolist()], borders.tolist(), strict=True)):
            same += np.array_equal(shard.document(index), tokens[start:stop])
        total += len(lengths)
    return same, total


if __name__ == "__main__":
    main()
