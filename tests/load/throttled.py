"""A store that behaves badly on purpose: latency, jitter, a bandwidth limit, 5xx answers, answers cut short.

Faults are drawn by (seed, file, range, how often it was asked), so that the same requests meet the same faults in any
order of threads. A thread of a test, or a process of a benchmark: `python tests/load/throttled.py FOLDER JSON`.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """How the store behaves."""

    latency_s: float = 0.0
    jitter_s: float = 0.0
    """Mean of an exponential delay on top."""
    bytes_per_s: float = float("inf")
    """Shared by all connections."""
    status_share: float = 0.0
    """Requests answered 503."""
    short_share: float = 0.0
    """Requests answered with a part of the bytes, then a closed connection."""
    straggler_share: float = 0.0
    """Requests that take `straggler_s` longer."""
    straggler_s: float = 0.0
    seed: int = 0


class ThrottledStore(ThreadingHTTPServer):
    """Serves the files of a folder by ranges; `/stats` tells what was injected."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, throttle: Throttle) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder, self.throttle = folder, throttle
        self.injected: Counter[str] = Counter()
        self.asked: Counter[tuple[str, str]] = Counter()
        self.lock = threading.Lock()
        self._free_at = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def draw(self, path: str, span: str) -> random.Random:
        """The fate of this request."""
        with self.lock:
            self.asked[path, span] += 1
            return random.Random(f"{self.throttle.seed} {path} {span} {self.asked[path, span]}")

    def pass_through(self, size: int) -> None:
        """Waits until the shared line has carried `size` bytes."""
        with self.lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + size / self.throttle.bytes_per_s
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ThrottledStore

    def do_HEAD(self) -> None:
        self._answer(200, b"", length=(self.server.folder / self.path[1:]).stat().st_size)

    def do_GET(self) -> None:
        server, throttle = self.server, self.server.throttle
        if self.path == "/stats":
            self._answer(200, json.dumps({**server.injected, "requests": sum(server.asked.values())}).encode())
            return
        span = self.headers.get("Range", "")
        data, status = self._read(span)
        fate = server.draw(self.path, span)
        time.sleep(throttle.latency_s + (fate.expovariate(1 / throttle.jitter_s) if throttle.jitter_s else 0.0))
        drawn = fate.random()
        if drawn < throttle.status_share:
            self._inject("status")
            self._answer(503, b"")
        elif drawn < throttle.status_share + throttle.short_share:
            self._inject("short")
            self._answer(status, data[: len(data) // 2], length=len(data))
            self.close_connection = True
        else:
            if drawn > 1 - throttle.straggler_share:
                self._inject("straggler")
                time.sleep(throttle.straggler_s)
            self._answer(status, data)

    def _read(self, span: str) -> tuple[bytes, int]:
        with open(self.server.folder / self.path[1:], "rb") as file:
            if not span:
                return file.read(), 200
            first, last = span.removeprefix("bytes=").split("-")
            file.seek(int(first))
            return file.read(int(last) + 1 - int(first) if last else -1), 206

    def _inject(self, what: str) -> None:
        with self.server.lock:
            self.server.injected[what] += 1

    def _answer(self, status: int, data: bytes, *, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) if length is None else length))
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        for start in range(0, len(data), 1 << 16):
            part = data[start : start + (1 << 16)]
            self.server.pass_through(len(part))
            self.wfile.write(part)

    def handle(self) -> None:
        try:
            super().handle()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # a reader that gave up, as hedged ones do

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@contextmanager
def serving(folder: Path, throttle: Throttle) -> Iterator[ThrottledStore]:
    """A store in a thread of this process."""
    store = ThrottledStore(folder, throttle)
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield store
    finally:
        store.shutdown()
        store.server_close()
        thread.join()


def arguments(folder: Path, throttle: Throttle) -> list[str]:
    """The command line of a store in a process of its own; its first line of output is the URL."""
    return [sys.executable, __file__, str(folder), json.dumps(asdict(throttle))]


if __name__ == "__main__":
    server = ThrottledStore(Path(sys.argv[1]), Throttle(**json.loads(sys.argv[2])))
    print(server.url, flush=True)
    server.serve_forever()
