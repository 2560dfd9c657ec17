"""Keys that no run without GPUs may show: the result is the same by design, and why."""

from __future__ import annotations

UNCHANGING = {
    "prepare.workers": "more processes make the same bytes (tests/prepare/test_prepare.py)",
    "prepare.folder": "where prepared data lies",
    "prepare.deduplicate.near.memory_bytes": "a bound of memory; the result does not depend on it",
    "prepare.deduplicate.near.device": "a GPU makes the same signatures (tests/prepare/test_gpu_minhash.py)",
    "prepare.deduplicate.substring.memory_bytes": "a bound of memory; the result does not depend on it",
    "prepare.deduplicate.substring.method": "both find the same spans (tests/prepare/test_substring.py)",
    "model.kind": "one kind is built in; tests/extend trains one of the user's own",
}
"""Key -> why nothing may differ."""

ELSEWHERE = {
    "load.media.": "`train` and `run` refuse images; `doctor data` and Python read them (tests/load/media)",
}
"""Beginning of a key -> which tests show that it has an effect."""
