"""Sockets of this machine: where it listens, how others reach it, how a dead machine is noticed."""

from __future__ import annotations

import contextlib
import socket

KEEPALIVE = {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 15, "TCP_KEEPCNT": 8}
"""Seconds, seconds, probes: a machine without power is noticed after three minutes. Shorter would take a network that
is gone for a moment for a dead machine; the kernel of a stopped process answers."""


def listen(one_host: bool, *, backlog: int) -> socket.socket:
    """A server on any free port, of every address or of this host's loopback alone."""
    if one_host:
        return socket.create_server(("127.0.0.1", 0), backlog=backlog)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=backlog)
    return socket.create_server(("", 0), backlog=backlog)


def own_addresses() -> list[str]:
    """Numbers by which other hosts may reach this one: of its name, and of its way out."""
    found: dict[str, None] = {}
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect(("192.0.2.1", 9))  # an address for documentation; nothing is sent
        found[way_out.getsockname()[0]] = None
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            found[str(address[0])] = None
    return [address for address in found if not address.startswith(("127.", "::1"))]


def keep_alive(connection: socket.socket) -> None:
    """Waits without a limit; the kernel notices when the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def allow_files(world: int) -> None:
    """Raises the soft limit of open files where it is below what so many connections need; 1,024 is usual."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = world + 1024
    if soft != resource.RLIM_INFINITY and soft < wanted:
        allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
