"""Products by the quickest way: the same numbers as torch's own, and the way that was measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools

import pytest
import torch
import torch.nn.functional as F

from ropewalk.model.matmul import QUICKEST, in_two, multiply, plain, problem_of, product
from ropewalk.model.modules import Linear

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ORDERS = list(itertools.product([False, True], repeat=2))


def drawn(*shape, seed=0, dtype=torch.float64, device="cpu"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)), dtype=dtype).to(device)


def operands(a_transposed, b_transposed, **kind):
    """N K times K M with N 48, K 64, M 80, as they lie in memory."""
    return drawn(*((64, 48) if a_transposed else (48, 64)), **kind), drawn(
        *((80, 64) if b_transposed else (64, 80)), seed=1, **kind
    )


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_is_that_of_torch_with_its_gradients(biased, adds, compiled):
    x, weight = drawn(2, 3, 8).requires_grad_(), drawn(5, 8).requires_grad_()
    bias = drawn(5).requires_grad_() if biased else None
    added = drawn(2, 3, 5).requires_grad_() if adds else None
    inputs = [each for each in (x, weight, bias, added) if each is not None]
    ours = torch.compile(product, backend="aot_eager", fullgraph=True) if compiled else product
    found, expected = ours(x, weight, bias, added), F.linear(x, weight, bias) + (0 if added is None else added)
    torch.testing.assert_close(found, expected)
    gradient = drawn(2, 3, 5, seed=7)
    torch.testing.assert_close(
        torch.autograd.grad(found, inputs, gradient), torch.autograd.grad(expected, inputs, gradient)
    )


def test_a_bare_map_joins_what_is_added_to_its_product():
    module = Linear(8, 5, bias=True).double()
    for number, parameter in enumerate(module.parameters()):
        parameter.data = drawn(*parameter.shape, seed=number)
    x, added = drawn(2, 3, 8), drawn(2, 3, 5, seed=9)
    expected = module(x, added=added)
    module.bare = True
    torch.testing.assert_close(module(x, added=added), expected)
    torch.testing.assert_close(module(x, biased=False, added=added), expected - module.bias)


def test_under_autocast_a_product_is_as_narrow_as_that_of_torch():
    x, weight = drawn(4, 8, dtype=torch.float32).requires_grad_(), drawn(5, 8, dtype=torch.float32).requires_grad_()
    bias = drawn(5, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = product(x, weight, bias), F.linear(x, weight, bias)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(y.sum(), [x, weight, bias]) for y in (found, expected)]
    assert [each.dtype for each in gradients[0]] == [torch.float32] * 3
    torch.testing.assert_close(*gradients)


def test_weights_that_do_not_learn_get_no_gradient():
    x, weight = drawn(4, 8).requires_grad_(), drawn(5, 8)
    (by_x,) = torch.autograd.grad(product(x, weight, None).sum(), [x])
    torch.testing.assert_close(by_x, weight.sum(0).expand(4, -1))


@pytest.mark.parametrize(("a_transposed", "b_transposed"), ORDERS)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_products_of_operands_in_any_order(a_transposed, b_transposed, biased, adds):
    a, b = operands(a_transposed, b_transposed)
    bias, out = drawn(80) if biased else None, drawn(48, 80, seed=3)
    orders = "kn" if a_transposed else "nk", "mk" if b_transposed else "km"
    expected = torch.einsum(f"{orders[0]},{orders[1]}->nm", a, b)
    expected = expected + (out if adds else 0) + (bias if biased else 0)
    flags = {"a_transposed": a_transposed, "b_transposed": b_transposed}
    assert multiply(a, b, out, bias=bias, added=out if adds else None, **flags) is out
    torch.testing.assert_close(out, expected)


def test_a_way_that_was_chosen_serves_its_own_shapes_alone(monkeypatch):
    monkeypatch.setattr("ropewalk.model.matmul.ALIGNMENT", 64)  # what torch has on a CPU
    a, b = operands(False, True)
    out = drawn(48, 80)
    served = []
    flags = {"a_transposed": False, "b_transposed": True, "biased": False, "adds": False}
    monkeypatch.setitem(QUICKEST, problem_of(a, b, out, **flags), lambda *given: served.append(given))
    multiply(a, b, out, b_transposed=True)
    ((*given, bias, added),) = served
    assert all(x is y for x, y in zip(given, (a, b, out), strict=True))
    assert bias is None
    assert added is None
    multiply(a[:40].contiguous(), b, out[:40], b_transposed=True)
    multiply(a, b, out, b_transposed=True, bias=drawn(80))
    multiply(a, b, out, b_transposed=True, added=out)
    room = torch.empty(48 * 64 + 1, dtype=a.dtype)
    multiply(room[1:].view(48, 64).copy_(a), b, out, b_transposed=True)  # not where the library wants it
    assert len(served) == 1


@pytest.mark.parametrize(("a_transposed", "b_transposed"), ORDERS)
@pytest.mark.parametrize("added", ["nothing", "a matrix", "what is there"])
def test_a_product_in_two_parts_is_the_whole(a_transposed, b_transposed, added):
    a, b = operands(a_transposed, b_transposed)
    by_torch = plain(a_transposed=a_transposed, b_transposed=b_transposed)
    other = drawn(48, 80, seed=3)

    def made(way):
        out = drawn(48, 80, seed=4)
        way(a, b, out, None if added == "nothing" else drawn(80), {"a matrix": other, "what is there": out}.get(added))
        return out

    found = made(in_two(by_torch, by_torch, rows=40, a_transposed=a_transposed))
    torch.testing.assert_close(found, made(by_torch))


@pytest.mark.gpu
@ON_GPU
def test_the_library_makes_a_product_in_two_parts():
    from ropewalk.model.kernels.cublas import Product

    a, b = (drawn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 384), (64, 80)))
    out = torch.full((384, 80), torch.nan, dtype=torch.bfloat16, device="cuda")
    whole = problem_of(a, b, out, a_transposed=True)
    parts = [Product(dataclasses.replace(whole, n=n, a_stride=384)) for n in (256, 128)]
    first, rest = (functools.partial(part.run, part.proposals()[0]) for part in parts)
    in_two(first, rest, rows=256, a_transposed=True)(a, b, out, None, None)
    torch.testing.assert_close(out.double(), a.double().t() @ b.double(), atol=0.05, rtol=0.01)


@pytest.mark.gpu
@ON_GPU
def test_every_algorithm_has_the_same_product_of_part_of_a_matrix():
    from ropewalk.model.kernels.cublas import Product

    wide, b = (drawn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((64, 304), (64, 80)))
    a, out = wide[:, 256:], torch.empty(48, 80, dtype=torch.bfloat16, device="cuda")
    exact = a.double().t() @ b.double()
    problem = problem_of(a, b, out, a_transposed=True)
    own = Product(dataclasses.replace(problem, a_stride=304))
    proposals = own.proposals()
    assert proposals
    for algorithm in proposals:
        own.run(algorithm, a, b, out.fill_(torch.nan), None, None)
        torch.testing.assert_close(out.double(), exact, atol=0.05, rtol=0.01)


@pytest.mark.gpu
@ON_GPU
@pytest.mark.parametrize(("a_transposed", "b_transposed"), ORDERS)
@pytest.mark.parametrize("adds", [False, True])
# A bias is as wide as the operands: the library takes none for a wider result.
@pytest.mark.parametrize(("biased", "wide"), [(False, False), (True, False), (False, True)])
def test_every_algorithm_of_the_library_has_the_same_product(a_transposed, b_transposed, biased, adds, wide):
    from ropewalk.model.kernels.cublas import Product

    kind = {"dtype": torch.bfloat16, "device": "cuda"}
    a, b = operands(a_transposed, b_transposed, **kind)
    bias = drawn(80, **kind) if biased else None
    before = drawn(48, 80, dtype=torch.float32 if wide else torch.bfloat16, device="cuda")
    exact = (a.t() if a_transposed else a).double() @ (b.t() if b_transposed else b).double()
    exact = exact + (before.double() if adds else 0) + (bias.double() if biased else 0)
    flags = {"a_transposed": a_transposed, "b_transposed": b_transposed, "biased": biased, "adds": adds}
    own = Product(problem_of(a, b, before, **flags))
    proposals = own.proposals()
    assert proposals
    for algorithm in proposals:
        out = before.clone()
        own.run(algorithm, a, b, out, bias, out if adds else None)
        torch.testing.assert_close(out.double(), exact, atol=1e-4 if wide else 0.05, rtol=1e-5 if wide else 0.01)
