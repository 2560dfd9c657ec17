"""Memory that is used again: never while somebody reads it."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from ropewalk.load.media.shared import Shared, mapped
from ropewalk.load.media.staging import Allocate, Results, Staging, pageable, shared, shared_page_locked

KINDS = pytest.mark.parametrize("allocate", [pageable, shared])


@KINDS
def test_results_are_used_again_only_when_no_view_of_them_is_left(allocate: Allocate) -> None:
    results = Results(allocate)
    first, _ = results.numbers((4, 5))
    first.fill_(7)
    place, view = first.data_ptr(), first[2:, 1]
    del first
    second, _ = results.numbers((4, 5))
    second.zero_()
    assert second.data_ptr() != place
    assert view.tolist() == [7, 7]
    del view
    gc.collect()
    assert results.numbers((3, 5))[0].data_ptr() == place


def test_results_that_are_too_small_are_not_taken() -> None:
    results = Results()
    results.numbers((2,))
    assert results.numbers((100,))[0].shape == (100,)


@KINDS
def test_buffers_come_back_and_grow(allocate: Allocate) -> None:
    staging = Staging(allocate)
    one, _ = staging.take(100)
    other, _ = staging.take(100)
    place = one.memory.bytes.data_ptr()
    assert place != other.memory.bytes.data_ptr()
    staging.give_back(one)
    again, last = staging.take(110)
    assert last is None
    assert again.memory.bytes.data_ptr() == place
    staging.give_back(again)
    assert len(staging.take(1000)[0].memory.bytes) >= 1000
    assert again.memory.bytes.dtype == torch.uint8


def test_shared_memory_is_the_same_for_all_who_map_it_and_has_no_name() -> None:
    names = set(os.listdir("/dev/shm"))
    memory = Shared(5000)
    seen = mapped(memory.descriptor, memory.size)
    memory.bytes[4999] = 7
    assert seen[4999] == 7
    assert set(os.listdir("/dev/shm")) <= names
    descriptor = memory.descriptor
    del memory
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert seen[4999] == 7


def test_memory_is_unlocked_when_nobody_holds_it_and_a_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    locked: dict[int, int] = {}

    class Runtime:
        """What is asked of the CUDA runtime, noted; it refuses more than a page."""

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            if size > 4096:
                return 1
            locked[address] = size
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            del locked[address]
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    memory = shared_page_locked(1000)
    assert locked == {memory.bytes.data_ptr(): 1000}
    large = shared_page_locked(5000)
    assert "5000 bytes of memory could not be page-locked" in caplog.text
    del memory, large
    gc.collect()
    assert not locked
