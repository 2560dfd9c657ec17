"""The quick path of a step computes what the plain one does."""

from __future__ import annotations

import shutil
import warnings

import pytest
import torch

from ropewalk.model import fp8
from ropewalk.model.decoder import build
from ropewalk.parallel.apply import apply
from ropewalk.parallel.kernels import kernel_choice as kernels
from ropewalk.parallel.kernels.kernel_choice import Contest, choose_8_bits
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.tiny import random_batch, small_spec

from .quick_path import SMALL, check_float32, check_narrow

compiles = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile wants a C++ compiler on a CPU")


def losses_and_weights(spec, *, steps=3, rows=4, **changes):
    plan = Plan(**{"device": "cpu", "precision": "fp32", "batch_size": rows, "microbatch_size": rows, **changes})
    made = apply(plan, build(spec, seed=0), None, lambda p, _: make_optimizer(p, Optimizer(), spec=spec), clip_norm=1.0)
    losses = [made.step(random_batch(spec, rows=rows, seed=step), lr=1e-3).loss for step in range(steps)]
    return torch.stack(losses), {name: part.local for name, part in made.model_state().items()}


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [{}, {"norm": "layer", "mlp": "gelu", "position": "learned", "dropout": 0.1, "bias": True}],
    ids=["default", "GPT-2, dropped"],
)
def test_compiled_blocks_train_as_plain_ones(changes, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    spec = small_spec(layers=3, **changes)
    plain, weights = losses_and_weights(spec)
    torch._dynamo.reset()
    compiled, others = losses_and_weights(spec, compile=True)
    torch.testing.assert_close(compiled, plain, atol=0, rtol=1e-5)
    for name, weight in weights.items():
        # Adam divides by the size of a gradient: one that is 0 but for rounding moves a weight by a whole step.
        assert (others[name] - weight).abs().max() <= 3e-3, name
        assert (others[name] - weight).norm() <= 1e-3 * weight.norm() + 1e-4, name


@pytest.mark.parametrize("compiled", [True, False])
def test_the_plan_says_whether_blocks_are_compiled(compiled, monkeypatch):
    given = []

    def noted(function, **settings):
        given.append(function.__qualname__)
        return function

    monkeypatch.setattr(torch, "compile", noted)
    losses_and_weights(small_spec(layers=3), steps=1, compile=compiled)
    assert given == ["Block.forward"] * 3 * compiled + ["Decoder.lookup"] * compiled


@compiles
@pytest.mark.parametrize("name", ["llama", pytest.param("gpt-2", marks=pytest.mark.slow)])
def test_the_quick_path_has_the_loss_and_gradients_of_the_plain_one(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    check_float32(name, "cpu")


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "bf16-pure", "fp8", "fp8 by rows"])
@pytest.mark.parametrize("name", SMALL)
def test_the_quick_path_in_few_bits_is_nearer_to_the_plain_one_than_another_seed(
    name, precision, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    check_narrow(name, precision, "cpu")


@compiles
@pytest.mark.slow
def test_all_layers_share_one_compiled_block(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    losses_and_weights(small_spec(layers=10), steps=1, compile=True)
    # The block and the embedding.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_8_bit_products_learn_what_bfloat16_ones_learn():
    """On one batch, again and again: the loss falls as far, within what two seeds differ by."""
    spec = small_spec(layers=2, width=64, mlp_width=192, sequence_length=32)

    def learnt(precision, seed):
        plan = Plan(device="cpu", precision=precision, batch_size=8, microbatch_size=8)
        made = apply(
            plan, build(spec, seed=seed), None, lambda p, _: make_optimizer(p, Optimizer(), spec=spec), clip_norm=1.0
        )
        batch = random_batch(spec, rows=8)
        return [made.step(batch, lr=3e-3).loss.item() for _ in range(30)][-1]

    narrow, wide = ([learnt(precision, seed) for seed in range(3)] for precision in ("fp8", "bf16-pure"))
    spread = max(wide) - min(wide)
    assert abs(sum(narrow) - sum(wide)) / 3 < 2 * spread + 0.02


def test_the_kernel_wins_that_is_quickest_when_the_gpu_has_settled():
    cold_and_settled = {"greedy": (1.0, 1.8), "frugal": (1.1, 1.401), "last": (1.2, 1.4), "torch": (2.0, 1.9)}
    cold_and_settled["hopeless"] = (1.3, 1.0)
    settled = []

    def timer(run, device, repeats):
        if repeats > 1:
            settled.append(run())
        return cold_and_settled[run()][repeats > 1]

    runs = {name: lambda name=name: name for name in cold_and_settled}
    found = kernels.settled_contest("a matmul", runs, torch.device("cuda"), beside="torch", timer=timer)
    assert list(found.milliseconds.items()) == [("last", 1.4), ("frugal", 1.401), ("greedy", 1.8), ("torch", 1.9)]
    assert "hopeless" not in settled, "far behind in a few calls"
    assert settled.count("last") == settled.count("frugal") == 2 * settled.count("greedy"), "close ones once more"


@pytest.mark.filterwarnings("error")
def test_a_kernel_that_does_not_know_the_shapes_is_left_out_without_a_word():
    def unable():
        warnings.warn("kernel not used", stacklevel=1)
        raise RuntimeError("no available kernel")

    runs = {"able": lambda: 1.0, "unable": unable}
    found = kernels.contest("attention", runs, torch.device("cuda"), timer=lambda run, *_: run())
    assert found.milliseconds == {"able": 1.0}


@pytest.mark.parametrize(("deterministic", "winner"), [(False, "cudnn"), (True, "flash")])
def test_attention_is_the_quickest_or_the_same_every_time(monkeypatch, deterministic, winner):
    """On a GPU that takes longest for the first of the kernels that give the same bits."""
    real, times = torch.randn, {"cudnn": 1.0, "efficient": 2.0, "flash": 3.0}
    monkeypatch.setattr(kernels.torch, "randn", lambda *shape, **_: real(*shape))
    monkeypatch.setattr(kernels, "_both_passes", lambda attend, *_: lambda: attend.kernels[0])
    plan = Plan(device="cuda", precision="bf16", batch_size=2, microbatch_size=2, deterministic=deterministic)
    found = kernels.measure_attention(
        small_spec(), plan, torch.device("cuda"), dtype=torch.bfloat16, timer=lambda run, *_: times[run()]
    )
    assert next(iter(found["attention"])) == winner


def never(*_):
    pytest.fail("nothing is to be measured")


def test_maps_that_the_tensor_cores_cannot_cut_stay_as_they_are():
    spec = small_spec(width=64, mlp_width=96, sequence_length=32)
    plan = Plan(device="cpu", precision="fp8", batch_size=2, microbatch_size=2, sequence_length=32)
    model = build(spec, seed=0)
    assert not kernels.measure_8_bits(model, plan, torch.device("cpu"), timer=never), "nothing to measure on a CPU"
    assert not list(choose_8_bits(model, plan, {}))
    block = next(iter(model.blocks.values()))
    assert block.mlp.down.product is fp8.product
    odd = build(small_spec(width=36, heads=3, sequence_length=32), seed=0)
    list(choose_8_bits(odd, plan, {}))
    assert next(iter(odd.blocks.values())).attention.qkv.product is torch.nn.functional.linear


@pytest.mark.parametrize(("setting", "measured"), [({}, 4), ({"fp8": "all"}, 0), ({"deterministic": True}, 0)])
@pytest.mark.parametrize("winner", ["bf16", "fp8", "fp8 by rows"])
def test_products_are_made_the_quickest_way_unless_all_are_wanted_in_8_bits(monkeypatch, setting, measured, winner):
    """On a GPU that finds one way quickest for all of them."""
    found = Contest(what="", milliseconds={winner: 1.0, "another": 2.0})
    monkeypatch.setattr(kernels, "_matmul_contest", lambda *_, **__: found)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    model = build(small_spec(width=64, mlp_width=192, sequence_length=32), seed=0)
    plan = Plan(device="cuda", precision="fp8", batch_size=2, microbatch_size=2, sequence_length=32, **setting)
    times = kernels.measure_8_bits(model, plan, torch.device("cpu"), timer=never)
    assert len(times) == len(list(choose_8_bits(model, plan, times))) == measured
    made = {module.product for module in model.linears().values()}
    ways = {"bf16": torch.nn.functional.linear, "fp8": fp8.product, "fp8 by rows": fp8.product_by_rows}
    assert made == {ways[winner] if measured else fp8.product}
