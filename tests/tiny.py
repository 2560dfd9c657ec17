"""Tiny real things for the tests: a prepared corpus, a run directory ready to train, models and batches.

A model of 20 000 parameters on rows of 16 tokens: 20 steps take about a second on one core.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ropewalk.base.seal import write_sealed
from ropewalk.checkpoint.config import Checkpoints
from ropewalk.checkpoint.format import checksum
from ropewalk.config.read import Resolved
from ropewalk.config.resolved import save_resolved
from ropewalk.flow.plan_recipe import plan_recipe
from ropewalk.flow.recipe import Recipe
from ropewalk.load.batch import Batch
from ropewalk.load.config import Load
from ropewalk.model.config import Model
from ropewalk.model.spec import Spec, resolve
from ropewalk.plan.config import Layout
from ropewalk.plan.machine import Machine
from ropewalk.plan.plan import save_plan
from ropewalk.prepare.config import Prepare, Source
from ropewalk.store.manifest import Manifest, ShardEntry, SourceEntry, Split, TokenizerEntry, write_manifest
from ropewalk.store.shards import document_key, write_shard
from ropewalk.train.config import Optimizer, Schedule, Train

END = "<|endoftext|>"
WORDS = [
    "rope",
    "walk",
    "strand",
    "yarn",
    "hemp",
    "twist",
    "lay",
    "comb",
    "spin",
    "tar",
    "hall",
    "knot",
    "fibre",
    "cable",
    "hawser",
]

Documents = Sequence[Sequence[int]]
"""The tokens of each document."""


def byte_tokenizer() -> Tokenizer:
    """One token a byte, 256 of them, then the end of text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def write_prepared(
    folder: Path, train: dict[str, list[Documents]], validation: dict[str, list[Documents]], **weights: float
) -> Path:
    """Commits a prepared folder of the given shards by source: each shard a list of documents, each of those tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer()
    tokenizer.save(str(folder / "tokenizer.json"))
    splits: list[tuple[Split, dict[str, list[Documents]]]] = [("train", train), ("validation", validation)]
    shards = tuple(
        _write_shard(folder, source, split, number, documents)
        for split, by_source in splits
        for source, several in by_source.items()
        for number, documents in enumerate(several)
    )
    manifest = Manifest(
        recipe_hash="0" * 16,
        dtype="uint16",
        tokenizer=TokenizerEntry(
            file="tokenizer.json",
            checksum=checksum((folder / "tokenizer.json").read_bytes()),
            vocabulary=tokenizer.get_vocab_size(),
            end_of_text=tokenizer.token_to_id(END),
        ),
        sources=tuple(
            SourceEntry(name=name, domain="prose", weight=weights.get(name, 1.0), steps=())
            for name in dict.fromkeys([*train, *validation])
        ),
        shards=shards,
    )
    write_manifest(folder, manifest)
    return folder


def write_corpus(folder: Path, *, documents: int = 60, seed: int = 0) -> Path:
    """Commits a prepared folder of two sources of random sentences, `notes` in three shards, `code` in one."""
    draw = random.Random(seed)

    def texts(count: int, mark: str) -> list[list[int]]:
        return [_encode(mark.join(draw.choices(WORDS, k=draw.randint(3, 20))) + ".") for _ in range(count)]

    third = documents // 3
    train = {"notes": [texts(third, " ") for _ in range(3)], "code": [texts(third, "_")]}
    return write_prepared(folder, train, {"notes": [texts(8, " ")], "code": [texts(8, "_")]}, code=0.5)


def make_run(folder: Path, **overrides: Any) -> Path:
    """A run directory that is prepared and planned, ready for `train`; `overrides` as `train__steps=3` or `seed=1`.

    The prepared data lies in `folder/prepared` and is made when it is not there.
    """
    prepared = folder / "prepared"
    if not prepared.exists():
        write_corpus(prepared)
    recipe = _overridden(
        Recipe(
            name="tiny",
            seed=3,
            prepare=Prepare(sources=(Source(name="notes", paths=("corpus/*",)),)),
            load=Load(sequence_length=16),
            model=Model(layers=2, width=16, heads=2, mlp_width=32),
            plan=Layout(microbatch_size=2, device="cpu"),
            train=Train(
                steps=8,
                batch_size=4,
                optimizer=Optimizer(),
                schedule=Schedule(peak_lr=1e-2, warmup_steps=2),
                precision="fp32",
                log_every_steps=2,
                validate_every_steps=4,
                validation_sequences=4,
                threads=1,
            ),
            checkpoint=Checkpoints(save_every_steps=3, keep_last=2),
        ),
        overrides,
    )
    run = folder / "run"
    save_resolved(run, Resolved(recipe, {}))
    record = {"format": 2, "stage": "prepare", "input": "", "seconds": 0.0, "result": {"folder": str(prepared)}}
    write_sealed(run / "stages" / "prepare.json", record)
    machine = Machine(processor="test", cores=2, memory_bytes=1 << 33, bf16=False, gpus=())
    save_plan(run, plan_recipe(recipe, vocabulary=257, machine=machine))
    return run


def small_spec(*, vocabulary: int = 61, sequence_length: int = 12, **settings: Any) -> Spec:
    """A spec of two small layers."""
    model = Model(**{"layers": 2, "width": 16, "heads": 4, "mlp_width": 24, **settings})
    return resolve(model, vocabulary=vocabulary, sequence_length=sequence_length)


def random_batch(spec: Spec, *, rows: int, seed: int = 0) -> Batch:
    """Rows of random tokens, every target with weight 1."""
    draw = torch.Generator().manual_seed(seed)
    return Batch.of_rows(torch.randint(0, spec.vocabulary, (rows, spec.sequence_length + 1), generator=draw))


def _encode(text: str) -> list[int]:
    tokenizer = byte_tokenizer()
    return [*tokenizer.encode(text).ids, tokenizer.token_to_id(END)]


def _write_shard(folder: Path, source: str, split: Split, number: int, documents: Documents) -> ShardEntry:
    file = f"{source}-{split}-{number:05d}.tokens"
    keyed = ((document_key(f"{source}:{number}:{i}"), np.array(d, np.uint16)) for i, d in enumerate(documents))
    written = write_shard(folder / file, keyed, dtype="uint16")
    return ShardEntry(
        file=file,
        source=source,
        split=split,
        documents=written.documents,
        tokens=written.tokens,
        text_bytes=max(0, written.tokens - written.documents),
        file_bytes=written.bytes,
        checksum=written.checksum,
    )


def _overridden(recipe: Any, overrides: dict[str, Any]) -> Any:
    for key, value in overrides.items():
        name, _, rest = key.partition("__")
        changed = _overridden(getattr(recipe, name), {rest: value}) if rest else value
        recipe = dataclasses.replace(recipe, **{name: changed})
    return recipe
