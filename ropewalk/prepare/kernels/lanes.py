"""Bytes of a text side by side: 64 of them compared at once, eight of them read as a word.

Numba writes no vector comparisons whose result is a bit a byte, though LLVM has them on every processor (AVX-512: one
instruction for 64 bytes, SSE2: four), and no products of 128 bits. These are functions of a few LLVM instructions for
kernels to use; they check no bounds.
"""

from __future__ import annotations

from typing import Any

import llvmlite.ir
from numba import types
from numba.extending import intrinsic

ir: Any = llvmlite.ir
"""Which has no types of its own."""

LANES = 64
_BYTE, _WORD = ir.IntType(8), ir.IntType(64)
_VECTOR = ir.VectorType(_BYTE, LANES)


def _bytes_between(context: Any, data: Any, place: Any, fold: Any, first: Any, count: Any) -> Any:
    """Bit i: whether byte `place` + i of `data` (uint8, contiguous), with the bits of `fold` set, is one of the `count`
    values from `first` on. The last three are written as numbers in the call."""
    constants = [argument.literal_value for argument in (fold, first, count)]

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        fold, first, count = (ir.Constant(_VECTOR, [value] * LANES) for value in constants)
        lanes = builder.or_(_loaded(context, builder, signature, arguments, _VECTOR), fold)
        return builder.bitcast(builder.icmp_unsigned("<", builder.sub(lanes, first), count), _WORD)

    return types.uint64(data, types.int64, fold, first, count), build


def _word_at(context: Any, data: Any, place: Any) -> Any:
    """The eight bytes of `data` (uint8, contiguous) from `place` on, the first one lowest."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _loaded(context, builder, signature, arguments, _WORD)

    return types.uint64(data, types.int64), build


def _put_word(context: Any, data: Any, place: Any, word: Any) -> Any:
    """Writes a word to two places of `data` (uint32, contiguous) from `place` on, its lower half first."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _pointer(context, builder, signature, arguments, _WORD)).align = 4
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), build


def _trailing_zeros(context: Any, word: Any) -> Any:
    """How many of the lowest bits of a word are 0; 64 when all are."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), build


def _folded_product(context: Any, one: Any, other: Any) -> Any:
    """The two halves of the 128 bits of a product of words, one xor the other."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(*(builder.zext(argument, wide) for argument in arguments))
        upper = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _WORD)
        return builder.xor(upper, builder.trunc(product, _WORD))

    return types.uint64(types.uint64, types.uint64), build


def _loaded(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any) -> Any:
    """A value of `kind` from the array that is the first argument, at the place that is the second."""
    value = builder.load(_pointer(context, builder, signature, arguments, kind))
    value.align = 1
    return value


def _pointer(context: Any, builder: Any, signature: Any, arguments: Any, kind: Any) -> Any:
    """To that place, as one of a value of `kind`."""
    array = context.make_array(signature.args[0])(context, builder, arguments[0])
    return builder.bitcast(builder.gep(array.data, [arguments[1]]), kind.as_pointer())


bytes_between: Any = intrinsic(prefer_literal=True)(_bytes_between)
word_at: Any = intrinsic(_word_at)
put_word: Any = intrinsic(_put_word)
trailing_zeros: Any = intrinsic(_trailing_zeros)
folded_product: Any = intrinsic(_folded_product)
