"""`[load]`, with the caches and stores that shards are read through."""

from __future__ import annotations

from tests.wiring.rows import Given, Row
from tests.wiring.verbs import adopted, damaged, stored

MEGA: Given = ("prepare.sources=[]", 'load.corpus=[{path="mega/text"}]', 'load.tokenizer="tokenizer.json"')
TWO: Given = (
    "prepare.sources=[]",
    'load.corpus=[{path="mega/text", name="a", weight=1}, {path="other/text", name="b", weight=1}]',
    'load.tokenizer="tokenizer.json"',
)
MDS: Given = ("prepare.sources=[]", 'load.corpus=[{path="mds"}]', 'load.tokenizer="tokenizer.json"')
CACHE: Given = ("load.cache={}",)
DISK: Given = ('load.cache.disk="kept"',)
PEERS: Given = ('load.cache.peers=["127.0.0.1:0"]',)
JOBS: Given = ('load.cache.staging="staging"', "load.cache.jobs=2")
DRAWN: Given = (
    "load.importance={memory_bytes=2000, package_bytes=400, package_memory_bytes=400, draws=16}",
    "train.steps=12",
)
SHARED: Given = (*DRAWN, 'load.importance.shared="shared"')
MIRROR: Given = ('load.remote.mirrors=[{of="prepared", at="mirror"}]',)

ROWS = [
    Row("load.corpus.0.path", "other/text", "tokens", MEGA, by=adopted),
    Row("load.corpus.0.name", "books", "sources", MEGA, by=adopted),
    Row("load.corpus.0.format", "parquet", "error", MEGA, by=adopted),
    Row("load.corpus.0.column", "nothing", "error", MDS, by=adopted),
    Row("load.corpus.0.dtype", "int32", "first", MDS, by=adopted),
    Row("load.corpus.0.weight", "9", "sources", TWO, by=adopted),
    Row("load.corpus.0.validation_share", "0.5", "tokens", MEGA, by=adopted),
    Row("load.tokenizer", "tokenizer.json", "vocabulary", MEGA[:2], by=adopted),
    Row("load.sequence_length", "32", "batches"),
    Row("load.packing", "best-fit", "batches"),
    Row("load.shuffle", "blocks", "batches"),
    Row("load.verify", "off", "error", by=damaged),
    Row("load.on_damage", "skip", "error", by=damaged),
    Row("load.threads", "3", "Ring(threads)"),
    Row("load.prefetch_bytes", "0", "Ring(prefetch_bytes)"),
    Row("load.autotune", "true", "DataStalls(adapt)"),
    Row("load.cache.policy", "once", "Ram(budget_bytes)", CACHE, by=stored),
    Row("load.cache.ram_bytes", "4096", "Ram(budget_bytes)", CACHE, by=stored),
    Row("load.cache.pinned", "true", "Ram(pin)", ("load.cache.ram_bytes=65536",), by=stored),
    Row("load.cache.disk", "kept", "beside", CACHE, by=stored),
    Row("load.cache.disk_bytes", "0", "beside", DISK, by=stored),
    Row("load.cache.peers", '["127.0.0.1:0"]', "Server(listen)", CACHE, by=stored),
    Row("load.cache.listen", "127.0.0.2:0", "Server(listen)", PEERS, by=stored),
    Row("load.cache.secret_file", "secret", "Peers(secret)", PEERS, by=stored),
    Row("load.cache.peer_timeout_s", "3", "Peers(timeout_s)", PEERS, by=stored),
    # That jobs share what one of them unpacks: tests/cli/test_shared_loading.py, tests/load/cache/test_coordinated.py.
    Row("load.cache.staging", "elsewhere", "Shared(folder)", JOBS, by=stored),
    Row("load.cache.staging_bytes", "1048576", "Shared(budget_bytes)", JOBS, by=stored),
    Row("load.cache.jobs", "3", "Shared(jobs)", JOBS, by=stored),
    Row("load.cache.job", "1", "Shared(job)", JOBS, by=stored),
    # The moments of a checkpoint hold the draws, their weights, what is held and what is packed.
    Row("load.importance.memory_bytes", "200", "moments", DRAWN),
    Row("load.importance.draws", "8", "moments", DRAWN),
    Row("load.importance.floor", "1.0", "moments", DRAWN),
    Row("load.importance.smoothing", "0", "Importance(smoothing)", DRAWN),
    Row("load.importance.packages", "elsewhere", "package folders", DRAWN),
    Row("load.importance.package_bytes", "1600", "moments", DRAWN),
    Row("load.importance.package_memory_bytes", "1600", "Packages(memory_bytes)", DRAWN),
    Row("load.importance.shared", "shared", "beside", DRAWN),
    Row("load.importance.job", "1", "beside", SHARED),
    Row("load.remote.prefetch_bytes", "2097152", "Foresight(prefetch_bytes)", by=stored),
    Row("load.remote.max_requests", "3", "InFlight(requests)", by=stored),
    Row("load.remote.policy", "fixed", "InFlight(policy)", by=stored),
    Row("load.remote.hedge", "2", "Patience(times)", by=stored),
    Row("load.remote.timeout_s", "7", "Reading(timeout_s)", by=stored),
    Row("load.remote.mirrors.0.of", "elsewhere", "Endpoint(known_as)", MIRROR, by=stored),
    Row("load.remote.mirrors.0.at", "elsewhere", "Endpoint(base)", MIRROR, by=stored),
]
