"""Services that anybody on the network may reach, and clients that trust no server. No torch.

    handshake   server: purpose (8 bytes), nonce   client: nonce, HMAC-SHA256(secret, ...)   server: HMAC-SHA256(...)

Both ends prove that they know a shared secret, for this purpose and with both nonces; the secret never travels. Before
the proof nothing is parsed, only 48 bytes are read, and no thread is started: one loop holds all strangers. A stranger
has a few seconds for the whole handshake, and when there are too many, the one that has waited longest goes. So silent
connections, however many, do not keep a peer out. What passes after the proof is not encrypted.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import ConfigError, DamagedFile, Problem
from .files import NO_FILE, open_regular

HANDSHAKE_S = 5.0
"""For the whole handshake. On a loaded machine it takes milliseconds; a stranger has no reason to take longer."""
MOST_STRANGERS = 256
LEAST_BYTES_PER_S = 16 << 10
"""A message that arrives more slowly on average than this is given up: a byte now and then would hold a thread."""
LEAST_SECRET_BYTES = 16
MOST_SECRET_BYTES = 4096
_PURPOSE, _NONCE, _PROOF = 8, 16, 32
_HELLO = _NONCE + _PROOF
_ATTEMPTS = 3
"""Connections that a client tries: a server under a flood may have dropped one of them with the strangers."""
_ACCEPTED_AT_ONCE = 32
"""Between two looks at those who have answered, so that a flood of connections does not drop who is about to."""

_log = logging.getLogger(__name__)


class Untrusted(ConnectionError):
    """The other end did not prove that it knows the secret, or speaks another language."""


def read_secret(file: str, *, setting: str) -> bytes:
    """The secret in `file`, which other users must not be able to read; ConfigError names `setting` and the remedy."""

    def refuse(what: str, remedy: str) -> ConfigError:
        return ConfigError([Problem(setting, f"{file}: {what}", remedy)])

    try:
        with open_regular(Path(file).expanduser()) as opened:
            found = os.fstat(opened.fileno())
            secret = opened.read(MOST_SECRET_BYTES + 1).strip()
    except FileNotFoundError:
        remedy = f"make one of {LEAST_SECRET_BYTES} random bytes or more, the same secret into this file on every node"
        raise refuse("no such file", remedy) from None
    except DamagedFile:
        raise refuse(NO_FILE, "write the same secret into a file on every node") from None
    except OSError as error:
        raise refuse(error.strerror or str(error), "write the same secret into this file on every node") from None
    if found.st_uid not in (os.geteuid(), 0):
        raise refuse(f"belongs to user {found.st_uid}", "copy it to a file of your own, mode 0600")
    if found.st_mode & (stat.S_IRWXO | stat.S_IWGRP):
        mode = stat.S_IMODE(found.st_mode)
        raise refuse(
            f"other users can read or write it (mode {mode:04o})", f"`chmod 600 {file}`, then make a new secret"
        )
    if not LEAST_SECRET_BYTES <= len(secret) <= MOST_SECRET_BYTES:
        size = "is empty" if not secret else f"{len(secret)} bytes"
        raise refuse(size, f"a secret has {LEAST_SECRET_BYTES} or more, at most {MOST_SECRET_BYTES}")
    return secret


def connect(address: tuple[str, int], *, secret: bytes, purpose: bytes, timeout_s: float) -> socket.socket:
    """A connection to a server that has proven to know the secret, as we have to it; OSError otherwise."""
    deadline = time.monotonic() + min(timeout_s, HANDSHAKE_S)
    for attempt in range(_ATTEMPTS):
        link = socket.create_connection(address, timeout=max(0.001, deadline - time.monotonic()))
        try:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            greet_server(link, secret=secret, purpose=purpose, deadline=deadline)
            return link
        except Untrusted:
            link.close()
            raise
        except OSError:
            link.close()
            if attempt == _ATTEMPTS - 1 or time.monotonic() >= deadline:
                raise
    raise AssertionError("unreachable")


def greet_server(link: socket.socket, *, secret: bytes, purpose: bytes, deadline: float) -> None:
    """The client's side of the handshake."""
    hello = bytes(receive(link, _PURPOSE + _NONCE, deadline=deadline))
    if hello[:_PURPOSE] != purpose:
        raise Untrusted(f"what listens there is not {purpose.decode()}")
    theirs, ours = hello[_PURPOSE:], os.urandom(_NONCE)
    link.sendall(ours + _proof(secret, purpose, b"client", theirs, ours))
    try:
        proof = bytes(receive(link, _PROOF, deadline=deadline))
    except ConnectionError:
        raise ConnectionError("it hung up on our greeting; is `secret_file` the same there?") from None
    if not hmac.compare_digest(proof, _proof(secret, purpose, b"server", theirs, ours)):
        raise Untrusted("it does not know the secret")


