"""Toxicity by the Perspective API. It sends texts over the network: nothing uses it unless a recipe names it."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from ropewalk.base.errors import UserError
from ropewalk.config.api_keys import api_key

URL = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
KEY = "PERSPECTIVE_API_KEY"
_RETRIED = (429, 500, 502, 503, 504)
_MOST_BYTES = 20_480
"""What the service accepts; longer texts are cut."""


class Perspective:
    """Asks the service for one attribute of each text, at most so many per second; empty texts are 0."""

    name, version = "perspective", "v1alpha1"

    def __init__(
        self,
        *,
        url: str = URL,
        key: str = "",
        attribute: str = "TOXICITY",
        per_second: float = 1.0,
        tries: int = 6,
        timeout_s: float = 30.0,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._key = key or api_key(KEY, "the judge `perspective`")
        self._url, self._attribute, self._timeout_s = url, attribute, timeout_s
        self._pause, self._tries, self._sleep, self._clock = 1 / per_second, tries, sleep, clock
        self._next = clock()

    def scores(self, texts: Sequence[str], contexts: Sequence[str]) -> list[float]:
        return [self._score(text) if text.strip() else 0.0 for text in texts]

    def _score(self, text: str) -> float:
        short = text.encode()[:_MOST_BYTES].decode(errors="ignore")
        asked = {"comment": {"text": short}, "requestedAttributes": {self._attribute: {}}, "doNotStore": True}
        answer = self._ask(json.dumps(asked).encode())
        try:
            return float(json.loads(answer)["attributeScores"][self._attribute]["summaryScore"]["value"])
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self._url}: the answer has no score of {self._attribute}: {answer[:200]!r}") from None

    def _ask(self, body: bytes) -> bytes:
        # A header, because URLs are logged.
        headers = {"Content-Type": "application/json", "x-goog-api-key": self._key}
        fault = ""
        for attempt in range(self._tries):
            self._wait(attempt)
            request = urllib.request.Request(self._url, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=self._timeout_s) as answer:
                    found: bytes = answer.read()
                return found
            except urllib.error.HTTPError as error:
                fault = f"status {error.code}: {error.read()[:200].decode(errors='replace')}"
                if error.code not in _RETRIED:
                    raise UserError(f"{self._url}: {fault}; check the key in {KEY} and the text's language") from None
            except (OSError, http.client.HTTPException) as error:
                fault = str(error) or type(error).__name__
        raise UserError(f"{self._url}: {fault} ({self._tries} tries); run the same command again later")

    def _wait(self, attempt: int) -> None:
        """Until the rate allows the next request, after failures twice as long each time."""
        now = self._clock()
        pause = max(0.0, self._next - now, 2.0**attempt - 1 if attempt else 0.0)
        if pause:
            self._sleep(pause)
        self._next = now + pause + self._pause
