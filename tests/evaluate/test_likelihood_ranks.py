"""Log-likelihoods and greedy completions under every plan: those of one process, to rounding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ropewalk.evaluate.config import Evaluate
from ropewalk.evaluate.held_out import HeldOut
from ropewalk.evaluate.sharded_model import PlannedModel
from ropewalk.evaluate.task import Likelihood, Sampling
from ropewalk.evaluate.text import Detokenizer
from ropewalk.evaluate.text_encoder import TextEncoder
from ropewalk.model.spec import Spec
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import Mesh
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import Plan
from ropewalk.plan.stage_split import split_layers
from tests.parallel.pool import POOL

from .tiny import small, train_tokenizer, vivid

pytestmark = pytest.mark.xdist_group("pool")

ONE = Plan(device="cpu", precision="fp32", batch_size=2, microbatch_size=1)
SPEC = small(vocabulary=12, sequence_length=24)
PLANS: dict[str, dict[str, Any]] = {
    "DDP 2": {"replicate": 2},
    "ZeRO-3 2": {"shard": 2, "zero": 3},
    "TP 2": {"tensor": 2},
    "PP 2": {"pipeline": 2, "stages": split_layers(SPEC, 2)},
    "CP 2": {"context": 2},
}


def asked(spec: Spec) -> tuple[list[tuple[list[int], list[int]]], list[np.ndarray]]:
    """Questions with choices that begin alike, of uneven lengths; documents."""
    draw = np.random.default_rng(0)
    pairs = []
    for _ in range(6):
        context = [0, *draw.integers(1, spec.vocabulary, draw.integers(1, 12)).tolist()]
        pairs += [(context, draw.integers(1, spec.vocabulary, draw.integers(1, 6)).tolist()) for _ in range(3)]
    documents = [draw.integers(1, spec.vocabulary, size) for size in (3, 30, 55)]
    return pairs, documents


def answered(rank: int, plan: Plan, spec: Spec, dtype: str) -> tuple[list[Likelihood], list[list[int]]]:
    """A rank's job."""
    torch.set_num_threads(1)
    mesh = Mesh(plan, rank) if plan.world > 1 else None
    model = vivid(spec).to(getattr(torch, dtype))
    texts = TextEncoder(Detokenizer.of(train_tokenizer(["rope"]), end_of_text=0), 0)
    held_out = HeldOut(None, Evaluate(), seed=0, texts=texts)
    trained = () if mesh else None
    planned = PlannedModel(
        inference(plan, length=spec.sequence_length),
        lambda wanted: apply(wanted, model, mesh, None, **({"trained": trained} if mesh else {})),
        spec=spec,
        held_out=held_out,
    )
    pairs, documents = asked(spec)
    found = [*planned.loglikelihood(pairs), *planned.rolling(documents)]
    drawn = planned.generate([context for context, _ in pairs[::3]], Sampling(6), seeds=[0] * len(pairs[::3]))
    return found, drawn


@pytest.mark.parametrize(("dtype", "close"), [("float64", 1e-10), ("float32", 1e-4)])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_answers_what_one_process_does(name: str, dtype: str, close: float) -> None:
    plan = replace(ONE, **PLANS[name])
    expected, drawn = answered(0, ONE, SPEC, dtype)
    assert len({each.correct for each in expected}) > 1
    for found, same in POOL.run(answered, plan, SPEC, dtype, world=2):
        assert same == drawn
        for mine, theirs in zip(found, expected, strict=True):
            scale = max(1.0, abs(theirs.log_probability) / theirs.tokens)
            assert mine.log_probability == pytest.approx(theirs.log_probability, abs=close * scale)
            assert (mine.tokens, mine.correct) == (theirs.tokens, theirs.correct)
