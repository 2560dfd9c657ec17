"""A file that one process at a time appends to, and truncates when written data is undone."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.base.files import storage


class AppendedFile:
    """An append-only file, locked by this process until it is closed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with storage(f"opening {path}"):
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and not path.is_file():
                raise UserError(f"{path}: not a regular file; name another one")
            self._file = open(path, "a+b")  # noqa: SIM115 - lives as long as the tracker
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise UserError(f"{path}: another process writes this file; stop it or name another file") from None

    def read(self) -> bytes:
        """The content of the file."""
        with storage(f"reading {self.path}"):
            self._file.seek(0)
            return self._file.read()

    def append(self, data: bytes) -> None:
        """Adds `data` at the end."""
        with storage(f"writing {self.path}"):
            self._file.write(data)
            self._file.flush()

    def cut(self, size: int) -> None:
        """Truncates the file to `size` bytes."""
        with storage(f"writing {self.path}"):
            self._file.flush()
            os.ftruncate(self._file.fileno(), size)

    def close(self) -> None:
        """Makes the file durable and releases the lock."""
        with storage(f"writing {self.path}"), self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
