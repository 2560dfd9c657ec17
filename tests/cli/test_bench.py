"""`ropewalk bench train` and `ropewalk profile`, as a user meets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.progress import amount
from ropewalk.model.config import Model
from ropewalk.model.sizes import size_of
from ropewalk.model.spec import resolve
from ropewalk.plan.forecast import memory
from ropewalk.plan.roofline import KINDS

from .conftest import Call

FIGURES = {
    *("tokens_per_s", "mfu_full", "mfu_causal", "step_ms", "spread", "profiled_ms", "memory_bytes", "loss", "steps"),
    *("least_ms", "distance", "kinds"),
}
DEVICE = {"device", "device_name", "torch", "ceilings", "nominal_flops", "nominal_bytes", "peak_flops", "peak_from"}


def check_figures(found: dict[str, Any]) -> None:
    assert found.keys() >= FIGURES
    assert [kind["kind"] for kind in found["kinds"]] == list(KINDS)
    assert sum(kind["ms"] for kind in found["kinds"]) == pytest.approx(found["step_ms"])
    assert sum(kind["share"] for kind in found["kinds"]) == pytest.approx(1)
    assert sum(kind["least_ms"] for kind in found["kinds"]) == pytest.approx(found["least_ms"])
    for kind in found["kinds"]:
        assert kind["distance"] is None or kind["distance"] == pytest.approx(kind["ms"] / kind["least_ms"])
    assert 0 < found["mfu_causal"] < found["mfu_full"]


def answers(monkeypatch: pytest.MonkeyPatch, **found: dict[str, Any]) -> list[dict[str, Any]]:
    """Contenders that answer at once; what each was asked."""
    asked = []

    def measured(contender: str, job: dict[str, Any], progress: Any) -> dict[str, Any]:
        asked.append({"contender": contender, **job})
        return found[contender.replace(" ", "_")]

    monkeypatch.setattr("ropewalk.flow.training_bench._measured", measured)
    return asked


def step(*, ms: float = 10.0, idle: float = 0.0) -> dict[str, Any]:
    rest = (ms - idle) / 5
    return {
        "device": "cuda:0",
        "device_name": "NVIDIA H200",
        "torch": "2.11.0",
        "ceilings": {"flops": 8e14, "bytes": 4e12, "gemm_flops": None},
        "nominal_flops": 989e12,
        "nominal_bytes": 4.8e12,
        "steps": 12,
        "step_ms": ms,
        "spread": 0.01,
        "profiled_ms": 1.2 * ms,
        "memory_bytes": 5 << 30,
        "loss": 10.8,
        "kinds": {**dict.fromkeys(KINDS, rest), "idle": idle},
    }


def test_optimizer_and_recomputation_may_be_chosen(call: Call) -> None:
    options = ("--steps", "1", "--device", "cpu", "--precision", "fp32", "--optimizer", "adamw-8bit")
    ended = call("bench", "train", "--size", "tiny", *options, "--recompute", "attention")
    assert ended.status == 0, ended.err
    assert "adamw-8bit" in ended.out
    assert "attention recomputed" in ended.out


def test_the_smallest_size_is_measured_beside_a_peer(call: Call) -> None:
    options = ("--steps", "2", "--device", "cpu", "--precision", "fp32")
    ended = call("bench", "train", "--size", "tiny", *options, "--peer", "transformers", "--json")
    assert ended.status == 0, ended.err
    (size,) = json.loads(ended.out)["sizes"]
    assert size.keys() >= DEVICE
    assert (size["size"], size["batch_size"], size["microbatch_size"]) == ("tiny", 4, 2)
    assert size["model"] == {"layers": 2, "width": 64, "mlp_width": 128}
    assert (size["peak_from"], size["peak_flops"]) == ("measured", size["ceilings"]["flops"])
    assert [each["contender"] for each in size["contenders"]] == ["ropewalk", "transformers"]
    for each in size["contenders"]:
        assert each["error"] is None
        check_figures(each)
        assert each["steps"] == 2


def test_the_table_has_every_contender_and_says_what_failed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(
        monkeypatch,
        ropewalk=step(ms=100.0, idle=5.0),
        transformers=step(ms=200.0, idle=5.0),
        transformers_compiled={"error": "out of memory"},
    )
    ended = call("bench", "train", "--size", "124m", "--device", "cuda", "--peer", "transformers", "--steps", "7")
    assert ended.status == 0, ended.err
    assert [(job["contender"], job["batch_size"], job["steps"]) for job in asked] == [
        ("ropewalk", 64, 7),
        ("transformers", 64, 7),
        ("transformers compiled", 64, 7),
    ]
    lines = [line.split() for line in ended.out.splitlines()]
    speed = 64 * 1024 / 0.1
    # 6 N of the matrices, with the head, and 12 L C T for attention in full.
    flops = 6 * (12 * 12 * 768**2 + 50304 * 768) + 12 * 12 * 768 * 1024
    assert ["ropewalk", f"{speed:,.0f}", "100.00", f"{speed * flops / 989e12:.1%}"] in [line[:4] for line in lines]
    assert any(line[:3] == ["transformers", f"{speed / 2:,.0f}", "200.00"] and "2.00" in line for line in lines)
    assert "transformers compiled: out of memory" in ended.out
    assert "NVIDIA H200, torch 2.11.0: matmuls 800 TFLOP/s (data sheet 989 TFLOP/s)" in ended.out
    # 32 bytes a weight at 4 TB/s.
    (optimizer,) = [line for line in lines if line[:1] == ["optimizer"]]
    assert optimizer[1] == f"{32 * 124_475_904 / 4e12 * 1e3:.2f}"


def test_out_of_memory_says_which_microbatch_would_fit(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    size = size_of("124M")
    spec = resolve(size.model, vocabulary=size.vocabulary, sequence_length=size.sequence_length)
    room = memory(spec, rows=16, precision="bf16", device="cuda").total + 1
    answers(monkeypatch, ropewalk={"error": "out of memory", "memory_bytes": room})
    ended = call("bench", "train", "--size", "124M", "--device", "cuda", "--precision", "bf16")
    assert ended.status == 2
    assert (
        f"124M: out of memory, with 64 sequences of 1024 tokens per microbatch ({amount(room, 'B')} available)"
        in ended.err
    )
    assert "the forecast fits with --microbatch 16" in ended.err


def test_a_cpu_is_not_asked_for_more_memory_than_there_is(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch)
    for size in ("1.3B", "7B"):
        ended = call("bench", "train", "--size", size, "--batch", "4096", "--microbatch", "4096", "--device", "cpu")
        assert ended.status == 2
        assert f"{size}: not started, because the forecast does not fit, with 4096 sequences of" in ended.err
        assert "out of memory" not in ended.err
    assert asked == []


def test_a_single_sequence_of_one_token_is_in_the_singular(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ropewalk=step(idle=1.0))
    ended = call("bench", "train", "--size", "124M", "--device", "cuda", "--batch", "1", "--length", "1")
    assert "parameters, 1 sequence of 1 token in 1 microbatch, " in ended.out
    ended = call("bench", "train", "--size", "7B", "--device", "cpu", "--batch", "1", "--length", "100000000")
    assert "with 1 sequence of 100000000 tokens per microbatch" in ended.err
    assert ended.err.rstrip().endswith("available); choose a smaller --size or --length")


def test_only_idleness_is_left_out_of_the_table_where_it_takes_no_time(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, ropewalk={**step(), "kinds": {**dict.fromkeys(KINDS, 0.0), "other": 10.0}})
    ended = call("bench", "train", "--size", "124M", "--device", "cuda")
    shown = {line.split()[0] for line in ended.out.splitlines() if line}
    assert shown & set(KINDS) == set(KINDS) - {"idle"}


def test_a_gpu_that_is_not_there_is_said_in_a_line(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    ended = call("bench", "train", "--size", "tiny", "--device", "cuda")
    assert ended.status == 2
    assert ended.err.splitlines()[-1] == "tiny: torch sees no GPU; drop --device or use --device cpu"


def test_the_model_of_a_size_may_be_written_in_a_recipe(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ropewalk=step(idle=1.0))
    ended = call("bench", "train", "--size", "350M", "--device", "cuda")
    (line,) = [line for line in ended.out.splitlines() if line.startswith("model = ")]
    model = tomllib.loads(line)["model"]
    assert Model(**model) == size_of("350M").model


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--size", "125M"], "no size `125M`; did you mean `124M`? There are tiny, 124M, 350M, 1.3B, 7B"),
        (["--size", "tiny", "--peer", "keras"], "no peer `keras`; there are transformers"),
        (
            ["--size", "tiny", "--compile", "--recompute", "attention"],
            "--compile does not work with --recompute attention",
        ),
        (["--size", "tiny", "--batch", "6", "--microbatch", "4"], "--microbatch 4 does not divide --batch 6"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_is(call: Call, options: list[str], message: str) -> None:
    ended = call("bench", "train", *options)
    assert ended.status == 2
    assert message in ended.err


def test_longer_rows_are_taken_fewer_at_a_time(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answers(monkeypatch, ropewalk=step(idle=1.0))
    assert call("bench", "train", "--size", "124M", "--device", "cuda", "--length", "4096").status == 0
    assert call("bench", "train", "--size", "124M", "--device", "cuda", "--batch", "96").status == 0
    assert [(job["batch_size"], job["microbatch_size"]) for job in asked] == [(64, 16), (96, 48)]


def test_a_recipe_is_profiled_without_its_data_or_a_run(call: Call, tiny: Path) -> None:
    ended = call("profile", "tiny.toml", "plan.device=cpu", "--steps", "2", "--json")
    assert ended.status == 0, ended.err
    found = json.loads(ended.out)
    assert found.keys() >= DEVICE
    check_figures(found)
    planned = json.loads(call("plan", "tiny.toml", "plan.device=cpu", "--json").out)["phases"][0]
    assert found["parameters"] == planned["derived"]["parameters"]
    assert (found["batch_size"], found["microbatch_size"], found["precision"]) == (
        planned["plan"]["batch_size"],
        planned["plan"]["microbatch_size"],
        planned["plan"]["precision"],
    )
    assert not (tiny / "runs").exists()


def test_a_recipe_for_several_processes_is_not_profiled(call: Call, tiny: Path) -> None:
    ended = call("profile", "tiny.toml", "plan.device=cpu", "parallel.replicate=2")
    assert ended.status == 2
    assert "profile supports a single process, but `[parallel]` asks for 2; set its degrees to 1" in ended.err


def test_a_recipe_for_several_devices_of_one_process_is_not_profiled(call: Call, tiny: Path) -> None:
    """The profiler does not see into the threads that drive them."""
    ended = call("profile", "tiny.toml", "plan.device=cpu", "parallel.devices=2")
    assert ended.status == 2
    assert "profile supports a single device, but `parallel.devices` asks for 2; set it to 1" in ended.err


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["parallel.recompute=auto"], ""),
        (["parallel.recompute=auto", "plan.memory_bytes={tight}"], ", 1 block recomputed in the backward pass"),
        (["parallel.recompute=full"], ", blocks recomputed in the backward pass"),
        (
            ["parallel.saved_activations=8-bit", 'parallel.offload=["optimizer"]'],
            ", 8-bit activations, optimizer offloaded",
        ),
    ],
)
def test_a_profile_says_how_its_step_saves_memory(settings: list[str], said: str, call: Call, tiny: Path) -> None:
    options = ("plan.device=cpu", "train.precision=fp32", "--steps", "1")
    needed = json.loads(call("plan", "tiny.toml", *options[:2], "--json").out)["phases"][0]["memory"]
    tight = str(sum(needed.values()) - needed["activations"] // 10)
    ended = call("profile", "tiny.toml", *options, *(each.format(tight=tight) for each in settings))
    assert ended.status == 0, ended.err
    assert ended.out.splitlines()[0].endswith(f"in 2 microbatches, fp32, adamw{said}")


def test_a_profile_leaves_stderr_to_us(tiny: Path) -> None:
    """In a process of its own: torch asks once how much its profiler may say."""
    environment = {name: value for name, value in os.environ.items() if name != "KINETO_LOG_LEVEL"}
    settings = ("plan.device=cpu", "train.precision=fp32", "--steps", "1")
    command = [sys.executable, "-m", "ropewalk", "profile", "tiny.toml", *settings]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "4 sequences of 32 tokens, fp32\n"
