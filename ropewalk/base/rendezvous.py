"""How the ranks of a launch find each other before torch is imported, and learn of each other's failures.

Rank 0 listens and leaves its address in a file beside the run; every other rank connects to it. Over these connections
rank 0 announces what there is to do, and every rank reports its failure. A process that is killed reports nothing, but
the kernel closes its sockets: end of file without a goodbye is its death, and neither a compilation, a long collective
nor a stopped process looks like it, as a late heartbeat would.

The first failure reaches all ranks. A thread then ends the process, so that a rank ends even where its main thread is
blocked in a collective whose peer is gone. A file of an earlier launch leads to a closed port, or to somebody who does
not know its token; both are tried again.

The file is for this user's eyes alone. Both ends prove that they know the token in it before anything is said
(`network.py`), so that nobody else on the network can report a failure, take a rank's place or keep one out.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from .errors import PeerFailed, Preempted, RopewalkError, StorageError, UserError
from .files import committed_file, read_json
from .network import Listener, Untrusted, connect, parse_json
from .network import field as field_of
from .sockets import allow_files, keep_alive, listen, own_addresses

LOOK_EVERY_S = 0.1
LINGER_S = 1.0
"""Between the message of a failure and the end of a process that did not cause it: launchers that end all processes
when one fails see the cause first."""
SETTLE_S = 1.0
"""How long rank 0 waits for the cause of an error that looks like the consequence of another rank's."""
LATE_S = 10.0
"""How long rank 0, when it fails, stays for ranks that have not come yet."""
CLEANUP_S = 8.0
"""How long a rank may clean up after its failure. Its peers are gone, so a collective in there would wait forever."""
CONNECT_S = 2.0
MAX_MESSAGE = 8000
"""Characters of an error that travel."""
MAX_LINE = 1 << 17
"""Bytes of a message: the characters above may be spelled with twelve each."""
PURPOSE = b"rwranks1"


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rank ended."""

    rank: int
    host: str
    message: str
    status: int = PeerFailed.exit_code
    """Exit status of the other ranks."""
    step: int | None = None
    """Steps done before, where that is known."""
    consequence: bool = False
    """Whether the error looks like that of a rank whose peer failed."""

    def __str__(self) -> str:
        step = f" after step {self.step}" if self.step is not None else ""
        return f"rank {self.rank} on {self.host} failed first{step}: {self.message}"


class Rendezvous:
    """The ranks of one launch of the run in folder `run`, which need not exist yet. A world of one does nothing.

    A process that enters takes part until it leaves the block; an exception that leaves it is reported. `say` and `end`
    are called by a thread when another rank failed.
    """

    def __init__(
        self,
        run: Path,
        *,
        rank: int,
        world: int,
        launch: str = "",
        head: str = "",
        one_host: bool = False,
        timeout_s: float = 600.0,
        late_s: float = LATE_S,
        on_failure: Callable[[Failure], None] | None = None,
        say: Callable[[str], None] | None = None,
        end: Callable[[int], Any] = os._exit,
    ) -> None:
        """`launch` tells launches of a run apart as far as their environment does; `head` is the launcher's name for
        the host of rank 0; with `one_host` rank 0 listens on that host's loopback alone."""
        self.rank, self.world = rank, world
        self._timeout_s, self._late_s = timeout_s, late_s
        self._on_failure, self._say, self._end = on_failure, say or _to_stderr, end
        self._lock = threading.Lock()
        self._heard = threading.Event()
        self._words: deque[str] = deque()
        """What rank 0 announced and this rank has not waited for yet."""
        self._failure: Failure | None = None
        self._own: Failure | None = None
        self._waits = self._left = self._ending = False
        self._file = run.with_name(f".{run.name}.rendezvous.json")
        self._link: _Leader | _Member | None = None
        if world > 1 and rank == 0:
            self._link = _Leader(self._file, self, launch=launch, one_host=one_host)
        elif world > 1:
            _check_folder(self._file.parent)
            self._link = _Member(self._file, self, launch=launch, head=head, timeout_s=timeout_s)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self._report(error, step=None)
        self.leave()

    def announce(self, word: str) -> None:
        """Rank 0 tells all others what to do next, after all have arrived."""
        if self._link is None:
            return
        assert isinstance(self._link, _Leader), "rank 0 announces"
        missing = self._link.wait_for_all(self._timeout_s)
        if missing:
            raise UserError(
                f"{_listed(missing)} of {self.world} did not arrive within {self._timeout_s:.0f} s; look into the "
                "output of these processes, and whether their hosts see the folder of runs and reach this one"
            )
        self._link.send({"do": word})

    def wait(self) -> str:
        """What rank 0 announces next; "nothing" where it leaves. Raises PeerFailed when a rank fails."""
        assert isinstance(self._link, _Member), "rank 0 does not wait"
        with self._lock:
            self._waits = not self._ending
        self._heard.wait()
        with self._lock:
            waited, self._waits = self._waits, False
            word = self._words.popleft() if self._words else None
            if word and not self._words and not self._failure:
                self._heard.clear()
        if self._failure:
            if not waited:
                threading.Event().wait(3 * LINGER_S)  # the thread ends this process
            raise PeerFailed(str(self._failure), self._failure.status)
        if word is None:
            raise UserError(
                f"rank 0 was not found within {self._timeout_s:.0f} s: {self._link.problem}; all ranks must see "
                f"{self._file.parent} and reach the host of rank 0"
            )
        return word

    @contextlib.contextmanager
    def reporting(self, step: Callable[[], int]) -> Iterator[None]:
        """Reports an exception of the block at once, before whoever called cleans up, which may wait for others."""
        try:
            yield
        except BaseException as error:
            self._report(error, step=step())
            raise

    def leave(self) -> None:
        """Says goodbye: nothing that happens to other ranks from now on ends this one."""
        with self._lock:
            if self._left:
                return
            self._left = True
        if self._link:
            self._link.close(goodbye=self._own is None)

    def _report(self, error: BaseException, *, step: int | None) -> None:
        # All ranks agree on these two and save together: one that is earlier must not end the others.
        agreed = isinstance(error, KeyboardInterrupt | Preempted | PeerFailed)
        if self._link is None or self._own or self._left or agreed:
            return
        failure = self._own = Failure(
            rank=self.rank,
            host=socket.gethostname(),
            message=_describe(error),
            status=error.exit_code if isinstance(error, RopewalkError) else PeerFailed.exit_code,
            step=step,
            consequence=_is_consequence(error),
        )
        self._link.report(failure)
        if failure.consequence:
            # The thread ends this process when another rank turns out to be the cause.
            self._heard.wait(3 * SETTLE_S)
            if self._failure and self._failure.rank != self.rank:
                threading.Event().wait(3 * LINGER_S)
        if isinstance(self._link, _Leader) and step is None:
            self._link.wait_for_all(self._late_s)
        timer = threading.Timer(CLEANUP_S, self._cut_short, [failure])
        timer.daemon = True
        timer.start()

    def _cut_short(self, failure: Failure) -> None:
        if not self._left:
            self._say(f"rank {self.rank}: {failure.message}")
            self._end(failure.status)

    # Called by the threads of the link.

    def heard_word(self, word: str) -> None:
        with self._lock:
            self._words.append(word)
            self._heard.set()

    def heard_nobody(self) -> None:
        self._heard.set()

    def heard_failure(self, failure: Failure) -> None:
        """Ends this process, unless it has left, fails by itself, or its main thread waits for rank 0 and raises."""
        with self._lock:
            if self._left or self._failure:
                return
            self._failure = failure
            fails_by_itself = self._own is not None and not self._own.consequence
            self._ending = not (self._waits or fails_by_itself or failure == self._own)
        self._heard.set()
        if not self._ending:
            return
        self._say(f"rank {self.rank}: {failure}" if self.rank else str(failure))
        with contextlib.suppress(Exception):
            if self._on_failure:
                self._on_failure(failure)
        time.sleep(LINGER_S)
        self._end(failure.status)


