"""The remote tier: checkpoints in an object store, or any other fsspec URL. No torch.

    URL/RUN/step-00000100-IDENTITY/   the files of a checkpoint and its manifest

A checkpoint is uploaded after it is durable on disk: files first, then the manifest, which completes it. Folders are
named by the content of the checkpoint, so repeated or concurrent uploads write the same files to the same paths. The
manifest is created only if it is absent, conditionally by the store where possible (`If-None-Match`); otherwise it is
read back.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsspec.core import url_to_fs

from ropewalk.base.errors import DamagedCheckpoint, DataError, MissingPackage, RopewalkError, StorageError
from ropewalk.base.files import NO_FILE, point

from ..format import FILE, CheckpointManifest, identity, parse_checkpoint_manifest, read_checkpoint_manifest
from ..shard_file import CHUNK_BYTES, FileEntry, ShardFile
from .gap_scheduler import TransferGate
from .tier import CopyOffer, ShardKey, plain_name

_EXTRA = ("aiohttp", "s3fs")
"""Packages of the extra `remote`."""
_CHUNKS_PER_REQUEST = 16
"""64 MiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """The outcome of an upload."""

    name: str
    bytes: int
    """Sent; 0 if the checkpoint was already there."""
    seconds: float


class RemoteTier:
    """The checkpoints of a run in a store. Failures are retried, then raised as StorageError with the URL."""

    def __init__(
        self,
        url: str,
        run: str,
        *,
        retries: int = 4,
        pause_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`pause_s`: before the first retry; doubles with each retry (back-off)."""
        self.url = url.rstrip("/")
        self._run, self._retries, self._pause, self._sleep = plain_name(run), retries, pause_s, sleep
        try:
            self._store, path = url_to_fs(self.url)
        except ImportError as error:
            package = getattr(error.__cause__ or error, "name", None) or str(error)
            if package in _EXTRA:
                raise MissingPackage(package, f"writing to {url}", "remote") from None
            raise DataError(f"{url}: needs the package `{package}`; install it with: pip install {package}") from None
        except ValueError as error:
            raise DataError(f"{url}: {error}; change `checkpoint.tiers.remote`") from None
        self._root = f"{path.rstrip('/')}/{self._run}"

    def upload(self, path: Path, *, gate: TransferGate | None = None) -> Upload:
        """Uploads the checkpoint folder `path`, verifying every chunk; returns when it is complete."""
        start = time.perf_counter()
        manifest = read_checkpoint_manifest(path)
        name = f"step-{manifest.step:08d}-{identity(manifest)[:8]}"
        folder = f"{self._root}/{name}"
        if self._manifest_there(folder, manifest):
            return Upload(name=name, bytes=0, seconds=time.perf_counter() - start)
        self._try(lambda: self._store.makedirs(folder, exist_ok=True))
        for file, entry in manifest.files.items():
            source = ShardFile(path / file, entry, owners=manifest.byte_ranges(file))
            self._try(functools.partial(self._send, f"{folder}/{file}", source, entry, gate))
            point(f"remote.file:{file}")
        self._publish(folder, (path / FILE).read_bytes(), manifest)
        point(f"remote.committed:{name}")
        return Upload(name=name, bytes=manifest.bytes, seconds=time.perf_counter() - start)

    def names(self) -> list[str]:
        """The complete checkpoints, oldest step first."""
        self._store.invalidate_cache()
        found = self._try(lambda: self._store.glob(f"{self._root}/step-*/{FILE}"))
        return sorted(str(path).split("/")[-2] for path in found)

    def manifest(self, name: str) -> CheckpointManifest:
        """The manifest of a checkpoint; DataError if it is damaged."""
        file = f"{self._root}/{name}/{FILE}"
        self._check_kind(file)
        text = self._try(lambda: bytes(self._store.cat_file(file)))
        return parse_checkpoint_manifest(text, Path(f"{self.url}/{self._run}/{name}"))

    def fetch(self, name: str, file: str, target: Path) -> None:
        """Downloads a file of a checkpoint, without verification."""
        source = f"{self._root}/{name}/{plain_name(file)}"
        self._check_kind(source)
        self._try(lambda: self._store.get_file(source, str(target)))

    def fetch_chunks(self, name: str, file: str, target: Path, *, entry: FileEntry, chunks: Sequence[int]) -> None:
        """As `fetch`, but only `chunks` at their offsets, with holes between them."""
        source = f"{self._root}/{name}/{plain_name(file)}"
        self._check_kind(source)
        with open(target, "wb") as out:
            for first, last in _runs(chunks):
                begin, end = first * entry.chunk_bytes, min(last * entry.chunk_bytes, entry.bytes)
                data = self._try(functools.partial(self._store.cat_file, source, start=begin, end=end))
                os.pwrite(out.fileno(), data, begin)
            os.ftruncate(out.fileno(), entry.bytes)

    def retain(self, *, keep_last: int, keep_every: int = 0) -> list[str]:
        """Deletes checkpoints except the newest `keep_last` and those of steps that `keep_every` divides."""
        names = self.names()
        doomed = [name for name in names[:-keep_last] if not (keep_every and _step(name) % keep_every == 0)]
        for name in doomed:
            self.remove(name)
        return doomed

    def remove(self, name: str) -> None:
        """Deletes a checkpoint, its manifest first, so that it is never partially visible."""
        self._try(lambda: self._store.rm_file(f"{self._root}/{name}/{FILE}"), missing_ok=True)
        self._try(lambda: self._store.rm(f"{self._root}/{name}", recursive=True), missing_ok=True)

    def set_aside(self, name: str) -> None:
        """Quarantines a damaged checkpoint by renaming its manifest."""
        old, new = f"{self._root}/{name}/{FILE}", f"{self._root}/{name}/damaged-{FILE}"
        self._try(lambda: self._store.mv(old, new), missing_ok=True)

    def _check_kind(self, file: str) -> None:
        """Refuses pipes in a mounted file system, on which reads block forever."""
        if self._try(lambda: self._store.info(file))["type"] != "file":
            raise DamagedCheckpoint(f"{file}: damaged checkpoint: {NO_FILE}")

    def _send(self, target: str, source: ShardFile, entry: FileEntry, gate: TransferGate | None) -> None:
        size = min(gate.slice_bytes, CHUNK_BYTES) if gate else CHUNK_BYTES
        with self._store.open(target, "wb") as out:
            for begin in range(0, entry.bytes, size):
                data = source.read(begin, min(begin + size, entry.bytes))
                if gate:
                    gate.wait(len(data))
                out.write(data)
        self._store.invalidate_cache()
        arrived = self._store.info(target)["size"]
        if arrived != entry.bytes:
            raise OSError(f"{target}: {arrived} of {entry.bytes} bytes arrived")

    def _publish(self, folder: str, text: bytes, manifest: CheckpointManifest) -> None:
        """Creates the manifest unless it exists."""
        target = f"{folder}/{FILE}"

        def put() -> None:
            try:
                self._store.pipe_file(target, text, mode="create")
            except FileExistsError:
                pass
            except (TypeError, NotImplementedError):
                # A store without conditional writes.
                self._store.pipe_file(target, text)

        self._try(put)
        self._store.invalidate_cache()
        if not self._manifest_there(folder, manifest):
            raise StorageError(f"{self.url}: {target} is not what was written; is another program writing there?")

    def _manifest_there(self, folder: str, manifest: CheckpointManifest) -> bool:
        """Whether the folder has a manifest of the same content."""
        try:
            text = self._try(lambda: bytes(self._store.cat_file(f"{folder}/{FILE}")))
        except FileNotFoundError:
            return False
        try:
            return identity(parse_checkpoint_manifest(text, Path(folder))) == identity(manifest)
        except DataError:
            # Partially written by a store without atomic objects: written again.
            self._try(lambda: self._store.rm_file(f"{folder}/{FILE}"), missing_ok=True)
            return False

    def _try(self, work: Callable[[], Any], *, missing_ok: bool = False) -> Any:
        """The result of `work`, with retries. FileNotFoundError is not retried."""
        for attempt in range(self._retries + 1):
            try:
                return work()
            except FileNotFoundError:
                if missing_ok:
                    return None
                raise
            except RopewalkError:
                raise
            except Exception as error:
                # Stores raise exceptions of their own libraries without a common base.
                if attempt == self._retries:
                    reason = f"{type(error).__name__}: {error}"
                    raise StorageError(f"{self.url}: {reason} (tried {attempt + 1} times)") from error
            self._sleep(self._pause * 2**attempt)
        raise AssertionError("unreachable")


class RemoteSource:
    """A remote store as a source of copies."""

    checks = False

    def __init__(self, remote: RemoteTier, run: str) -> None:
        self._remote, self._run = remote, run

    @property
    def name(self) -> str:
        return f"remote {self._remote.url}"

    def offers(self) -> tuple[list[CopyOffer], list[str]]:
        found, wrong = [], []
        for name in self._remote.names():
            try:
                manifest = self._remote.manifest(name)
            except DataError as error:
                wrong.append(f"{self.name}: {error}")
                self._remote.set_aside(name)
                continue
            key = ShardKey(run=self._run, step=manifest.step, attempt=f"remote-{name.rpartition('-')[2]}")
            found.append(CopyOffer(key, manifest, name))
        return found, wrong

    def fetch(self, offer: CopyOffer, file: str, target: Path, chunks: Sequence[int]) -> None:
        entry = offer.manifest.files[file]
        try:
            if len(chunks) == len(entry.chunks):
                self._remote.fetch(offer.where, file, target)
            else:
                self._remote.fetch_chunks(offer.where, file, target, entry=entry, chunks=chunks)
        except FileNotFoundError:
            raise DataError(f"{self.name}/{offer.where}/{file}: damaged checkpoint: this file is missing") from None

    def quarantine(self, offer: CopyOffer) -> None:
        self._remote.set_aside(offer.where)


def _runs(chunks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last (exclusive) of consecutive chunks, at most _CHUNKS_PER_REQUEST."""
    begin = 0
    for index in range(1, len(chunks) + 1):
        if index == len(chunks) or chunks[index] != chunks[index - 1] + 1 or index - begin == _CHUNKS_PER_REQUEST:
            yield chunks[begin], chunks[index - 1] + 1
            begin = index


def _step(name: str) -> int:
    """The step in the name of a checkpoint."""
    return int(name.split("-")[1])
