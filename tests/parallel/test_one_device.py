"""A step on one device is the step written out by hand."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from ropewalk.base.errors import UserError
from ropewalk.config.ranks import Ranks
from ropewalk.load.batch import Batch
from ropewalk.model.decoder import Decoder, build
from ropewalk.parallel.apply import apply, local
from ropewalk.parallel.compat import deterministic
from ropewalk.parallel.executor import Executor, StepHooks
from ropewalk.parallel.mesh import pick_device
from ropewalk.plan.plan import Plan
from ropewalk.train.config import Optimizer
from ropewalk.train.optim.optimizers import make_optimizer
from ropewalk.train.optim.table import OPTIMIZERS
from tests.tiny import random_batch, small_spec

SPEC = small_spec()
ROWS = 8
DECAY = Optimizer(weight_decay=0.1, beta1=0.9, beta2=0.95, epsilon=1e-8)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def executor(
    *,
    microbatch: int = 4,
    clip: float = 0.5,
    dtype: torch.dtype = torch.float64,
    precision: str = "fp32",
    kind: str = "adamw",
    seed: int = 0,
) -> Executor:
    plan = Plan(device="cpu", precision=precision, batch_size=ROWS, microbatch_size=microbatch)  # type: ignore[arg-type]
    model = build(SPEC, seed=seed, dtype=dtype)
    settings = dataclasses.replace(DECAY, kind=kind)
    return apply(plan, model, None, lambda p, _: make_optimizer(p, settings, spec=SPEC), clip_norm=clip)


def reweighted(batch: Batch, weight: Tensor) -> Batch:
    return dataclasses.replace(batch, weight=weight)


def copy_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def identical(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest_difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)


class ByHand:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on the weighted mean loss of the whole batch, written out."""

    def __init__(self, model: Decoder, *, clip: float) -> None:
        self.model, self.clip, self.time = model, clip, 0
        self.first = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
        self.second = {name: torch.zeros_like(p) for name, p in model.named_parameters()}

    def step(self, batch: Batch, lr: float) -> tuple[float, float]:
        logits = self.model(batch.tokens) @ self.model.head_weight.T
        chosen = logits.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
        weight = batch.weight.double()
        loss = ((logits.logsumexp(-1) - chosen) * weight).sum() / weight.sum()
        named = dict(self.model.named_parameters())
        gradients = dict(zip(named, torch.autograd.grad(loss, list(named.values())), strict=True))
        norm = sum((g**2).sum() for g in gradients.values()) ** 0.5
        scale = min(1.0, self.clip / (float(norm) + 1e-6)) if self.clip else 1.0
        self.time += 1
        with torch.no_grad():
            for name, parameter in named.items():
                gradient = gradients[name] * scale
                self.first[name] = 0.9 * self.first[name] + 0.1 * gradient
                self.second[name] = 0.95 * self.second[name] + 0.05 * gradient**2
                mean = self.first[name] / (1 - 0.9**self.time)
                spread = (self.second[name] / (1 - 0.95**self.time)).sqrt()
                decay = 0.1 * parameter if parameter.dim() == 2 else 0.0
                parameter -= lr * (mean / (spread + 1e-8) + decay)
        return loss.item(), float(norm)


@pytest.mark.parametrize("clip", [0.0, 0.5, 100.0])
def test_five_steps_equal_the_formulas_written_out(clip: float) -> None:
    ours, hand = executor(clip=clip), ByHand(build(SPEC, seed=0, dtype=torch.float64), clip=clip)
    for number in range(5):
        batch, lr = random_batch(SPEC, rows=ROWS, seed=number), 1e-2 * (number + 1)
        result, (loss, norm) = ours.step(batch, lr=lr), hand.step(batch, lr)
        assert result.loss.item() == pytest.approx(loss, abs=1e-12)
        assert result.grad_norm.item() == pytest.approx(norm, abs=1e-12)
        assert result.skipped.item() == 0
    assert largest_difference(local(ours.model_state()), dict(hand.model.named_parameters())) < 1e-12


