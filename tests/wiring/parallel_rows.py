"""`[parallel]`: what the processes of a run send each other, and compute."""

from __future__ import annotations

from tests.wiring.rows import Given, Row, planned
from tests.wiring.verbs import ranked, stepped

TWO = ranked(2)
SHARD: Given = ("parallel.shard=2",)
TENSOR: Given = ("parallel.tensor=2",)
CONTEXT: Given = ("parallel.context=2",)
PIPELINE: Given = ("parallel.pipeline=2", "plan.microbatch_size=1", "model.layers=4")
INTERLEAVED: Given = (*PIPELINE[:2], 'parallel.schedule="interleaved"', "model.layers=8")
LOW_RANK: Given = ("parallel.gradient_compression=powersgd",)

ROWS = [
    Row("parallel.replicate", "2", "world", by=planned),
    Row("parallel.shard", "2", "sent", by=TWO, pool=True),
    Row("parallel.zero", "1", "sent", SHARD, by=TWO, pool=True),
    Row("parallel.tensor", "2", "sent", by=TWO, pool=True),
    Row("parallel.sequence", "false", "sent", TENSOR, by=TWO, pool=True),
    Row("parallel.context", "2", "sent", by=TWO, pool=True),
    Row("parallel.context_method", "ulysses", "sent", CONTEXT, by=TWO, pool=True),
    Row("parallel.pipeline", "2", "sent", by=TWO, pool=True),
    Row("parallel.schedule", "gpipe", "make_schedule(kind)", PIPELINE, by=TWO, pool=True),
    Row("parallel.chunks", "4", "sent", INTERLEAVED, by=TWO, pool=True),
    Row("parallel.recompute", "attention", "ops", by=stepped),
    Row("parallel.saved_activations", "8-bit", "ops", by=stepped),
    Row(
        "parallel.partition_activations",
        "true",
        "sent",
        (*TENSOR, "parallel.sequence=false", "parallel.recompute=full"),
        by=TWO,
        pool=True,
    ),
    Row("parallel.offload", '["optimizer"]', "threads"),
    Row("parallel.offload_path", "far", "threads", ('parallel.offload=["optimizer"]',)),
    Row("parallel.exact", "true", "sent", by=TWO, pool=True),
    Row("parallel.balance", "true", "sent", ("load.packing=best-fit", "model.documents=separate"), by=TWO, pool=True),
    Row("parallel.resplit", "true", "plan", by=planned),
    Row("parallel.devices", "2", "threads"),
    Row("parallel.bucket_bytes", "0", "calls", by=TWO, pool=True),
    Row("parallel.gradient_compression", "bf16", "sent", by=TWO, pool=True),
    Row("parallel.powersgd_rank", "1", "sent", LOW_RANK, by=TWO, pool=True),
    Row("parallel.backend", "mpi", "plan", by=planned),
]
