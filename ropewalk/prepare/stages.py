"""Results of earlier work, found again by what they depend on.

A stage makes files. Each is named by a hash of all that it depends on: the version of the code, the settings that
matter to this stage and the names of its inputs, so that whatever has not changed is there already, also in another
recipe. Files exist whole or not at all and never change; to delete some or all of them only costs the time to make them
again.

Each carries a checksum that covers its bytes and its name (`store/sealed.py`), verified whenever it is opened. One that
is not what was written raises DamagedArtifact: `healed` deletes it and does the work again, so that no damage reaches a
result that has a fresh checksum of its own.

    prepared/stages/read/3f2a9c....arrow      documents of a chunk, as text
    prepared/stages/measure/...               their statistics
    prepared/stages/used/...                  which results the data in a folder of prepared/ was made from
    prepared/stages/4711.partial/             what process 4711 is writing
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow as pa
import xxhash

from ropewalk.base.errors import DamagedFile, DataError, StorageError
from ropewalk.base.files import NO_FILE, PARTIAL, open_lock, point, storage, sync_folder
from ropewalk.store.sealed import append_seal, read_content, verify

FOLDER = "stages"

Made = TypeVar("Made")


class DamagedArtifact(DataError):
    """A result of a stage is not what was written: `path` is to be deleted and made again."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: this result of a prepare stage is damaged: {why}")
        self.path, self.why = path, why

    def __reduce__(self) -> tuple[Any, ...]:  # a worker tells its parent
        return type(self), (self.path, self.why)


def key_of(*parts: Any) -> str:
    """The name of what depends on `parts` (plain values) and on nothing else."""
    return xxhash.xxh3_128_hexdigest(json.dumps(parts, sort_keys=True, ensure_ascii=False).encode())


def seal_key(path: Path) -> str:
    """What the checksum of a stage's file is bound to: the stage and the name, which says what it was made from."""
    return f"{path.parent.name}/{path.name}"


def healed(work: Callable[[], Made], *, say: Callable[[str], None]) -> Made:
    """What `work` gives. Whenever it meets a damaged result of a stage, this is deleted, with a word to `say`, and
    `work` begins again, which keeps all other results. StorageError when one file is damaged twice."""
    seen: set[Path] = set()
    while True:
        try:
            return work()
        except DamagedArtifact as error:
            if error.path in seen:
                raise StorageError(
                    f"{error}; it was made again and is damaged again: check the disk and the memory of this machine"
                ) from error
            seen.add(error.path)
            say(f"{error}; it is made again")
            drop_artifact(error.path)


def drop_artifact(path: Path) -> None:
    """Deletes a file of a stage."""
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def filled(path: Path, *, sealed: bool = True) -> Iterator[Path]:
    """A place to write a file that becomes `path`, durable, when the block ends; several processes may do so at once.

    `sealed`: it gets its checksum here. What carries one already is synced by whoever wrote it.
    """
    private = path.parent.parent / f"{os.getpid()}{PARTIAL}"
    with storage(f"writing {path}"):
        for folder in (private, path.parent):
            if not folder.is_dir():
                folder.mkdir(parents=True, exist_ok=True)
        point(f"stage.begin:{path.parent.name}")
        try:
            yield private / path.name
            if sealed:
                append_seal(private / path.name, seal_key(path))
            point(f"stage.written:{path.parent.name}")
            os.replace(private / path.name, path)
        except BaseException:
            (private / path.name).unlink(missing_ok=True)
            raise
        finally:
            with contextlib.suppress(OSError):  # another file of this process is still in it
                private.rmdir()
        sync_folder(path.parent)
        point(f"stage.committed:{path.parent.name}")


@contextlib.contextmanager
def filled_file(path: Path, *, sealed: bool = True) -> Iterator[IO[bytes]]:
    """An open file that becomes `path`, durable, when the block ends."""
    with filled(path, sealed=sealed) as place, open(place, "wb") as file:
        yield file
        file.flush()
        if not sealed:
            os.fsync(file.fileno())


@contextlib.contextmanager
def batch_writer(path: Path, schema: pa.Schema, *, compressed: bool = True) -> Iterator[pa.RecordBatchFileWriter]:
    """Commits the batches that the block writes, in order, to `path`; uncompressed ones are read without a copy."""
    options = pa.ipc.IpcWriteOptions(compression="lz4" if compressed else None)  # lz4 halves text, read at > 1 GB/s
    with filled_file(path) as file, pa.ipc.new_file(file, schema, options=options) as writer:
        yield writer


def open_content(path: Path) -> pa.BufferReader:
    """The content of a committed file, mapped and verified; DamagedArtifact when it is not what was written."""
    try:
        size = verify(path, seal_key(path))
    except DamagedFile as error:
        raise damaged(path, error) from None
    with pa.memory_map(str(path)) as file:
        return pa.BufferReader(file.read_buffer(size))


def read_artifact(path: Path) -> bytes:
    """The content of a small committed file; DamagedArtifact when it is not what was written."""
    try:
        return read_content(path, seal_key(path))
    except DamagedFile as error:
        raise damaged(path, error) from None


def damaged(path: Path, error: DataError) -> DataError:
    """`error`, which names `path`, as one that `healed` knows what to do about; itself for a folder or a pipe in place
    of the file, which we did not make and do not delete."""
    if NO_FILE in str(error):
        return error
    told = error.fault if isinstance(error, DamagedFile) else str(error)
    return DamagedArtifact(path, told.removeprefix(f"{path}: "))


def read_batches(path: Path, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
    """The batches of a committed file one by one, all columns or those named; DamagedArtifact when it is damaged."""
    file = open_content(path)
    schema = pa.ipc.open_file(file).schema
    wanted = None if columns is None else sorted(schema.get_field_index(name) for name in columns)
    # Columns decompressed by threads of their own cost a tenth more CPU time; workers go over files in parallel.
    reader = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=wanted, use_threads=False))
    for index in range(reader.num_record_batches):
        yield reader.get_batch(index)


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """All batches of a committed file."""
    schema = pa.ipc.open_file(open_content(path)).schema
    kinds = schema if columns is None else pa.schema([field for field in schema if field.name in columns])
    return pa.Table.from_batches(read_batches(path, columns), kinds)


@contextlib.contextmanager
def sharing(folder: Path) -> Iterator[None]:
    """Holds the stages in `folder` beside other processes; the only one there sweeps away what crashes have left."""
    with _lock(folder) as file:
        if _alone(file):
            for left in folder.glob(f"*{PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Whether no other process uses the stages in `folder`, and none does while the block runs."""
    with _lock(folder) as file:
        yield _alone(file)


def drop(folder: Path) -> bool:
    """Deletes the stages in `folder` unless another process uses them; whether it did."""
    with alone(folder) as is_alone:
        for stage in folder.iterdir() if is_alone else ():
            if stage.is_dir():
                shutil.rmtree(stage, ignore_errors=True)
        return is_alone


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[Any]:
    with open_lock(folder) as file:
        yield file


def _alone(file: Any) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
