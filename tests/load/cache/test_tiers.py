"""The chain of tiers as recipes make it: what it holds together, what it tells, what it refuses."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import xxhash

from ropewalk.base.errors import ConfigError, StorageError
from ropewalk.config.read import parse
from ropewalk.load.cache.config import Cache
from ropewalk.load.cache.tiers import open_shared, open_tiers
from ropewalk.load.config import Load
from ropewalk.store.items import Item
from ropewalk.store.origin import open_origin

from .origins import Counting, make_items, truth

ITEMS = [Item("origin", start, start + 100) for start in range(0, 5000, 100)]


def epochs(fetch, count: int, items: list[Item] = ITEMS) -> None:  # type: ignore[no-untyped-def]
    order = random.Random(0)
    for _ in range(count):
        for item in order.sample(items, len(items)):
            assert bytes(fetch.fetch([item])[0]) == truth(item)


def test_memory_and_disk_together_hold_the_sum_of_their_budgets(tmp_path: Path) -> None:
    origin = Counting()
    tiers = open_tiers(Cache(ram_bytes=10 * 100, disk=str(tmp_path), disk_bytes=15 * 132), origin)
    epochs(tiers, 1)
    assert sum(origin.asked.values()) == 50
    epochs(tiers, 2)
    assert sum(origin.asked.values()) == 50 + 2 * 25
    counts = tiers.counts()
    assert (counts["ram"].hits, counts["disk"].hits) == (2 * 10, 2 * 15)
    tiers.close()
    assert origin.closed


def test_the_disk_is_there_for_the_next_run(tmp_path: Path) -> None:
    settings = Cache(ram_bytes=0, disk=str(tmp_path))
    first = open_tiers(settings, Counting())
    epochs(first, 1)
    first.close()
    origin = Counting()
    epochs(open_tiers(settings, origin), 1)
    assert origin.requests == 0


def test_once_holds_nothing(tmp_path: Path) -> None:
    origin = Counting()
    tiers = open_tiers(Cache(policy="once", disk=str(tmp_path / "unused")), origin)
    epochs(tiers, 2)
    assert set(origin.asked.values()) == {2}
    assert not (tmp_path / "unused").exists()


def test_nodes_of_a_recipe_find_each_other(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("swordfish swordfish\n")
    secret.chmod(0o600)
    origins = [Counting() for _ in range(3)]
    # The port of the node is known once its first process listens; the other two of the node ask it.
    settings = Cache(peers=("127.0.0.1:0",), secret_file=str(secret))
    server = open_tiers(settings, origins[0], roots=["origin"], rank=0, world=3)
    assert server.address is not None
    known = Cache(peers=(server.address,), secret_file=str(secret))
    ranks = [open_tiers(known, origin, rank=rank, world=3) for rank, origin in enumerate(origins[1:], 1)]
    for rank in ranks:
        epochs(rank, 2)
    assert [origin.requests for origin in origins[1:]] == [0, 0]
    assert set(origins[0].asked.values()) == {1}
    assert "peers: 100 of 100 items (100.0%)" in ranks[0].lines()[0]
    for tiers in (*ranks, server):
        tiers.close()


def test_the_staging_area_of_a_recipe_is_shared(tmp_path: Path) -> None:
    origin = Counting()
    settings = [Cache(staging=str(tmp_path), staging_bytes=10**6, jobs=2, job=job) for job in range(2)]
    jobs = [open_shared(each, origin, prepare=lambda item, data, epoch: bytes(data)[::-1]) for each in settings]
    for job in jobs:
        assert [bytes(data) for data in job.at(0).fetch(ITEMS)] == [truth(item)[::-1] for item in ITEMS]
    assert set(origin.asked.values()) == {1}


def test_nothing_of_the_users_is_removed_from_a_folder_that_is_named_as_a_cache(tmp_path: Path) -> None:
    mine = [
        tmp_path / "cache" / name for name in ("jobs/run.sh", "staged/a", "had/b", "claims/c", "items/00/d.partial")
    ]
    for path in mine:
        path.parent.mkdir(parents=True)
        path.write_text("mine")
    (tmp_path / "cache").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    for name in ("link", "cache"):
        shared = Cache(staging=str(tmp_path / name), staging_bytes=10**6)
        disk = Cache(disk=str(tmp_path / name), disk_bytes=10**6)
        if name == "link":
            with pytest.raises(StorageError, match=r"symbolic link.*`load.cache.staging`"):
                open_shared(shared, Counting(), prepare=lambda item, data, epoch: data)
            with pytest.raises(StorageError, match=r"symbolic link.*`load.cache.disk`"):
                open_tiers(disk, Counting())
        else:
            open_shared(shared, Counting(), prepare=lambda item, data, epoch: data).close()
            open_tiers(disk, Counting()).close()
    assert [path.read_text() for path in mine] == ["mine"] * len(mine)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[cache]\npinned = true\npolicy = 'lru'", 'set `policy = "keep"`'),
        ("[cache]\nlisten = '0.0.0.0:1'", "peers"),
        ("[cache]\njobs = 2\njob = 2\nstaging = 'x'", "from 0 to 1"),
        ("[cache]\njobs = 2", "need a folder"),
        ("[cache]\nram_byte = 2", "ram_bytes"),
    ],
)
def test_contradictions_are_told_when_the_recipe_is_read(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        parse(Load, text, "recipe.toml")


def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    missing = Cache(peers=("127.0.0.1:0",), secret_file=str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match="same secret into this file on every node"):
        open_tiers(missing, Counting())
    (tmp_path / "empty").touch(0o600)
    with pytest.raises(ConfigError, match="is empty"):
        open_tiers(Cache(peers=("127.0.0.1:0",), secret_file=str(tmp_path / "empty")), Counting())
    with pytest.raises(ConfigError, match="3 nodes do not share 4 processes"):
        open_tiers(Cache(peers=("a:1", "b:1", "c:1")), Counting(), rank=1, world=4)


def test_the_first_process_of_each_node_serves(tmp_path: Path) -> None:
    peers = ("127.0.0.1:0", "localhost:0")
    opened = [open_tiers(Cache(peers=peers), Counting(), rank=rank, world=4) for rank in range(4)]
    assert [tiers.address is not None for tiers in opened] == [True, False, True, False]
    alone = open_tiers(Cache(peers=peers, listen=peers[1]), Counting())
    assert alone.address is not None
    assert alone.address.startswith("localhost:")
    for tiers in (*opened, alone):
        tiers.close()


def test_real_files_come_through_all_tiers(tmp_path: Path) -> None:
    data = random.Random(1).randbytes(50_000)
    (tmp_path / "corpus").mkdir()
    file = tmp_path / "corpus" / "shard.bin"
    file.write_bytes(data)
    ranges = [(0, 999), (5, 1004)]
    items = [Item(str(file), start, stop, xxhash.xxh3_64_intdigest(data[start:stop])) for start, stop in ranges]
    settings = Cache(disk=str(tmp_path / "cache"), peers=("127.0.0.1:0",))
    server = open_tiers(settings, open_origin(str(file)), roots=[str(tmp_path / "corpus")])
    assert server.address is not None
    guest = open_tiers(Cache(peers=(server.address,)), open_origin(str(file)), rank=1, world=2)
    before = [bytes(found) for found in guest.fetch(items)]
    file.unlink()
    assert [bytes(found) for found in guest.fetch(items)] == before == [data[:999], data[5:1004]]
    guest.close()
    server.close()


def test_items_of_no_bytes_pass_through_every_tier(tmp_path: Path) -> None:
    tiers = open_tiers(Cache(disk=str(tmp_path)), Counting())
    empty = make_items(3)[1]
    nothing = Item(empty.file, empty.start, empty.start)
    for _ in range(2):
        assert [bytes(data) for data in tiers.fetch([nothing, empty])] == [b"", truth(empty)]
