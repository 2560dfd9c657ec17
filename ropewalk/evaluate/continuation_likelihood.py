"""Log-likelihoods of continuations under the model of a checkpoint, on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ropewalk.base.progress import Progress
from ropewalk.checkpoint.format import TOKENIZER
from ropewalk.config.ranks import Ranks
from ropewalk.parallel.apply import apply
from ropewalk.parallel.mesh import pick_device
from ropewalk.plan.inference_plan import inference
from ropewalk.plan.plan import alone, load_plan
from ropewalk.prepare.foreign import encoding
from ropewalk.prepare.tokenizer import end_of_text

from .from_checkpoint import load_model
from .score import score_documents
from .task import Likelihood


def continuation_likelihoods(
    path: Path, *, run: Path, pairs: Sequence[tuple[str, str]], progress: Progress
) -> list[Likelihood]:
    """The likelihood of each (context, continuation), as `LogLikelihood` defines it: both are tokenized together, and
    what their tokens have beyond those of the context is predicted. No end of text is predicted.

    It is the difference of two rolling log-likelihoods, of all tokens and of those of the context.
    """
    trained = alone(load_plan(run).phases[-1].plan)
    model, _, tokenizer = load_model(path, device=pick_device(trained, Ranks()), texts=[pair[0] for pair in pairs])
    # Differences of sums: in float32, whatever the precision of training.
    plan = dataclasses.replace(inference(trained, length=model.spec.sequence_length), precision="fp32")
    with encoding(path / TOKENIZER):
        wholes = [tokenizer.encode(before + after, add_special_tokens=False).ids for before, after in pairs]
        contexts = [tokenizer.encode(before, add_special_tokens=False).ids for before, _ in pairs]
    beginnings = [whole[: len(context)] for whole, context in zip(wholes, contexts, strict=True)]
    documents = [np.array(tokens, np.int64) for tokens in (*wholes, *beginnings) if tokens]
    scored = iter(
        score_documents(
            apply(plan, model, None, None),
            documents,
            sequence_length=model.spec.sequence_length,
            rows=plan.batch_size,
            end_of_text=end_of_text(tokenizer, path=path / TOKENIZER),
            progress=progress,
        )
    )
    nothing = Likelihood(0.0, 0, 0)
    found = [next(scored) if tokens else nothing for tokens in (*wholes, *beginnings)]
    return [
        Likelihood(
            whole.log_probability - beginning.log_probability,
            whole.tokens - beginning.tokens,
            whole.correct - beginning.correct,
        )
        for whole, beginning in zip(found[: len(pairs)], found[len(pairs) :], strict=True)
    ]
