"""A checkpoint comes back bit for bit, or is refused by name."""

from __future__ import annotations

import dataclasses
import json
import random
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch
import xxhash

from ropewalk.base.errors import DataError
from ropewalk.checkpoint.format import (
    list_checkpoints,
    read_checkpoint_manifest,
    resolve_checkpoint,
    step_path,
    verify_checkpoint,
)
from ropewalk.checkpoint.policy.retention import retain
from ropewalk.checkpoint.read.load import load, set_aside
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from tests.checkpoint.newest import load_newest
from tests.tiny import small_spec

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def state(step: int = 5) -> State:
    draw = torch.Generator().manual_seed(step)
    weight = torch.randn(6, 4, generator=draw)
    return State(
        step=step,
        tokens=step * small_spec().sequence_length,
        seed=3,
        spec=small_spec(),
        data={"row": step},
        model={"embedding.weight": weight, "turned": weight.T.clone().T, "scalar": torch.tensor(float(step))},
        optimizer={"step/embedding.weight": torch.tensor(4.0), "exp_avg/embedding.weight": weight * 2},
        tokenizer='{"naïve": "🪢"}'.encode(),
    )


def identical(left: State, right: State) -> bool:
    def bits(tensors: object) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
        return {
            name: (t.dtype, t.shape, t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, t in dict(tensors).items()  # type: ignore[call-overload]
        }

    plain = ("step", "tokens", "seed", "spec", "data", "tokenizer")
    return all(getattr(left, name) == getattr(right, name) for name in plain) and all(
        bits(getattr(left, name)) == bits(getattr(right, name)) for name in ("model", "optimizer")
    )


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    path = save(tmp_path, state())
    assert path == tmp_path / "step-00000005"
    assert identical(load(path), state())
    assert verify_checkpoint(path) == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)], ids=str)
