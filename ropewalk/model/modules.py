"""The modules of a block: linear layers, attention, feed-forward. Plain PyTorch on one device.

Shapes: B sequences, T tokens, C width, H query heads, G key and value heads, D head size, F hidden features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Attend
from .components import ACTIVATIONS, NORMS, made
from .dropout import Dropout
from .feed_forward import gated, gelu, gelu_tanh
from .heads import Heads, has_head_kernel, rotated_heads, rotated_projection, split_biased_heads, split_heads
from .matmul import product
from .norms import has_norm_kernel, passing
from .positions import Rotation, rotate
from .spec import Spec


def make_norm(spec: Spec) -> nn.Module:
    """The spec's norm over the width."""
    norm: nn.Module = made(NORMS[spec.norm], spec.norm_settings)(spec.width)
    return norm


def make_linear(spec: Spec, name: str, *, inputs: int, outputs: int) -> Linear:
    """The linear layer `name` of a block, with an adapter if the spec has one."""
    rank = spec.lora_rank if name in spec.adapted else 0
    return Linear(inputs, outputs, bias=spec.bias, rank=rank, alpha=spec.lora_alpha)


Product = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Computes x W^T + b from an input, a matrix and an optional bias."""


def _same(x: Tensor) -> Tensor:
    return x


class Linear(nn.Module):
    """x W^T + b, plus a low-rank adapter alpha / rank (x A^T) B^T if any (Hu et al. 2021, equation 3).

    Tensor parallelism sets `enter` (gathers the input) or `column` (gathers and multiplies), and `leave` (reduces
    partial results before the bias is added); deferred weight gradients set `product`. A layer is `bare` if
    model/matmul.py computes all of it: callers may then fuse an addition into its matmul.
    """

    def __init__(self, inputs: int, outputs: int, *, bias: bool, rank: int = 0, alpha: float = 1.0) -> None:
        super().__init__()
        self.scale = alpha / rank if rank else 0.0
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs)) if bias else None
        self.lora_a = nn.Parameter(torch.empty(rank, inputs)) if rank else None
        self.lora_b = nn.Parameter(torch.empty(outputs, rank)) if rank else None
        self.enter: Callable[[Tensor], Tensor] = _same
        self.column: Callable[[Tensor, Tensor, Tensor | None, Product], Tensor] | None = None
        """`enter` and `product` in one, for matmuls by torch or model/matmul.py without an adapter."""
        self.leave: Callable[[Tensor], Tensor] | None = None
        self.product: Product = F.linear
        self.bare = False

    def forward(
        self, x: Tensor, *, biased: bool = True, bias_learns: bool = True, added: Tensor | None = None
    ) -> Tensor:
        """The layer's output plus `added`. `biased`: whether to add the bias here; `bias_learns`: whether to compute
        its gradient here. Otherwise the caller does."""
        bias: Tensor | None = self.bias if biased else None
        bias = bias if bias is None or bias_learns else bias.detach()
        if added is not None and self.bare:
            return product(x, self.weight, bias, added)
        if self.column is not None and self.lora_a is None and self.product in (F.linear, product):
            y = self.column(x, self.weight, bias, self.product)
            return y if added is None else added + y
        x = self.enter(x)
        # The bias is free inside the matmul; with partial sums it is added once, after their reduction.
        y = self.product(x, self.weight, None if self.leave else bias)
        if self.lora_a is not None and self.lora_b is not None:
            y = torch.add(y, self.product(self.product(x, self.lora_a, None), self.lora_b, None), alpha=self.scale)
        if self.leave:
            y = self.leave(y)
            y = y if bias is None else y + bias.to(y.dtype)
        return y if added is None else added + y


class HeadNorm(nn.Module):
    """RMS norm over each head's features, with a scale shared by all heads."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(spec.head_size))

    def forward(self, x_BHTD: Tensor) -> Tensor:
        # Attention needs q and k in the dtype of v; a float32 scale would widen them under autocast.
        scale = self.weight.to(x_BHTD.dtype)
        return F.rms_norm(x_BHTD, scale.shape, scale, 1e-6).to(x_BHTD.dtype)


