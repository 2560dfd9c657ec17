from __future__ import annotations

from ropewalk.config.nccl import DUMPS, ERRORS, own_error_handling


def test_the_watchdog_of_nccl_aborts_nobody_unless_the_user_wants_it() -> None:
    fresh: dict[str, str] = {}
    own_error_handling(fresh)
    assert fresh == {ERRORS: "0", DUMPS: "0"}
    chosen = {ERRORS: "1", DUMPS: "1"}
    own_error_handling(chosen)
    assert chosen == {ERRORS: "1", DUMPS: "1"}
