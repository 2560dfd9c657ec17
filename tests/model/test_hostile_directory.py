"""Hugging Face directories of strangers are imported as they are or refused by name, within limits."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from ropewalk.base.errors import DamagedModel, DamagedTokenizer, RopewalkError
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.read.model_check import verify_model
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.flow import export_model, import_model
from ropewalk.model.decoder import build
from ropewalk.model.hugging_face.strict import NotImportedError, read_spec
from ropewalk.model.spec import TABLES, spec_tree
from tests.checkpoint.hostile import VALUES, Hang, _places, copied, watched
from tests.tiny import byte_tokenizer, small_spec

FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json")
KINDS = (
    *("config", "config number", "config missing", "config deep", "config text", "index", "index text", "header"),
    *("fifo", "link outside", "link to zero", "folder", "gone", "cut", "grown", "tokenizer", "regex", "chat"),
)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model in one file, and the same with an index of two."""
    folder = tmp_path_factory.mktemp("good")
    spec = small_spec(vocabulary=257, sequence_length=24, layers=2, width=16, heads=2, mlp_width=24)
    tokenizer = byte_tokenizer().to_str(pretty=True).encode()
    model = build(spec, seed=1).state_dict()
    of = State(step=0, tokens=0, seed=0, spec=spec, data={}, model=model, optimizer={}, tokenizer=tokenizer)
    path = save(folder / "ours", of)
    export_model(path, folder / "one")
    shutil.copytree(folder / "one", folder / "two")
    tensors = safetensors.torch.load_file(folder / "two/model.safetensors")
    (folder / "two/model.safetensors").unlink()
    names, places = sorted(tensors), {}
    for number, part in enumerate((names[:5], names[5:])):
        safetensors.torch.save_file({name: tensors[name] for name in part}, folder / f"two/part-{number}.safetensors")
        places |= dict.fromkeys(part, f"part-{number}.safetensors")
    (folder / "two/model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return {"one": folder / "one", "two": folder / "two"}


def weights_of(folder: Path) -> dict[str, bytes]:
    """The tensors of a directory, by the reference reader."""
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= safetensors.torch.load_file(file)
    return {name: tensor.contiguous().view(torch.uint8).numpy().tobytes() for name, tensor in found.items()}


def examine(source: Path, place: Path, seed: int) -> str:
    """Whether a mutated directory was refused; fails where the import does what it must not."""
    secret = place / "secret.safetensors"
    if not secret.exists():
        shutil.copy(next(source.glob("*.safetensors")), secret)
    folder, out = copied(source, place / "case" / "theirs"), place / "case" / "out"
    told = f"seed {seed}: {mutate(folder, seed, secret)}"
    shutil.rmtree(out, ignore_errors=True)
    try:
        with watched(inside=place / "case", around=place) as wrong:
            made = import_model(folder, out)
    except RopewalkError:
        assert not wrong, f"{told}: opened {wrong}"
        return "refused"
    except (Exception, Hang) as error:
        raise AssertionError(f"{told}: {type(error).__name__}: {error}") from error
    assert not wrong, f"{told}: opened {wrong}"
    path = Path(made["checkpoint"])
    assert verify_model(path) == [], told
    assert all(tensor.isfinite().all() for tensor in dict(load(path).model).values() if hasattr(tensor, "isfinite"))
    # What was accepted goes out as it came in, whatever was changed beside it.
    exported = place / "case" / "again"
    shutil.rmtree(exported, ignore_errors=True)
    export_model(path, exported)
    changed_norms = json.loads((folder / "config.json").read_text()).get("rms_norm_eps", 1e-6) != 1e-6
    assert changed_norms or weights_of(exported) == weights_of(folder), f"{told}: other weights"
    return "imported"


def mutate(folder: Path, seed: int, secret: Path) -> str:
    draw, kind = random.Random(seed), KINDS[seed % len(KINDS)]
    target = folder / draw.choice([name for name in os.listdir(folder) if name != "generation_config.json"])
    weights = draw.choice(sorted(folder.glob("*.safetensors")))
    config = json.loads((folder / "config.json").read_text())
    if kind in ("config", "config number", "config missing"):
        key = draw.choice(sorted(config))
        if kind == "config":
            config[key] = draw.choice(VALUES)
        elif kind == "config missing":
            del config[key]
        else:
            old = config[key] if isinstance(config[key], (int, float)) else 1
            config[key] = draw.choice([-old, old + 1, old * 2, old / 2, 10**9, 1e9, 1e999, 1e-320, 1 << 70])
        (folder / "config.json").write_text(json.dumps(config))
        return f"{kind} {key} {config.get(key)!r:.80}"
    if kind in ("config deep", "config text", "index text"):
        name = FILES[0] if kind.startswith("config") else FILES[4]
        text = draw.choice(
            ["[" * 100_000, "{", "NaN", "[]", "7", '{"a": 1, "a": 2}', "\ufffe", '{"model_type": Infinity}']
        )
        deep = json.dumps({**config, "rope_scaling": "@"}).replace('"@"', "[" * 900 + "]" * 900)
        (folder / name).write_text(deep if kind == "config deep" else text)
        return f"{kind} {text[:20]}"
    if kind == "index":
        for file in folder.glob("model.safetensors"):
            file.rename(folder / "part-0.safetensors")
        index = {"weight_map": {"model.norm.weight": "part-0.safetensors"}}
        path = draw.choice(list(_places(index)))
        value = draw.choice(VALUES)
        (index if len(path) == 1 else index["weight_map"])[path[-1]] = value
        (folder / FILES[4]).write_text(json.dumps(index))
        return f"{kind} {path} {value!r:.80}"
    if kind == "header":
        data = weights.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        name = draw.choice(sorted(header))
        if name != "__metadata__":
            key = draw.choice(["dtype", "shape", "data_offsets"])
            header[name][key] = draw.choice([[1 << 62], [0, 1 << 40], [-1, 4], "F8_E4M3", "I64", "BF16", [], None])
        text = json.dumps(header).encode()
        length = draw.choice([len(text), len(text), len(text), 1 << 62, 0])
        weights.write_bytes(struct.pack("<Q", length) + text + data[8 + size :])
        return f"{kind} {name}"
    if kind in ("tokenizer", "regex"):
        path = folder / "tokenizer.json"
        tree = json.loads(path.read_text())
        if kind == "regex":
            split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
            tree["pre_tokenizer"] = split
        else:
            tree[draw.choice(sorted(tree))] = draw.choice([v for v in VALUES if not isinstance(v, float)])
        path.write_text(json.dumps(tree))
    elif kind == "chat":
        bomb = draw.choice(["{% for i in range(10**12) %}x{% endfor %}", "{{ ''.__class__.__mro__ }}", 7, ["x"]])
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": bomb}))
    elif kind == "fifo":
        target.unlink()
        os.mkfifo(target)
    elif kind.startswith("link"):
        target.unlink()
        target.symlink_to(secret if kind == "link outside" else "/dev/zero")
    elif kind in ("folder", "gone"):
        target.unlink()
        if kind == "folder":
            target.mkdir()
    elif kind == "cut":
        target.write_bytes(target.read_bytes()[: draw.randrange(target.stat().st_size)])
    else:
        target.write_bytes(target.read_bytes() + b"\0" * 100)
    return f"{kind} {target.name}"


@pytest.mark.parametrize("seeds", [range(18), pytest.param(range(18, 518), marks=pytest.mark.slow)], ids=len)
def test_mutated_directories_are_imported_as_they_are_or_refused(
    good: dict[str, Path], tmp_path: Path, seeds: range
) -> None:
    results = [examine(good[draw_source(seed)], tmp_path, seed) for seed in seeds]
    assert len(seeds) // 2 < results.count("refused") < len(seeds)


def draw_source(seed: int) -> str:
    return "one" if seed // len(KINDS) % 2 == 0 else "two"


# The findings, one by one


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_hidden_layers", 10**9, "layers"),
        ("num_hidden_layers", 60_000, "cannot be a model of 60000 layers"),
        ("rms_norm_eps", float("nan"), "NaN"),
        ("rope_theta", float("inf"), "Infinity"),
        ("rms_norm_eps", 1e-300, "between 1e-12 and 0.1"),
        ("hidden_size", 16.0, "whole number"),
        ("hidden_act", ["silu"], "hidden_act"),
        ("rope_scaling", [1], "must be an object"),
    ],
    ids=str,
)
def test_a_config_of_a_stranger_is_read_strictly(
    good: dict[str, Path], tmp_path: Path, key: str, value: Any, words: str
) -> None:
    folder = copied(good["one"], tmp_path / "theirs")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(DamagedModel, match=words):
        import_model(folder, tmp_path / "out")