@pytest.mark.parametrize("microbatch", [1, 2, 4])
def test_accumulation_changes_neither_loss_nor_weights(microbatch: int) -> None:
    whole, parts = executor(microbatch=ROWS), executor(microbatch=microbatch)
    # Weights that differ by row and are zero for two whole microbatches: a mean of means would be wrong.
    weight = torch.rand(ROWS, SPEC.sequence_length, generator=torch.Generator().manual_seed(1))
    weight[2:4] = 0
    for number in range(3):
        batch = reweighted(random_batch(SPEC, rows=ROWS, seed=number), weight)
        results = [each.step(batch, lr=1e-2) for each in (whole, parts)]
        assert results[0].loss.item() == pytest.approx(results[1].loss.item(), abs=1e-12)
    assert largest_difference(local(whole.model_state()), local(parts.model_state())) < 1e-12


def test_uneven_weights_give_the_weighted_mean() -> None:
    ours, hand = executor(microbatch=2), ByHand(build(SPEC, seed=0, dtype=torch.float64), clip=0.5)
    weight = torch.tensor([1.0, 0.25, 0.0, 3.0, 0.0, 0.0, 1.0, 0.5]).unsqueeze(1).expand(-1, SPEC.sequence_length)
    batch = reweighted(random_batch(SPEC, rows=ROWS), weight)
    assert ours.step(batch, lr=1e-2).loss.item() == pytest.approx(hand.step(batch, 1e-2)[0], abs=1e-12)
    assert largest_difference(local(ours.model_state()), dict(hand.model.named_parameters())) < 1e-12


def test_a_masked_target_has_no_influence() -> None:
    batch = random_batch(SPEC, rows=ROWS)
    weight = torch.ones(ROWS, SPEC.sequence_length)
    weight[:, -1] = 0
    targets = batch.targets.clone()
    targets[:, -1] = 7
    first, second = executor(), executor()
    first.step(reweighted(batch, weight), lr=1e-2)
    second.step(dataclasses.replace(batch, weight=weight, targets=targets), lr=1e-2)
    assert identical(local(first.model_state()), local(second.model_state()))


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_no_bit(kind: str, bad: float, steps_before: int) -> None:
    ours = executor(dtype=torch.float32, kind=kind)
    for number in range(steps_before):
        ours.step(random_batch(SPEC, rows=ROWS, seed=number), lr=1e-2)
    weights, moments = copy_of(local(ours.model_state())), copy_of(local(ours.optimizer_state()))
    ours.hooks.on_gradients.append(lambda g: g["blocks.0.mlp.up.weight"].view(-1)[3].fill_(bad))
    result = ours.step(random_batch(SPEC, rows=ROWS, seed=9), lr=1e-2)
    assert result.skipped.item() == 1
    assert identical(local(ours.model_state()), weights)
    if not steps_before:
        # There were none: they are those that a fresh optimizer begins with.
        fresh = executor(dtype=torch.float32, kind=kind)
        fresh.hooks.on_gradients.append(lambda g: g["blocks.0.mlp.up.weight"].view(-1)[3].fill_(bad))
        fresh.step(random_batch(SPEC, rows=ROWS, seed=5), lr=1e-2)
        moments = copy_of(local(fresh.optimizer_state()))
        assert all(not tensor.any() for name, tensor in moments.items() if "_code/" not in name)
    assert identical(local(ours.optimizer_state()), moments)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_skipped_step_leaves_no_trace_in_the_next(kind: str) -> None:
    straight, disturbed = executor(kind=kind), executor(kind=kind)
    poison = [lambda g: g["norm.weight"].fill_(float("nan"))]
    for number in range(3):
        straight.step(random_batch(SPEC, rows=ROWS, seed=number), lr=1e-2)
        disturbed.hooks.on_gradients[:] = poison
        disturbed.step(random_batch(SPEC, rows=ROWS, seed=50 + number), lr=1e-2)
        disturbed.hooks.on_gradients.clear()
        disturbed.step(random_batch(SPEC, rows=ROWS, seed=number), lr=1e-2)
    assert identical(local(straight.model_state()), local(disturbed.model_state()))
    assert identical(local(straight.optimizer_state()), local(disturbed.optimizer_state()))


