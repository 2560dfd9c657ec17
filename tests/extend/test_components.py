"""A user's norm and activation, each in one file beside the recipe: planned, trained, saved and loaded like ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.cli.main import main
from ropewalk.config.plugins import load_plugin
from ropewalk.model.activations import saved_bytes
from ropewalk.model.protocol import build_model
from ropewalk.model.spec import Spec, spec_of_tree, spec_tree
from tests.flow.tiny import write_tiny
from tests.model.specs import small
from tests.model.test_activations import kept_bytes

HERE = Path(__file__).parent
NORM = ["model.norm=norms:NORM", "model.norm_settings.epsilon=0.001", "model.kv_heads=2"]
SWISH = ["model.mlp=activations:Swish", "model.mlp_settings.beta=1.5"]
TWO = ["--nproc", "2"]

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """The command line in a folder with a prepared recipe and the user's files."""
    write_tiny(tmp_path)
    for name in ("norms.py", "activations.py"):
        assert len((HERE / name).read_text().splitlines()) < 60
        shutil.copy(HERE / name, tmp_path)
    monkeypatch.chdir(tmp_path)

    def called(*words: str) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as stop:
            main(list(words))
        return int(stop.value.code or 0), *capsys.readouterr()

    return called


def losses(run: str) -> list[float]:
    events = (json.loads(line) for line in Path("runs", run, "events.jsonl").read_text().splitlines())
    return [event["loss"] for event in events if event["kind"] == "step"]


def trained(call: Call, name: str, *words: str) -> list[float]:
    status, _, err = call("train", "tiny.toml", f"name={name}", *words)
    assert status == 0, err
    return losses(name)


def test_a_norm_of_a_user_trains_alone_with_zero_3_and_on_tensor_ranks(call: Call) -> None:
    alone = trained(call, "alone", *NORM)
    assert alone != trained(call, "other", *NORM[::2], "model.norm_settings.epsilon=0.5")
    for name, parallel in (
        ("zero", ["parallel.shard=2", "parallel.zero=3"]),
        ("tensor", ["parallel.tensor=2", "parallel.sequence=true"]),
    ):
        assert trained(call, name, *NORM, *parallel, *TWO) == pytest.approx(alone, rel=1e-4)
    plan = json.loads(Path("runs/alone/plan.json").read_text())["phases"][0]["spec"]
    assert (plan["norm"], plan["norm_settings"]) == ("norms:NORM", {"epsilon": 0.001})
    status, out, err = call("evaluate", "runs/alone", "--json")
    assert status == 0, err
    assert json.loads(out)["bits_per_byte"] > 0
    # Other commands find the norm by the run. A checkpoint alone does not choose what is imported, and is not damaged.
    newest = str(list_checkpoints(Path("runs/alone/checkpoints"))[-1])
    program = [sys.executable, "-m", "ropewalk"]
    shown = subprocess.run([*program, "generate", "runs/alone", "--tokens", "2"], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    verified = subprocess.run([*program, "checkpoint", "verify", "runs/alone"], capture_output=True, text=True)
    assert (verified.returncode, verified.stdout.count(": whole")) == (0, 2), verified.stderr
    alone = subprocess.run([*program, "checkpoint", "verify", newest], capture_output=True, text=True)
    assert (alone.returncode, "name the run's directory" in alone.stderr) == (2, True)
    assert "damaged" not in alone.stderr + alone.stdout
    status, _, err = call("model", "export", "runs/alone", "out")
    assert (status, "needs `model.norm` rms, not norms:NORM" in err) == (2, True)
    status, _, err = call("train", "tiny.toml", *NORM[:1], "model.norm_settings.epsilon=0")
    assert (status, "it must be above 0" in err) == (2, True)


def test_an_activation_of_a_user_trains(call: Call) -> None:
    found = trained(call, "swish", *SWISH)
    assert found[-1] < found[0]
    assert found != trained(call, "other", *SWISH[:1])


@pytest.mark.parametrize(
    "changes",
    [
        {"norm": "tests.extend.norms:NORM"},
        {"norm": "tests.extend.norms:NORM", "norm_position": "post"},
        {"mlp": "tests.extend.activations:Swish", "bias": True},
    ],
)
def test_declarations_of_a_user_are_exact(changes: dict[str, object]) -> None:
    spec = small(**changes)
    model = build_model(spec, seed=0)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == spec.shapes()
    for names in (None, [name for name in spec.shapes() if "norm" in name], ["blocks.1.mlp.down.weight"]):
        expected = kept_bytes(spec, rows=2, precision="fp32", trained=names)
        assert saved_bytes(spec, rows=2, precision="fp32", trained=names) == expected


def test_a_spec_with_settings_of_a_user_is_written_and_read_back() -> None:
    settings = load_plugin("tests.extend.activations:Swish")(beta=3.0)
    spec = small(mlp="tests.extend.activations:Swish", mlp_settings=settings)
    tree = json.loads(json.dumps(spec_tree(spec)))
    assert tree["mlp_settings"] == {"beta": 3.0}
    assert spec_of_tree(tree) == spec
    assert not {"kind", "norm_settings"} & spec_tree(small()).keys()


def shifted(x_BTC: Tensor, positions_BT: Tensor, spec: Spec) -> Tensor:
    """A kind of position: the number of the token at the first feature."""
    return torch.cat([x_BTC[..., :1] + positions_BT.unsqueeze(-1), x_BTC[..., 1:]], dim=-1)


def test_positions_of_a_user_are_added_to_the_embedding() -> None:
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    plain, moved = (build_model(small(position=p), seed=0) for p in ("none", f"{__name__}:shifted"))
    assert torch.equal(plain(tokens)[0, 0], moved(tokens)[0, 0])
    assert not torch.allclose(plain(tokens)[0, 3], moved(tokens)[0, 3])
