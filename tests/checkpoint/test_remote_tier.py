"""A second place for checkpoints: whole or not counted, whatever the store does."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import register_implementation

from ropewalk.base.errors import DataError, MissingPackage, StorageError
from ropewalk.checkpoint.read.load_latest import restore
from ropewalk.checkpoint.tiers.remote_tier import RemoteSource, RemoteTier
from ropewalk.checkpoint.write.save import save
from tests.checkpoint.shards import flip, same, state


class Unreliable(MemoryFileSystem):  # type: ignore[misc]
    """A store that does what `trouble(operation, path)` says before it works."""

    protocol = ("unreliable",)
    store: dict[str, Any] = {}  # noqa: RUF012 - as its base has it
    pseudo_dirs = [""]  # noqa: RUF012 - as its base has it
    trouble: Callable[[str, str], None] = staticmethod(lambda operation, path: None)
    cachable = False

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        type(self).trouble("open " + mode, path)
        return super()._open(path, mode, **options)

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        type(self).trouble("pipe " + mode, path)
        super().pipe_file(path, value, mode=mode, **options)
        type(self).trouble("piped " + mode, path)


register_implementation("unreliable", Unreliable)


@pytest.fixture(autouse=True)
def empty() -> None:
    Unreliable.store.clear()
    Unreliable.pseudo_dirs[:] = [""]
    Unreliable.trouble = staticmethod(lambda operation, path: None)


def remote(url: str = "unreliable://bucket/deep", **options: Any) -> RemoteTier:
    waits: list[float] = []
    return RemoteTier(url, "run", sleep=waits.append, **options)


def found_in(place: RemoteTier, folder: Path) -> Any:
    return restore([RemoteSource(place, "run")], scratch=folder / "scratch")


@pytest.mark.parametrize("kind", ["file", "unreliable"])
def test_a_checkpoint_goes_there_and_comes_back(tmp_path: Path, kind: str) -> None:
    place = remote(f"file://{tmp_path}/store" if kind == "file" else "unreliable://bucket")
    sent = place.upload(save(tmp_path / "disk", state(5)))
    assert place.names() == [sent.name]
    assert sent.name.startswith("step-00000005-")
    found, report = found_in(place, tmp_path)
    assert same(found, state(5))
    assert report.bytes == sent.bytes
    assert place.upload(tmp_path / "disk/step-00000005").bytes == 0, "sent again"


def test_without_a_manifest_it_does_not_count(tmp_path: Path) -> None:
    def dies(operation: str, path: str) -> None:
        if operation.startswith("pipe") and path.endswith("manifest.json"):
            raise KeyboardInterrupt

    place = remote()
    place.upload(save(tmp_path / "disk", state(5)))
    Unreliable.trouble = staticmethod(dies)
    with pytest.raises(KeyboardInterrupt):
        place.upload(save(tmp_path / "disk", state(6)))
    assert found_in(place, tmp_path)[1].step == 5
    Unreliable.trouble = staticmethod(lambda operation, path: None)
    place.upload(tmp_path / "disk/step-00000006")
    assert found_in(place, tmp_path)[1].step == 6


def test_what_fails_is_tried_again_and_then_told(tmp_path: Path) -> None:
    path, draw = save(tmp_path / "disk", state(5)), random.Random(0)

    def often(operation: str, path: str) -> None:
        if draw.random() < 0.4:
            raise RuntimeError("503 slow down")

    Unreliable.trouble = staticmethod(often)
    place = remote(retries=30)
    place.upload(path)
    assert same(found_in(place, tmp_path)[0], state(5))

    def always(operation: str, path: str) -> None:
        raise RuntimeError("503 slow down")

    Unreliable.trouble = staticmethod(always)
    waits: list[float] = []
    place = RemoteTier("unreliable://other", "run", retries=3, pause_s=1.0, sleep=waits.append)
    with pytest.raises(StorageError, match=r"503 slow down \(tried 4 times\)"):
        place.upload(path)
    assert waits == [1.0, 2.0, 4.0]


def test_an_answer_lost_after_the_manifest_was_put_is_no_failure(tmp_path: Path) -> None:
    lost: list[str] = []

    def loses(operation: str, path: str) -> None:
        if operation.startswith("piped") and not lost:
            lost.append(path)
            raise TimeoutError("no answer")

    Unreliable.trouble = staticmethod(loses)
    place = remote()
    place.upload(save(tmp_path / "disk", state(5)))
    assert lost
    assert same(found_in(place, tmp_path)[0], state(5))


def test_a_store_without_conditions_is_read_back(tmp_path: Path) -> None:
    def unconditional(operation: str, path: str) -> None:
        if operation == "pipe create":
            raise NotImplementedError("mode")

    Unreliable.trouble = staticmethod(unconditional)
    place = remote()
    place.upload(save(tmp_path / "disk", state(5)))
    assert same(found_in(place, tmp_path)[0], state(5))


def test_other_content_of_the_same_step_lies_beside_it(tmp_path: Path) -> None:
    place = remote()
    place.upload(save(tmp_path / "one", state(5)))
    place.upload(save(tmp_path / "two", state(5, rows=8)))
    assert len(place.names()) == 2


def test_a_damaged_file_is_found_there_and_an_older_step_is_taken(tmp_path: Path) -> None:
    place = remote(f"file://{tmp_path}/store")
    for step in (5, 6):
        place.upload(save(tmp_path / "disk", state(step)))
    (model,) = (tmp_path / "store/run").glob("step-00000006-*/model.safetensors")
    flip(model, bit=2222)
    found, report = found_in(place, tmp_path)
    assert same(found, state(5))
    assert "model.safetensors" in report.damaged[0]
    assert len(place.names()) == 1, "the damaged one is out of sight"
    flip(next((tmp_path / "store/run").glob("step-00000005-*/manifest.json")), bit=4444)
    with pytest.raises(DataError, match=r"manifest"):
        found_in(place, tmp_path)


def test_a_damaged_checkpoint_is_not_sent(tmp_path: Path) -> None:
    path = save(tmp_path / "disk", state(5))
    flip(path / "model.safetensors", bit=2222)
    place = remote()
    with pytest.raises(DataError, match=r"model.safetensors"):
        place.upload(path)
    assert place.names() == []


def test_retention_there_is_as_on_the_disk(tmp_path: Path) -> None:
    place = remote(f"file://{tmp_path}/store")
    for step in range(1, 8):
        place.upload(save(tmp_path / "disk", state(step)))
        place.retain(keep_last=2, keep_every=3)
    assert [int(name.split("-")[1]) for name in place.names()] == [3, 6, 7]
    assert len(list((tmp_path / "store/run").iterdir())) == 3


def test_unknown_stores_are_named() -> None:
    with pytest.raises(DataError, match=r"checkpoint\.tiers\.remote"):
        remote("nonsense://x")
    try:
        import s3fs  # noqa: F401
    except ImportError:
        with pytest.raises(MissingPackage, match=r"s3fs"):
            remote("s3://bucket/x")
