"""cuBLASLt matmuls with a chosen algorithm. Twin: `plain` of model/matmul.py.

torch leaves the choice to the library's heuristic. On an H200 the fastest of its eight proposals per matmul make a step
of a 1.36 B model 2.7 % faster. torch cannot select an algorithm, so this module calls the library, which torch has
loaded.
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
"""Values of `cudaDataType_t`."""
COMPUTE_FLOAT32, SCALE_FLOAT32 = 68, 0
TRANSPOSE_A, TRANSPOSE_B, EPILOGUE, BIAS_POINTER = 3, 4, 7, 8
"""Attributes of a matmul descriptor."""
EPILOGUE_BIAS = 4
WORKSPACE_LIMIT = 1
"""Attribute of a matmul preference."""
WORKSPACE_BYTES = 32 << 20
"""The workspace size of torch on Hopper GPUs."""
PROPOSALS = 8
"""Asked for 40, the library proposed no more than this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """A matmul a b of row-major operands, N M = N K times K M."""

    n: int
    k: int
    m: int
    dtype: torch.dtype
    wide: bool = False
    """Whether the result is float32 whatever the operands' dtype."""
    a_transposed: bool = False
    """Whether `a` is stored K N."""
    b_transposed: bool = False
    """Whether `b` is stored M K."""
    biased: bool = False
    """Whether a bias of M values is added to every row."""
    adds: bool = False
    """Whether a matrix of the result's shape is added."""
    a_stride: int = 0
    """Row stride of `a` in elements, if `a` is part of a wider matrix."""

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.float32 if self.wide else self.dtype


class Algorithm(ctypes.Structure):
    """One proposed algorithm: `cublasLtMatmulHeuristicResult_t`."""

    _fields_ = (
        ("algo", c_uint64 * 8),
        ("workspace_bytes", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    )


class Product:
    """A problem in the library's column-major layout, with the operands swapped."""

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
        """Algorithms from the library's heuristic, best guess first."""
        lib, found, count = self._library, (Algorithm * PROPOSALS)(), c_int()
        preference = _made(lib.cublasLtMatmulPreferenceCreate)
        most = c_uint64(WORKSPACE_BYTES)
        _check(lib.cublasLtMatmulPreferenceSetAttribute(preference, c_int(WORKSPACE_LIMIT), byref(most), c_size_t(8)))
        layouts = self._a, self._b, self._out, self._out
        # It returns an error status for unsupported shapes: then there are no proposals.
        lib.cublasLtMatmulAlgoGetHeuristic(
            _handle(), self._operation, *layouts, preference, c_int(PROPOSALS), found, byref(count)
        )
        _check(lib.cublasLtMatmulPreferenceDestroy(preference))
        return [each for each in found[: count.value] if each.state == 0]

    def run(
        self, algorithm: Algorithm, a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None, added: Tensor | None
    ) -> None:
        """Writes the matmul into `out`, on the current stream of its device."""
        # Threads of several devices share the matmul descriptor, which contains the bias pointer.
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
    """The cuBLASLt loaded by torch; None if there is none or it cannot be found."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    try:
        with open("/proc/self/maps") as maps:
            found = {line.split(maxsplit=5)[-1].strip() for line in maps if "libcublasLt.so" in line}
        return ctypes.CDLL(found.pop()) if found else None
    except OSError:
        return None


def version() -> int:
    """Version of that library."""
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
    """One workspace per stream: concurrent matmuls must not share it."""
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _made(create: ctypes._NamedFuncPointer, *arguments: object) -> c_void_p:
    """The handle that a library function writes to the pointer in its first argument."""
    made = c_void_p()
    _check(create(byref(made), *arguments))
    return made


def _check(status: int) -> None:
    if status:
        raise RuntimeError(f"cuBLASLt refuses a product: status {status}")
