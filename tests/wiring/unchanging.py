"""Keys that no run without GPUs may show: the result is the same by design, and why."""

from __future__ import annotations

UNCHANGING = {
    "prepare.workers": "more processes make the same bytes (tests/prepare/test_prepare.py)",
    "prepare.folder": "where prepared data lies",
    "prepare.deduplicate.near.memory_bytes": "a bound of memory; the result does not depend on it",
    "prepare.deduplicate.near.device": "a GPU makes the same signatures (tests/prepare/test_gpu_minhash.py)",
    "prepare.deduplicate.substring.memory_bytes": "a bound of memory; the result does not depend on it",
    "prepare.deduplicate.substring.method": "both find the same spans (tests/prepare/test_substring.py)",
}
"""Key -> why nothing may differ."""

PENDING: dict[str, str] = {}
"""Key -> why nothing differs yet. A key leaves this table when a run shows it."""

ELSEWHERE = {
    "load.media.": "`train` reads tokens; `doctor data` and Python read images (tests/load/media)",
    "load.importance.": "tests/train/test_importance.py and tests/load show what they change",
    "load.cache.staging": "needs two runs side by side: tests/load/cache/test_coordinated.py",
    "load.cache.job": "as above",
}
"""Beginning of a key -> which tests show that it has an effect."""
