"""Generation: the cache is invisible, streams belong to prompts, rows never outgrow the model."""

from __future__ import annotations

import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.base.seeds import seed_for
from ropewalk.evaluate.generate import choose, context_start, generate, stream
from ropewalk.model.decoder import Decoder

from .tiny import small, vivid

PROMPTS = [[5, 9, 2], [7, 7, 1], [3], [8, 1, 4, 4, 60], [2] * 15]


def recomputed(model: Decoder, prompt: list[int], *, index: int, new_tokens: int, temperature: float, top_k: int):
    """The completion with every token computed from the whole visible text, no cache, probabilities by hand."""
    limit = model.spec.sequence_length
    generator = torch.Generator().manual_seed(seed_for(index, "generate"))
    text = list(prompt)
    for chance in torch.rand(new_tokens, generator=generator, dtype=torch.float64).tolist():
        visible = text[context_start(len(text), limit) :]
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([visible])))[0, -1]
        ranked = logits.argsort(descending=True)[: top_k or None] if top_k else torch.arange(len(logits))
        weights = ((logits[ranked] - logits.max()) / max(temperature, 1e-9)).exp()
        reached = (weights / weights.sum()).cumsum(0)
        drawn = int((reached <= chance).sum())
        text.append(int(logits.argmax()) if temperature == 0 else int(ranked[drawn]))
    return text[len(prompt) :]


@pytest.mark.parametrize("position", ["rope", "learned"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(("temperature", "top_k"), [(0.0, 0), (1.0, 0), (0.8, 7)])
def test_cached_generation_equals_recomputation(position, kv_heads, temperature, top_k):
    model = vivid(small(position=position, kv_heads=kv_heads))
    options = {"new_tokens": 20, "temperature": temperature, "top_k": top_k}
    completions = generate(model, PROMPTS, **options, seeds=range(len(PROMPTS)), end=None)
    for index, prompt in enumerate(PROMPTS):
        assert completions[index] == recomputed(model, prompt, index=index, **options)
    # The prompts and the weights are such that the model does not settle on one token: the test sees differences.
    assert len({token for completion in completions for token in completion}) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "alibi"},
        {"position": "alibi", "heads": 6, "width": 48, "kv_heads": 3, "window": 4},
        {"position": "sinusoidal", "bias": True, "norm": "layer", "norm_position": "post"},
        {"position": "none", "norm_position": "both"},
        {"window": 5, "qk_norm": True, "rope_scaling": "linear", "rope_factor": 2.0},
        {"window": 1, "mlp": "relu2", "norm": "none", "rope_scaling": "ntk", "rope_factor": 4.0},
    ],
)
def test_cached_generation_equals_recomputation_under_every_option(changes):
    model = vivid(small(**changes))
    options = {"new_tokens": 20, "temperature": 1.0, "top_k": 0}
    completions = generate(model, PROMPTS, **options, seeds=range(len(PROMPTS)), end=None)
    for index, prompt in enumerate(PROMPTS):
        assert completions[index] == recomputed(model, prompt, index=index, **options)


def test_a_completion_does_not_depend_on_the_other_prompts():
    model = vivid(small())
    options = {"new_tokens": 9, "temperature": 1.0, "top_k": 0, "end": None}
    alone = generate(model, PROMPTS[:1], **options, seeds=[3])[0]
    assert generate(model, [PROMPTS[0], *PROMPTS], **options, seeds=[3, *range(5)])[0] == alone
    assert list(stream(model, PROMPTS[0], **options, seed=3)) == alone
    first, second = generate(model, [PROMPTS[0], PROMPTS[0]], **options, seeds=[3, 4])
    assert first != second


def test_a_completion_stops_before_the_end_token():
    model = vivid(small())
    options = {"new_tokens": 12, "temperature": 1.0, "top_k": 0}
    seeds = range(len(PROMPTS))
    whole = generate(model, PROMPTS, **options, seeds=seeds, end=None)
    end = whole[0][4]
    for free, stopped in zip(whole, generate(model, PROMPTS, **options, seeds=seeds, end=end), strict=True):
        assert stopped == (free[: free.index(end)] if end in free else free)
    assert list(stream(model, PROMPTS[0], **options, seed=0, end=end)) == whole[0][: whole[0].index(end)]


@pytest.mark.parametrize("limit", [1, 2, 7, 12])
def test_the_visible_text_fits_and_keeps_at_least_half_a_row(limit):
    for length in range(1, 5 * limit):
        visible = length - context_start(length, limit)
        assert visible == length if length <= limit else limit // 2 < visible <= limit


def test_sampling_follows_the_distribution():
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.float64)
    chances = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    drawn = choose(logits.expand(10_000, -1), chances, temperature=0.5, top_k=3)
    expected = (logits[0] / 0.5).masked_fill(logits[0] < 0, float("-inf")).softmax(0)
    # Evenly spaced quantiles miss each probability by at most one part in 10,000 on either side.
    torch.testing.assert_close(drawn.bincount(minlength=4) / 10_000, expected, atol=2e-4, rtol=0, check_dtype=False)


def test_a_vanishing_temperature_is_greedy():
    logits = torch.randn(5, 40)
    chances = torch.rand(5, dtype=torch.float64)
    assert torch.equal(choose(logits, chances, temperature=1e-300, top_k=0), logits.argmax(-1))


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="empty prompt"):
        generate(vivid(small()), [[]], new_tokens=1, temperature=0, top_k=0, seeds=[0], end=None)
