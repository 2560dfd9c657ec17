"""Matmuls of linear layers and of the head, by the fastest implementation measured for their shapes.

Shapes: N tokens, K inputs, M outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .kernels.cublas import Problem

Run = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], None]
"""Writes the matmul of two operands into the third, plus a bias added to every row and a matrix, which may be the
output itself."""

ALIGNMENT = 256
"""Bytes. Freshly allocated tensors are aligned at least so; slices may not be."""
QUICKEST: dict[Problem, Run] = {}
"""Measured by parallel/kernels/matmul_tuning.py. Other shapes use torch."""


def product(x: Tensor, weight_MK: Tensor, bias: Tensor | None, added: Tensor | None = None) -> Tensor:
    """x W^T + b as `torch.nn.functional.linear`, autocast included; plus `added`, before rounding."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind):
        narrow = torch.get_autocast_dtype(kind)
        x, weight_MK = x.to(narrow), weight_MK.to(narrow)
        bias, added = bias if bias is None else bias.to(narrow), added if added is None else added.to(narrow)
    added = added if added is None else added.flatten(0, -2).contiguous()
    y: Tensor = _Product.apply(x.flatten(0, -2).contiguous(), weight_MK, bias, added)
    return y.unflatten(0, x.shape[:-1])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, bias_M: Tensor | None, added_NM: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NK, weight_MK)
        return times(x_NK, weight_MK, False, True, bias_M, added_NM)

    @staticmethod
    def backward(ctx: Any, gradient_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_MK = ctx.saved_tensors
        gradient_NM = gradient_NM.contiguous()
        to_x, to_weight, to_bias, to_added = ctx.needs_input_grad
        return (
            times(gradient_NM, weight_MK, False, False, None, None) if to_x else None,
            times(gradient_NM, x_NK, True, False, None, None) if to_weight else None,
            gradient_NM.sum(dim=0) if to_bias else None,
            gradient_NM if to_added else None,
        )


@torch.library.custom_op(
    "ropewalk::times",
    mutates_args=(),
    schema="(Tensor a, Tensor b, bool a_transposed, bool b_transposed, Tensor? bias, Tensor? added) -> Tensor",
)
def times(
    a: Tensor, b: Tensor, a_transposed: bool, b_transposed: bool, bias: Tensor | None, added: Tensor | None
) -> Tensor:
    """a b, plus a bias added to every row, plus a matrix; a `transposed` operand is stored in the other order."""
    out = _room(a, b, a_transposed, b_transposed, bias, added)
    return multiply(a, b, out, a_transposed=a_transposed, b_transposed=b_transposed, bias=bias, added=added)


@times.register_fake
def _room(
    a: Tensor, b: Tensor, a_transposed: bool, b_transposed: bool, bias: Tensor | None, added: Tensor | None
) -> Tensor:
    return a.new_empty(a.shape[1 if a_transposed else 0], b.shape[0 if b_transposed else 1])


def multiply(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    a_transposed: bool = False,
    b_transposed: bool = False,
    bias: Tensor | None = None,
    added: Tensor | None = None,
) -> Tensor:
    """`times` into `out`, which may be wider than the operands, and may be `added`."""
    run = None
    if QUICKEST and all(each is None or _fits(each) for each in (a, b, out, bias, added)):
        flags = {"biased": bias is not None, "adds": added is not None}
        run = QUICKEST.get(problem_of(a, b, out, a_transposed=a_transposed, b_transposed=b_transposed, **flags))
    (run or plain(a_transposed=a_transposed, b_transposed=b_transposed))(a, b, out, bias, added)
    return out


def _fits(x: Tensor) -> bool:
    """Whether the memory layout meets the library's requirements."""
    return x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0


def problem_of(a: Tensor, b: Tensor, out: Tensor, **flags: bool) -> Problem:
    """The matmul problem of these operands and `out`."""
    n, m = out.shape
    return Problem(n=n, k=a.numel() // n, m=m, dtype=a.dtype, wide=out.dtype != a.dtype, **flags)


def plain(*, a_transposed: bool, b_transposed: bool) -> Run:
    """torch's own matmul."""

    def run(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, added: Tensor | None) -> None:
        a, b = a.t() if a_transposed else a, b.t() if b_transposed else b
        first = bias if added is None else added
        if out.dtype != a.dtype:  # torch needs an explicit dtype
            wide = out.dtype
            torch.mm(a, b, wide, out=out) if first is None else torch.addmm(first, a, b, wide, out=out)
        else:
            torch.mm(a, b, out=out) if first is None else torch.addmm(first, a, b, out=out)
        if added is not None and bias is not None:
            out += bias

    return run


def in_two(first: Run, rest: Run, *, rows: int, a_transposed: bool) -> Run:
    """Computes the first `rows` of a matmul with one implementation, the rest with another."""

    def run(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, added: Tensor | None) -> None:
        for way, part in (first, slice(rows)), (rest, slice(rows, None)):
            some_a, some_added = a[:, part] if a_transposed else a[part], added if added is None else added[part]
            way(some_a, b, out[part], bias, some_added)

    return run
