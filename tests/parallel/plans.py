"""The table of plans that are proven equal to one device, and the page of the docs that lists it.

`python -m tests.parallel.plans docs/equality.md` runs every plan and writes the table with what was measured;
`--backend nccl` does so for the table of those with several ranks on GPUs.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.model.spec import Spec
from ropewalk.plan.plan import Plan
from tests.tiny import small_spec

ROWS, LENGTH = 8, 16
PAIRS = {"microbatch_size": 2}
"""Where all of four ranks have all rows: with more processes than cores each collective takes milliseconds."""
MARKS = {"gloo": "table of plans", "nccl": "table of plans on NCCL"}
"""Names of the tables in the page, in comments before and after them."""

MODELS: dict[str, Spec] = {
    # 61 tokens: no number of ranks divides the vocabulary.
    "plain": small_spec(sequence_length=LENGTH),
    "deep": small_spec(sequence_length=LENGTH, layers=4),
    "rich": small_spec(
        sequence_length=LENGTH,
        layers=4,
        kv_heads=2,
        bias=True,
        norm="layer",
        mlp="gelu",
        position="learned",
        norm_position="both",
        qk_norm=True,
        dropout=0.1,
        documents="separate",
        tie_embeddings=False,
    ),
    "alibi": small_spec(sequence_length=LENGTH, layers=4, position="alibi", dropout=0.1, window=7),
    "post": small_spec(
        sequence_length=LENGTH, position="sinusoidal", norm="layer", norm_position="post", mlp="geglu", kv_heads=2
    ),
    "adapters": dataclasses.replace(
        small_spec(sequence_length=LENGTH, bias=True, kv_heads=2, dropout=0.1), lora_rank=3
    ),
}
"""Every kind of layer appears in one of them; each is 5 000 to 13 000 numbers."""

ABOUT = {
    "plain": "2 layers, RMSNorm, SwiGLU, RoPE, tied head",
    "deep": "4 layers of the same",
    "rich": "4 layers, LayerNorm before and after, GeLU, biases, learned positions, 2 key heads of 4, norms of queries "
    "and keys, dropout, separate documents, untied head",
    "alibi": "4 layers, ALiBi, window of 7, dropout",
    "post": "2 layers, LayerNorm after, GeGLU, sinusoids, 2 key heads of 4",
    "adapters": "2 layers, biases, dropout; adapters of rank 3 are trained, the rest is frozen",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    model: str
    """Key of `MODELS`."""
    plan: Plan
    optimizer: str = "adamw"

    @property
    def spec(self) -> Spec:
        return MODELS[self.model]

    @property
    def trained(self) -> list[str] | None:
        """Names of the parameters that are trained; None: all."""
        return [n for n in self.spec.shapes() if ".lora_" in n] if self.spec.lora_rank else None


def case(name: str, model: str = "plain", *, optimizer: str = "adamw", **settings: Any) -> Case:
    """A plan of 8 rows in microbatches of one unless `settings` say otherwise, with its layers dealt evenly."""
    plan = Plan(
        **{
            "device": "cpu",
            "precision": "fp32",
            "batch_size": ROWS,
            "microbatch_size": 1,
            "sequence_length": LENGTH,
            **settings,
        }
    )
    count = plan.pipeline * plan.chunks
    if count > 1:
        each = MODELS[model].layers // count
        stages = tuple(tuple(range(s * each, (s + 1) * each)) for s in range(count))
        plan = dataclasses.replace(plan, stages=stages)
    return Case(name=name, model=model, plan=plan, optimizer=optimizer)


def _alone() -> list[Case]:
    """Each strategy by itself."""
    return [
        case("one process"),
        case("one process, 4 rows a microbatch", "rich", microbatch_size=4),
        case("recompute attention", "rich", recompute="attention"),
        case("recompute full", "alibi", recompute="full"),
        case("replicate 2", replicate=2),
        case("replicate 2, a bucket a parameter", "post", replicate=2, bucket_bytes=0),
        case("replicate 2, small buckets", "rich", replicate=2, bucket_bytes=4096, microbatch_size=2),
        case("replicate 2, adapters", "adapters", replicate=2),
        case("replicate 4", replicate=4),
        case("replicate 2, offload activations", "deep", replicate=2, offload=("activations",)),
        case("replicate 2, offload optimizer", "rich", replicate=2, offload=("optimizer",)),
        case("ZeRO-2 over 2, offload optimizer", "deep", shard=2, zero=2, offload=("optimizer",)),
        case("ZeRO-3 over 2, offload all", "rich", shard=2, zero=3, offload=("activations", "optimizer", "parameters")),
        case("recompute by budget", "rich", recompute="auto", recompute_bytes=100_000),
        case("tensor 2, recompute by budget", "deep", tensor=2, recompute="auto", recompute_bytes=50_000),
        case("replicate 8", "rich", replicate=8),
        *(case(f"ZeRO-{zero} over {ranks}", shard=ranks, zero=zero) for ranks in (2, 4) for zero in (1, 2, 3)),
        case("ZeRO-1 over 2, small buckets", "rich", shard=2, zero=1, bucket_bytes=4096, microbatch_size=2),
        case("ZeRO-2 over 2, a bucket a parameter", "post", shard=2, zero=2, bucket_bytes=0),
        case("ZeRO-3 over 4, rich", "rich", shard=4, zero=3),
        case("ZeRO-3 over 8", "deep", shard=8, zero=3),
        case("ZeRO-1 over 2, adapters", "adapters", shard=2, zero=1),
        case("ZeRO-3 over 2, adapters", "adapters", shard=2, zero=3),
        case("ZeRO-3 over 2, recompute full", "deep", shard=2, zero=3, recompute="full"),
        case("tensor 2", tensor=2),
        case("tensor 2 with sequence", tensor=2, sequence=True),
        case("tensor 2, rich", "rich", tensor=2),
        case("tensor 2 with sequence, rich", "rich", tensor=2, sequence=True),
        case("tensor 2 with sequence, post", "post", tensor=2, sequence=True),
        case("tensor 2, adapters", "adapters", tensor=2),
        case("tensor 2 with sequence, adapters", "adapters", tensor=2, sequence=True),
        case("tensor 2, recompute attention", "deep", tensor=2, recompute="attention"),
        case("tensor 2, recompute full, partitioned", "rich", tensor=2, recompute="full", partition_activations=True),
        case("tensor 4", tensor=4, **PAIRS),
        case("tensor 4 with sequence", "alibi", tensor=4, sequence=True, **PAIRS),
        case("ring 2", context=2),
        case("ring 2, rich", "rich", context=2),
        case("ring 2, recompute full", "deep", context=2, recompute="full"),
        case("ring 4", "alibi", context=4, **PAIRS),
        case("ulysses 2", context=2, context_method="ulysses"),
        case("ulysses 2, rich", "rich", context=2, context_method="ulysses"),
        case("ulysses 4", "post", context=4, context_method="ulysses", **PAIRS),
        case("pipeline 2, GPipe", pipeline=2, schedule="gpipe"),
        case("pipeline 2, 1F1B", pipeline=2),
        case("pipeline 2, zero-bubble", "rich", pipeline=2, schedule="zero-bubble"),
        case("pipeline 2, interleaved", "deep", pipeline=2, chunks=2, schedule="interleaved"),
        case("pipeline 2, adapters", "adapters", pipeline=2),
        case("pipeline 2, recompute full", "deep", pipeline=2, recompute="full"),
        case("pipeline 4, GPipe", "deep", pipeline=4, schedule="gpipe"),
        case("pipeline 4, 1F1B", "alibi", pipeline=4),
        case("pipeline 4, zero-bubble", "deep", pipeline=4, schedule="zero-bubble"),
    ]


def _pairs() -> list[Case]:
    return [
        case("replicate 2 x ZeRO-1 over 2", replicate=2, shard=2, zero=1),
        case("replicate 2 x ZeRO-2 over 2", "rich", replicate=2, shard=2, zero=2),
        case("replicate 2 x ZeRO-3 over 2", replicate=2, shard=2, zero=3),
        case("replicate 2 x ZeRO-3 over 4", "rich", replicate=2, shard=4, zero=3),
        case("replicate 2 x tensor 2", "rich", replicate=2, tensor=2, sequence=True),
        case("replicate 2 x ring 2", "rich", replicate=2, context=2),
        case("replicate 2 x pipeline 2", replicate=2, pipeline=2),
        case("ZeRO-1 over 2 x tensor 2", "deep", shard=2, zero=1, tensor=2),
        case("ZeRO-2 over 2 x tensor 2", "rich", shard=2, zero=2, tensor=2, sequence=True),
        case("ZeRO-3 over 2 x tensor 2", "rich", shard=2, zero=3, tensor=2, sequence=True),
        case("ZeRO-1 over 2 x ring 2", shard=2, zero=1, context=2),
        case("ZeRO-3 over 2 x ring 2", "alibi", shard=2, zero=3, context=2),
        case("ZeRO-1 over 2 x pipeline 2", "deep", shard=2, zero=1, pipeline=2),
        case("ZeRO-2 over 2 x pipeline 2", "rich", shard=2, zero=2, pipeline=2, schedule="zero-bubble"),
        case("ZeRO-3 over 2 x pipeline 2", "deep", shard=2, zero=3, pipeline=2),
        # The inner stages have nothing outside of blocks.
        case("ZeRO-3 over 2 x pipeline 4", "deep", shard=2, zero=3, pipeline=4),
        case("tensor 2 x ring 2", "rich", tensor=2, sequence=True, context=2, **PAIRS),
        case("tensor 2 x ulysses 2", tensor=2, sequence=True, context=2, context_method="ulysses", **PAIRS),
        case("tensor 2 x pipeline 2", "rich", tensor=2, sequence=True, pipeline=2),
        case("tensor 2 x pipeline 2, adapters", "adapters", tensor=2, pipeline=2),
        case("ring 2 x pipeline 2", "alibi", context=2, pipeline=2, schedule="gpipe"),
    ]


def _products() -> list[Case]:
    """Three axes, and sequence as the fourth."""
    seq = {"tensor": 2, "sequence": True}
    return [
        case("pipeline 2 x replicate 2 x tensor 2", "deep", pipeline=2, replicate=2, **seq),
        case(
            "interleaved 2 x replicate 2 x tensor 2",
            "rich",
            pipeline=2,
            chunks=2,
            schedule="interleaved",
            replicate=2,
            tensor=2,
        ),
        case("pipeline 2 x ZeRO-1 over 2 x tensor 2", "rich", pipeline=2, shard=2, zero=1, **seq),
        case("pipeline 2 x ZeRO-3 over 2 x tensor 2", "deep", pipeline=2, shard=2, zero=3, **seq),
        case("pipeline 2 x ring 2 x tensor 2", "alibi", pipeline=2, schedule="zero-bubble", context=2, **seq),
        case("pipeline 2 x ZeRO-3 over 2 x ring 2", "rich", pipeline=2, shard=2, zero=3, context=2),
        case("replicate 2 x ZeRO-3 over 2 x tensor 2", "rich", replicate=2, shard=2, zero=3, **seq),
        case("replicate 2 x ZeRO-3 over 2 x ring 2", "alibi", replicate=2, shard=2, zero=3, context=2),
        case("replicate 2 x ulysses 2 x tensor 2", "deep", replicate=2, context=2, context_method="ulysses", **seq),
        case("ZeRO-3 over 2 x ring 2 x tensor 2", "rich", shard=2, zero=3, context=2, recompute="full", **seq),
    ]


def _optimizers() -> list[Case]:
    """Rules that need norms, means or products of whole matrices, where these are cut."""
    kinds: tuple[str, ...] = ("adafactor", "lamb", "muon")
    found = []
    for kind in kinds:
        found += [
            case(f"{kind}, replicate 2", "rich", optimizer=kind, replicate=2),
            case(f"{kind}, ZeRO-1 over 2", "rich", optimizer=kind, shard=2, zero=1),
            case(f"{kind}, ZeRO-3 over 4", "rich", optimizer=kind, shard=4, zero=3),
            case(f"{kind}, tensor 2", "rich", optimizer=kind, tensor=2, sequence=True),
            case(f"{kind}, pipeline 2", "deep", optimizer=kind, pipeline=2),
            case(f"{kind}, ring 2 x ZeRO-2 over 2", "deep", optimizer=kind, context=2, shard=2, zero=2),
            case(
                f"{kind}, pipeline 2 x ZeRO-3 over 2 x tensor 2",
                "rich",
                optimizer=kind,
                pipeline=2,
                shard=2,
                zero=3,
                tensor=2,
                sequence=True,
            ),
        ]
    return found


# Fewest processes first: the pool starts those it needs, and never waits for ones it has.
CASES = {
    each.name: each
    for each in sorted([*_alone(), *_pairs(), *_products(), *_optimizers()], key=lambda each: each.plan.world)
}

SLOW = {
    "ZeRO-1 over 4",
    "ZeRO-2 over 4",
    "ZeRO-3 over 4",
    "ZeRO-3 over 8",
    "tensor 2, rich",
    "tensor 4",
    "replicate 2 x ZeRO-3 over 4",
    "pipeline 2 x replicate 2 x tensor 2",
    "pipeline 2 x ZeRO-3 over 2 x tensor 2",
    "replicate 2 x ZeRO-3 over 2 x tensor 2",
    "replicate 2 x ZeRO-3 over 2 x ring 2",
    "replicate 2 x ulysses 2 x tensor 2",
    "ZeRO-3 over 2 x ring 2 x tensor 2",
    *(f"{kind}, {plan}" for kind in ("adafactor", "lamb", "muon") for plan in ("ZeRO-3 over 4", "pipeline 2")),
    *(f"{kind}, ring 2 x ZeRO-2 over 2" for kind in ("adafactor", "muon")),
}
"""Plans all of whose settings and pairs of axes are in a plan of `make test`; `make test-slow` runs these."""


def on_gpu(case: Case) -> Case:
    """The same plan on GPUs."""
    return dataclasses.replace(case, plan=dataclasses.replace(case.plan, device="cuda"))


def page(differences: dict[str, dict[str, float]]) -> str:
    """The table in Markdown: what was found for each plan by its name."""
    lines = [
        "| plan | processes | model | optimizer | loss | gradients | weights after 3 steps | scores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, found in differences.items():
        each = CASES[name]
        numbers = [f"{found[what]:.0e}" for what in ("loss", "gradients", "weights", "scores")]
        cells = [each.name, str(each.plan.world), each.model, each.optimizer, *numbers]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    from tests.parallel.pool import NCCL, POOL
    from tests.parallel.worlds import Proof, wrong

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    parser.add_argument("--backend", choices=sorted(MARKS), default="gloo")
    asked = parser.parse_args()
    cases = [each for each in CASES.values() if asked.backend == "gloo" or each.plan.world > 1]
    proof = Proof(POOL if asked.backend == "gloo" else NCCL)
    differences, failed = {}, []
    for number, each in enumerate(cases, start=1):
        try:
            differences[each.name] = proof.differences(each if asked.backend == "gloo" else on_gpu(each))
            state = "equal" if not wrong(differences[each.name]) else f"NOT equal: {wrong(differences[each.name])}"
        except AssertionError as error:
            state = f"FAILED: {error}"
        if state != "equal":
            failed.append(each.name)
        print(f"{number} of {len(cases)}: {each.name}: {state}", file=sys.stderr, flush=True)
    print(f"{len(cases) - len(failed)} of {len(cases)} plans are equal to one device on {asked.backend}; not: {failed}")
    begin, end = (f"<!-- {MARKS[asked.backend]}: {side} -->" for side in ("begin", "end"))
    before, _, rest = asked.page.read_text().partition(begin)
    _, _, after = rest.partition(end)
    models = "\n".join(f"- *{name}*: {about}." for name, about in ABOUT.items())
    head = f"\n{models}\n" if asked.backend == "gloo" else ""
    asked.page.write_text(f"{before}{begin}\n{head}\n{page(differences)}\n{end}{after}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