def allowed_s(size: int, timeout_s: float) -> float:
    """How long a message of `size` bytes may take, the whole of it."""
    return timeout_s + size / LEAST_BYTES_PER_S


def receive(link: socket.socket, size: int, *, deadline: float, buffer: bytearray | None = None) -> memoryview:
    """The next `size` bytes, by `deadline` (monotonic), in `buffer` if they fit; memory grows as they come, so that a
    length alone takes none."""
    held = buffer if buffer is not None and len(buffer) >= size else bytearray(min(size, 1 << 16))
    done = 0
    while done < size:
        if done == len(held):
            held = held + bytes(min(size, 4 * done) - done)
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the message took too long")
        link.settimeout(left)
        count = link.recv_into(memoryview(held)[done:size])
        if count == 0:
            raise ConnectionError("the connection was closed")
        done += count
    return memoryview(held)[:size]


def parse_json(text: bytes | memoryview, *, most_depth: int = 8, most_objects: int = 1 << 19) -> Any:
    """The value of JSON from the network; ValueError for all else, nesting and numbers of objects bounded before."""
    data = bytes(text)
    if data.count(b"[") + data.count(b"{") > most_objects:
        raise ValueError(f"more than {most_objects} lists and objects")
    # Only quotes, backslashes and brackets are left, then only the brackets outside of strings.
    marks = data.translate(None, _NOT_MARKS).replace(b"\\\\", b"").replace(b'\\"', b"")
    brackets = b"".join(marks.split(b'"')[::2])
    for _ in range(most_depth):
        brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
    if brackets:
        raise ValueError("nested too deeply, or never closed")
    return json.loads(data)


_NOT_MARKS = bytes(set(range(256)) - set(b'[]{}"\\'))


def field(message: Any, name: str, kind: type) -> Any:
    """The field of a message; ValueError if the message is no object or the field is not of this kind."""
    value = message.get(name) if isinstance(message, dict) else None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ValueError(f"a message without `{name}`, {kind.__name__}")
    return value


