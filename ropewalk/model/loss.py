"""Chunked cross-entropy from hidden states and head, which never materializes all logits of a batch.

Shapes: N tokens, C width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .matmul import multiply

LOGIT_BYTES = 1 << 22
"""Maximum bytes of float32 logits at once on a CPU; larger batches are split into chunks that fit its cache. Takes
0.6 to 0.95 of the time of one chunk and of `token_losses` (2,048 and 4,096 tokens and logits)."""
GPU_LOGIT_BYTES = 1 << 32
"""The same for a GPU, where large matmuls are faster: 28.6 ms for 65,536 tokens of 768 features and 50,304 logits,
against 32.7 with an eighth of the limit and 27.9 in one chunk (H200)."""


def weighted_loss(
    hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor, weights_N: Tensor, *, each_N: Tensor | None = None
) -> Tensor:
    """Weighted sum of the targets' negative log-probabilities, in float32 or wider.

    Gradients are computed in the forward pass, per chunk of tokens: the gradient of the chunk's logits replaces them in
    place and is multiplied with head and hidden states immediately. Nothing is recomputed; saved tensors have the size
    of the hidden states and the head. `each_N` receives the terms of the sum.
    """
    loss: Tensor = _WeightedLoss.apply(hidden_NC, head_VC, targets_N, weights_N, each_N)
    return loss


def token_losses(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
    """Negative log-probability of each target, in float32 or wider, by plain autograd; `weighted_loss` sums it.
    Materializes all logits."""
    return F.cross_entropy(_wide(F.linear(hidden_NC, head_VC)), targets_N, reduction="none")


@torch.no_grad()
def token_scores(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, whether it is the argmax), without gradients."""
    chunk = chunk_rows(len(hidden_NC), head_VC)
    scores, first = [], []
    for hidden, targets in zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True):
        logits_NV = _wide(F.linear(hidden, head_VC))
        scores.append(-F.cross_entropy(logits_NV, targets, reduction="none"))
        first.append(logits_NV.argmax(-1) == targets)
    return torch.cat(scores), torch.cat(first)


def chunk_rows(tokens: int, head_VC: Tensor) -> int:
    """Tokens per chunk: equal chunks within the logit limit."""
    most = max(1, (GPU_LOGIT_BYTES if head_VC.is_cuda else LOGIT_BYTES) // (4 * head_VC.shape[0]))
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


def losses_and_gradient_(logits_NV: Tensor, targets_N: Tensor, weights_N: Tensor) -> Tensor:
    """Weighted loss of each token; overwrites `logits_NV` with the gradient of the sum. Plain PyTorch."""
    log_NV = F.log_softmax(_wide(logits_NV), dim=1)
    losses_N = -log_NV.gather(1, targets_N.unsqueeze(1)).squeeze(1) * weights_N
    gradient_NV = log_NV.exp_()
    gradient_NV.scatter_add_(1, targets_N.unsqueeze(1), gradient_NV.new_full((len(targets_N), 1), -1.0))
    logits_NV.copy_(gradient_NV.mul_(weights_N.unsqueeze(1)))
    return losses_N


class _WeightedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor, weights_N: Tensor, each_N: Tensor | None
    ) -> Tensor:
        kind = hidden_NC.device.type
        narrow = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden_NC.dtype
        wide = torch.promote_types(narrow, torch.float32)
        judge = losses_and_gradient_
        if hidden_NC.is_cuda and wide == torch.float32:
            from .kernels.cross_entropy import losses_and_gradient_ as judge
        to_hidden, to_head = ctx.needs_input_grad[:2]
        with torch.autocast(kind, enabled=False):
            hidden, head, weights_N = hidden_NC.to(narrow), head_VC.to(narrow), weights_N.to(wide)
            by_hidden = torch.empty_like(hidden) if to_hidden else None
            by_head: Tensor | None = None
            loss = torch.zeros((), dtype=wide, device=hidden.device)
            chunk = chunk_rows(len(hidden), head)
            for first in range(0, len(hidden), chunk):
                part = slice(first, first + chunk)
                logits = multiply(hidden[part], head, hidden.new_empty(len(hidden[part]), len(head)), b_transposed=True)
                losses_N = judge(logits, targets_N[part], weights_N[part])
                loss += losses_N.sum()
                if each_N is not None:
                    each_N[part] = losses_N
                if by_hidden is not None:
                    multiply(logits, head, by_hidden[part])
                if to_head:
                    by_head = _add_product(by_head, logits, hidden[part], wide)
                del logits  # before the next chunk allocates its own
            if to_head and by_head is None:
                by_head = torch.zeros_like(head, dtype=wide)
        ctx.save_for_backward(by_hidden, by_head)
        ctx.dtypes = hidden_NC.dtype, head_VC.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        by_hidden, by_head = ctx.saved_tensors
        return (
            None if by_hidden is None else _scaled(by_hidden, gradient, ctx.dtypes[0]),
            None if by_head is None else _scaled(by_head, gradient, ctx.dtypes[1]),
            None,
            None,
            None,
        )


def _add_product(total_VC: Tensor | None, logits_NV: Tensor, hidden_NC: Tensor, dtype: torch.dtype) -> Tensor:
    """Gradient of the head in `dtype`, accumulated in place into `total_VC` if given. On a GPU the matmul itself
    accumulates, without rounding."""
    if not logits_NV.is_cuda or logits_NV.dtype == dtype:
        product = logits_NV.t() @ hidden_NC
        return product.to(dtype) if total_VC is None else total_VC.add_(product)
    out_VC = total_VC
    if out_VC is None:
        out_VC = hidden_NC.new_empty(logits_NV.shape[1], hidden_NC.shape[1], dtype=dtype)
    return multiply(logits_NV, hidden_NC, out_VC, a_transposed=True, added=total_VC)


def _scaled(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    if x.is_cuda and x.dtype != torch.float64:
        from .kernels.cross_entropy import scaled

        return scaled(x, by, dtype)
    return (x * by).to(dtype)


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
