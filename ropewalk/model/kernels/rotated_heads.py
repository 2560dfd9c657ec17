"""Splits a fused projection into heads and rotates queries and keys by position; forward and backward.

Twin: the plain steps of `rotated_heads` in model/heads.py. Each program handles whole tokens, whose heads share angles.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..matmul import multiply

TOKENS, TURNS = 32, 16
"""Tile size within one head, and tiles per program, for sums over tokens."""
WALKED = 16
"""Tokens per program in kernels that iterate over heads."""


@torch.library.custom_op(
    "ropewalk::turned_heads",
    mutates_args=(),
    schema="(Tensor fused, Tensor cosines, Tensor sines, int group_heads, int head_size) -> (Tensor, Tensor, Tensor)",
)
def rotated(
    fused: Tensor, cosines: Tensor, sines: Tensor, group_heads: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries B T H D, keys and values B T G D of `fused` B T (G group_heads D); angles B 1 T D/2."""
    queries, keys, values = _heads(fused, cosines, sines, group_heads, head_size)
    rows, tokens, groups = keys.shape[:3]
    _rotated_heads[(rows * tokens,)](
        fused,
        cosines.contiguous(),
        sines.contiguous(),
        queries,
        keys,
        values,
        GROUPS=groups,
        GROUP=group_heads,
        HALF=head_size // 2,
        SLOTS=triton.next_power_of_2(groups * group_heads),
        num_warps=4,
    )
    return queries, keys, values


