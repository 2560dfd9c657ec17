"""Chooses tokens from logits.

In the order of transformers: repetition penalty, temperature, top-k, top-p, min-p; each reads what the ones before it
left. Temperature 0 takes the most likely token after the penalty.

Shapes: B sequences, V vocabulary, K candidates, S slots.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ropewalk.base.seeds import seed_for

from ..task import Sampling


def prompt_seed(seed: int, prompt: Sequence[int], repeat: int) -> int:
    """The seed of a completion of `prompt` in a run with `seed`: the same whatever else the run completes."""
    return seed_for(seed, "generate", ",".join(map(str, prompt)), repeat)


def choose(logits_BV: Tensor, chances_B: Tensor, sampling: Sampling) -> Tensor:
    """One token per sequence, by inverse CDF at the quantiles `chances_B` of the distribution; the penalty is
    `Penalty`'s. Does not wait for the device."""
    if sampling.temperature == 0:
        return logits_BV.argmax(-1)
    candidates_BK = None
    if 0 < sampling.top_k < logits_BV.shape[-1]:
        logits_BV, candidates_BK = logits_BV.topk(sampling.top_k, dim=-1)
    elif sampling.top_p < 1:
        logits_BV, candidates_BK = logits_BV.sort(dim=-1, descending=True, stable=True)
    # Float64 logits minus their maximum: a very low temperature underflows to probability 0 instead of nan.
    wide_BK = logits_BV.double()
    sharp_BK = (wide_BK - wide_BK.amax(-1, keepdim=True)) / sampling.temperature
    weights_BK = sharp_BK.softmax(-1)
    least_B1 = sampling.min_p * weights_BK.amax(-1, keepdim=True)
    if sampling.top_p < 1:
        # A candidate stays while those before it sum to less than `top_p`.
        before_BK = weights_BK.cumsum(-1) - weights_BK
        weights_BK = weights_BK.masked_fill(before_BK >= max(sampling.top_p, 1e-300), 0.0)
    if sampling.min_p > 0:
        weights_BK = weights_BK.masked_fill(weights_BK < least_B1, 0.0)
    below_BK = weights_BK.cumsum(-1)
    total_B1 = below_BK[:, -1:].contiguous()
    place_B1 = torch.searchsorted(below_BK, chances_B.unsqueeze(1) * total_B1, right=True)
    # A quantile that rounds up to the sum: the last candidate that has a probability. With nan: any.
    last_B1 = torch.searchsorted(below_BK, total_B1).clamp(max=below_BK.shape[1] - 1)
    place_B1 = torch.minimum(place_B1, last_B1)
    return (place_B1 if candidates_BK is None else candidates_BK.gather(1, place_B1)).squeeze(1)


class Penalty:
    """The repetition penalty: remembers the tokens of the text in each slot (one byte per slot and token of the
    vocabulary)."""

    def __init__(self, penalty: float, *, slots: int, vocabulary: int, device: torch.device) -> None:
        self._penalty = penalty
        self._used_SV = torch.zeros(slots, vocabulary, dtype=torch.bool, device=device)

    def begin(self, slot: int, text: Sequence[int]) -> None:
        """A new text is in the slot."""
        self._used_SV[slot] = False
        self._used_SV[slot, torch.tensor(text, device=self._used_SV.device)] = True

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Texts move to other slots."""
        self._used_SV[list(targets)] = self._used_SV[list(sources)]

    def apply(self, logits_BV: Tensor, slots: Tensor) -> Tensor:
        """The logits after the penalty."""
        used_BV = self._used_SV[slots, : logits_BV.shape[1]]
        lower_BV = torch.where(logits_BV > 0, logits_BV / self._penalty, logits_BV * self._penalty)
        return torch.where(used_BV, lower_BV, logits_BV)

    def add(self, slots: Tensor, token_B: Tensor) -> None:
        """Each slot's text has one more token."""
        self._used_SV[slots, token_B] = True
