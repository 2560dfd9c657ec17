"""The probe finds a processor that computes wrongly now and then, and changes nothing of the run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import HardwareError
from ropewalk.checkpoint.format import list_checkpoints
from ropewalk.model.decoder import Decoder
from ropewalk.parallel.executor import bit_sum
from ropewalk.parallel.microbatch import Microbatch, MicrobatchRunner
from ropewalk.train.config import Faults
from ropewalk.train.hooks.corruption import disagreeing
from ropewalk.train.loop import train
from tests.tiny import make_run
from tests.train.runs import events, final_files, quick


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick(monkeypatch)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_probed_run_ends_with_the_same_bits(tmp_path: Path, dropout: float) -> None:
    plain = make_run(tmp_path / "plain", model__dropout=dropout)
    probed = make_run(tmp_path / "probed", model__dropout=dropout, train__faults=Faults(probe_every_steps=2))
    train(plain)
    train(probed)
    assert [event["step"] for event in events(probed, "probed")] == [2, 4, 6, 8]
    assert final_files(plain)["model.safetensors"] == final_files(probed)["model.safetensors"]


def test_one_flipped_bit_in_one_gradient_ends_the_run_before_it_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path, train__faults=Faults(probe_every_steps=5))
    sound, calls = MicrobatchRunner.loss, []

    def errs(
        self: MicrobatchRunner, model: Decoder, outputs: tuple[torch.Tensor, ...], microbatch: Microbatch
    ) -> torch.Tensor:
        loss = sound(self, model, outputs, microbatch)
        calls.append(None)
        if len(calls) == 2 * 4 + 2:  # four steps of two microbatches, then the second half of the probe
            weight = self.model.get_parameter("embedding.weight")
            weight.register_hook(flip_one_bit)
        return loss

    monkeypatch.setattr(MicrobatchRunner, "loss", errs)
    with pytest.raises(HardwareError, match=r"step 5: the same microbatch computed twice gave other bits"):
        train(run)
    assert [path.name for path in list_checkpoints(run / "checkpoints")] == ["step-00000003"]


def flip_one_bit(gradient: torch.Tensor) -> torch.Tensor:
    flipped = gradient.clone()
    flipped.view(torch.int32).view(-1)[7] ^= 1
    return flipped


@given(st.data())
def test_any_one_flipped_bit_changes_the_sum(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int8]))
    tensors = [torch.arange(12).to(kind).reshape(3, 4), torch.zeros(5, dtype=torch.float32)]
    before = bit_sum(tensors)
    hit = data.draw(st.sampled_from(tensors)).view(-1).view(torch.uint8)
    hit[data.draw(st.integers(0, len(hit) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert bit_sum(tensors) != before


@pytest.mark.parametrize(
    ("hashes", "wrong"), [([1], []), ([1, 1, 1], []), ([1, 1, 2], [2]), ([1, 2], [0, 1]), ([3, 1, 1, 1, 2], [0, 4])]
)
def test_the_replicas_that_differ_from_most_are_named(hashes: Sequence[int], wrong: list[int]) -> None:
    assert disagreeing(hashes) == wrong