@pytest.mark.parametrize("name", ["theirs:Norm", "os:_exit", "torch:os._exit"])
def test_a_model_of_a_stranger_chooses_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "theirs.py").write_text("raise SystemExit('imported')")
    monkeypatch.chdir(tmp_path)
    for key in TABLES:
        with pytest.raises(NotImportedError, match="which nothing here has imported"):
            read_spec({**spec_tree(small_spec()), key: name}, name="a model")


@pytest.mark.parametrize("places", [[], 7, None, {"a": 1}], ids=str)
def test_an_index_of_another_type_is_refused(good: dict[str, Path], tmp_path: Path, places: Any) -> None:
    folder = copied(good["two"], tmp_path / "theirs")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(DamagedModel, match="weight_map"):
        import_model(folder, tmp_path / "out")


def test_json_of_any_depth_is_refused(good: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(good["one"], tmp_path / "theirs")
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(DamagedModel, match="nested too deeply"):
        import_model(folder, tmp_path / "out")


def test_a_fifo_named_by_the_index_is_never_opened(good: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(good["two"], tmp_path / "theirs")
    (folder / "part-1.safetensors").unlink()
    os.mkfifo(folder / "part-1.safetensors")
    with pytest.raises(DamagedModel, match=r"part-1\.safetensors.*not a regular file"):
        import_model(folder, tmp_path / "out")


def test_links_lead_into_the_cache_of_the_hub_and_nowhere_else(good: dict[str, Path], tmp_path: Path) -> None:
    cache = tmp_path / "models--them--model"
    shutil.copytree(good["one"], cache / "blobs")
    folder = cache / "snapshots" / "abc"
    folder.mkdir(parents=True)
    for file in (cache / "blobs").iterdir():
        (folder / file.name).symlink_to(f"../../blobs/{file.name}")
    assert import_model(folder, tmp_path / "out")["layout"] == "llama"
    elsewhere = copied(good["one"], tmp_path / "theirs")
    (elsewhere / "model.safetensors").unlink()
    (elsewhere / "model.safetensors").symlink_to(cache / "blobs" / "model.safetensors")
    with pytest.raises(DamagedModel, match="outside its folder"):
        import_model(elsewhere, tmp_path / "out2")


def test_a_regular_expression_without_end_is_one_clean_error(good: dict[str, Path], tmp_path: Path) -> None:
    folder = copied(good["one"], tmp_path / "theirs")
    tree = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (folder / "tokenizer.json").write_text(json.dumps({**tree, "pre_tokenizer": split}))
    with pytest.raises(DamagedTokenizer, match=r"tokenizer\.json: this tokenizer is not used"):
        import_model(folder, tmp_path / "out")