@rotated.register_fake
def _heads(
    fused: Tensor, cosines: Tensor, sines: Tensor, group_heads: int, head_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocates the result."""
    rows, tokens, features = fused.shape
    groups = features // (group_heads * head_size)
    queries = fused.new_empty(rows, tokens, groups * (group_heads - 2), head_size)
    keys, values = (fused.new_empty(rows, tokens, groups, head_size) for _ in range(2))
    return queries, keys, values


@torch.library.custom_op(
    "ropewalk::turned_product",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor cosines, Tensor sines, int group_heads, int head_size) -> Tensor",
)
def rotated_product(
    x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, group_heads: int, head_size: int
) -> Tensor:
    """x W^T, B T (G group_heads D), with queries and keys rotated in place."""
    fused = _projected(x, weight, cosines, sines, group_heads, head_size)
    multiply(x.flatten(0, 1), weight, fused.flatten(0, 1), b_transposed=True)
    _walk(_rotated_in_place, fused, cosines, sines, (), group_heads, head_size)
    return fused


@rotated_product.register_fake
def _projected(x: Tensor, weight: Tensor, cosines: Tensor, sines: Tensor, group_heads: int, head_size: int) -> Tensor:
    """Allocates the result."""
    return x.new_empty(x.shape[0], x.shape[1], weight.shape[0])


@torch.library.custom_op(
    "ropewalk::turned_heads_back",
    mutates_args=(),
    schema="(Tensor queries, Tensor keys, Tensor values, Tensor cosines, Tensor sines, int group_heads) -> Tensor",
)
def rotated_backward(
    queries: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor, group_heads: int
) -> Tensor:
    """Gradient of `fused`, given those of the outputs of `rotated`."""
    fused = _fused(queries, keys, values, cosines, sines, group_heads)
    parts = [x if x.stride(3) == 1 else x.contiguous() for x in (queries, keys, values)]
    strides = (stride for part in parts for stride in part.stride()[:3])
    _walk(_rotated_heads_backward, fused, cosines, sines, (*parts, *strides, keys.shape[1]), group_heads, keys.shape[3])
    return fused


@rotated_backward.register_fake
def _fused(queries: Tensor, keys: Tensor, values: Tensor, cosines: Tensor, sines: Tensor, group_heads: int) -> Tensor:
    """Allocates the result."""
    rows, tokens, groups, head_size = keys.shape
    return keys.new_empty(rows, tokens, groups * group_heads * head_size)


@torch.library.custom_op(
    "ropewalk::merged_heads",
    mutates_args=(),
    schema="(Tensor queries, Tensor keys, Tensor values, int group_heads) -> (Tensor, Tensor)",
)
def merged(queries: Tensor, keys: Tensor, values: Tensor, group_heads: int) -> tuple[Tensor, Tensor]:
    """Queries B T H D, keys and values B T G D merged to B T (G group_heads D); and partial sums over tokens, to be
    reduced."""
    fused, sums = _with_sums(queries, keys, values, group_heads)
    rows, tokens, groups, head_size = keys.shape
    parts = [x if x.stride(3) == 1 else x.contiguous() for x in (queries, keys, values)]
    _merged_heads[(groups * group_heads, len(sums))](
        fused,
        sums,
        *parts,
        *(stride for part in parts for stride in part.stride()[:3]),
        rows * tokens,
        tokens,
        GROUP=group_heads,
        SIZE=head_size,
        TOKENS=TOKENS,
        TURNS=TURNS,
        num_warps=4,
    )
    return fused, sums


@merged.register_fake
def _with_sums(queries: Tensor, keys: Tensor, values: Tensor, group_heads: int) -> tuple[Tensor, Tensor]:
    """Allocates the result."""
    rows, tokens, groups, head_size = keys.shape
    features = groups * group_heads * head_size
    parts = triton.cdiv(rows * tokens, TOKENS * TURNS)
    return keys.new_empty(rows, tokens, features), keys.new_empty(parts, features, dtype=torch.float32)


def _walk(
    kernel: Any, fused: Tensor, cosines: Tensor, sines: Tensor, others: tuple[Any, ...], group_heads: int, size: int
) -> None:
    """Launches a kernel whose programs take a few tokens of `fused` B T (G group_heads D) and iterate over heads."""
    count = fused.shape[0] * fused.shape[1]
    kernel[(triton.cdiv(count, WALKED),)](
        fused,
        cosines.contiguous(),
        sines.contiguous(),
        count,
        *others,
        GROUPS=fused.shape[2] // (group_heads * size),
        GROUP=group_heads,
        HALF=size // 2,
        TOKENS=WALKED,
        num_warps=4,
    )


@triton.jit
def _merged_heads(
    fused,
    sums,
    queries,
    keys,
    values,
    query_row,
    query_token,
    query_head,
    key_row,
    key_token,
    key_head,
    value_row,
    value_token,
    value_head,
    count,
    tokens,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    TURNS: tl.constexpr,
):
    slot = tl.program_id(0)
    features = tl.num_programs(0) * SIZE
    group, member = slot // GROUP, slot % GROUP
    head = queries + (group * (GROUP - 2) + member) * query_head
    row_step, token_step = query_row, query_token
    if member == GROUP - 2:
        head, row_step, token_step = keys + group * key_head, key_row, key_token
    if member == GROUP - 1:
        head, row_step, token_step = values + group * value_head, value_row, value_token
    feature = tl.arange(0, SIZE)
    total = tl.zeros([TOKENS, SIZE], tl.float32)
    for angles in range(TURNS):
        place = (tl.program_id(1) * TURNS + angles) * TOKENS + tl.arange(0, TOKENS)
        here = (place < count)[:, None]
        at = (place // tokens).to(tl.int64) * row_step + (place % tokens).to(tl.int64) * token_step
        x = tl.load(head + at[:, None] + feature[None, :], mask=here, other=0.0)
        into = place.to(tl.int64) * features + slot * SIZE
        tl.store(fused + into[:, None] + feature[None, :], x, mask=here)
        total += x.to(tl.float32)
    tl.store(sums + tl.program_id(1) * features + slot * SIZE + feature, tl.sum(total, axis=0))


@triton.jit
def _rotated_heads(
    fused,
    cosines,
    sines,
    queries,
    keys,
    values,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    SLOTS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.arange(0, SLOTS)[:, None]
    group, member = slot // GROUP, slot % GROUP
    feature = tl.arange(0, HALF)[None, :]
    here = (slot < GROUPS * GROUP) & (feature < HALF)
    at = token * (GROUPS * GROUP * 2 * HALF) + slot * (2 * HALF) + feature
    first = tl.load(fused + at, mask=here, other=0.0).to(tl.float32)
    second = tl.load(fused + at + HALF, mask=here, other=0.0).to(tl.float32)
    cosine = tl.load(cosines + token * HALF + feature).to(tl.float32)
    sine = tl.load(sines + token * HALF + feature).to(tl.float32)
    turns = member < GROUP - 1
    low = tl.where(turns, first * cosine - second * sine, first).to(fused.dtype.element_ty)
    high = tl.where(turns, first * sine + second * cosine, second).to(fused.dtype.element_ty)
    query = (token * GROUPS * (GROUP - 2) + group * (GROUP - 2) + member) * (2 * HALF) + feature
    is_query = here & (member < GROUP - 2)
    tl.store(queries + query, low, mask=is_query)
    tl.store(queries + query + HALF, high, mask=is_query)
    other = (token * GROUPS + group) * (2 * HALF) + feature
    is_key = here & (member == GROUP - 2)
    tl.store(keys + other, low, mask=is_key)
    tl.store(keys + other + HALF, high, mask=is_key)
    is_value = here & (member == GROUP - 1)
    tl.store(values + other, low, mask=is_value)
    tl.store(values + other + HALF, high, mask=is_value)


@triton.jit
def _angles(cosines, sines, count, HALF: tl.constexpr, TOKENS: tl.constexpr):
    """Offsets of a program's tokens, their mask, the features of half a head, cosines and sines."""
    place = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]
    here = place < count
    feature = tl.arange(0, HALF)[None, :]
    cosine = tl.load(cosines + place * HALF + feature, mask=here, other=0.0).to(tl.float32)
    sine = tl.load(sines + place * HALF + feature, mask=here, other=0.0).to(tl.float32)
    return place, here, feature, cosine, sine


