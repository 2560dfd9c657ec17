"""Generation: cache, slots and other prompts are invisible, streams belong to prompts, texts fit the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.evaluate.decode import batching
from ropewalk.evaluate.decode.batching import context_start
from ropewalk.evaluate.decode.token_choice import choose, prompt_seed
from ropewalk.evaluate.generate import generate, stream
from ropewalk.evaluate.task import Sampling
from ropewalk.model.decoder import Decoder
from ropewalk.parallel import decoding
from ropewalk.parallel.decoding import ModelDecoding
from ropewalk.parallel.static_step import StaticStep

from .tiny import small, vivid

PROMPTS = [[5, 9, 2], [7, 7, 1], [3], [8, 1, 4, 4, 60], [2] * 15]
SEEDS = [21, 22, 23, 24, 25]
PREAMBLE = [4, 9, 33, 7, 7, 12, 50, 3]
SHARING = [
    *([*PREAMBLE, 1, 2, last] for last in (5, 6)),
    PREAMBLE,
    [*PREAMBLE, 1, 2, 5],
    [*PREAMBLE, 1],
    [*PREAMBLE[:5], 44],
    [60, 2],
    [*PREAMBLE, 9, 9, 9, 9],
    [*PREAMBLE, 20, 21, 22],
    [*PREAMBLE, 1, 2, 5],
]
"""Few-shot prompts, repeats of one, a prompt that begins another, and strangers."""


def recomputed(model: Decoder, prompt: list[int], sampling: Sampling, *, seed: int = 0) -> list[int]:
    """The completion with every token computed from the whole visible text, without cache, and its probabilities one by
    one."""
    random, text = np.random.default_rng(seed), list(prompt)
    for _ in range(sampling.max_new_tokens):
        visible = text[context_start(len(text), model.spec.sequence_length) :]
        with torch.no_grad():
            logits = model.logits(model(torch.tensor([visible])))[0, -1].tolist()
        text.append(drawn(logits, text, sampling, random))
    return text[len(prompt) :]


def drawn(logits: list[float], text: list[int], how: Sampling, random: np.random.Generator) -> int:
    """A token by the definitions of `Sampling`."""
    for token in set(text):
        logits[token] *= how.repetition_penalty if logits[token] <= 0 else 1 / how.repetition_penalty
    ranked = sorted(range(len(logits)), key=lambda token: -logits[token])
    if how.temperature == 0:
        return ranked[0]
    in_order = ranked if how.top_k or how.top_p < 1 else range(len(logits))
    kept = list(in_order)[: how.top_k or None]
    weight = {token: np.exp((logits[token] - logits[ranked[0]]) / how.temperature) for token in kept}
    total, before, chosen = sum(weight.values()), 0.0, {}
    for token in kept:
        share = weight[token] / total
        if before < how.top_p and share >= how.min_p / total:
            chosen[token] = share
        before += share
    quantile, reached = random.random() * sum(chosen.values()), 0.0
    for token, share in chosen.items():
        reached += share
        if reached > quantile:
            return token
    raise AssertionError("the quantile is beyond the last token")


SAMPLINGS = [
    Sampling(20),
    Sampling(20, temperature=1.0),
    Sampling(20, temperature=0.8, top_k=7),
    Sampling(20, temperature=3.0, top_p=0.8),
    Sampling(20, temperature=3.0, top_k=9, top_p=0.7, min_p=0.05, repetition_penalty=1.4),
    Sampling(20, temperature=4.0, min_p=0.1),
    Sampling(20, repetition_penalty=2.0),
]


def assert_equals_recomputation(model: Decoder, prompts: list[list[int]], sampling: Sampling) -> list[list[int]]:
    seeds = [100 + index for index in range(len(prompts))]
    completions = generate(model, prompts, sampling, seeds=seeds, end=None)
    for completion, prompt, seed in zip(completions, prompts, seeds, strict=True):
        assert completion == recomputed(model, prompt, sampling, seed=seed)
    return completions


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_cached_generation_equals_recomputation(sampling: Sampling) -> None:
    completions = assert_equals_recomputation(vivid(small(kv_heads=2)), PROMPTS, sampling)
    # The prompts and the weights are such that the model does not settle on one token: the test sees differences.
    assert len({token for completion in completions for token in completion}) > 5


@pytest.mark.parametrize(
    "changes",
    [
        {"position": "learned", "kv_heads": 1},
        {"position": "alibi"},
        {"position": "alibi", "heads": 6, "width": 48, "kv_heads": 3, "window": 4},
        {"position": "sinusoidal", "bias": True, "norm": "layer", "norm_position": "post"},
        {"position": "none", "norm_position": "both"},
        {"window": 5, "qk_norm": True, "rope_scaling": "linear", "rope_factor": 2.0},
        {"window": 1, "mlp": "relu2", "norm": "none", "rope_scaling": "ntk", "rope_factor": 4.0},
    ],
    ids=str,
)
def test_cached_generation_equals_recomputation_under_every_option(changes: dict[str, Any]) -> None:
    assert_equals_recomputation(vivid(small(**changes)), PROMPTS, Sampling(20, temperature=1.0))


class Uncached(Decoder):
    """A kind without a cache."""

    def cache(self, **_: Any) -> None:
        return None


@pytest.mark.parametrize("kind", ["cached", "static", "uncached"])
@pytest.mark.parametrize("slots", [1, 3, 64])
@pytest.mark.parametrize("least_shared", [1, 100])
def test_slots_are_refilled_and_common_beginnings_copied_without_a_trace(
    kind: str, slots: int, least_shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = vivid(small(sequence_length=24, kv_heads=2, position="alibi", window=9))
    expected = [recomputed(model, prompt, Sampling(16), seed=1) for prompt in SHARING]
    monkeypatch.setattr(decoding, "SLOTS", {"cpu": slots})
    monkeypatch.setattr(batching, "LEAST_SHARED", least_shared)
    monkeypatch.setattr(batching, "PREFILL_TOKENS", 9)
    if kind == "uncached":
        model.__class__ = Uncached
    if kind == "static":
        steps = made_static(monkeypatch)
    # Completions of different lengths, so that slots are left at different steps.
    for end in (None, expected[0][3], expected[5][6]):
        wanted = [row[: row.index(end)] if end in row else row for row in expected]
        assert generate(model, SHARING, Sampling(16), seeds=range(len(SHARING)), end=end) == wanted
    assert kind != "static" or len(steps) > 20


def made_static(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Makes decode steps use fixed buffers, without CUDA graphs; returns a list that gets the rows of each step."""
    rows: list[int] = []
    make, call = ModelDecoding.__init__, StaticStep.__call__
    monkeypatch.setattr(ModelDecoding, "__init__", lambda it, model, **named: make(it, model, **named, static=True))
    monkeypatch.setattr(StaticStep, "__call__", lambda it, new, at: (rows.append(len(new)), call(it, new, at))[1])
    return rows