@dataclass(slots=True)
class _Peer:
    """A rank as rank 0 sees it."""

    socket: socket.socket
    rank: int = -1
    host: str = "?"
    pid: int = 0
    unread: bytearray = field(default_factory=bytearray)
    ended: bool = False
    """It said goodbye or reported a failure."""


class _Leader:
    """Rank 0's end of all connections."""

    def __init__(self, file: Path, ranks: Rendezvous, *, launch: str, one_host: bool) -> None:
        self._file, self._ranks, self._launch = file, ranks, launch
        self._token = secrets.token_hex()
        self._lock = threading.RLock()
        self._peers: dict[int, _Peer] = {}
        self._said: list[dict[str, Any]] = []
        """What everybody must hear, also who comes later."""
        self._suspect: tuple[float, Failure] | None = None
        self._decided = self._closed = False
        allow_files(ranks.world)
        self._selector = selectors.DefaultSelector()
        listener = listen(one_host, backlog=max(128, ranks.world))
        address = {
            "host": socket.gethostname(),
            "addresses": ["127.0.0.1"] if one_host else own_addresses(),
            "port": listener.getsockname()[1],
            "token": self._token,
        }
        self._listener = Listener(
            listener,
            secret=self._token.encode(),
            purpose=PURPOSE,
            welcome=self._accept,
            most_strangers=max(256, 2 * ranks.world),
        )
        _write_private(file, address)
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        self._thread.start()

    def wait_for_all(self, timeout_s: float) -> list[int]:
        """The ranks that have not come after so long."""
        deadline = time.monotonic() + timeout_s
        while (missing := self._missing()) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return missing

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self._said.append(message)
            for peer in self._peers.values():
                _send(peer.socket, message)

    def report(self, failure: Failure) -> None:
        """A failure, of this rank or another. The first counts, unless it is the consequence of one that follows."""
        with self._lock:
            if self._decided:
                return
            if failure.consequence:
                self._suspect = self._suspect or (time.monotonic() + SETTLE_S, failure)
                return
            self._decided = True
        self.send({"failed": asdict(failure)})
        self._ranks.heard_failure(failure)

    def close(self, *, goodbye: bool) -> None:
        if goodbye:
            self.send({"done": True})
        self._closed = True
        self._thread.join(2.0)
        with contextlib.suppress(OSError, ValueError, KeyError):
            if json.loads(self._file.read_text("utf-8"))["token"] == self._token:
                self._file.unlink()
        self._listener.close()
        with self._lock:
            for peer in self._peers.values():
                _shut(peer.socket)
            self._selector.close()

    def _missing(self) -> list[int]:
        with self._lock:
            return [rank for rank in range(1, self._ranks.world) if rank not in self._peers]

    def _serve(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(LOOK_EVERY_S):
                self._read(key.data)
            self._judge_suspect()

    def _accept(self, connection: socket.socket, _: str) -> None:
        # Called by the listener's thread: a selector may be added to while another thread waits in it.
        with contextlib.suppress(OSError):
            keep_alive(connection)
            self._selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
            return
        peer.unread += data
        *lines, rest = bytes(peer.unread).split(b"\n")
        peer.unread[:] = rest
        if len(peer.unread) > MAX_LINE:
            self._drop(peer)
            return
        for line in lines:
            with contextlib.suppress(ValueError):  # no rank says what makes no sense; it will be missed if it matters
                self._hear(peer, parse_json(line, most_depth=2))

    def _hear(self, peer: _Peer, message: dict[str, Any]) -> None:
        if peer.rank < 0:
            self._welcome(peer, message)
        elif "done" in message:
            peer.ended = True
        elif "failed" in message:
            peer.ended = True
            self.report(_failure(message))

    def _welcome(self, peer: _Peer, message: dict[str, Any]) -> None:
        rank, host, pid = (field_of(message, *part) for part in (("rank", int), ("host", str), ("pid", int)))
        if message.get("launch") != self._launch or not 0 < rank < self._ranks.world:
            self._drop(peer)
            return
        with self._lock:
            present = self._peers.get(rank)
            if present:
                twice = f"process {present.pid} on {present.host} has this rank too; start every rank once"
                failure = Failure(rank=rank, host=host, message=twice, status=UserError.exit_code)
                _send(peer.socket, {"welcome": rank})
                _send(peer.socket, {"failed": asdict(failure)})
                self._drop(peer)
                return
            peer.rank, peer.host, peer.pid = rank, host, pid
            self._peers[rank] = peer
            for said in ({"welcome": rank}, *self._said):
                _send(peer.socket, said)

    def _drop(self, peer: _Peer) -> None:
        self._selector.unregister(peer.socket)
        peer.socket.close()
        if peer.rank >= 0 and not peer.ended:
            peer.ended = True
            why = "it ended without a word: killed, out of memory, or crashed; its output may tell"
            self.report(Failure(rank=peer.rank, host=peer.host, message=why))

    def _judge_suspect(self) -> None:
        with self._lock:
            if self._decided or not self._suspect or time.monotonic() < self._suspect[0]:
                return
            failure = self._suspect[1]
            self._decided = True
        self.send({"failed": asdict(failure)})
        self._ranks.heard_failure(failure)


class _Member:
    """Another rank's connection to rank 0, made by a thread as soon as rank 0 is there."""

    def __init__(self, file: Path, ranks: Rendezvous, *, launch: str, head: str, timeout_s: float) -> None:
        self._file, self._ranks, self._launch, self._head = file, ranks, launch, head
        self._deadline = time.monotonic() + timeout_s
        self._socket: socket.socket | None = None
        self._met = threading.Event()
        self._closed = self._released = False
        self._leader = "?"
        self.problem = f"{file} is not there"
        """Why the last try to reach rank 0 failed."""
        self._thread = threading.Thread(target=self._follow, name="rendezvous", daemon=True)
        self._thread.start()

    def report(self, failure: Failure) -> None:
        self._send({"failed": asdict(failure)})

    def close(self, *, goodbye: bool) -> None:
        if goodbye:
            self._send({"done": True}, wait_s=0.0)
        self._closed = True
        if self._socket:
            # What was sent arrives before the end; closing at once could discard it.
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_WR)
        if threading.current_thread() is not self._thread:
            self._thread.join(1.0)

    def _send(self, message: dict[str, Any], *, wait_s: float = LATE_S) -> None:
        if self._met.wait(wait_s) and self._socket:
            _send(self._socket, message)

    def _follow(self) -> None:
        """Everything that rank 0 says."""
        connection, unread = self._find(), b""
        if connection is None:
            self._ranks.heard_nobody()
            return
        with connection:
            self._socket = connection
            self._met.set()
            while data := _receive(connection):
                *lines, unread = (unread + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):
                        self._hear(parse_json(line, most_depth=2))
        if not (self._released or self._closed):
            why = "it ended without a word: killed, out of memory, or crashed; its output may tell"
            self._ranks.heard_failure(Failure(rank=0, host=self._leader, message=why))

    def _hear(self, message: dict[str, Any]) -> None:
        if "do" in message:
            self._ranks.heard_word(field_of(message, "do", str))
        elif "done" in message:
            self._released = True
            self._ranks.heard_word("nothing")
        elif "failed" in message:
            self._released = True
            self._ranks.heard_failure(_failure(message))

    def _find(self) -> socket.socket | None:
        """A connection to rank 0 of this launch; None when this process leaves, or time is up, before there is one."""
        while not self._closed and time.monotonic() < self._deadline:
            for address, port, token in self._candidates():
                connection = self._try(address, port, token)
                if connection:
                    return connection
            time.sleep(LOOK_EVERY_S)
        return None

    def _candidates(self) -> list[tuple[str, int, str]]:
        # Listing the folder makes a network file system look again for what it did not see a moment ago.
        with contextlib.suppress(OSError):
            os.listdir(self._file.parent)
        try:
            found = read_json(self._file, what="address of rank 0")
            self._leader = found["host"]
            here = ["127.0.0.1"] if found["host"] == socket.gethostname() else []
            names = dict.fromkeys([*here, *([self._head] if self._head else []), *found["addresses"], found["host"]])
            return [(name, int(found["port"]), str(found["token"])) for name in names]
        except (RopewalkError, OSError, KeyError, TypeError, ValueError):
            return []

    def _try(self, address: str, port: int, token: str) -> socket.socket | None:
        try:
            connection = connect((address, port), secret=token.encode(), purpose=PURPOSE, timeout_s=CONNECT_S)
        except Untrusted:
            self.problem = f"{address}:{port} belongs to another launch"
            return None
        except OSError as error:
            self.problem = f"{address}:{port} could not be reached ({error})"
            return None
        who = {"rank": self._ranks.rank, "host": socket.gethostname(), "pid": os.getpid()}
        connection.settimeout(CONNECT_S)
        _send(connection, {**who, "launch": self._launch})
        line = bytearray()
        # Byte by byte: what follows the welcome is for the reader.
        while not line.endswith(b"\n") and len(line) < 1000 and (byte := _receive(connection, 1)):
            line += byte
        if line.strip() == json.dumps({"welcome": self._ranks.rank}).encode():
            keep_alive(connection)
            return connection
        self.problem = f"{address}:{port} belongs to another launch"
        connection.close()
        return None


