"""The quickest products: which are tried, and what is known of them afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from ropewalk.model import matmul as products
from ropewalk.model.decoder import build
from ropewalk.model.kernels.cublas import Problem
from ropewalk.model.loss import weighted_loss
from ropewalk.parallel.apply import apply
from ropewalk.parallel.kernels import kernel_choice as kernels
from ropewalk.parallel.kernels import matmul_tuning as tuning
from ropewalk.parallel.kernels import selection
from ropewalk.parallel.kernels.kernel_choice import Contest
from ropewalk.parallel.kernels.matmul_tuning import Known
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from tests.tiny import small_spec

FORWARD = Problem(n=48, k=64, m=80, b_transposed=True, dtype=torch.bfloat16)


def test_what_was_measured_is_known_to_the_next_run_on_such_a_gpu(tmp_path):
    Known("NVIDIA H200", 130200, tmp_path).put(FORWARD, {"cuBLASLt 5": 0.4, "torch": 0.5})
    assert list(Known("NVIDIA H200", 130200, tmp_path).get(FORWARD)) == ["cuBLASLt 5", "torch"]
    assert Known("NVIDIA H200", 130201, tmp_path).get(FORWARD) is None
    assert Known("NVIDIA H100 80GB", 130200, tmp_path).get(FORWARD) is None
    other = Problem(n=48, k=64, m=80, dtype=torch.bfloat16)
    assert Known("NVIDIA H200", 130200, tmp_path).get(other) is None


@pytest.mark.parametrize("damage", ["", "{", "null"])
def test_a_damaged_file_is_measured_anew(tmp_path, damage):
    Known("H200", 1, tmp_path).put(FORWARD, {"torch": 0.5})
    (path,) = (tmp_path / "products").iterdir()
    path.write_text(damage)
    known = Known("H200", 1, tmp_path)
    assert known.get(FORWARD) is None
    known.put(FORWARD, {"torch": 0.5})
    assert Known("H200", 1, tmp_path).get(FORWARD) == {"torch": 0.5}


def test_a_folder_that_cannot_be_written_costs_the_next_run_alone(tmp_path):
    (tmp_path / "products").write_text("a file where the folder should be")
    known = Known("H200", 1, tmp_path)
    known.put(FORWARD, {"torch": 0.5})
    assert known.get(FORWARD) == {"torch": 0.5}


def test_every_product_of_a_step_is_among_those_that_are_tried(monkeypatch):
    spec = small_spec(width=32, mlp_width=64, sequence_length=16, bias=True)
    model = build(spec, seed=0)
    asked = set()
    problem_of = products.problem_of
    monkeypatch.setattr(products, "problem_of", lambda *a, **k: asked.add(problem_of(*a, **k)) or problem_of(*a, **k))
    monkeypatch.setitem(products.QUICKEST, FORWARD, None)
    monkeypatch.setattr(products, "_fits", torch.is_tensor)
    for module in model.linears().values():
        module.product = products.product
    tokens = torch.zeros(2, 16, dtype=torch.long)
    model(tokens).sum().backward()
    tried = {}
    for name, module in model.linears().items():
        tried |= tuning._of_map(name.partition(".")[2], module, 32, torch.float32)
    # The input of the first layer's map comes from the embedding, which learns: all three products are made.
    assert asked
    assert asked <= set(tried.values())
    unused = {name for name, problem in tried.items() if problem not in asked}
    assert all("forward" in name for name in unused), "with biases, and without a residual"


def test_a_cpu_and_a_deterministic_plan_keep_the_products_of_torch():
    model = build(small_spec(), seed=0)
    sizes = {"precision": "bf16-pure", "batch_size": 1, "microbatch_size": 1}
    for plan in (Plan(device="cpu", **sizes), Plan(device="cuda", deterministic=True, **sizes)):
        assert not tuned(model, plan, dtype=torch.bfloat16)
    assert all(module.product is F.linear for module in model.linears().values())


def tuned(model, plan, *, dtype=torch.float32, budget=math.inf, **settings):
    """What is measured for a model and given to it."""
    device = next(model.parameters()).device
    found = tuning.measure_products(
        [model], plan, device=device, dtype=dtype, budget=budget, timer=kernels.gpu_milliseconds, **settings
    )
    return list(tuning.tune_products(model, plan, device=device, dtype=dtype, times=found))


class ByTorch:
    """A library that proposes twice what torch does."""

    def __init__(self, problem):
        self._plain = products.plain(a_transposed=problem.a_transposed, b_transposed=problem.b_transposed)
        self._shapes = problem

    def proposals(self):
        return ["first", "second"]

    def run(self, algorithm, a, b, out, bias, added):
        it = self._shapes
        assert a.shape == ((it.k, it.n) if it.a_transposed else (it.n, it.k))
        assert b.shape == ((it.m, it.k) if it.b_transposed else (it.k, it.m))
        assert a.stride() == (it.a_stride or a.shape[1], 1)
        assert (bias is not None, added is not None) == (it.biased, it.adds)
        USED.append(algorithm)
        self._plain(a, b, out, bias, added)


USED: list[str] = []


@pytest.fixture
def by_torch(monkeypatch, tmp_path):
    """Lets products be tuned on a CPU; the second proposal is the quickest, but for two parts where these are tried."""

    def contest(what, runs, device, *, beside, timer):
        assert beside in runs
        for run in runs.values():
            run()
        best = {tuning.IN_TWO: 0.5} if tuning.IN_TWO in runs else {}
        return Contest(what=what, milliseconds=best | {"cuBLASLt 2": 1.0, "torch": 2.0, "cuBLASLt 1": 3.0})

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(products, "QUICKEST", {})
    monkeypatch.setattr(products, "ALIGNMENT", 64)  # what torch has on a CPU
    monkeypatch.setattr(tuning, "TUNED", (torch.float32,))
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    monkeypatch.setattr(tuning, "Product", ByTorch)
    monkeypatch.setattr(tuning, "settled_contest", contest)
    monkeypatch.setattr(tuning, "version", lambda: 1)
    monkeypatch.setattr(tuning, "_has_ways", lambda device: True)
    monkeypatch.setattr(tuning, "_processors", lambda device: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    USED.clear()


def trained_gradients(model, spec):
    tokens = torch.arange(2 * spec.sequence_length).view(2, -1) % spec.vocabulary
    hidden = model(tokens).flatten(0, 1)
    weighted_loss(hidden, model.head_weight, tokens.flatten(), torch.ones(len(hidden))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("changes", [{}, {"bias": True, "mlp": "gelu", "norm": "layer", "tie_embeddings": True}])
@pytest.mark.parametrize("in_two", [False, True])
def test_a_tuned_model_uses_what_was_found_and_computes_the_same(by_torch, monkeypatch, changes, in_two):
    if in_two:
        monkeypatch.setattr(tuning, "TILE", (8, 16))
        monkeypatch.setattr(tuning, "_processors", lambda device: 7)
    spec = small_spec(width=32, mlp_width=64, heads=2, sequence_length=16, vocabulary=64, **changes)
    plan = Plan(device="cuda", precision="bf16-pure", batch_size=2, microbatch_size=2)
    model, plain = (build(spec, seed=0) for _ in range(2))
    told = []
    kind = {"before": [lambda: told.append("measuring")]}
    contests = tuned(model, plan, **kind)
    assert told == ["measuring"]
    assert set(USED) == {"first", "second"}
    assert all(module.bare and module.product is products.product for module in model.linears().values())
    USED.clear()
    found, expected = trained_gradients(model, spec), trained_gradients(plain, spec)
    torch.testing.assert_close(found, expected)
    # Three products of each of four maps in both layers, of which biases and the residual are no others here.
    assert USED.count("second") >= 3 * 4 * 2 * (2 if in_two else 1)
    assert {each.winner for each in contests} == {tuning.IN_TWO if in_two else "cuBLASLt 2"}
    assert "first" not in USED

    def again(*_):
        pytest.fail("what is known is not measured")

    monkeypatch.setattr(tuning, "settled_contest", again)
    assert tuned(build(spec, seed=0), plan, **kind) == contests
    assert tuned(build(spec, seed=0), plan, **kind, budget=0.0) == contests
    assert told == ["measuring"]


def test_who_only_scores_measures_nothing(by_torch):
    spec = small_spec(width=32, mlp_width=64, heads=2, sequence_length=16, vocabulary=64)
    plan = Plan(device="cpu", precision="bf16-pure", batch_size=2, microbatch_size=2)
    model = build(spec, seed=0)
    assert not tuned(model, plan, budget=0.0)
    assert all(module.product is F.linear for module in model.linears().values())
    assert not USED


def test_nothing_is_joined_to_the_products_of_adapted_maps(by_torch):
    model = build(dataclasses.replace(small_spec(width=32, mlp_width=64, heads=2), lora_rank=2), seed=0)
    plan = Plan(device="cuda", precision="bf16-pure", batch_size=2, microbatch_size=2)
    tuned(model, plan)
    adapted = [module for module in model.linears().values() if module.lora_a is not None]
    assert adapted
    assert all(module.product is products.product and not module.bare for module in adapted)


@pytest.mark.parametrize("precision", ["bf16-pure", "bf16"])
def test_sharding_changes_nothing_about_what_is_joined_to_products(by_torch, monkeypatch, precision):
    """Residuals are joined where the stream is as narrow as the products. Sharded weights are not there meanwhile."""
    monkeypatch.setattr(tuning, "TUNED", (torch.bfloat16,))
    won = {"cuBLASLt 2": 1.0, "torch": 2.0}  # a CPU cannot run all of them in bfloat16
    monkeypatch.setattr(tuning, "settled_contest", lambda what, *_, **__: Contest(what=what, milliseconds=won))
    spec = small_spec(width=32, mlp_width=64, heads=2, sequence_length=16, vocabulary=64)
    for zero in range(4):
        plan = Plan(device="cpu", precision=precision, batch_size=2, microbatch_size=2, zero=zero)
        made = apply(plan, build(spec, seed=0), None, lambda p, _: make_optimizer(p, Optimizer(), spec=spec))
        tuned(made.model, plan, dtype=torch.bfloat16)  # `apply` does so on a GPU, after sharding as well
        found = {module.bare for module in made.model.linears().values()}
        assert found == {precision == "bf16-pure"}, zero
        assert all(module.product is products.product for module in made.model.linears().values())


def test_an_executor_without_an_optimizer_only_scores(monkeypatch):
    budgets = []
    monkeypatch.setattr(selection, "measure_products", lambda *_, budget, **__: budgets.append(budget) or {})
    spec = small_spec()
    plan = Plan(device="cuda", precision="fp32", batch_size=1, microbatch_size=1)
    for make in (None, lambda parameters, _: make_optimizer(parameters, Optimizer(), spec=spec)):
        apply(plan, build(spec, seed=0), None, make, run_s=600.0)
    assert budgets == [0.0, tuning.budget_s(plan, 600.0)]
    assert budgets[1] > 0


def test_a_run_measures_for_no_longer_than_half_of_what_it_can_gain():
    plan = Plan(device="cuda", precision="bf16", batch_size=1, microbatch_size=1)
    seconds = [tuning.budget_s(plan, run_s) for run_s in (0.0, 60.0, 420.0, 1e6, math.inf)]
    assert seconds == [0.0, 0.0, pytest.approx(4.2), tuning.MOST_S, tuning.MOST_S]
    assert tuning.budget_s(dataclasses.replace(plan, tuning="on"), 0.0) == math.inf
    assert tuning.budget_s(dataclasses.replace(plan, tuning="off"), math.inf) == 0.0


def test_when_time_is_over_the_smallest_matmuls_are_left_to_torch_and_to_the_next_run(by_torch):
    spec = small_spec(width=32, mlp_width=64, heads=2, sequence_length=16, vocabulary=64)
    plan = Plan(device="cuda", precision="bf16-pure", batch_size=2, microbatch_size=2)
    clock, told = iter(range(100)), []
    settings = {"budget": 4.5, "clock": lambda: next(clock), "after": [told.append]}
    first = tuned(build(spec, seed=0), plan, **settings)
    assert told[0].left_out > 0
    assert "a run this short" in told[0].reason()
    problems = list(tuning._problems(build(spec, seed=0), plan, torch.float32))
    weights = {what: count * it.n * it.k * it.m for what, it, count in problems}
    measured = {each.what for each in first}
    assert min(weights[what] for what in measured) >= max(weights[what] for what in weights.keys() - measured)
    second = tuned(build(spec, seed=0), plan, **settings)
    assert told[1].known == told[0].measured == len(first) < len(second)


@pytest.mark.parametrize(
    ("n", "m", "rows"),
    [
        (11264, 2048, 10496),  # 704 tiles: 82 rows of 8 are nearly five waves of 132
        (2048, 5632, 1536),  # 352: 12 rows of 22 are two waves
        (67584, 2048, 0),  # 32 waves
        (65536, 2048, 0),  # 31.03 waves lose 3 %
        (768, 3072, 0),  # not one wave
    ],
)
def test_a_product_is_tried_in_two_parts_where_its_last_tiles_leave_processors_idle(n, m, rows):
    problem = Problem(n=n, k=64, m=m, dtype=torch.bfloat16)
    assert tuning.whole_waves(problem, 132) == rows
    for part in (rows, n - rows) if rows else ():
        assert tuning.whole_waves(dataclasses.replace(problem, n=part), 132) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tuned_maps_have_the_products_of_torch(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning, "LEAST_FLOPS", 0)
    for wait in ("SETTLING", "SETTLED"):
        monkeypatch.setattr(kernels, wait, 1e-3)
    spec = small_spec(width=64, mlp_width=128, sequence_length=32, vocabulary=64, bias=True)
    model = build(spec, seed=0, device="cuda", dtype=torch.bfloat16)
    plan = Plan(device="cuda", precision="bf16-pure", batch_size=4, microbatch_size=4)
    contests = tuned(model, plan, dtype=torch.bfloat16)
    assert {each.what.split(",")[0] for each in contests} >= {"attention.qkv", "mlp.up", "mlp.down", "head"}
    assert all("torch" in each.milliseconds for each in contests)
    again = build(spec, seed=0, device="cuda", dtype=torch.bfloat16)
    assert tuned(again, plan, dtype=torch.bfloat16, budget=0.0) == contests, "known by now"
    x = torch.randn(4, 32, 64, dtype=torch.bfloat16, device="cuda").requires_grad_()
    for module in model.linears().values():
        if module.weight.shape[1] != 64:
            continue
        inputs = [x, module.weight, module.bias]
        found, expected = products.product(*inputs), F.linear(*inputs)
        torch.testing.assert_close(found, expected)
        gradients = [torch.autograd.grad(y, inputs, torch.ones_like(y)) for y in (found, expected)]
        torch.testing.assert_close(*gradients, atol=0.05, rtol=0.02)
