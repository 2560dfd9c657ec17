"""Checkpoints of strangers are read as written or refused by name; `verify` and every reader say the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch import Tensor

from ropewalk.base.errors import DamagedCheckpoint, DamagedTokenizer, DataError, RopewalkError, StorageError, UserError
from ropewalk.checkpoint.commit import Attempt, commit
from ropewalk.checkpoint.disk import LocalDisk
from ropewalk.checkpoint.format import parse_checkpoint_manifest, read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.read.load import CheckpointReader, load, load_weights
from ropewalk.checkpoint.read.load_latest import DiskCheckpoints
from ropewalk.checkpoint.read.model_check import check_weights, verify_model
from ropewalk.checkpoint.read.reshard import reshard
from ropewalk.checkpoint.regions import Region, tiles
from ropewalk.checkpoint.run_state import State, groups_of, manifest_of, shards_to_write
from ropewalk.checkpoint.shard_compression import CompressionPolicy
from ropewalk.checkpoint.write.save import save, write_tensor_files
from ropewalk.evaluate.from_checkpoint import load_model
from ropewalk.flow import export_model, reshard_checkpoint
from ropewalk.model.decoder import build
from ropewalk.model.spec import Spec
from ropewalk.parallel.placement import whole_placement
from ropewalk.train.start import load_start
from tests.checkpoint import hostile
from tests.checkpoint.newest import searched
from tests.tiny import byte_tokenizer, small_spec

Weights = dict[str, Tensor]


def spec() -> Spec:
    return small_spec(vocabulary=257, sequence_length=24, layers=1, width=16, heads=2, mlp_width=24)


def state() -> State:
    weights = build(spec(), seed=1).state_dict()
    moments = {f"exp_avg/{name}": tensor * 2 for name, tensor in weights.items()}
    moments |= {f"step/{name}": torch.tensor(3.0) for name in weights}
    tokenizer = byte_tokenizer().to_str(pretty=True).encode()
    return State(
        step=5, tokens=120, seed=3, spec=spec(), data={"row": 5}, model=weights, optimizer=moments, tokenizer=tokenizer
    )


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same state as one rank, as two ranks and packed."""
    folder = tmp_path_factory.mktemp("good")
    one = save(folder / "one", state())
    attempt, disk = Attempt(), LocalDisk()
    parts = {group: list(shards_to_write(tensors)) for group, tensors in groups_of(state()).items()}
    packed = commit(
        folder / "packed",
        manifest_of(state()),
        write=lambda place: write_tensor_files(
            place, parts, tokenizer=state().tokenizer, disk=disk, attempt=attempt, policy=CompressionPolicy("on")
        ),
        disk=disk,
    )
    return {"one": one, "two": reshard(one, folder / "two", mesh=(2,)), "packed": packed}


def readers(out: Path) -> dict[str, Callable[[Path], Weights]]:
    """Whatever reads a checkpoint, each giving the weights as it got them."""

    def started(path: Path) -> Weights:
        found: Weights = {}
        whole = lambda group, name, shape: whole_placement(shape)  # noqa: E731
        load_start(
            str(path),
            spec(),
            state().tokenizer,
            seed=0,
            choose=whole,
            load=lambda weights: found.update({name: weights[name].local for name in weights}),  # type: ignore[union-attr]
        )
        return found

    def exported(path: Path) -> Weights:
        export_model(path, out / "exported")
        return load_weights(path).model  # type: ignore[return-value]

    def continued(path: Path) -> Weights:
        found = searched(DiskCheckpoints(path.parent, check=check_weights))
        assert found.state
        return dict(found.state.model)  # type: ignore[arg-type]

    def resharded(path: Path) -> Weights:
        made = reshard_checkpoint(path, out / "resharded", ranks=2)
        return dict(load(Path(made["checkpoint"])).model)  # type: ignore[arg-type]

    return {
        "continue": continued,
        "generate": lambda path: dict(load_model(path, device=torch.device("cpu"))[0].state_dict()),
        "export": exported,
        "reshard": resharded,
        "start": started,
    }


