"""What can go wrong, as one tree.

    RopewalkError            everything we raise on purpose; the command line prints it without a traceback
    ├── UserError            the request cannot be met as asked: exit 2
    │   ├── ConfigError      a recipe or an override is wrong; carries every problem found
    │   ├── DataError        something that is read is missing, damaged or of another version
    │   │   ├── DamagedFile        a file is not what was written
    │   │   │   ├── DamagedData        prepared data: a shard or its manifest
    │   │   │   ├── DamagedPlan        a run's plan
    │   │   │   └── DamagedTokenizer   a tokenizer cannot be read, or does not end
    │   │   ├── DamagedModel       a Hugging Face directory is not one that can be imported
    │   │   └── DamagedCheckpoint  a checkpoint is not what was written; an older one may be whole
    │   ├── RunConflict      the run directory belongs to another recipe or another process
    │   └── MissingPackage   an optional dependency is needed; says what to install
    ├── StorageError         the disk is full, read-only or failing: exit 2; what was committed is intact
    ├── HardwareError        two computations that must agree do not: exit 2; what was committed is intact
    ├── WorkersFailed        processes started for a run fail again and again: exit 1; shows their last words
    ├── PeerFailed           another rank of the launch failed first: exits as that rank's error says
    └── Preempted            the scheduler wanted the machine back and the state is saved: exit 0

Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import errno
from collections.abc import Iterable
from dataclasses import dataclass

from .install import install_command


class RopewalkError(Exception):
    """The root of the tree above."""

    exit_code = 2


class UserError(RopewalkError):
    """The request cannot be met as asked; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a recipe: where it stands, what it is, what to do."""

    where: str
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.remedy}" if self.remedy else text


class ConfigError(UserError):
    """A recipe is wrong in one or more places; `problems` holds them all."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = list(problems)
        super().__init__("\n".join(map(str, self.problems)))


class DataError(UserError):
    """An input, shard, manifest or checkpoint is missing, damaged or of another version.

    Each kind below is blamed on one thing. Whoever catches one, as the search for a whole checkpoint does, catches that
    kind alone: a damaged shard says nothing about the checkpoints of a run.
    """


class DamagedFile(DataError):
    """A file is not what was written. Whoever can make it again catches this; others see name, reason and remedy."""

    def __init__(self, fault: str, remedy: str = "") -> None:
        super().__init__(f"{fault}; {remedy}" if remedy else fault)
        self.fault = fault
        """File and reason alone, for whoever makes it again."""


class DamagedData(DamagedFile):
    """A shard of prepared data, or the manifest that lists the shards, is not what was written."""


class DamagedPlan(DamagedFile):
    """The plan of a run is not what was written."""


class DamagedTokenizer(DamagedFile):
    """A tokenizer cannot be read, or takes longer to encode a short text than anybody waits."""


class DamagedModel(DataError):
    """A Hugging Face directory holds a model that is damaged or that we cannot build."""


class DamagedCheckpoint(DataError):
    """A checkpoint is not what was written; an older one may be whole."""


class RunConflict(UserError):
    """The run directory belongs to another recipe, or another process is writing it."""


class MissingPackage(UserError):
    """An optional dependency is needed for what was asked."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(f"{purpose} needs the package `{package}`; install it with: {install_command(extra)}")


class StorageError(RopewalkError):
    """Storage refused a write or a read; what was committed before is intact."""


class HardwareError(RopewalkError):
    """The machine computes wrongly; what was committed before the last check is intact."""


class WorkersFailed(RopewalkError):
    """Processes that were started for a run failed as often as they may; what was committed before is intact."""

    exit_code = 1


class PeerFailed(RopewalkError):
    """Another rank of the launch failed first; the message says which, where and why."""

    exit_code = 71
    """Where the other rank died or met a bug; 70 is a process that hung. A request that cannot be met stays 2."""

    def __init__(self, message: str, exit_code: int = exit_code) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Preempted(RopewalkError):
    """The run was asked to make room and did; nothing is wrong, the same command continues."""

    exit_code = 0


_STORAGE_REMEDIES = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again, it continues",
    errno.EDQUOT: "the disk quota is used up; free some space and run the same command again",
    errno.EFBIG: "the file is larger than this account may write; raise `ulimit -f` and run it again",
    errno.EROFS: "the file system is read-only; choose another folder (a run's are `--runs` and `prepare.folder`)",
    errno.EACCES: "choose another folder or change its permissions",
    errno.EPERM: "choose another folder or change its permissions",
    errno.ENAMETOOLONG: "choose a shorter name or folder",
    errno.EEXIST: "a file stands where a folder is needed; move it away or choose another folder",
    errno.ENOTDIR: "a file stands where a folder is needed; move it away or choose another folder",
    errno.EISDIR: "a folder stands where a file is needed; move it away",
    errno.EXDEV: "the folder spans two file systems; keep a run on one, without mounts or links inside it",
    errno.ESTALE: "the network file system lost the folder; mount it again, then run the same command again",
    errno.ETIMEDOUT: "the storage did not answer in time; check it, then run the same command again",
    errno.EIO: "the device reported an input/output error; check the disk, then run the same command again",
}


def storage_error(error: OSError, *, doing: str) -> StorageError | None:
    """`error` in the user's words when storage is at fault, else None (the caller re-raises)."""
    remedy = _STORAGE_REMEDIES.get(error.errno or 0)
    if remedy is None:
        return None
    # A block that writes one file may fail on another, such as the input it reads: name the one at fault.
    name = error.filename2 or error.filename  # a rename fails for what stands where the file is to be
    culprit = f"{name}: " if name and str(name) not in doing else ""
    return StorageError(f"{doing}: {culprit}{error.strerror}: {remedy}")
