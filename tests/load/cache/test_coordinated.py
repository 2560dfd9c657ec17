"""Jobs that train on one corpus: each piece is fetched and unpacked once an epoch for all of them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import ConfigError
from ropewalk.load.cache.config import Cache
from ropewalk.load.config import Remote
from ropewalk.store.shards import TokenLayout
from tests.load.test_remote import corpus as corpus
from tests.load.test_remote import equal, loader, remote_folder, tokens_of
from tests.load.throttled import Throttle, ThrottledStore, serving

BATCHES = 40


def caches(folder: Path, jobs: int = 2) -> list[Cache]:
    return [Cache(staging=str(folder), jobs=jobs, job=job, ram_bytes=0) for job in range(jobs)]


def together(folder: Path, settings: list[Cache]) -> tuple[list[list[torch.Tensor]], list[dict[str, float]]]:
    """What jobs with these settings read side by side, and what each did in the staging area."""
    # On a busy machine an answer may be late enough to be asked for a second time.
    opened = [loader(folder, cache=cache, remote=Remote(hedge=0)) for cache in settings]
    read: list[list[torch.Tensor]] = [[] for _ in opened]

    def run(job: int) -> None:
        for _ in range(BATCHES):
            batch = opened[job].next()
            read[job].append(torch.stack([batch.tokens, batch.weight.long()]))

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in range(len(opened))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counts = [reader.cache_counts()["staging"] for reader in opened]
    for reader in opened:
        reader.close()
    return read, counts


def pieces_asked(store: ThrottledStore) -> dict[tuple[str, str], int]:
    """How often each whole piece was asked for: the last of a shard is shorter, and read with the index too."""

    def size(span: str) -> int:
        first, last = span.removeprefix("bytes=").split("-")
        return int(last) - int(first) + 1

    return {asked: times for asked, times in store.asked.items() if size(asked[1]) == 1 << 20}


def test_two_jobs_ask_the_store_once_for_each_piece_and_read_the_same_batches(corpus: Path, tmp_path: Path) -> None:
    expected = tokens_of(corpus, BATCHES)
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        read, counts = together(there, caches(tmp_path / "staging"))
        asked = pieces_asked(store)
    assert all(equal(each, expected) for each in read)
    assert asked
    assert set(asked.values()) == {1}
    assert sum(each["prepared"] for each in counts) == sum(each["taken"] for each in counts) > 0
    assert [each["alone"] for each in counts] == [0, 0]


def test_a_piece_is_unpacked_by_one_of_the_jobs(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decode, decoded = TokenLayout.decode, []

    def counting(self: TokenLayout, chunk: int, data: bytes | memoryview) -> object:
        decoded.append((self.file, chunk))
        return decode(self, chunk, data)

    monkeypatch.setattr(TokenLayout, "decode", counting)
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        together(there, caches(tmp_path / "staging"))
    assert decoded
    assert len(decoded) == len(set(decoded))


def test_a_job_that_ends_holds_the_other_not_up(corpus: Path, tmp_path: Path) -> None:
    expected = tokens_of(corpus, BATCHES)
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        first, second = caches(tmp_path / "staging")
        gone = loader(there, cache=first)
        gone.next()
        left = loader(there, cache=second)
        gone.close()
        read = [left.next() for _ in range(BATCHES)]
        left.close()
    assert equal([torch.stack([batch.tokens, batch.weight.long()]) for batch in read], expected)


def test_ranks_of_jobs_share_with_the_same_rank_of_the_other(corpus: Path, tmp_path: Path) -> None:
    with serving(corpus, Throttle()) as store:
        there = remote_folder(corpus, tmp_path / "remote", store.url)
        settings = caches(tmp_path / "staging")
        readers = [loader(there, cache=cache, rank=rank, world=2) for cache in settings for rank in range(2)]
        batches = [reader.next() for reader in readers]
        for reader in readers:
            reader.close()
    assert torch.equal(batches[0].tokens, batches[2].tokens)
    assert torch.equal(batches[1].tokens, batches[3].tokens)


def test_staging_of_mapped_shards_is_refused(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"load\.cache\.staging.*\n?.*share them in memory anyway"):
        loader(corpus, cache=caches(tmp_path / "staging")[0])
