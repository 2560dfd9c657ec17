"""Worker processes: the images of threads, bit for bit, whatever happens to a worker; nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.base.errors import DataError, UserError
from ropewalk.load.media import pipeline, team
from ropewalk.load.media.config import Transform
from ropewalk.load.media.pipeline import MediaLoader, open_media
from ropewalk.load.media.processes import Processes
from ropewalk.load.media.threads import Threads
from ropewalk.load.media.transforms import compiled
from ropewalk.store.blobs import Blob, write_blobs
from ropewalk.store.items import Item
from ropewalk.store.origin import Origin

from .pictures import encoded, picture, training

COUNT = 40
KINDS = ("JPEG", "PNG", "BMP", "WEBP")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of four kinds and different sizes, a file each; of some kinds the size is known only when decoded."""
    path = tmp_path_factory.mktemp("files")
    for number in range(COUNT):
        pixels = picture(number, height=48 + number, width=90 - number)
        kind = KINDS[number % 4] if number % 3 else "JPEG"
        ending = "jpg" if kind == "JPEG" else kind.lower()
        (path / f"{number % 5}").mkdir(exist_ok=True)
        (path / f"{number % 5}" / f"{number:02}.{ending}").write_bytes(encoded(pixels, kind))
    return path


def processes_of(loader: MediaLoader) -> list[int]:
    assert isinstance(loader._executor, Processes)
    return loader._executor.team.processes


def assert_same_batches(one: MediaLoader, other: MediaLoader, count: int = 5) -> None:
    with contextlib.closing(one), contextlib.closing(other):
        for _ in range(count):
            expected, found = one.next(), other.next()
            assert torch.equal(found.images, expected.images)
            assert torch.equal(found.samples, expected.samples)
            assert torch.equal(found.labels, expected.labels)
            assert found.weight.all()


@pytest.mark.parametrize("workers", [1, 3])
def test_files_give_the_images_of_threads_for_any_number_of_processes_and_epochs(folder: Path, workers: int) -> None:
    media = training(folder, batch_size=20, workers="processes", threads=workers)
    assert_same_batches(open_media(training(folder, batch_size=20), seed=4), open_media(media, seed=4))


@pytest.mark.parametrize("compression", ["off", "zstd"])
def test_shards_give_the_images_of_threads(folder: Path, tmp_path: Path, compression: Any) -> None:
    blobs = [Blob(file.name, file.read_bytes(), note=number) for number, file in enumerate(folder.rglob("*.*"))]
    write_blobs(tmp_path / "pictures.blobs", blobs, compression=compression)
    media = training(tmp_path, workers="processes")
    assert_same_batches(open_media(training(tmp_path), seed=4), open_media(media, seed=4))


class Counted(Origin):
    """A source of bytes that is not the files themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def fetch(self, items: Sequence[Item]) -> list[bytes | memoryview]:
        self.asked.extend(item.name for item in items)
        return super().fetch(items)


def test_what_is_fetched_through_a_cache_gives_the_images_of_threads(folder: Path) -> None:
    counted = Counted()
    media = training(folder, batch_size=20, workers="processes", prefetch_bytes=1)
    assert_same_batches(open_media(training(folder, batch_size=20), seed=4), open_media(media, seed=4, fetch=counted))
    assert len(counted.asked) >= 5 * 20


@pytest.mark.parametrize("resampling", ["auto", "cpu"])
def test_windows_and_levels_for_a_device_are_those_of_threads(
    folder: Path, resampling: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chain_of_a_gpu(media: Any, *, gpu: bool) -> Any:
        return compiled(media, gpu=True)

    # The operations of the device run on any; here it is the CPU.
    monkeypatch.setattr(pipeline, "compiled", chain_of_a_gpu)
    steps = (
        Transform(kind="decode"),
        Transform(kind="random-resized-crop", size=16, executor=resampling),
        Transform(kind="colour", brightness=0.4),
        Transform(kind="normalise"),
    )
    threads, processes = (
        open_media(training(folder, transforms=steps, workers=workers), seed=4) for workers in ("threads", "processes")
    )
    assert_same_batches(threads, processes)


def test_a_worker_that_is_killed_changes_nothing(folder: Path) -> None:
    threads, processes = (open_media(training(folder, workers=workers), seed=4) for workers in ("threads", "processes"))
    with contextlib.closing(threads), contextlib.closing(processes):
        for step in range(6):
            assert torch.equal(processes.next().images, threads.next().images)
            if step % 2 == 0:
                os.kill(processes_of(processes)[0], signal.SIGKILL)
                assert torch.equal(processes.batch(1000, 60).images, threads.batch(1000, 60).images)


# A decoder that ends its process, as a fault in a library does.
POISONED = """
import os, signal, sys
sys.path[:] = {path!r}
from ropewalk.load.media import worker

class Stills(worker.Stills):
    def decode(self, data, size, *, reduce=1):
        if b"poison" in bytes(data):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().decode(data, size, reduce=reduce)

