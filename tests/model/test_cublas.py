"""What the library is asked for, by a library that does what its manual says, column by column, in float32 on a CPU."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ropewalk.model.kernels import cublas
from ropewalk.model.kernels.cublas import Problem, Product

TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8


class ColumnMajor:
    """Matrices in columns, `ld` numbers from one to the next; D = op(A) op(B) + beta C, and a bias for every row."""

    def __init__(self):
        self.made: list[dict] = [{}]

    def _make(self, pointer, **what):
        self.made.append(what)
        pointer._obj.value = len(self.made) - 1
        return 0

    def cublasLtCreate(self, pointer):
        return self._make(pointer)

    def cublasLtMatmulDescCreate(self, pointer, compute, scale):
        assert (compute.value, scale.value) == (68, 0), "adds up in float32"
        return self._make(pointer)

    def cublasLtMatmulDescSetAttribute(self, description, attribute, value, size):
        assert size.value == ctypes.sizeof(value._obj)
        self.made[description.value][attribute.value] = value._obj.value
        return 0

    def cublasLtMatrixLayoutCreate(self, pointer, kind, rows, columns, ld):
        assert kind.value == 0
        return self._make(pointer, rows=rows.value, columns=columns.value, ld=ld.value)

    def cublasLtMatmulPreferenceCreate(self, pointer):
        return self._make(pointer)

    def cublasLtMatmulPreferenceSetAttribute(self, preference, attribute, value, size):
        return 0

    def cublasLtMatmulPreferenceDestroy(self, preference):
        return 0

    def cublasLtMatmulAlgoGetHeuristic(self, handle, description, a, b, c, d, preference, most, found, count):
        if self.made[a.value]["rows"] == 13:
            return 15  # not supported
        for number in range(3):
            found[number].algo[0], found[number].state = number + 1, 0 if number < 2 else 7
        count._obj.value = 3
        return 0

    def cublasLtMatmul(self, handle, description, alpha, a, a_at, b, b_at, beta, c, c_at, d, d_at, algorithm, *rest):
        how = self.made[description.value]
        left, right = self._matrix(a, a_at), self._matrix(b, b_at)
        left, right = left.T if how[TRANSPOSE_A] else left, right.T if how[TRANSPOSE_B] else right
        result = alpha._obj.value * (left @ right) + beta._obj.value * self._matrix(c, c_at)
        if how.get(EPILOGUE) == 4:
            room = (ctypes.c_float * len(result)).from_address(how[BIAS_POINTER])
            result += np.frombuffer(room, np.float32)[:, None]
        self._matrix(d, d_at)[:] = result
        return 0 if algorithm._obj.algo[0] in (1, 2) else 7

    def _matrix(self, pointer, layout):
        it = self.made[layout.value]
        room = (ctypes.c_float * (it["ld"] * it["columns"])).from_address(pointer.value)
        return np.frombuffer(room, np.float32).reshape(it["columns"], it["ld"]).T[: it["rows"]]


@pytest.fixture
def column_major(monkeypatch):
    library = ColumnMajor()
    monkeypatch.setattr(cublas, "library", lambda: library)
    monkeypatch.setattr(cublas, "_handle", ctypes.c_void_p)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


@pytest.mark.parametrize(("a_transposed", "b_transposed"), itertools.product([False, True], repeat=2))
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("adds", [False, True])
def test_operands_are_handed_over_as_they_lie(column_major, a_transposed, b_transposed, biased, adds):
    n, k, m = 3, 5, 7
    a = torch.randn(k, n) if a_transposed else torch.randn(n, k)
    b = torch.randn(m, k) if b_transposed else torch.randn(k, m)
    bias, added = torch.randn(m) if biased else None, torch.randn(n, m) if adds else None
    flags = {"a_transposed": a_transposed, "b_transposed": b_transposed, "biased": biased, "adds": adds}
    own = Product(Problem(n=n, k=k, m=m, dtype=torch.float32, **flags))
    expected = (a.t() if a_transposed else a) @ (b.t() if b_transposed else b)
    expected = expected + (0 if bias is None else bias) + (0 if added is None else added)
    proposals = own.proposals()
    assert [each.algo[0] for each in proposals] == [1, 2], "the third does not work"
    for algorithm in proposals:
        out = torch.full((n, m), 99.0)
        own.run(algorithm, a, b, out, bias, added)
        torch.testing.assert_close(out, expected)
    if added is not None:
        own.run(proposals[0], a, b, added, bias, added)
        torch.testing.assert_close(added, expected)


def test_a_shape_that_the_library_does_not_know_has_no_proposals(column_major):
    assert not Product(Problem(n=3, k=5, m=13, dtype=torch.float32)).proposals()


def test_a_refusal_is_an_error_with_its_status(column_major):
    own = Product(Problem(n=3, k=5, m=7, dtype=torch.float32))
    (algorithm, _) = own.proposals()
    algorithm.algo[0] = 3
    with pytest.raises(RuntimeError, match="cuBLASLt refuses a product: status 7"):
        own.run(algorithm, torch.randn(3, 5), torch.randn(5, 7), torch.empty(3, 7), None, None)


def test_without_a_gpu_there_is_no_library(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cublas.library.__wrapped__() is None
