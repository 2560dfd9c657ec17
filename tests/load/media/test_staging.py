"""Memory that is used again: never while somebody reads it."""

from __future__ import annotations

import gc

import torch

from ropewalk.load.media.staging import Results, Staging


def test_results_are_used_again_only_when_no_view_of_them_is_left() -> None:
    results = Results()
    first = results.take((4, 5))
    first.fill_(7)
    place, view = first.data_ptr(), first[2:, 1]
    del first
    second = results.take((4, 5))
    second.zero_()
    assert second.data_ptr() != place
    assert view.tolist() == [7, 7]
    del view
    gc.collect()
    assert results.take((3, 5)).data_ptr() == place


def test_results_that_are_too_small_are_not_taken() -> None:
    results = Results()
    results.take((2,))
    assert results.take((100,)).shape == (100,)


def test_buffers_come_back_and_grow() -> None:
    staging = Staging(pin=False)
    one, _ = staging.take(100)
    other, _ = staging.take(100)
    assert one.bytes.data_ptr() != other.bytes.data_ptr()
    place = one.bytes.data_ptr()
    staging.give_back(one)
    again, last = staging.take(110)
    assert last is None
    assert again.bytes.data_ptr() == place
    staging.give_back(again)
    assert len(staging.take(1000)[0].bytes) >= 1000
    assert again.bytes.dtype == torch.uint8
