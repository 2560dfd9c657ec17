"""How kernels of many small functions are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """A kernel without reference counts, for code that neither makes nor returns an array.

    Otherwise every call of a helper counts the references of all arrays that it takes. Measured on the encoder of
    tokens, numba 0.67: that is half of the time.
    """
    return cast(Function, njit(cache=True, nogil=True, _nrt=False)(function))  # type: ignore[call-overload]


def inlined(function: Function) -> Function:
    """The same for a helper that becomes a part of its callers."""
    return cast(Function, njit(cache=True, nogil=True, _nrt=False, forceinline=True)(function))  # type: ignore[call-overload]
