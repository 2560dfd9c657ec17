"""Tiny real things: models, an executor, a tokenizer, a prepared corpus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.sharded_model import PlannedModel
from ropewalk.model.config import Model
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.spec import Spec, resolve
from ropewalk.parallel.apply import apply
from ropewalk.parallel.executor import Executor
from ropewalk.plan.plan import Plan
from ropewalk.store.manifest import Manifest, ShardEntry, SourceEntry, TokenizerEntry, write_manifest
from ropewalk.store.shards import document_key, write_shard

END = "<|end|>"

CODE = [
    f"def area_{n}(width, height):\n    # naïve – {n} × {n}\n    total = width * height + {n}\n    return total\n" * 3
    for n in range(8)
]
PROSE = [
    f"Chapter {n}. The rope is laid in strands – 绳索 {n} 🪢 – and each strand is spun from fibre.\n" * 2
    for n in range(8)
]


def small(**changes: object) -> Spec:
    """A spec of two small layers."""
    settings = {"layers": 2, "width": 16, "heads": 4, "mlp_width": 24, **changes}
    vocabulary, length = settings.pop("vocabulary", 61), settings.pop("sequence_length", 12)
    return resolve(Model(**settings), vocabulary=vocabulary, sequence_length=length)


def vivid(spec: Spec, *, seed: int = 0) -> Decoder:
    """A float64 model with weights so large that its predictions depend strongly on what it reads."""
    model = build(spec, seed=seed, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.dim() == 2 else 1)
    return model


PLAN = Plan(device="cpu", precision="fp32", batch_size=4, microbatch_size=4)


def one_device(model: Decoder) -> Executor:
    """An executor for scoring."""
    return apply(PLAN, model, None, None)


def planned(model: Decoder, held_out: HeldOut, *, length: int = 16) -> PlannedModel:
    """What tasks ask."""
    spec = replace(model.spec, sequence_length=length)
    return PlannedModel(PLAN, lambda plan: apply(plan, model, None, None), spec=spec, held_out=held_out)


def train_tokenizer(texts: Iterable[str], *, prefix_space: bool = False, end: str = END) -> Tokenizer:
    """A byte-level tokenizer of 320 tokens, the end of text first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=[end], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def write_corpus(folder: Path, sources: dict[str, tuple[str, list[str]]], tokenizer: Tokenizer) -> Manifest:
    """Commits a prepared corpus whose documents, by source name with their domain, are all held out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    shards = []
    for name, (_, texts) in sources.items():
        rows = [(document_key(f"{name}:{i}"), np.array([*tokenizer.encode(t).ids, end])) for i, t in enumerate(texts)]
        file = f"{name}-validation-00000.tokens"
        written = write_shard(folder / file, iter(rows), dtype="uint16")
        shards.append(
            ShardEntry(
                file=file,
                source=name,
                split="validation",
                documents=written.documents,
                tokens=written.tokens,
                text_bytes=sum(len(text.encode()) for text in texts),
                file_bytes=written.bytes,
                checksum=written.checksum,
            )
        )
    manifest = Manifest(
        recipe_hash="0" * 16,
        dtype="uint16",
        tokenizer=TokenizerEntry(
            file="tokenizer.json",
            checksum=xxhash.xxh3_64_hexdigest((folder / "tokenizer.json").read_bytes()),
            vocabulary=tokenizer.get_vocab_size(),
            end_of_text=end,
        ),
        sources=tuple(SourceEntry(name=n, domain=d, weight=1.0, steps=()) for n, (d, _) in sources.items()),
        shards=tuple(shards),
    )
    write_manifest(folder, manifest)
    return manifest