def computed_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that gets the number of tokens of each pass, without padding."""
    found: list[int] = []
    run = ModelDecoding._forward

    def counted(it: ModelDecoding, new: torch.Tensor, at: Any) -> torch.Tensor:
        found.append(int((at.positions_BT >= 0).sum()))
        return run(it, new, at)

    monkeypatch.setattr(ModelDecoding, "_forward", counted)
    return found


def test_a_common_beginning_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vivid(small(sequence_length=64))
    preamble = [(7 * n) % 61 for n in range(30)]
    prompts = [[*preamble, 1], [*preamble, 2, 2], [*preamble, 1], [*preamble, 3, 3, 3], [*preamble, 1], [9, 9]]
    passes = computed_tokens(monkeypatch)
    generate(model, prompts, Sampling(1), seeds=range(6), end=None)
    # The preamble with one prompt, the rest of two others, two last tokens of repeats, and the stranger.
    assert sum(passes) == 31 + 2 + 3 + 2 + 2
    monkeypatch.setattr(decoding, "SLOTS", {"cpu": 1})
    passes.clear()
    generate(model, prompts, Sampling(1), seeds=range(6), end=None)
    assert sum(passes) == 31 + 2 + 3 + 2 + 2


def test_a_free_slot_goes_to_the_next_prompt_before_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = vivid(small(sequence_length=64))
    monkeypatch.setattr(decoding, "SLOTS", {"cpu": 2})
    free = generate(model, PROMPTS, Sampling(30), seeds=SEEDS, end=None)
    end = free[0][1]
    passes = computed_tokens(monkeypatch)
    found = generate(model, PROMPTS, Sampling(30), seeds=SEEDS, end=end)
    steps = sum(len(completion) + 1 if len(completion) < 30 else 30 for completion in found)
    # Two sequences in nearly every pass: waiting for both would take more passes.
    assert len(passes) < 0.75 * steps


def test_a_completion_does_not_depend_on_the_other_prompts() -> None:
    model = vivid(small())
    sampling = Sampling(9, temperature=1.0)
    (alone,) = generate(model, PROMPTS[:1], sampling, seeds=[3], end=None)
    assert generate(model, [*PROMPTS, PROMPTS[0]], sampling, seeds=[*SEEDS, 3], end=None)[-1] == alone
    assert list(stream(model, PROMPTS[0], sampling, seed=3, end=None)) == alone
    first, second = generate(model, [PROMPTS[0], PROMPTS[0]], sampling, seeds=[3, 4], end=None)
    assert first == alone
    assert first != second
    longer = Sampling(15, temperature=1.0)
    assert generate(model, PROMPTS[:1], longer, seeds=[3], end=None)[0][:9] == alone


def test_a_seed_belongs_to_prompt_and_repeat() -> None:
    seeds = {prompt_seed(run, prompt, repeat) for run in (1, 2) for prompt in ([1, 23], [12, 3]) for repeat in (0, 1)}
    assert len(seeds) == 8
    assert prompt_seed(1, [1, 23], 0) in seeds


def test_a_completion_stops_before_the_end_token() -> None:
    model = vivid(small())
    sampling = Sampling(12, temperature=1.0)
    whole = generate(model, PROMPTS, sampling, seeds=SEEDS, end=None)
    end = whole[0][4]
    for free, stopped in zip(whole, generate(model, PROMPTS, sampling, seeds=SEEDS, end=end), strict=True):
        assert stopped == (free[: free.index(end)] if end in free else free)
    assert list(stream(model, PROMPTS[0], sampling, seed=SEEDS[0], end=end)) == whole[0][: whole[0].index(end)]


def letters(tokens: list[int]) -> str:
    """Token 3 as "ddd", and so on: texts of different lengths."""
    return "".join(chr(ord("a") + token % 26) * (1 + token % 3) for token in tokens)


def test_a_completion_ends_before_a_stop_string_wherever_it_begins() -> None:
    model = vivid(small())
    whole = generate(model, PROMPTS, Sampling(20), seeds=SEEDS, end=None)
    for length in (1, 2, 5):
        for start in (0, 3, 8):
            stop = letters(whole[3])[start : start + length]
            found = generate(model, PROMPTS, Sampling(20, stop=("0", stop)), seeds=SEEDS, end=None, text=letters)
            for tokens, free in zip(found, whole, strict=True):
                text, before = letters(tokens), letters(free).split(stop)[0]
                assert tokens == free[: len(tokens)]
                assert text.startswith(before)
                # One token less would lack text, unless the stop string never came.
                assert tokens == free or not tokens or not letters(tokens[:-1]).startswith(before)
                assert tokens != free or stop not in letters(free)


@pytest.mark.parametrize("limit", [1, 2, 7, 12])
def test_the_visible_text_fits_and_keeps_at_least_half_a_row(limit: int) -> None:
    for length in range(1, 5 * limit):
        visible = length - context_start(length, limit)
        assert visible == length if length <= limit else limit // 2 < visible <= limit


@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(3, 1.0, 0.0), (0, 0.97, 0.0), (0, 1.0, 0.01), (0, 0.97, 0.2)])
def test_sampling_follows_the_distribution(top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, -1.0]], dtype=torch.float64)
    chances = (torch.arange(10_000, dtype=torch.float64) + 0.5) / 10_000
    sampling = Sampling(1, temperature=0.5, top_k=top_k, top_p=top_p, min_p=min_p)
    found = choose(logits.expand(10_000, -1), chances, sampling)
    # At temperature 0.5 the probabilities are .0159, .867, .117 and .0003; .2 of the largest is .173.
    kept = {3: [0, 1, 2], 0: [0, 1, 2]}[top_k] if min_p < 0.2 and top_p == 1 else [1, 2] if min_p < 0.2 else [1]
    expected = torch.full((4,), float("-inf"), dtype=torch.float64)
    expected[kept] = logits[0, kept] / 0.5
    # Evenly spaced quantiles miss each probability by at most one part in 10,000 on either side.
    torch.testing.assert_close(
        found.bincount(minlength=4) / 10_000, expected.softmax(0), atol=2e-4, rtol=0, check_dtype=False
    )


def test_the_largest_quantile_never_takes_a_token_that_was_left_out() -> None:
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1))
    chances = torch.full((50,), 1 - 2**-53, dtype=torch.float64)
    found = choose(logits, chances, Sampling(1, temperature=1.0, min_p=0.3))
    shares = logits.softmax(-1)
    assert (shares.gather(1, found.unsqueeze(1)) >= 0.3 * shares.amax(-1, keepdim=True)).all()


def test_a_vanishing_temperature_or_top_p_is_greedy() -> None:
    logits = torch.randn(5, 40)
    chances = torch.rand(5, dtype=torch.float64)
    for how in (Sampling(1, temperature=1e-300), Sampling(1, temperature=1.0, top_p=0.0)):
        assert torch.equal(choose(logits, chances, how), logits.argmax(-1))


def test_an_empty_prompt_is_refused_and_no_tokens_are_none() -> None:
    model = vivid(small())
    with pytest.raises(UserError, match="empty prompt"):
        generate(model, [[]], Sampling(1), seeds=[0], end=None)
    assert generate(model, [[1], [2]], Sampling(0), seeds=[0, 1], end=None) == [[], []]
    assert generate(model, [], Sampling(4), seeds=[], end=None) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("changes", [{}, {"kv_heads": 1}, {"position": "alibi", "window": 9}], ids=str)
def test_cuda_graphs_give_the_tokens_of_eager_steps(changes: dict[str, Any]) -> None:
    model = vivid(small(sequence_length=24, width=128, **changes)).float().cuda()
    captured = generate(model, SHARING, Sampling(16), seeds=range(len(SHARING)), end=None)
    with pytest.MonkeyPatch.context() as patch:
        make = ModelDecoding.__init__
        patch.setattr(ModelDecoding, "__init__", lambda it, model, **named: make(it, model, **named, static=False))
        assert generate(model, SHARING, Sampling(16), seeds=range(len(SHARING)), end=None) == captured
    step = ModelDecoding(model, sequences=4, room=24)
    assert step._step is not None
    assert step._step._capture