def test_points_come_in_order_with_the_gradients_of_that_moment() -> None:
    seen: list[tuple[str, float]] = []

    def note(name: str):  # type: ignore[no-untyped-def]
        return lambda gradients: seen.append((name, sum((g**2).sum().item() for g in gradients.values()) ** 0.5))

    ours = executor(clip=0.5)
    ours.hooks = StepHooks(on_gradients=[note("on_gradients"), note("again")], before_update=[note("before_update")])
    result = ours.step(random_batch(SPEC, rows=ROWS), lr=1e-2)
    norm = result.grad_norm.item()
    assert norm > 0.5
    assert [name for name, _ in seen] == ["on_gradients", "again", "before_update"]
    assert [value for _, value in seen] == pytest.approx([norm, norm, 0.5 * norm / (norm + 1e-6)], abs=1e-9)


@pytest.fixture
def _no_reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes every way to read a tensor on the host an error."""

    def refuse(self: Tensor, *_: object) -> None:
        raise AssertionError("a tensor was read on the host: on a GPU that waits for the device")

    for name in ("item", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__"):
        monkeypatch.setattr(Tensor, name, refuse)
    yield
    monkeypatch.undo()


@pytest.mark.usefixtures("_no_reading")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_never_waits_for_the_device(precision: str, kind: str) -> None:
    ours = executor(dtype=torch.float32, precision=precision, kind=kind)
    for number in range(2):
        ours.step(random_batch(SPEC, rows=ROWS, seed=number), lr=1e-2)
    ours.score(random_batch(SPEC, rows=ROWS))


def test_hidden_states_of_the_last_layer_are_gone_when_the_backward_pass_comes_to_the_first() -> None:
    made, outputs, alive = executor(microbatch=ROWS), [], []
    made.model.norm.register_forward_hook(lambda module, inputs, output: outputs.append(weakref.ref(output)))
    first = made.model.blocks["0"].attention_norm.weight
    first.register_post_accumulate_grad_hook(lambda weight: alive.append(outputs[0]() is not None))
    made.step(random_batch(SPEC, rows=ROWS), lr=1e-3)
    assert alive == [False]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_state_taken_over_is_the_same_state_and_goes_on_the_same(kind: str) -> None:
    first, second = executor(dtype=torch.float32, kind=kind), executor(dtype=torch.float32, kind=kind, seed=1)
    for number in range(3):
        first.step(random_batch(SPEC, rows=ROWS, seed=number), lr=1e-2)
    second.load_state(copy_of(local(first.model_state())), copy_of(local(first.optimizer_state())))
    assert identical(local(first.model_state()), local(second.model_state()))
    assert identical(local(first.optimizer_state()), local(second.optimizer_state()))
    for each in (first, second):
        each.step(random_batch(SPEC, rows=ROWS, seed=9), lr=1e-2)
    assert identical(local(first.model_state()), local(second.model_state()))
    assert identical(local(first.optimizer_state()), local(second.optimizer_state()))


DROPPING = small_spec(dropout=0.3, documents="separate", position="alibi")


def dropping(*, microbatch: int, seed: int = 5) -> Executor:
    plan = Plan(device="cpu", precision="fp32", batch_size=ROWS, microbatch_size=microbatch)
    model = build(DROPPING, seed=0, dtype=torch.float64)
    return apply(plan, model, None, lambda parameters, _: make_optimizer(parameters, DECAY), seed=seed)


def packed_batch(number: int) -> Batch:
    """Rows of two documents each."""
    batch = random_batch(DROPPING, rows=ROWS, seed=number)
    return dataclasses.replace(batch, documents=(batch.positions > 5).int())


def test_dropout_and_documents_are_the_same_under_any_microbatch_and_after_a_restart() -> None:
    whole, parts, other = dropping(microbatch=ROWS), dropping(microbatch=2), dropping(microbatch=2, seed=6)
    for number in range(3):
        losses = [each.step(packed_batch(number), lr=1e-2).loss.item() for each in (whole, parts, other)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-12)
        assert losses[0] != pytest.approx(losses[2], abs=1e-6)
    assert largest_difference(local(whole.model_state()), local(parts.model_state())) < 1e-12
    again = dropping(microbatch=2)
    again.load_state(copy_of(local(parts.model_state())), copy_of(local(parts.optimizer_state())))
    for each in (parts, again):
        each.step(packed_batch(9), lr=1e-2)
    assert identical(local(parts.model_state()), local(again.model_state()))


def test_separate_documents_score_as_if_alone() -> None:
    ours, batch = dropping(microbatch=4), packed_batch(0)
    together = ours.score(batch).log_probabilities[:, 6:]
    pieces = [getattr(batch, field.name)[:, 6:] for field in dataclasses.fields(Batch)]
    # ALiBi knows distances alone: the second document need not be moved to the front.
    torch.testing.assert_close(together, ours.score(Batch(*pieces)).log_probabilities, atol=1e-12, rtol=1e-12)


def test_an_optimizer_that_would_follow_a_broken_gradient_is_refused() -> None:
    plan = Plan(device="cpu", precision="fp32", batch_size=ROWS, microbatch_size=ROWS)
    with pytest.raises(AssertionError, match="would follow a broken gradient"):
        apply(plan, build(SPEC, seed=0), None, lambda parameters, _: torch.optim.SGD(parameters.values()))


def test_state_of_another_model_is_refused() -> None:
    state = build(small_spec(layers=3), seed=0).state_dict()
    with pytest.raises(AssertionError, match="another model"):
        executor().load_state(state, {})


def test_bf16_stays_close_to_fp32() -> None:
    wide, narrow = executor(dtype=torch.float32), executor(dtype=torch.float32, precision="bf16")
    for number in range(5):
        batch = random_batch(SPEC, rows=ROWS, seed=number)
        losses = [each.step(batch, lr=1e-3).loss.item() for each in (wide, narrow)]
        # bfloat16 has 8 bits: 0.4 % a rounding, and the loss is a mean of many.
        assert losses[1] == pytest.approx(losses[0], rel=4e-3)
    assert all(parameter.dtype == torch.float32 for parameter in local(narrow.model_state()).values())


@pytest.mark.parametrize("microbatch", [3, 8])
def test_score_is_the_log_softmax_at_the_target(microbatch: int) -> None:
    ours, batch = executor(microbatch=microbatch), random_batch(SPEC, rows=ROWS)
    scores = ours.score(batch)
    with torch.no_grad():
        expected = (ours.model(batch.tokens) @ ours.model.head_weight.T).log_softmax(-1)
    chosen = expected.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
    assert torch.allclose(scores.log_probabilities, chosen, atol=1e-12, rtol=0)
    assert torch.equal(scores.first_choice, expected.argmax(-1) == batch.targets)


def test_more_than_one_process_is_refused() -> None:
    plan = Plan(device="cpu", precision="fp32", batch_size=8, microbatch_size=4, shard=2)
    with pytest.raises(UserError, match="the plan is for 2 processes, 1 are here"):
        apply(plan, build(SPEC, seed=0), None, None)
    with pytest.raises(UserError, match="4 processes were started, but the plan is for 2"):
        pick_device(plan, Ranks(rank=0, world=4, local_rank=0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_same_steps_on_a_gpu_give_the_same_bits(precision: str) -> None:
    spec = small_spec(width=256, heads=4, vocabulary=4096, sequence_length=512)
    sizes = {"batch_size": ROWS, "microbatch_size": 4}
    plan = Plan(device="cuda", precision=precision, deterministic=True, **sizes)  # type: ignore[arg-type]
    ends = []
    for _ in range(2):
        ours = apply(
            plan, build(spec, seed=0, device="cuda"), None, lambda p, _: make_optimizer(p, DECAY), clip_norm=1.0
        )
        for number in range(5):
            with deterministic(torch.device("cuda")):
                ours.step(random_batch(spec, rows=ROWS, seed=number), lr=1e-3)
        ends.append(copy_of(local(ours.model_state())))
    assert identical(*ends)


def test_determinism_is_asked_for_on_a_gpu_only_and_given_back() -> None:
    with deterministic(torch.device("cpu")):
        assert not torch.are_deterministic_algorithms_enabled()
    with deterministic(torch.device("cuda")):
        assert torch.are_deterministic_algorithms_enabled()
    assert not torch.are_deterministic_algorithms_enabled()
