"""`[checkpoint]`, with its copies in memory, at peers and in a store."""

from __future__ import annotations

from tests.wiring.rows import Given, Row
from tests.wiring.verbs import copies, failing

EVERY: Given = ("checkpoint.save_every_steps=1", "train.steps=6")
MEMORY: Given = ('checkpoint.tiers.memory="on"', 'checkpoint.tiers.folder="memory"')
REMOTE: Given = ('checkpoint.tiers.remote="remote"', "checkpoint.save_every_steps=1", "train.steps=4")
FOUR: Given = (
    *(*MEMORY, 'checkpoint.tiers.secret_file="secret"'),
    'checkpoint.tiers.peers=["127.0.0.1:0", "127.0.0.2:0", "127.0.0.3:0", "127.0.0.4:0"]',
)

ROWS = [
    Row("checkpoint.save_every", "auto", "saved", EVERY),
    Row("checkpoint.save_every_steps", "1", "saved"),
    Row("checkpoint.max_overhead", "0.5", "Frequency(overhead)"),
    Row("checkpoint.mtbf_hours", "2", "Frequency(mtbf_hours)"),
    Row("checkpoint.write", "blocking", "Stager(slots)"),
    Row("checkpoint.bytes_per_s", "1e9", "RateLimiter(bytes_per_s)"),
    Row("checkpoint.threads", "3", "Persister(threads)"),
    Row("checkpoint.compression", "on", "packed"),
    Row("checkpoint.failures", "0", "events", by=failing),
    Row("checkpoint.timeout_s", "77", "Attempt(timeout_s)"),
    Row("checkpoint.keep_last", "1", "checkpoints"),
    Row("checkpoint.keep_every_steps", "2", "checkpoints", ("checkpoint.keep_last=1", "train.steps=6")),
    Row("checkpoint.keep_verified", "2", "retain(keep_verified)"),
    Row("checkpoint.tiers.memory", "on", "copied", ('checkpoint.tiers.folder="memory"',)),
    Row("checkpoint.tiers.memory_every_steps", "1", "copied", (*MEMORY, "checkpoint.save_every_steps=4")),
    Row("checkpoint.tiers.folder", "other", "MemoryTier(folder)", MEMORY),
    Row("checkpoint.tiers.memory_bytes", "1000", "warnings", MEMORY),
    Row("checkpoint.tiers.idle_hours", "1", "MemoryTier.reclaim(idle_s)", MEMORY),
    Row("checkpoint.tiers.peers", '["127.0.0.1:0", "127.0.0.2:0"]', "holders", FOUR, by=copies),
    Row("checkpoint.tiers.copies", "3", "holders", FOUR, by=copies),
    Row("checkpoint.tiers.placement", "ring", "holders", (*FOUR, "checkpoint.tiers.copies=2"), by=copies),
    Row("checkpoint.tiers.racks", '["a", "a", "b", "b"]', "holders", FOUR, by=copies),
    Row("checkpoint.tiers.secret_file", "longer", "secret", FOUR, by=copies),
    Row("checkpoint.tiers.timeout_s", "7", "timeout", FOUR, by=copies),
    Row("checkpoint.tiers.remote", "remote", "copied", ('checkpoint.tiers.run="tiny"',)),
    Row("checkpoint.tiers.remote_every", "2", "copied", REMOTE),
    Row("checkpoint.tiers.remote_keep_last", "1", "remote steps", REMOTE),
    Row("checkpoint.tiers.network_bytes_per_s", "1e9", "TierLink(limit_bytes_per_s)", REMOTE),
    Row("checkpoint.tiers.run", "named", "remote run", REMOTE),
]