@triton.jit
def _rotated_in_place(
    fused,
    cosines,
    sines,
    count,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    place, here, feature, cosine, sine = _angles(cosines, sines, count, HALF, TOKENS)
    at = fused + place.to(tl.int64) * (GROUPS * GROUP * 2 * HALF) + feature
    for group in range(GROUPS):
        for member in tl.static_range(GROUP - 1):  # the last is the value
            head = at + (group * GROUP + member) * (2 * HALF)
            first = tl.load(head, mask=here, other=0.0).to(tl.float32)
            second = tl.load(head + HALF, mask=here, other=0.0).to(tl.float32)
            tl.store(head, (first * cosine - second * sine).to(fused.dtype.element_ty), mask=here)
            tl.store(head + HALF, (first * sine + second * cosine).to(fused.dtype.element_ty), mask=here)


@triton.jit
def _rotated_heads_backward(
    fused,
    cosines,
    sines,
    count,
    queries,
    keys,
    values,
    query_row,
    query_token,
    query_head,
    key_row,
    key_token,
    key_head,
    value_row,
    value_token,
    value_head,
    tokens,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    TOKENS: tl.constexpr,
):
    place, here, feature, cosine, sine = _angles(cosines, sines, count, HALF, TOKENS)
    row, token = (place // tokens).to(tl.int64), (place % tokens).to(tl.int64)
    query = queries + row * query_row + token * query_token + feature
    key = keys + row * key_row + token * key_token + feature
    value = values + row * value_row + token * value_token + feature
    into = fused + place.to(tl.int64) * (GROUPS * GROUP * 2 * HALF) + feature
    for group in range(GROUPS):
        for member in tl.static_range(GROUP):
            if member < GROUP - 2:
                head = query + (group * (GROUP - 2) + member) * query_head
            elif member == GROUP - 2:
                head = key + group * key_head
            else:
                head = value + group * value_head
            first = tl.load(head, mask=here, other=0.0)
            second = tl.load(head + HALF, mask=here, other=0.0)
            slot = into + (group * GROUP + member) * (2 * HALF)
            if member < GROUP - 1:
                low, high = first.to(tl.float32), second.to(tl.float32)
                first = (low * cosine + high * sine).to(fused.dtype.element_ty)
                second = (high * cosine - low * sine).to(fused.dtype.element_ty)
            tl.store(slot, first, mask=here)
            tl.store(slot + HALF, second, mask=here)