class Listener:
    """Hands every connection that proves to know the secret to `welcome`, in a thread that must not be held up."""

    def __init__(
        self,
        server: socket.socket,
        *,
        secret: bytes,
        purpose: bytes,
        welcome: Callable[[socket.socket, str], None],
        most_strangers: int = MOST_STRANGERS,
        handshake_s: float = HANDSHAKE_S,
    ) -> None:
        assert len(purpose) == _PURPOSE
        self._server, self._secret, self._purpose, self._welcome = server, secret, purpose, welcome
        self._most, self._handshake_s = most_strangers, handshake_s
        self._strangers: dict[socket.socket, _Stranger] = {}
        """In the order in which they came."""
        self._closed = False
        self._selector = selectors.DefaultSelector()
        server.setblocking(False)
        self._selector.register(server, selectors.EVENT_READ)
        self._woken, self._wake = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._loop, name=f"listen-{purpose.decode()}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and hangs up on strangers; whom `welcome` was given stays connected."""
        if self._closed:
            return
        self._closed = True
        self._wake.send(b"\0")
        self._thread.join()
        for link in (*self._strangers, self._server, self._woken, self._wake):
            link.close()
        self._selector.close()

    def _loop(self) -> None:
        while not self._closed:
            oldest = next(iter(self._strangers.values()), None)
            wait = None if oldest is None else max(0.0, oldest.deadline - time.monotonic())
            ready = {key.fileobj for key, _ in self._selector.select(wait)}
            for link in ready & self._strangers.keys():
                self._hear(link)  # type: ignore[arg-type]
            if self._server in ready:
                self._accept()
            now = time.monotonic()
            for link in [link for link, stranger in self._strangers.items() if stranger.deadline <= now]:
                self._drop(link, "too slow")

    def _accept(self) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                link, address = self._server.accept()
            except (BlockingIOError, ConnectionError):
                return
            except OSError:  # no descriptors left
                if self._strangers:
                    self._drop(next(iter(self._strangers)), "too many")
                else:
                    time.sleep(0.05)
                return
            nonce = os.urandom(_NONCE)
            self._strangers[link] = _Stranger(str(address[0]), nonce, time.monotonic() + self._handshake_s)
            link.setblocking(False)
            self._selector.register(link, selectors.EVENT_READ)
            if len(self._strangers) > self._most:
                self._drop(next(iter(self._strangers)), "too many")
            try:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                link.send(self._purpose + nonce)
            except OSError as error:
                self._drop(link, str(error))

    def _hear(self, link: socket.socket) -> None:
        stranger = self._strangers[link]
        try:
            said = link.recv(_HELLO - len(stranger.said))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._drop(link, str(error))
            return
        stranger.said += said
        if not said:
            self._drop(link, "hung up")
        elif len(stranger.said) == _HELLO:
            self._judge(link, stranger)

    def _judge(self, link: socket.socket, stranger: _Stranger) -> None:
        theirs, proof = bytes(stranger.said[:_NONCE]), bytes(stranger.said[_NONCE:])
        nonces = (stranger.nonce, theirs)
        if not hmac.compare_digest(proof, _proof(self._secret, self._purpose, b"client", *nonces)):
            self._drop(link, "does not know the secret")
            return
        self._forget(link)
        try:
            link.send(_proof(self._secret, self._purpose, b"server", *nonces))
            link.setblocking(True)
        except OSError:
            link.close()
            return
        self._welcome(link, stranger.address)

    def _drop(self, link: socket.socket, why: str) -> None:
        # Not a warning: whoever reaches the port could fill the log.
        if stranger := self._strangers.get(link):
            _log.info("%s: connection from %s: %s", self._purpose.decode(), stranger.address, why)
            self._forget(link)
        link.close()

    def _forget(self, link: socket.socket) -> None:
        del self._strangers[link]
        self._selector.unregister(link)


class Service:
    """A listener that serves each peer in a thread of its own; of too many, the one that asked least recently goes."""

    def __init__(
        self,
        server: socket.socket,
        *,
        secret: bytes,
        purpose: bytes,
        serve: Callable[[socket.socket, Callable[[], None]], None],
        most_peers: int,
    ) -> None:
        """`serve(link, asked)` serves a connection to its end and calls `asked` at every request."""
        self._serve, self._most = serve, most_peers
        self._purpose = purpose.decode()
        self._lock = threading.Lock()
        self._peers: dict[socket.socket, None] = {}
        """In the order of their last requests."""
        self._listener = Listener(server, secret=secret, purpose=purpose, welcome=self._welcome)

    def close(self) -> None:
        """Hangs up on everybody."""
        self._listener.close()
        with self._lock:
            for link in self._peers:
                _shut(link)

    def _welcome(self, link: socket.socket, address: str) -> None:
        with self._lock:
            self._peers[link] = None
            if len(self._peers) > self._most:
                quiet = next(iter(self._peers))
                del self._peers[quiet]
                _shut(quiet)
        threading.Thread(target=self._run, args=(link, address), name=self._purpose, daemon=True).start()

    def _run(self, link: socket.socket, address: str) -> None:
        try:
            self._serve(link, lambda: self._asked(link))
        except (OSError, ValueError) as error:
            # A peer that died, or says what makes no sense: this connection is over, the next one is welcome.
            _log.info("%s: connection from %s: %s: %s", self._purpose, address, type(error).__name__, error)
        finally:
            with self._lock:
                self._peers.pop(link, None)
            link.close()

    def _asked(self, link: socket.socket) -> None:
        with self._lock:
            if link in self._peers:
                del self._peers[link]
                self._peers[link] = None


class _Stranger:
    __slots__ = ("address", "deadline", "nonce", "said")

    def __init__(self, address: str, nonce: bytes, deadline: float) -> None:
        self.address, self.nonce, self.deadline = address, nonce, deadline
        self.said = bytearray()


def _shut(link: socket.socket) -> None:
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)


def _proof(secret: bytes, purpose: bytes, side: bytes, server_nonce: bytes, client_nonce: bytes) -> bytes:
    return hmac.digest(secret, purpose + side + server_nonce + client_nonce, "sha256")
