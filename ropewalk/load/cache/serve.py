"""A node's tiers offered to the other nodes: one thread for all strangers, one for each connection that is known."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from ropewalk.base.errors import ConfigError, Problem, RopewalkError, storage_error
from ropewalk.base.network import Service
from ropewalk.base.private import open_file
from ropewalk.store.items import Fetch, Item
from ropewalk.store.origin import is_url, local_path

from . import wire

_MOST_PEERS = 1024


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
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=128)
        except OSError as error:
            raise ConfigError(
                [Problem("load.cache.listen", f"{listen}: {error.strerror}", "choose another port or address")]
            ) from error
        self.address = f"{host}:{listener.getsockname()[1]}"
        """Where it listens; the port that was chosen when 0 was asked."""
        self._service = Service(
            listener, secret=secret, purpose=wire.PURPOSE, serve=self._serve, most_peers=_MOST_PEERS
        )

    def close(self) -> None:
        """Hangs up on everybody; what is behind stays open."""
        self._service.close()

    def _serve(self, connection: socket.socket, asked: Callable[[], None]) -> None:
        while (items := wire.receive_request(connection)) is not None:
            asked()
            self._answer(connection, items)

    def _answer(self, connection: socket.socket, items: list[Item]) -> None:
        forbidden = next((file for file in {item.file for item in items} if not self._allows(file)), None)
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
        """Whether a file lies below a root, and no part of the way from there is a link to elsewhere."""
        path = _normal(file)
        root = next((root for root in self._roots if path.startswith(root.rstrip("/") + "/")), None)
        if path in self._roots:
            root = path
        if root is None or is_url(file):
            return root is not None
        below = path[len(root) :].lstrip("/")
        return _is_plain(local_path(root), below)


def _is_plain(root: str, below: str) -> bool:
    """Whether the file `below` a local root is reached without a link; what is not there is for the reader to tell."""
    folder, name = (root, below) if below else os.path.split(root)
    try:
        descriptor = os.open(folder or ".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return True
    try:
        os.close(open_file(descriptor, name))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _normal(file: str) -> str:
    """The path or URL without detours: `..` must not lead out of a root."""
    scheme, mark, rest = file.rpartition("://")
    return scheme + mark + os.path.normpath(rest)