def bits(weights: Weights) -> dict[str, bytes]:
    return {
        name: t.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in weights.items()
    }


def examine(source: Path, place: Path, seed: int) -> tuple[str, str]:
    """What a mutation did, and whether it was refused; fails where a reader does what it must not."""
    place.mkdir(exist_ok=True)
    secret = place / "secret.txt"
    secret.write_text("TOP SECRET " * 400)
    path = hostile.copied(source, place / "case" / "step-00000005")
    told = f"seed {seed}, {source.parent.name}: {hostile.mutate(path, seed, secret)}"
    out = place / "case" / "out"
    with hostile.watched(inside=place / "case", around=place) as wrong:
        problems = verify_model(path)
    assert not wrong, f"{told}: verify opened {wrong}"
    for name, read in readers(out).items():
        shutil.rmtree(out, ignore_errors=True)
        try:
            with hostile.watched(inside=place / "case", around=place) as wrong:
                found = bits(read(path))
        except RopewalkError as error:
            # Another model than ours, or one that no layout holds, is whole all the same.
            other = isinstance(error, UserError) and not isinstance(error, DataError) and name in ("export", "start")
            if not (problems or other):
                raise AssertionError(f"{told}: verify says whole, {name}: {error}") from error
        except (Exception, hostile.Hang) as error:
            raise AssertionError(f"{told}: {name}: {type(error).__name__}: {error}") from error
        else:
            sound = bits(state().model) if problems else hostile.expected(path)
            assert found == sound, f"{told}: {name} gives other weights than were written"
        assert not wrong, f"{told}: {name} opened {wrong}"
    return told, "refused" if problems else "whole"


@pytest.mark.parametrize("seeds", [range(43), pytest.param(range(43, 1043), marks=pytest.mark.slow)], ids=len)
def test_verify_and_every_reader_agree_on_mutated_checkpoints(
    good: dict[str, Path], tmp_path: Path, seeds: range
) -> None:
    bases = list(good.values())
    results = [examine(bases[seed % len(bases)], tmp_path, seed)[1] for seed in seeds]
    assert len(seeds) // 2 < results.count("refused") < len(seeds)


def test_the_good_ones_are_whole(good: dict[str, Path], tmp_path: Path) -> None:
    for path in good.values():
        assert verify_model(path) == []
        for name, read in readers(tmp_path / path.parent.name).items():
            assert bits(read(path)) == bits(state().model), name


# The findings, one by one


def changed(good: dict[str, Path], tmp_path: Path, change: Callable[[dict[str, Any], Path], None]) -> Path:
    path = hostile.copied(good["one"], tmp_path / "step-00000005")
    tree = hostile.unsealed(path)
    change(tree, path)
    hostile.seal(path, tree)
    return path


