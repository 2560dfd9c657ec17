"""Measuring a real loader: what is slow is found, by the probe and by the counts of waiting alike.

Delays are injected that are many times anything else, so that no answer hangs on how busy the machine is.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ropewalk.load import probe as probing
from ropewalk.load.forecast import Rates, Setup, forecast
from ropewalk.load.loader import Loader
from ropewalk.load.probe import Opening, Pace, forget, pace, probe
from ropewalk.load.reader import Reader
from ropewalk.load.stalls import Stalls, binding_cause, warning
from tests.tiny import write_corpus

LENGTH, ROWS = 8, 4
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data") / "prepared")


def opening_of(folder: Path) -> Opening:
    def opening(*, stalls: Stalls, requests_factor: int = 1, prefetch_bytes: int | None = None) -> Loader:
        return Loader(
            folder,
            sequence_length=LENGTH,
            batch_size=ROWS,
            seed=0,
            verify=False,
            prefetch_bytes=0 if prefetch_bytes is None else prefetch_bytes,
            stalls=stalls,
        )

    return opening


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes fetching or preparing a row take so many seconds more."""
    read = Reader.read

    def begin(*, fetch: float = 0.0, prepare: float = 0.0) -> None:
        def delayed(self: Reader, rows: Any, *rest: Any, **more: Any) -> Any:
            time.sleep(fetch * len(rows))
            made = read(self, rows, *rest, **more)
            time.sleep(prepare * len(rows))
            return made

        monkeypatch.setattr(Reader, "read", delayed)

    return begin


def test_the_probe_finds_what_preparing_costs(corpus: Path, slow: Callable[..., None]) -> None:
    slow(prepare=0.002)
    files = sorted(corpus.glob("*-train-*.tokens"))
    # The slowest of three: while another process holds the core of this one, batches are made that then come at once.
    found = min(
        (probe(opening_of(corpus), files=files, device=CPU, seconds=0.1) for _ in range(3)),
        key=lambda each: each.prepare,
    )
    assert found.mapped
    assert 0 < found.prepare < LENGTH / 0.002 * 1.05
    assert found.hand_over > found.prepare


@pytest.mark.parametrize(
    ("fetch_s", "prepare_s"),
    [(3e-6, 1e-6), (1e-6, 3e-6), (1e-9, 1e-6), (0.0, 1e-6)],
)
def test_the_rate_of_the_store_is_that_of_the_difference_between_cold_and_warm_data(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, fetch_s: float, prepare_s: float
) -> None:
    # Seconds a token, of which cold data take those of both stages: the rate of the store is 1 / fetch_s, whatever
    # preparing costs, and neither the cold rate nor the difference of the rates.
    seconds = iter([prepare_s, prepare_s, fetch_s + prepare_s])

    def paced(loader: Loader, *, seconds: float, most: int = 1 << 30, rates: Any = seconds) -> probing.Pace:
        rate = 1 / next(rates)
        return probing.Pace(
            tokens_per_s=rate, jitter=0.1, batches=10, tokens=320, seconds=320 / rate, delivered_bytes=None
        )

    monkeypatch.setattr(probing, "pace", paced)
    found = probe(opening_of(corpus), files=sorted(corpus.glob("*-train-*.tokens")), device=CPU, seconds=0.01)
    assert found.prepare == pytest.approx(1 / prepare_s)
    assert found.fetch == (pytest.approx(1 / fetch_s, rel=1e-5) if fetch_s else math.inf)


def test_a_store_that_the_kernel_would_not_forget_is_not_measured(
    corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([1e6, 1e6, 1e5])

    def paced(loader: Loader, *, seconds: float, most: int = 1 << 30) -> probing.Pace:
        return probing.Pace(
            tokens_per_s=next(rates), jitter=0.1, batches=10, tokens=320, seconds=1.0, delivered_bytes=0
        )

    monkeypatch.setattr(probing, "pace", paced)
    found = probe(opening_of(corpus), files=sorted(corpus.glob("*-train-*.tokens")), device=CPU, seconds=0.01)
    assert (found.measured_cold, found.fetch) == (False, math.inf)


@pytest.mark.parametrize("stage", ["fetch", "prepare"])
def test_a_slow_stage_of_a_real_loader_is_the_cause_of_its_waiting(
    corpus: Path, slow: Callable[..., None], stage: str
) -> None:
    slow(**{stage: 0.01})
    figures = waiting(corpus, step_s=0.001)
    assert binding_cause(figures) == stage
    assert f"`{stage}`" in str(warning(figures))


def test_the_store_is_what_is_left_of_the_cold_rate(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DS-Analyzer's difference: 100 tokens a second from the store, 300 from memory: the store alone gives 150."""
    paces = iter([250.0, 300.0, 100.0])

    def paced(*_: object, **__: object) -> Pace:
        rate = next(paces)
        return Pace(tokens_per_s=rate, jitter=0.0, batches=8, tokens=64, seconds=0.1, delivered_bytes=None)

    monkeypatch.setattr("ropewalk.load.probe.pace", paced)
    monkeypatch.setattr("ropewalk.load.probe._hand_over", lambda *_, **__: 1e9)
    files = sorted(corpus.glob("*-train-*.tokens"))
    rates = probe(opening_of(corpus), files=files, device=CPU, seconds=0.1)
    assert (rates.prepare, rates.fetch) == (300.0, pytest.approx(150.0))


def test_a_slow_step_does_not_wait(corpus: Path) -> None:
    # Once in three is enough: another process may hold the core while a batch is made.
    assert any(warning(waiting(corpus, step_s=0.05)) is None for _ in range(3))


@pytest.mark.parametrize(("delay_s", "step_s", "binding"), [(0.01, 0.001, "prepare"), (0.0, 1.0, "compute")])
def test_the_forecast_of_a_real_loader_names_what_was_slowed_down(
    corpus: Path, slow: Callable[..., None], delay_s: float, step_s: float, binding: str
) -> None:
    slow(prepare=delay_s)
    found = probe(opening_of(corpus), files=sorted(corpus.glob("*-train-*.tokens")), device=CPU, seconds=0.1)
    rates = Rates(compute=LENGTH * ROWS / step_s, prepare=found.prepare, batch_tokens=LENGTH * ROWS)
    assert forecast(rates, Setup(threads=1, cores=2, ahead=8, joined=True)).binding == binding


def waiting(corpus: Path, *, step_s: float) -> dict[str, float]:
    """What steps of `step_s` wait for."""
    stalls = Stalls()
    with contextlib.closing(opening_of(corpus)(stalls=stalls)) as loader:
        loader.take()
        stalls.take()
        for _ in range(8):
            loader.take()
            time.sleep(step_s)
        return stalls.take()


def test_a_pace_counts_every_token_it_took(corpus: Path) -> None:
    with contextlib.closing(opening_of(corpus)(stalls=Stalls())) as loader:
        found = pace(loader, seconds=0.05, most=10)
        after = loader.state()["row"]
    assert (found.batches, found.tokens) == (10, 10 * LENGTH * ROWS)
    assert after == 10 * ROWS


def test_forgetting_keeps_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"strand" * 10_000)
    forget([path])
    assert path.read_bytes() == b"strand" * 10_000
