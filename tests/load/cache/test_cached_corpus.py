"""A corpus behind a URL read through the tiers: the same batches, and the store is asked once for each piece."""

from __future__ import annotations

from pathlib import Path

import pytest

from ropewalk.load.cache.config import Cache
from tests.load.test_remote import corpus as corpus
from tests.load.test_remote import equal, loader, remote_folder, tokens_of
from tests.load.throttled import Throttle, serving


def test_a_run_after_another_asks_the_store_for_nothing(corpus: Path, tmp_path: Path) -> None:
    expected = tokens_of(corpus, 20, shuffle="all")
    cache = Cache(disk=str(tmp_path / "cache"))
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        assert equal(tokens_of(there, 20, shuffle="all", cache=cache), expected)
        # 160 rows in any order lie in all 18 pieces, so what was read ahead on top makes no difference.
        before = sum(store.asked.values())
        assert equal(tokens_of(there, 20, shuffle="all", cache=cache), expected)
        assert sum(store.asked.values()) == before > 0


@pytest.mark.parametrize("policy", ["keep", "lru", "once"])
def test_no_policy_changes_a_batch(corpus: Path, tmp_path: Path, policy: str) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        cache = Cache(policy=policy, ram_bytes=3 << 20)  # type: ignore[arg-type]
        assert equal(tokens_of(there, 20, shuffle="all", cache=cache), tokens_of(corpus, 20, shuffle="all"))


def test_the_loader_tells_what_its_tiers_did(corpus: Path, tmp_path: Path) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        reader = loader(there, shuffle="all", cache=Cache(disk=str(tmp_path / "cache")))
        reader.next()
        lines = reader.describe()
        reader.close()
    assert [line.split(":")[0] for line in lines if line.startswith(("ram", "disk"))] == ["ram", "disk"]
