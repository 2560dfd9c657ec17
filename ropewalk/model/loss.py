"""Loss as a function of hidden states and head: the logits of a whole batch need never exist at once.

Shapes: N tokens, C width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_BYTES = 1 << 28
"""Most bytes of float32 logits alive at once; larger batches are cut into chunks whose logits are computed again in the
backward pass (one more head product, 2 V C FLOPs a token)."""


def token_losses(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
    """The negative log-probability of each target, in float32 or wider."""
    chunk = max(1, LOGIT_BYTES // (4 * head_VC.shape[0]))
    if len(hidden_NC) <= chunk:
        return _losses(hidden_NC, head_VC, targets_N)
    parts = zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True)
    return torch.cat([checkpoint(_losses, hidden, head_VC, targets, use_reentrant=False) for hidden, targets in parts])


@torch.no_grad()
def token_scores(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, whether it is the first choice), without gradients."""
    chunk = max(1, LOGIT_BYTES // (4 * head_VC.shape[0]))
    scores, first = [], []
    for hidden, targets in zip(hidden_NC.split(chunk), targets_N.split(chunk), strict=True):
        logits_NV = _wide(F.linear(hidden, head_VC))
        scores.append(-F.cross_entropy(logits_NV, targets, reduction="none"))
        first.append(logits_NV.argmax(-1) == targets)
    return torch.cat(scores), torch.cat(first)


def _losses(hidden_NC: Tensor, head_VC: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(_wide(F.linear(hidden_NC, head_VC)), targets_N, reduction="none")


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
