"""A node's tiers offered to the other nodes: a listening thread and one thread a connection."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Sequence

from ropewalk.base.errors import ConfigError, Problem, RopewalkError, storage_error
from ropewalk.store.items import Fetch, Item

from . import wire

_log = logging.getLogger(__name__)
_SEND_TIMEOUT_S = 60.0
_MOST_CONNECTIONS = 256


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" ("[::1]:7070" for IPv6)."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError([Problem("load.cache", f"{address!r} is not an address", 'write it as "host:port"')])
    return host.strip("[]"), int(port)


class Server:
    """Answers other nodes from `fetch`; nothing outside `roots` is ever read for them.

    Without a secret it binds to this machine only: whoever reaches the port reads the corpus.
    """

    def __init__(self, fetch: Fetch, *, listen: str, roots: Sequence[str], secret: bytes = b"") -> None:
        host, port = split_address(listen)
        if not secret and host not in ("localhost", "127.0.0.1", "::1"):
            raise ConfigError(
                [Problem("load.cache.listen", f"{listen} is open to the network", "set `load.cache.secret_file`")]
            )
        self._fetch = fetch
        self._roots = [_normal(root) for root in roots]
        self._secret = secret
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self._listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                [Problem("load.cache.listen", f"{listen}: {error.strerror}", "choose another port or address")]
            ) from error
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        """Where it listens; the port that was chosen when 0 was asked."""
        threading.Thread(target=self._accept, name="cache-server", daemon=True).start()

    def close(self) -> None:
        """Hangs up on everybody; what is behind stays open."""
        with contextlib.suppress(OSError):
            # A thread that waits in accept wakes up only by this, not by close.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                crowded = len(self._connections) >= _MOST_CONNECTIONS
                if not crowded:
                    self._connections.add(connection)
            if crowded:
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="cache-peer", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SEND_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not wire.greet_client(connection, self._secret):
                _log.warning("a node with another secret asked for items; it was turned away")
                return
            while True:
                connection.settimeout(None)
                items = wire.receive_request(connection)
                if items is None:
                    return
                connection.settimeout(_SEND_TIMEOUT_S)
                self._answer(connection, items)
        except OSError as error:
            _log.info("a peer's connection ended: %s", error)
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)

    def _answer(self, connection: socket.socket, items: list[Item]) -> None:
        forbidden = next((item.file for item in items if not self._allows(item.file)), None)
        if forbidden is not None:
            wire.send_failure(connection, f"{forbidden} is not part of the corpus")
            return
        if sum(map(len, items)) > wire.MOST_REPLY_BYTES:
            wire.send_failure(connection, f"more than {wire.MOST_REPLY_BYTES} bytes in one request")
            return
        try:
            data = self._fetch.fetch(items)
        except RopewalkError as error:
            wire.send_failure(connection, str(error))
        except OSError as error:
            wire.send_failure(connection, str(storage_error(error, doing="reading for a peer") or error))
        else:
            wire.send_items(connection, data)

    def _allows(self, file: str) -> bool:
        path = _normal(file)
        return any(path == root or path.startswith(root.rstrip("/") + "/") for root in self._roots)


def _normal(file: str) -> str:
    """The path or URL without detours: `..` must not lead out of a root."""
    scheme, mark, rest = file.rpartition("://")
    return scheme + mark + os.path.normpath(rest)
