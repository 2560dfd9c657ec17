"""A run and prepared data of a version with other names of settings continue as if nothing had happened."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ropewalk import flow
from ropewalk.base.seal import sealed_json, sealed_toml
from ropewalk.checkpoint import format as checkpoints
from ropewalk.config.resolved import load_resolved
from ropewalk.flow import run_stages as stages
from ropewalk.prepare import pipeline as preparing

from .tiny import write_tiny

# By hand, and only those that this run's files have: an independent word on what the names were.
PLAN = {
    "batch_size": "batch_rows",
    "microbatch_size": "microbatch_rows",
    "context_method": "context_kind",
    "saved_activations": "activations",
    "bucket_bytes": "fusion_bytes",
    "gradient_compression": "compression",
    "powersgd_rank": "compression_rank",
}
MODEL = {
    "mlp_width": "hidden",
    "rope_theta": "rope_base",
    "tie_embeddings": "tied",
    "norm_position": "norm_place",
}
TRAIN = {
    "batch_size": "batch_rows",
    "validation_sequences": "validate_rows",
    "final_lr_ratio": "final_share",
    "min_delta": "min_gain",
    "window_steps": "memory_steps",
    "max_consecutive": "most_in_a_row",
    "layer_stats_every_steps": "layers_every_steps",
}
CONFIG = {
    "model": MODEL,
    "plan": {"microbatch_size": "microbatch_rows"},
    "parallel": PLAN,
    "train": TRAIN,
    "prepare.tokenizer": {"vocab_size": "vocabulary"},
    "prepare": {"compression": "compress", "artifacts": "stages"},
    "prepare.sources": {"license_key": "licence_key", "license": "licence"},
    "load": {"prefetch_bytes": "ahead_bytes", "autotune": "adapt"},
    "load.remote": {"prefetch_bytes": "ahead_bytes", "max_requests": "requests"},
    "checkpoint": {"compression": "packing", "max_overhead": "overhead"},
    "evaluate": {"max_new_tokens": "new_tokens"},
    "prepare.deduplicate.bloom": {"expected_items": "items", "false_positive_rate": "false_positives"},
    "prepare.deduplicate.near": {"max_distance": "distance"},
    "prepare.deduplicate.substring": {"min_remaining_bytes": "min_left_bytes"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        flow.train("tiny.toml")
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a copy of the run, whose files are those of the version before."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "tiny"
    config = old_config((run / "config.toml").read_text())
    assert '"train.batch_rows" = "tiny.toml' in config
    assert "[prepare.substring]" in config
    (run / "config.toml").write_bytes(sealed_toml(config))
    plan = json.loads((run / "plan.json").read_text())
    phase = plan["phases"][0]
    phase["plan"], phase["spec"] = renamed(phase["plan"], PLAN), renamed(phase["spec"], MODEL)
    del plan["seal"]
    (run / "plan.json").write_bytes(sealed_json(plan | {"format": 3}))
    for path in (run / "checkpoints").glob("step-*/manifest.json"):
        tree = json.loads(path.read_text())
        del tree["checksum"]
        tree["spec"] = renamed(tree["spec"], MODEL)
        body = json.dumps(tree, indent=1, ensure_ascii=False).removesuffix("\n}").encode() + checkpoints._SEAL
        path.write_bytes(body + checkpoints.checksum(body).encode() + checkpoints._END)
    return run


def renamed(tree: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    assert names.keys() <= tree.keys()
    return {names.get(key, key): value for key, value in tree.items()}


def old_config(text: str) -> str:
    """`config.toml` in format 2."""
    table, lines = "", []
    for line in text.split("\n"):
        if found := re.match(r"\[+([a-z.]+)\]+$", line):
            table = found[1]
            line = line.replace("prepare.deduplicate.substring", "prepare.substring")
        elif found := re.match(r"(#? ?)([a-z_]+)( = .*)", line):
            names = next((CONFIG[key] for key in (table, table.partition(".")[0]) if key in CONFIG), {})
            line = found[1] + names.get(found[2], found[2]) + found[3]
        elif found := re.match(r'"(.*)\.([a-z_]+)" = ', line):
            names = CONFIG.get(re.sub(r"\.\d+", "", found[1]), {})
            line = line.replace(f'.{found[2]}"', f'.{names.get(found[2], found[2])}"', 1)
        lines.append(line.replace('"hill-climb"', '"climb"').replace("format = 3", "format = 2"))
    return re.sub(r"(?m)^# seal.*\n?|^seal = .*\n?", "", "\n".join(lines))


def test_a_run_begun_under_the_old_names_continues_to_the_same_weights(here: Path) -> None:
    run = here
    last = run / "checkpoints" / "step-00000006"
    expected = checkpoints.read_checkpoint_manifest(last)
    shutil.rmtree(last)
    record = json.loads((run / "stages" / "train.json").read_text())
    del record["seal"]
    (run / "stages" / "train.json").write_bytes(sealed_json(record | {"result": None}))
    origins = load_resolved(run, flow.Recipe).origins
    assert origins["train.batch_size"].startswith("tiny.toml:")
    view, _ = flow.monitor(run)
    assert not any("config.toml" in line or "plan.json" in line for line in view["missing"])
    assert flow.train("tiny.toml")["step"] == 6
    made = checkpoints.read_checkpoint_manifest(last)
    assert made.tensors == expected.tensors
    assert made.files == expected.files
    assert tomllib.loads((run / "config.toml").read_text())["train"]["batch_size"] == 4
    kinds = [event["kind"] for event in flow_events(run)]
    assert kinds.count("config_changed") == 0


def flow_events(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]


def test_hashes_are_made_of_the_first_names(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that prepared data and trained runs of earlier versions are still found."""
    hashed: list[Any] = []

    def note(module: ModuleType, name: str) -> None:
        before = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *parts: (hashed.extend(parts), before(*parts))[1])

    note(preparing, "key_of")
    note(stages, "fingerprint")
    flow.run("tiny.toml")
    settings = next(each["settings"] for each in hashed if "words" in each)
    assert settings["tokenizer"]["vocabulary"] == 300
    assert settings["substring"]["min_left_bytes"] == 200
    assert settings["sources"][0].keys() >= {"licence", "licence_key"}
    inputs = next(each for each in hashed if "sequence_length" in each)
    assert inputs["model"].keys() >= set(MODEL.values())
    assert inputs["train"]["batch_rows"] == 4
    assert inputs["train"]["schedule"]["final_share"] == 0.1
    (phase,) = next(each["planned"] for each in hashed if "planned" in each)["phases"]
    assert phase["plan"].keys() >= set(PLAN.values())
    assert phase["spec"].keys() >= set(MODEL.values())
    assert next(each["settings"] for each in hashed if "checkpoint" in each)["new_tokens"] == 8