def test_a_name_outside_and_a_negative_offset_read_nothing(good: dict[str, Path], tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_bytes(b"TOP SECRET " * 1000)

    def steal(tree: dict[str, Any], _: Path) -> None:
        chunk = {"bytes": secret.stat().st_size, "chunk_bytes": 1 << 22, "chunks": [xxhash.xxh3_64_hexdigest(b"")]}
        tree["files"]["../secret.txt"] = chunk
        (piece,) = tree["tensors"]["model"]["norm.weight"]["pieces"]
        piece |= {"file": "../secret.txt", "begin": -160}

    path = changed(good, tmp_path, steal)
    with (
        hostile.watched(inside=path, around=tmp_path) as wrong,
        pytest.raises(DamagedCheckpoint, match="is not a valid file name"),
    ):
        load_weights(path)
    assert not wrong
    assert verify_checkpoint(path)


@pytest.mark.parametrize("pieces", ["none", "beyond"])
def test_memory_that_nobody_filled_is_no_weight(good: dict[str, Path], tmp_path: Path, pieces: str) -> None:
    def empty(tree: dict[str, Any], _: Path) -> None:
        entry = tree["tensors"]["model"]["norm.weight"]
        entry["pieces"] = [] if pieces == "none" else [{**entry["pieces"][0], "offset": [1000]}]

    path = changed(good, tmp_path, empty)
    assert "norm.weight: its" in verify_checkpoint(path)[0]
    with pytest.raises(DamagedCheckpoint, match=r"norm\.weight"):
        CheckpointReader(path).tensor("model", "norm.weight")


def test_a_model_of_a_billion_layers_is_refused_at_once(good: dict[str, Path], tmp_path: Path) -> None:
    path = changed(good, tmp_path, lambda tree, _: tree["spec"].update(layers=10**9))
    assert "`layers`" in verify_model(path)[0]
    path = changed(good, tmp_path, lambda tree, _: tree["spec"].update(layers=60_000))
    assert "are too few for a model of 60000 layers" in verify_model(path)[0]


def test_a_regular_expression_without_end_is_one_clean_error(good: dict[str, Path], tmp_path: Path) -> None:
    def slow(tree: dict[str, Any], path: Path) -> None:
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
        (path / "tokenizer.json").write_text(json.dumps({**tokenizer, "pre_tokenizer": split}))
        hostile.rehash(path, tree, "tokenizer.json")

    path = changed(good, tmp_path, slow)
    with pytest.raises(DamagedTokenizer, match=r"tokenizer.json: this tokenizer is not used"):
        load_model(path, device=torch.device("cpu"))
    assert "is not used" in verify_model(path)[0]


def test_a_fifo_is_never_opened(good: dict[str, Path], tmp_path: Path) -> None:
    path = hostile.copied(good["one"], tmp_path / "step-00000005")
    for name in ("model.safetensors", "manifest.json"):
        (path / name).unlink()
        os.mkfifo(path / name)
        with hostile.watched(inside=path, around=tmp_path, seconds=30) as wrong:
            assert "not a regular file" in verify_checkpoint(path)[0]
        assert not wrong


def test_pieces_of_a_shard_need_not_cover_but_those_of_a_checkpoint_do(good: dict[str, Path]) -> None:
    path = good["two"]
    tree = hostile.unsealed(path)
    for entries in tree["tensors"].values():
        for entry in entries.values():
            entry["pieces"] = entry["pieces"][:1]
    hostile.seal(target := hostile.copied(path, path.with_name("shard")), tree)
    text = (target / "manifest.json").read_bytes()
    assert parse_checkpoint_manifest(text, target, shard=True)
    with pytest.raises(DamagedCheckpoint, match="pieces hold"):
        parse_checkpoint_manifest(text, target)


def test_tiles_are_told_from_gaps_and_overlaps() -> None:
    grid = [Region((i, j), (1, 2)) for i in range(60) for j in range(0, 80, 2)]
    assert tiles((60, 80), grid)
    assert not tiles((60, 80), [*grid[:-1], grid[0]])
    assert not tiles((60, 80), grid[:-1])
    pinwheel = [
        Region((0, 0), (1, 2)),
        Region((0, 2), (2, 1)),
        Region((2, 1), (1, 2)),
        Region((1, 0), (2, 1)),
        Region((1, 1), (1, 1)),
    ]
    assert tiles((3, 3), pinwheel)
    assert not tiles((3, 3), [*pinwheel[:-1], Region((1, 2), (1, 1))])
    assert tiles((), [Region((), ())])
    assert not tiles((), [Region((), ()), Region((), ())])
    assert tiles((0, 3), [])


def test_more_than_the_machine_has_is_no_traceback(good: dict[str, Path]) -> None:
    reader = CheckpointReader(good["one"])
    with pytest.raises(StorageError, match="more than this machine has"):
        reader._memory(1 << 60, "x")


def test_a_checkpoint_of_a_newer_version_is_not_called_damaged(good: dict[str, Path], tmp_path: Path) -> None:
    path = changed(good, tmp_path, lambda tree, _: tree.update(format=99))
    with pytest.raises(DataError, match="upgrade ropewalk") as caught:
        read_checkpoint_manifest(path)
    assert not isinstance(caught.value, DamagedCheckpoint)
