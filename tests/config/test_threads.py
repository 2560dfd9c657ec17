from __future__ import annotations

from ropewalk.config.threads import CONNECTIONS, SPINS, YIELD, share_cores


def test_threads_wait_briefly_unless_the_user_says_otherwise() -> None:
    fresh: dict[str, str] = {}
    share_cores(fresh)
    assert fresh == {"GOMP_SPINCOUNT": SPINS, YIELD: "1", "CUDA_DEVICE_MAX_CONNECTIONS": CONNECTIONS}
    chosen = {"GOMP_SPINCOUNT": "7", YIELD: "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    share_cores(chosen)
    assert chosen == {"GOMP_SPINCOUNT": "7", YIELD: "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