class Attention(nn.Module):
    """Self-attention with one fused projection.

    Rows of the projection are grouped by key-value head (queries, key, value of group 0, then group 1, ...): tensor
    parallelism may split dimension 0 between groups.

    With `positions_first` hidden states are T B C, and rotation angles T 1 B D/2: the order of tokens matters only in
    attention itself.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.head_size = spec.head_size
        self.group_heads = spec.group_heads
        self.positions_first = False
        rows = spec.kv_heads * spec.group_heads * spec.head_size
        self.qkv = make_linear(spec, "attention.qkv", inputs=spec.width, outputs=rows)
        self.query_norm = HeadNorm(spec) if spec.qk_norm else None
        self.key_norm = HeadNorm(spec) if spec.qk_norm else None
        self.out = make_linear(spec, "attention.out", inputs=spec.heads * spec.head_size, outputs=spec.width)

    def forward(
        self,
        x_BTC: Tensor,
        *,
        angles: Rotation | None,
        attend: Attend,
        biased: bool = True,
        bias_learns: bool = True,
        added: Tensor | None = None,
    ) -> Tensor:
        """Attention plus `added`; `biased` and `bias_learns` apply to the last linear layer."""
        sizes = {"group_heads": self.group_heads, "head_size": self.head_size}
        if angles is not None and self.query_norm is None:
            q_BHTD, k_BGTD, v_BGTD = self._rotated(x_BTC, angles, **sizes)
        else:
            q_BHTD, k_BGTD, v_BGTD = self._split(x_BTC, **sizes)
            if self.query_norm is not None and self.key_norm is not None:
                q_BHTD, k_BGTD = self.query_norm(q_BHTD), self.key_norm(k_BGTD)
            if angles is not None:
                q_BHTD, k_BGTD = rotate(q_BHTD, angles), rotate(k_BGTD, angles)
        if self.positions_first:
            q_BHTD, k_BGTD, v_BGTD = (x_THBD.transpose(0, 2) for x_THBD in (q_BHTD, k_BGTD, v_BGTD))
        attended_BHTD = attend(q_BHTD, k_BGTD, v_BGTD)
        if self.positions_first:
            attended_BHTD = attended_BHTD.transpose(0, 2)
        flat_BTC = attended_BHTD.transpose(1, 2).flatten(2)
        return self.out(flat_BTC, biased=biased, bias_learns=bias_learns, added=added)

    def _rotated(self, x_BTC: Tensor, angles: Rotation, **sizes: int) -> Heads:
        joined = self.qkv.bare and self.qkv.bias is None and x_BTC.dtype == self.qkv.weight.dtype
        if joined and has_head_kernel(x_BTC, self.head_size):
            return rotated_projection(x_BTC, self.qkv.weight, angles, **sizes)
        return rotated_heads(self.qkv(x_BTC), angles, **sizes)

    def _split(self, x_BTC: Tensor, **sizes: int) -> Heads:
        if self.qkv.bias is not None and has_head_kernel(x_BTC, self.head_size):
            return split_biased_heads(self.qkv(x_BTC, bias_learns=False), self.qkv.bias, **sizes)
        return split_heads(self.qkv(x_BTC), **sizes)


class FeedForward(nn.Module):
    """down(f(up(x))), or gated: down(f(gate(x)) x up(x)).

    Rows of gate and up alternate in chunks of one fused matrix; tensor parallelism splits between chunks.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.activation: Callable[[Tensor], Tensor] = made(ACTIVATIONS[spec.mlp], spec.mlp_settings)
        self.gated = spec.gated
        self.has_kernel = self.activation in (F.gelu, gelu_tanh)
        self.chunk = spec.mlp_chunk
        self.up = make_linear(spec, "mlp.up", inputs=spec.width, outputs=spec.mlp_width * (2 if spec.gated else 1))
        self.down = make_linear(spec, "mlp.down", inputs=spec.mlp_width, outputs=spec.width)

    def forward(self, x_BTC: Tensor, *, bias_learns: bool = True, added: Tensor | None = None) -> Tensor:
        """Feed-forward plus `added`; `bias_learns` applies to the last linear layer."""
        return self.down(self._hidden(x_BTC), bias_learns=bias_learns, added=added)

    def _hidden(self, x_BTC: Tensor) -> Tensor:
        if self.gated:
            return gated(self.up(x_BTC), self.activation, chunk=self.chunk)
        if self.has_kernel and x_BTC.is_cuda:
            return gelu(self.up(x_BTC, biased=False), self.up.bias, tanh=self.activation is gelu_tanh)
        return self.activation(self.up(x_BTC))


class Block(nn.Module):
    """A transformer block: attention and feed-forward branches with residual adds; norms follow `norm_position`.

    The forward pass does not read `layer`, so that one compiled block serves all layers.
    """

    def __init__(self, spec: Spec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.norm_last = spec.norm_position == "post"
        both = spec.norm_position == "both"
        self.attention_norm = make_norm(spec)
        self.attention = Attention(spec)
        self.attention_post_norm = make_norm(spec) if both else None
        self.mlp_norm = make_norm(spec)
        self.mlp = FeedForward(spec)
        self.mlp_post_norm = make_norm(spec) if both else None

    def forward(
        self, x_BTC: Tensor, *, angles: Rotation | None, attend: Attend, dropout: Dropout | None = None
    ) -> Tensor:
        """One block; `dropout` is that of this layer."""

        def attention(x_BTC: Tensor) -> Tensor:
            y_BTC = self.attention(x_BTC, angles=angles, attend=attend)
            return y_BTC if dropout is None else dropout(y_BTC, site="attention")

        def feed_forward(x_BTC: Tensor) -> Tensor:
            y_BTC = self.mlp(x_BTC)
            return y_BTC if dropout is None else dropout(y_BTC, site="mlp")

        if self.norm_last:
            x_BTC = self.attention_norm(x_BTC + attention(x_BTC))
            return self.mlp_norm(x_BTC + feed_forward(x_BTC))
        x_BTC, normed_BTC = passing(x_BTC, self.attention_norm)
        if dropout is None and self.attention_post_norm is None and has_norm_kernel(x_BTC, self.mlp_norm):
            # The norm kernels add the branches' output biases and compute their gradients.
            branch = functools.partial(self.attention, normed_BTC, angles=angles, attend=attend)
            biases = {"bias": self.attention.out.bias, "later": self.mlp.down.bias}
            if self.attention.out.bare:  # the matmul adds
                x_BTC, normed_BTC = passing(branch(bias_learns=False, added=x_BTC), self.mlp_norm, **biases)
            else:
                x_BTC, normed_BTC = passing(x_BTC, self.mlp_norm, added=branch(biased=False), **biases)
            return self.mlp(normed_BTC, bias_learns=False, added=x_BTC)
        attended_BTC = _normed(attention(normed_BTC), self.attention_post_norm, x_BTC.dtype)
        x_BTC, normed_BTC = passing(x_BTC, self.mlp_norm, added=attended_BTC)
        return x_BTC + _normed(feed_forward(normed_BTC), self.mlp_post_norm, x_BTC.dtype)


def _normed(y_BTC: Tensor, norm: nn.Module | None, dtype: torch.dtype) -> Tensor:
    """The output of a branch: half precision under autocast, its norm in the dtype of the stream."""
    return y_BTC if norm is None else norm(y_BTC.to(dtype))