def test_every_dtype_and_shape_comes_back(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(dtype) if shape == (2, 3) else torch.ones(shape).to(dtype)
    path = save(tmp_path, State(**{**fields(state()), "model": {"x": tensor}, "optimizer": {}}))
    assert identical(load(path), State(**{**fields(state()), "model": {"x": tensor}, "optimizer": {}}))
    described = read_checkpoint_manifest(path).tensors["model"]["x"]
    assert (described.dtype, described.shape) == (str(dtype).removeprefix("torch."), shape)


def fields(value: State) -> dict[str, object]:
    return {name: getattr(value, name) for name in State.__dataclass_fields__}


def test_nan_and_infinity_come_back(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    changed = State(**{**fields(state()), "model": {"x": odd}})
    assert identical(load(save(tmp_path, changed)), changed)


def test_the_optimizer_can_be_left_unread(tmp_path: Path) -> None:
    path = save(tmp_path, state())
    (path / "optimizer.safetensors").unlink()
    assert load(path, optimizer=False).optimizer == {}
    with pytest.raises(DataError, match=r"optimizer\.safetensors: damaged checkpoint: this file is missing"):
        load(path)


def test_200_flipped_bits_are_all_found_in_the_right_file(tmp_path: Path) -> None:
    path = save(tmp_path, state())
    draw = random.Random(0)
    files = sorted(path.iterdir())
    for number in range(200):
        file = files[number % len(files)]
        whole = file.read_bytes()
        position, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        file.write_bytes(whole[:position] + bytes([whole[position] ^ bit]) + whole[position + 1 :])
        wrong = verify_checkpoint(path)
        assert [message.split(":")[0] for message in wrong] == [str(file)], (position, bit)
        with pytest.raises(DataError, match=file.name):
            load(path)
        file.write_bytes(whole)
    assert verify_checkpoint(path) == []


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("cut", [1, 20, None], ids=["one byte less", "20 bytes less", "empty"])
def test_a_cut_file_is_named(tmp_path: Path, file: str, cut: int | None) -> None:
    path = save(tmp_path, state())
    data = (path / file).read_bytes()
    # The manifest ends in a newline, which says nothing.
    (path / file).write_bytes(data[: -cut - (file == "manifest.json")] if cut else b"")
    assert [message.split(":")[0] for message in verify_checkpoint(path)] == [str(path / file)]


def test_the_newest_whole_checkpoint_is_taken_and_the_reason_told(tmp_path: Path) -> None:
    save(tmp_path, state(5))
    newer = save(tmp_path, state(9))
    (newer / "model.safetensors").write_bytes(b"nothing")
    path, found, wrong = load_newest(tmp_path)
    assert path == step_path(tmp_path, 5)
    assert found is not None
    assert identical(found, state(5))
    assert len(wrong) == 1
    assert "step-00000009/model.safetensors: damaged checkpoint: 7 bytes" in wrong[0]


def test_nothing_whole_is_an_error_and_nothing_at_all_is_a_beginning(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "none") == (None, None, [])
    for step in (5, 9):
        (save(tmp_path, state(step)) / "manifest.json").write_text("{}")
    with pytest.raises(DataError) as caught:
        load_newest(tmp_path)
    assert all(words in str(caught.value) for words in ("step-00000005", "step-00000009", "no checkpoint is whole"))


def test_retention_keeps_the_newest_and_sweeps_what_crashes_left(tmp_path: Path) -> None:
    for step in (1, 2, 10, 100_000_000):
        save(tmp_path, state(step))
    (tmp_path / "step-00000003.partial").mkdir()
    gone = retain(tmp_path, keep_last=2)
    assert gone == [step_path(tmp_path, 1), step_path(tmp_path, 2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest.json", "step-00000010", "step-100000000"]
    assert retain(tmp_path, keep_last=5) == []


def test_a_checkpoint_set_aside_is_neither_listed_nor_lost(tmp_path: Path) -> None:
    path = save(tmp_path, state(5))
    for _ in range(2):
        aside = set_aside(save(tmp_path, state(9)))
    assert list_checkpoints(tmp_path) == [path]
    assert (aside.name, identical(load(aside), state(9))) == ("step-00000009.damaged", True)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    path = save(tmp_path, state(5))
    (path / "foreign").write_text("x")
    other = State(**{**fields(state(5)), "tokens": 1})
    save(tmp_path, other)
    assert identical(load(path), other)
    assert sorted(p.name for p in tmp_path.rglob("*")) == sorted(
        [
            "latest.json",
            "step-00000005",
            *("manifest.json", "model.safetensors", "optimizer.safetensors", "tokenizer.json"),
        ]
    )


def test_a_run_a_folder_or_a_step_names_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run" / "checkpoints"
    first, last = save(folder, state(5)), save(folder, state(12))
    assert [resolve_checkpoint(path) for path in (tmp_path / "run", folder, first)] == [last, last, first]
    monkeypatch.chdir(first)
    assert resolve_checkpoint(Path()).resolve() == first.resolve()
    with pytest.raises(DataError, match=r"no checkpoint here; name a `step-...` folder or a run directory"):
        resolve_checkpoint(tmp_path / "elsewhere")
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text("{}")
    with pytest.raises(DataError, match=r"a Hugging Face directory.*`ropewalk model import \S+llama FOLDER`"):
        resolve_checkpoint(tmp_path / "llama")


def test_a_newer_format_is_refused_by_name(tmp_path: Path) -> None:
    path = save(tmp_path, state())
    text = (path / "manifest.json").read_text().replace('"format": 3', '"format": 4')
    body = text[: text.rindex('"checksum": "') + len('"checksum": "')]
    (path / "manifest.json").write_text(f'{body}{xxhash.xxh3_64_hexdigest(body.encode())}"\n}}\n')
    with pytest.raises(DataError, match="this checkpoint has format 4, this ropewalk reads up to 3"):
        load(path)


@pytest.mark.parametrize("version", [1, 2])
def test_older_formats_are_read(tmp_path: Path, version: int) -> None:
    assert identical(load(write_old(tmp_path, state(), version=version)), state())


def test_damage_to_an_older_format_is_found(tmp_path: Path) -> None:
    path = write_old(tmp_path, state(), version=2)
    data = bytearray((path / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model.safetensors").write_bytes(data)
    with pytest.raises(DataError, match=r"model\.safetensors: damaged checkpoint: bytes 0 to"):
        load(path)


def write_old(folder: Path, what: State, *, version: int) -> Path:
    """A checkpoint as the first versions wrote it: one hash a file, no places of tensors, a hash of the sorted tree."""
    path = folder / f"step-{what.step:08d}"
    path.mkdir(parents=True)
    contents = {
        "model.safetensors": (safetensors.torch.save({k: v.contiguous() for k, v in what.model.items()}), what.model),
        "optimizer.safetensors": (safetensors.torch.save(dict(what.optimizer)), what.optimizer),
        "tokenizer.json": (what.tokenizer, {}),
    }
    files = {}
    for name, (data, tensors) in contents.items():
        (path / name).write_bytes(data)
        described = {k: {"dtype": str(t.dtype)[6:], "shape": list(t.shape)} for k, t in tensors.items()}
        files[name] = {"bytes": len(data), "checksum": xxhash.xxh3_64_hexdigest(data), "tensors": described}
    tree = {
        "format": version,
        "step": what.step,
        "tokens": what.tokens,
        "seed": what.seed,
        "spec": dataclasses.asdict(what.spec),
        "data": what.data,
        "files": files,
        "version": "0.1.0",
    }
    if version == 1:
        tree["data"] = {"step": what.step}
        tree["tokens"] = what.data["row"] * what.spec.sequence_length
    text = json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    tree["checksum"] = xxhash.xxh3_64_hexdigest(text.encode())
    (path / "manifest.json").write_text(json.dumps(tree, ensure_ascii=False, indent=1))
    return path


def test_a_copy_of_a_checkpoint_is_a_checkpoint(tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, state()), tmp_path / "elsewhere")
    assert identical(load(tmp_path / "elsewhere"), state())