def _check_folder(folder: Path) -> None:
    """Raises where `folder` cannot be written: rank 0, which cannot write it either, has no way to say so."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        raise StorageError(f"{folder} cannot be written by this process; choose another folder with `--runs`")


def _describe(error: BaseException) -> str:
    if isinstance(error, RopewalkError):
        return str(error)[:MAX_MESSAGE]
    text = str(error)
    return (f"{type(error).__name__}: {text}" if text else type(error).__name__)[:MAX_MESSAGE]


def _is_consequence(error: BaseException) -> bool:
    """Whether an error is what torch raises on a rank whose peer is gone. gloo raises a plain RuntimeError."""
    kinds = {kind.__name__ for kind in type(error).__mro__}
    text = str(error)
    signs = ("gloo", "NCCL", "Connection closed", "Connection reset", "Broken pipe")
    return "DistError" in kinds or ("RuntimeError" in kinds and any(sign in text for sign in signs))


def _failure(message: dict[str, Any]) -> Failure:
    """What a rank reports; ValueError when it is not a report."""
    told = field_of(message, "failed", dict)
    step = told.get("step")
    return Failure(
        rank=field_of(told, "rank", int),
        host=field_of(told, "host", str),
        message=field_of(told, "message", str)[:MAX_MESSAGE],
        status=field_of(told, "status", int) & 255,
        step=step if isinstance(step, int) else None,
        consequence=field_of(told, "consequence", bool),
    )


def _write_private(file: Path, value: dict[str, Any]) -> None:
    """Commits JSON that this user alone can read."""
    with committed_file(file, "w") as opened:
        os.fchmod(opened.fileno(), 0o600)
        json.dump(value, opened)


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"


def _to_stderr(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    # A few lines in a connection's life: they fit into its buffer, so nothing waits here for a stopped process.
    with contextlib.suppress(OSError):
        connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, size: int = 65536) -> bytes:
    try:
        return connection.recv(size)
    except OSError:
        return b""


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