worker.Stills = Stills
worker.main({descriptor})
"""


def test_a_picture_that_kills_its_decoder_is_found_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_PROGRAM", POISONED)
    for number in range(12):
        (tmp_path / f"{number:02}.jpg").write_bytes(encoded(picture(number)) + b"poison" * (number == 5))
    media = training(tmp_path, workers="processes", on_damage="skip", threads=1)
    with contextlib.closing(open_media(media, seed=4)) as loader:
        batch = loader.batch(0, 12)
    assert batch.samples[batch.weight == 0].tolist() == [5]
    assert (batch.images.flatten(1).amin(1) < batch.images.flatten(1).amax(1))[batch.weight > 0].all()
    ((name, why),) = loader.damaged.items()
    assert name.endswith("document 05.jpg")
    assert why == "the process that decodes it ends every time (status -9)"


def test_workers_that_cannot_start_are_an_error_with_a_remedy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(team, "_PROGRAM", "raise SystemExit(3)")
    loader = open_media(training(folder, workers="processes"), seed=4)
    with contextlib.closing(loader), pytest.raises(UserError, match=r'end as they start \(status 3\).* "threads"`'):
        loader.next()


def test_damage_is_named_or_skipped_as_by_threads(tmp_path: Path) -> None:
    for number in range(12):
        data = encoded(picture(number))
        data = data[: len(data) // 2] if number == 3 else b"nothing" * 9 if number == 7 else data
        (tmp_path / f"{number:02}.jpg").write_bytes(data)
    stopping = open_media(training(tmp_path, workers="processes"), seed=4)
    with contextlib.closing(stopping), pytest.raises(DataError, match=r"document 0[37]\.jpg: it.*; restore or .* set"):
        stopping.next()
    threads, processes = (
        open_media(training(tmp_path, workers=workers, on_damage="skip", prefetch_bytes=1), seed=4)
        for workers in ("threads", "processes")
    )
    with contextlib.closing(threads), contextlib.closing(processes):
        for _ in range(3):
            expected, found = threads.next(), processes.next()
            assert torch.equal(found.images, expected.images)
            assert torch.equal(found.weight, expected.weight)
        assert processes.damaged == threads.damaged


def test_files_that_vanish_or_change_after_an_epoch_are_named(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"{number:02}.png").write_bytes(encoded(picture(number), "PNG"))
    media = training(tmp_path, workers="processes", on_damage="skip", prefetch_bytes=1)
    with contextlib.closing(open_media(media, seed=4)) as loader:
        loader.batch(0, 12)
        (tmp_path / "04.png").unlink()
        other = encoded(picture(6, height=40), "PNG")
        size = (tmp_path / "06.png").stat().st_size
        (tmp_path / "06.png").write_bytes(other[:size].ljust(size, b"\0"))
        batch = loader.batch(12, 12)
        assert sorted(batch.samples[batch.weight == 0].tolist()) == [4, 6]
        reasons = {Path(name.split(": ")[0]).name: why for name, why in loader.damaged.items()}
        assert "no such file" in reasons["04.png"]
        assert "not the picture of 48 x 64 pixels that it was" in reasons["06.png"]


def test_closing_ends_all_processes_at_once_and_leaves_nothing_in_shared_memory(folder: Path) -> None:
    names = set(os.listdir("/dev/shm"))
    loader = open_media(training(folder, workers="processes", threads=2), seed=4)
    loader.next()
    workers = processes_of(loader)
    assert len(workers) == 2
    # Ctrl-C of the terminal is for the parent.
    for worker in workers:
        os.kill(worker, signal.SIGINT)
    loader.next()
    assert processes_of(loader) == workers
    loader.close()
    assert not any(runs(worker) for worker in workers)
    assert set(os.listdir("/dev/shm")) <= names


ORPHANS = """
import os, signal, sys, time
from ropewalk.load.media.team import Team
from ropewalk.load.media.worker import Measure
assert "torch" not in sys.modules
team = Team(2)
answers = [team.ask(Measure([None])) for _ in range(2)]
assert [answer.result().sizes.tolist() for answer in answers] == [[[0, 0]]] * 2
print(*team.processes, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_need_no_torch_and_do_not_outlive_a_parent_that_is_killed() -> None:
    done = subprocess.run([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True, check=False)
    workers = [int(word) for word in done.stdout.split()]
    assert len(workers) == 2
    until = time.monotonic() + 100
    while any(runs(worker) for worker in workers):
        assert time.monotonic() < until, "a worker goes on without its parent"
        time.sleep(0.01)


def runs(process: int) -> bool:
    """Whether a process is there and is not only waiting to be noticed."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("workers", "threads", "kind"),
    [
        ("auto", 4, Threads),
        ("auto", 5, Processes),
        ("threads", 5, Threads),
        ("processes", 1, Processes),
    ],
)
def test_auto_takes_processes_for_more_than_four_cores(folder: Path, workers: str, threads: int, kind: type) -> None:
    with contextlib.closing(open_media(training(folder, workers=workers, threads=threads), seed=4)) as loader:
        assert type(loader._executor) is kind
