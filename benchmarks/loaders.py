"""The loaders that load.py and resume.py put side by side: how each writes a corpus, reads it and resumes.

Every loader reads the same windows: window w of a corpus begins with two tokens that name it (`name_of`). A `Reader` is
one rank's part. Each function imports its own library only; it runs in that library's environment.
"""

from __future__ import annotations

import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BASE = 1 << 15
SECOND = 1 << 20
"""Windows of the second source are numbered from here on."""

PACKAGES = {
    "torchdata": ["torch==2.13.0", "numpy", "torchdata"],
    "grain": ["numpy", "grain"],
    "webdataset": ["torch==2.13.0", "numpy", "webdataset"],
    # These two ask for torchvision and clouds, which tokens do not need.
    "litdata": ["torch==2.13.0", "numpy", "--no-deps litdata", "filelock lightning-utilities boto3 requests tifffile"],
    "mosaicml": [
        "torch==2.13.0",
        "numpy",
        "--no-deps mosaicml-streaming transformers huggingface_hub catalogue",
        "xxhash zstd tqdm boto3 Brotli python-snappy filelock requests packaging regex pyyaml tokenizers safetensors",
        "pillow",
    ],
    "megatron": ["torch==2.13.0", "numpy", "--no-deps megatron-core", "packaging"],
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """What one rank is to read."""

    folder: Path
    length: int
    """Tokens of a window."""
    rows: int
    """Windows of a global batch."""
    rank: int = 0
    world: int = 1
    workers: int = 0
    weights: tuple[float, ...] = (1.0,)
    """Of the sources; one source is read alone."""
    dtype: str = "int64"

    @property
    def own_rows(self) -> int:
        return self.rows // self.world

    def file(self, source: int) -> Path:
        return self.folder / f"source{source}.bin"


@dataclass(frozen=True, slots=True)
class Reader:
    """One rank of a loader at work."""

    next: Callable[[], Any]
    """The next batch: rows of tokens."""
    state: Callable[[], Any] | None = None
    """What it saves; None when it cannot resume."""


def write_windows(path: Path, *, windows: int, length: int, first: int, seed: int) -> None:
    """A file of uint16 tokens: `windows` windows of `length`, the w-th named `first + w`."""
    tokens = np.random.default_rng(seed).integers(0, 50_000, (windows, length), dtype=np.uint16)
    names = np.arange(first, first + windows)
    tokens[:, 0], tokens[:, 1] = names // BASE, names % BASE
    tokens.tofile(path)


def name_of(batch: Any) -> list[int]:
    """The windows in a batch, by the two tokens that each begins with."""
    rows = np.asarray(batch)
    return (rows[:, 0].astype(np.int64) * BASE + rows[:, 1].astype(np.int64)).tolist()


def windows_of(task: Task, source: int) -> np.ndarray:
    return np.memmap(task.file(source), np.uint16, "r").reshape(-1, task.length)


class Windows:
    """Windows of a memory-mapped file, one at a time: the data set of those loaders that bring none."""

    def __init__(self, task: Task, source: int = 0) -> None:
        self._task, self._source = task, source
        self._map: np.ndarray | None = None

    def __len__(self) -> int:
        return self._task.file(self._source).stat().st_size // 2 // self._task.length

    def __getitem__(self, index: int) -> np.ndarray:
        if self._map is None:
            self._map = windows_of(self._task, self._source)
        return self._map[index].astype(self._task.dtype)


def cycle(make: Callable[[], Any]) -> Iterator[Any]:
    while True:
        yield from make()


# Ours


def ropewalk_write(task: Task) -> None:
    """The same tokens as shards with a manifest. A row of ours reads one token more than its inputs."""
    from ropewalk.store.manifest import Manifest, ShardEntry, SourceEntry, TokenizerEntry, write_manifest
    from ropewalk.store.shards import Run, write_runs

    shards, sources = [], []
    for number, weight in enumerate(task.weights):
        tokens = windows_of(task, number).reshape(-1)
        # The target of the last input of the last window.
        tokens = np.append(tokens, np.uint16(0))
        lengths = document_lengths(len(tokens))
        keys = np.arange(len(lengths), dtype=np.uint64)
        file = f"s{number}.tokens"
        written = write_runs(task.folder / file, [Run(keys, lengths, tokens)], dtype="uint16")
        shards.append(
            ShardEntry(
                file=file,
                source=f"s{number}",
                split="train",
                documents=written.documents,
                tokens=written.tokens,
                text_bytes=written.tokens,
                file_bytes=written.bytes,
                checksum=written.checksum,
            )
        )
        sources.append(SourceEntry(name=f"s{number}", domain="", weight=weight, steps=()))
    tokenizer = TokenizerEntry(file="tokenizer.json", checksum="", vocabulary=50_000, end_of_text=0)
    manifest = Manifest(
        recipe_hash="0", dtype="uint16", tokenizer=tokenizer, sources=tuple(sources), shards=tuple(shards)
    )
    write_manifest(task.folder, manifest)


def document_lengths(tokens: int) -> np.ndarray:
    """Lengths as those of web pages, log-normal with mean 670, that sum to `tokens`."""
    drawn = np.random.default_rng(0).lognormal(5.9, 1.1, tokens // 300 + 16).astype(np.int64).clip(16, 60_000)
    ends = np.cumsum(drawn)
    whole = int(np.searchsorted(ends, tokens))
    lengths = drawn[: whole + 1].copy()
    lengths[-1] -= ends[whole] - tokens
    return lengths[lengths > 0]


def ropewalk_open(task: Task, state: Any, *, packing: str = "windows") -> Reader:
    from ropewalk.load.loader import Loader

    loader = Loader(
        task.folder,
        sequence_length=task.length,
        batch_size=task.rows,
        seed=0,
        mixture={f"s{number}": weight for number, weight in enumerate(task.weights)},
        packing=packing,
        verify=False,
        rank=task.rank,
        world=task.world,
    )
    if state is not None:
        loader.seek(state)
    return Reader(lambda: loader.next().tokens.numpy(), loader.state)


# Peers


def torchdata_open(task: Task, state: Any) -> Reader:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    data = Windows(task)
    sampler = StatefulDistributedSampler(data, num_replicas=task.world, rank=task.rank, shuffle=True, seed=0)
    loader = StatefulDataLoader(data, batch_size=task.own_rows, sampler=sampler, num_workers=task.workers)
    if state is not None:
        loader.load_state_dict(state)
    batches = cycle(lambda: loader)
    return Reader(lambda: next(batches), loader.state_dict)


def dataloader_open(task: Task, state: Any) -> Reader:
    """Plain torch: no state."""
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

    data = Windows(task)
    sampler = DistributedSampler(data, num_replicas=task.world, rank=task.rank, shuffle=True, seed=0)
    loader = DataLoader(data, batch_size=task.own_rows, sampler=sampler, num_workers=task.workers)
    batches = cycle(lambda: loader)
    return Reader(lambda: next(batches))


def grain_open(task: Task, state: Any) -> Reader:
    import grain

    shuffled = [
        grain.MapDataset.source(Windows(task, number)).shuffle(seed=number).repeat()
        for number in range(len(task.weights))
    ]
    data = shuffled[0] if len(shuffled) == 1 else grain.MapDataset.mix(shuffled, weights=list(task.weights))
    options = grain.ReadOptions(num_threads=task.workers, prefetch_buffer_size=task.workers and 8)
    batches = iter(data[task.rank :: task.world].batch(task.own_rows).to_iter_dataset(options))
    if state is not None:
        batches.set_state(state)
    return Reader(lambda: next(batches), batches.get_state)


def grain_elastic_open(task: Task, state: Any) -> Reader:
    import grain
    from grain import experimental

    part = grain.sharding.ShardOptions(shard_index=task.rank, shard_count=task.world)
    data = grain.MapDataset.source(Windows(task)).shuffle(seed=0).repeat(1000)
    batches = experimental.ElasticIterator(data, task.rows, part)
    if state is not None:
        batches.set_state(state)
    return Reader(lambda: next(batches), batches.get_state)


def webdataset_write(task: Task) -> None:
    import webdataset

    with webdataset.ShardWriter(str(task.folder / "wds-%04d.tar"), maxcount=8192, verbose=0) as writer:
        for number, window in enumerate(windows_of(task, 0)):
            writer.write({"__key__": f"{number:08d}", "tokens": window.tobytes()})


def webdataset_open(task: Task, state: Any) -> Reader:
    import webdataset

    files = [str(path) for path in sorted(task.folder.glob("wds-*.tar"))]

    def decoded(sample: dict[str, bytes]) -> np.ndarray:
        return np.frombuffer(sample["tokens"], np.uint16).astype(task.dtype)

    data = webdataset.WebDataset(files, shardshuffle=len(files), seed=0).shuffle(1000).map(decoded)
    data = data.batched(task.own_rows, collation_fn=np.stack, partial=False)
    batches = cycle(lambda: data)
    return Reader(lambda: next(batches))


def litdata_write(task: Task) -> None:
    import torch
    from litdata import TokensLoader
    from litdata.streaming.writer import BinaryWriter

    for source in range(len(task.weights)):
        folder = task.folder / f"litdata{source}"
        folder.mkdir()
        writer = BinaryWriter(str(folder), chunk_bytes="16MB", item_loader=TokensLoader())
        for number, window in enumerate(windows_of(task, source)):
            writer[number] = torch.from_numpy(np.array(window))
        writer.done()
        writer.merge()


def litdata_open(task: Task, state: Any) -> Reader:
    _join_group(task)
    from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset, TokensLoader

    sets = [
        StreamingDataset(
            str(task.folder / f"litdata{source}"),
            item_loader=TokensLoader(block_size=task.length),
            shuffle=True,
            drop_last=True,
            seed=1,
        )
        for source in range(len(task.weights))
    ]
    data = sets[0]
    if len(sets) > 1:
        data = CombinedStreamingDataset(sets, seed=3, weights=task.weights, iterate_over_all=False)
    loader = StreamingDataLoader(data, batch_size=task.own_rows, num_workers=task.workers, drop_last=True)
    if state is not None:
        loader.load_state_dict(state)
    batches = cycle(lambda: loader)
    return Reader(lambda: _converted(next(batches), task), loader.state_dict)


def mosaicml_write(task: Task) -> None:
    _pretend_torchvision()
    from streaming import MDSWriter

    for source in range(len(task.weights)):
        columns = {"tokens": f"ndarray:uint16:{task.length}"}
        with MDSWriter(out=str(task.folder / f"mds{source}"), columns=columns) as writer:
            for window in windows_of(task, source):
                writer.write({"tokens": np.array(window)})


def mosaicml_open(task: Task, state: Any) -> Reader:
    _pretend_torchvision()
    _join_group(task)
    from streaming import Stream, StreamingDataLoader, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    if task.world == 1:
        clean_stale_shared_memory()

    class Tokens(StreamingDataset):
        def __getitem__(self, index: int) -> np.ndarray:
            return super().__getitem__(index)["tokens"].astype(task.dtype)

    folders = [str(task.folder / f"mds{source}") for source in range(len(task.weights))]
    if len(folders) == 1:
        where: dict[str, Any] = {"local": folders[0]}
    else:
        parts = zip(folders, task.weights, strict=True)
        where = {"streams": [Stream(local=folder, proportion=share) for folder, share in parts]}
    data = Tokens(**where, shuffle=True, batch_size=task.own_rows, num_canonical_nodes=1, shuffle_seed=1)
    loader = StreamingDataLoader(data, batch_size=task.own_rows, num_workers=task.workers)
    if state is not None:
        loader.load_state_dict(state)
    batches = cycle(lambda: loader)
    return Reader(lambda: next(batches), loader.state_dict)


def megatron_write(task: Task) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(task.folder / "megatron.bin"), dtype=np.uint16)
    for window in windows_of(task, 0):
        builder.add_document(torch.from_numpy(window.astype(np.int32)), [task.length])
    builder.finalize(str(task.folder / "megatron.idx"))


def megatron_open(task: Task, state: Any) -> Reader:
    """Its indexed file under torch's loader, as its own trainer has it. Its way to resume is a count of samples."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from torch.utils.data import DataLoader

    stored = IndexedDataset(str(task.folder / "megatron"))

    class Tokens:
        def __len__(self) -> int:
            return len(stored)

        def __getitem__(self, index: int) -> np.ndarray:
            return stored[index].astype(task.dtype)

    order = np.random.default_rng(0).permutation(len(stored)).tolist()
    loader = DataLoader(Tokens(), batch_size=task.own_rows, sampler=order, num_workers=task.workers)
    batches = cycle(lambda: loader)
    return Reader(lambda: next(batches))


OPEN: dict[str, Callable[[Task, Any], Reader]] = {
    "ropewalk": ropewalk_open,
    "dataloader": dataloader_open,
    "torchdata": torchdata_open,
    "grain": grain_open,
    "grain-elastic": grain_elastic_open,
    "webdataset": webdataset_open,
    "litdata": litdata_open,
    "mosaicml": mosaicml_open,
    "megatron": megatron_open,
}
WRITE: dict[str, Callable[[Task], None]] = {
    "ropewalk": ropewalk_write,
    "webdataset": webdataset_write,
    "litdata": litdata_write,
    "mosaicml": mosaicml_write,
    "megatron": megatron_write,
}


def python_of(name: str) -> Path | str:
    """The Python in whose environment a loader runs."""
    from harness import environment

    if name in ("ropewalk", "dataloader"):
        return sys.executable
    kind = name.removesuffix("-elastic")
    return environment(f"load-{kind}", PACKAGES[kind])


def save(state: Any, path: Path) -> None:
    """States of peers hold what only pickle takes."""
    import pickle

    path.write_bytes(json.dumps(state).encode() if isinstance(state, dict) and "row" in state else pickle.dumps(state))


def load(path: Path) -> Any:
    import pickle

    data = path.read_bytes()
    return json.loads(data) if data[:1] == b"{" else pickle.loads(data)


def _converted(batch: Any, task: Task) -> Any:
    import torch

    return batch if task.dtype == "uint16" else batch.to(torch.int64)


def _join_group(task: Task) -> None:
    """Ranks of these two know each other by torch.distributed."""
    if task.world > 1:
        import torch

        torch.distributed.init_process_group("gloo", rank=task.rank, world_size=task.world)


def _pretend_torchvision() -> None:
    """Its classes for images import torchvision at the top; tokens do not need it."""
    for name, names in {
        "torchvision": {},
        "torchvision.datasets": {"VisionDataset": object},
        "torchvision.transforms": {},
        "torchvision.transforms.functional": {"to_tensor": None},
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        module.__dict__.update(names)
        sys.modules[name] = module


def rank_environment(task: Task, port: int) -> dict[str, str]:
    """What torchrun would say to this rank."""
    return {
        **os.environ,
        "PYTHONPATH": "",
        "RANK": str(task.rank),
        "LOCAL_RANK": str(task.rank),
        "WORLD_SIZE": str(task.world),
        "LOCAL_WORLD_SIZE": str(task.world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TOKENIZERS_PARALLELISM": "false",
    }
