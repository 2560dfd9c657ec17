"""Matrix products by cuBLASLt with an algorithm of our choice. Twin: `plain` of model/matmul.py.

torch leaves the choice to the library, which guesses from shapes. On an H200 the best of its eight proposals for each
product make a step of a 1.36 B model 2.7 % quicker. torch has no way to say which, so the library, which it has loaded,
is called here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from ctypes import byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
"""Numbers of `cudaDataType_t`."""
COMPUTE_FLOAT32, SCALE_FLOAT32 = 68, 0
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
"""Attributes of a product."""
EPILOGUE_BIAS = 4
WORKSPACE_LIMIT = 1
"""Attribute of a preference."""
WORKSPACE_BYTES = 32 << 20
"""As much as torch gives the library on a Hopper GPU."""
PROPOSALS = 8
"""The library proposed no more than that when asked for 40."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """a b of row-major operands, N M = N K times K M."""

    n: int
    k: int
    m: int
    dtype: torch.dtype
    wide: bool = False
    """Whether the result is float32 whatever the operands are."""
    a_transposed: bool = False
    """Whether `a` lies as K N."""
    b_transposed: bool = False
    """Whether `b` lies as M K."""
    biased: bool = False
    """Whether M numbers are added to every row."""
    adds: bool = False
    """Whether a matrix like the result is added to it."""
    a_stride: int = 0
    """Numbers from a row of `a` to the next in memory, where `a` is part of a wider matrix."""

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else self.dtype


class Algorithm(ctypes.Structure):
    """One of the library's proposals: `cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Product:
    """A problem as the library wants it: column by column, so that the operands change places."""

    def __init__(self, problem: Problem) -> None:
        it, lib = problem, library()
        assert lib is not None
        self._library, self._lock = lib, threading.Lock()
        self._operation = _made(lib.cublasLtMatmulDescCreate, c_int(COMPUTE_FLOAT32), c_int(SCALE_FLOAT32))
        self._set(TRANSPOSE_A, c_int32(it.b_transposed))
        self._set(TRANSPOSE_B, c_int32(it.a_transposed))
        if it.biased:
            self._set(EPILOGUE, c_int32(EPILOGUE_BIAS))
        self._a = self._layout(it.dtype, it.k if it.b_transposed else it.m, it.m if it.b_transposed else it.k)
        self._b = self._layout(
            it.dtype, it.n if it.a_transposed else it.k, it.k if it.a_transposed else it.n, stride=it.a_stride
        )
        self._out = self._layout(it.out_dtype, it.m, it.n)
        self._one, self._beta = c_float(1.0), c_float(1.0 if it.adds else 0.0)

    def proposals(self) -> list[Algorithm]:
        """What the library would take, the likeliest first."""
        lib, found, count = self._library, (Algorithm * PROPOSALS)(), c_int()
        preference = _made(lib.cublasLtMatmulPreferenceCreate)
        most = c_uint64(WORKSPACE_BYTES)
        _check(lib.cublasLtMatmulPreferenceSetAttribute(preference, c_int(WORKSPACE_LIMIT), byref(most), c_size_t(8)))
        layouts = self._a, self._b, self._out, self._out
        # It has a status for shapes that it does not know: then there is nothing to count.
        lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(), self._operation, *layouts, preference, c_int(PROPOSALS), found, byref(count)
        )
        _check(lib.cublasLtMatmulPreferenceDestroy(preference))
        return [each for each in found[: count.value] if each.state == 0]

    def run(
        self, algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, added: Tensor | None
    ) -> None:
        """Writes the product into `out`, on the stream of the moment of its device."""
        # Threads of several devices share the description of the product, which holds the place of the bias.
        with torch.cuda.device(out.device), self._lock if bias is not None else contextlib.nullcontext():
            if bias is not None:
                self._set(BIAS_POINTER, c_void_p(bias.data_ptr()))
            stream = torch.cuda.current_stream().cuda_stream
            _check(
                self._library.cublasLtMatmul(
                    _handle(),
                    self._operation,
                    byref(self._one),
                    c_void_p(b.data_ptr()),
                    self._a,
                    c_void_p(a.data_ptr()),
                    self._b,
                    byref(self._beta),
                    c_void_p((out if added is None else added).data_ptr()),
                    self._out,
                    c_void_p(out.data_ptr()),
                    self._out,
                    byref(algorithm),
                    c_void_p(_workspace(out.device, stream).data_ptr()),
                    c_size_t(algorithm.workspace_bytes),
                    c_void_p(stream),
                )
            )

    def _set(self, attribute: int, value: c_int32 | c_void_p) -> None:
        size = c_size_t(ctypes.sizeof(value))
        _check(self._library.cublasLtMatmulDescSetAttribute(self._operation, c_int(attribute), byref(value), size))

    def _layout(self, dtype: torch.dtype, rows: int, columns: int, *, stride: int = 0) -> c_void_p:
        sizes = c_uint64(rows), c_uint64(columns), c_int64(stride or rows)
        return _made(self._library.cublasLtMatrixLayoutCreate, c_int(TYPES[dtype]), *sizes)


@functools.cache
def library() -> ctypes.CDLL | None:
    """The cuBLASLt that torch has loaded; None where there is none, or where it cannot be found."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    try:
        with open("/proc/self/maps") as maps:
            found = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcublasLt.so" in line}
        return ctypes.CDLL(found.pop()) if found else None
    except OSError:
        return None


def version() -> int:
    """Of that library."""
    lib = library()
    assert lib is not None
    lib.cublasLtGetVersion.restype = c_size_t
    found: int = lib.cublasLtGetVersion()
    return found


@functools.cache
def _handle_of(device: int) -> c_void_p:
    lib = library()
    assert lib is not None
    return _made(lib.cublasLtCreate)


def _handle() -> c_void_p:
    return _handle_of(torch.cuda.current_device())


@functools.cache
def _workspace(device: torch.device, stream: int) -> Tensor:
    """One for each stream: products that run at the same time must not share it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _made(create: ctypes._NamedFuncPointer, *arguments: object) -> c_void_p:
    """What a function of the library creates, by the pointer that is its first argument."""
    made = c_void_p()
    _check(create(byref(made), *arguments))
    return made


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt refuses a product: status {status}")
