"""Models and schedules for data, a machine and a time: the laws of sizing, for speeds that are given."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.flow.new.sizing import MOST_EPOCHS, TOKENS_PER_PARAMETER, Facts, Sizing, size_run
from ropewalk.model.config import Model
from ropewalk.model.spec import resolve
from ropewalk.plan.machine import Gpu, Machine
from ropewalk.plan.speed import ASSUMED_GPU, Speed, measured_core_flops, speed_of

LAPTOP = Speed(device="cpu", flops=240e9, words="two cores", bf16=True)
GPU = Speed(device="cuda", flops=165e12, words="a GPU", bf16=True, memory_bytes=24 << 30)
BOOKS = Facts(
    text_bytes=40_000_000, bytes_per_token=lambda vocabulary: 3.2, longest_characters=500_000, bytes_per_character=1.0
)
PLAY = dataclasses.replace(BOOKS, text_bytes=1_100_000, bytes_per_token=lambda vocabulary: 2.6)
POEMS = Facts(
    text_bytes=12_000_000,
    bytes_per_token=lambda vocabulary: 2.9,
    longest_characters=116,
    bytes_per_character=2.9,
    dense_characters=2100,
)
TEN_MINUTES = 600.0


def value(sizing: Sizing, key: str) -> float:
    return sizing.settings[key].value


def test_ten_minutes_of_two_cores_are_used_where_the_data_suffices() -> None:
    sizing = size_run(BOOKS, LAPTOP, seconds=TEN_MINUTES, cores=2)
    assert sizing.limited_by == "time"
    assert 0.8 * TEN_MINUTES < sizing.total_s < 1.15 * TEN_MINUTES
    assert 0.5e6 < sizing.parameters < 2e6


def test_little_data_gets_a_small_model_and_is_read_a_few_times() -> None:
    sizing = size_run(PLAY, LAPTOP, seconds=TEN_MINUTES, cores=2)
    assert sizing.limited_by == "data"
    assert sizing.epochs == pytest.approx(MOST_EPOCHS, rel=0.05)
    assert sizing.parameters < size_run(BOOKS, LAPTOP, seconds=TEN_MINUTES, cores=2).parameters
    assert sizing.total_s < TEN_MINUTES
    assert "more epochs over so little data gain little" in sizing.settings["train.steps"].reason


def test_more_time_and_a_gpu_give_larger_models_and_longer_rows() -> None:
    minutes, hours, gpu = (
        size_run(BOOKS, speed, seconds=seconds, cores=2)
        for speed, seconds in ((LAPTOP, TEN_MINUTES), (LAPTOP, 4 * 3600), (GPU, TEN_MINUTES))
    )
    assert minutes.parameters < hours.parameters < gpu.parameters
    assert value(minutes, "load.sequence_length") < value(gpu, "load.sequence_length")
    assert value(minutes, "train.schedule.peak_lr") > value(gpu, "train.schedule.peak_lr")


def test_chinese_gets_a_vocabulary_for_its_characters_and_short_poems_short_rows() -> None:
    sizing = size_run(POEMS, LAPTOP, seconds=TEN_MINUTES, cores=2)
    assert value(sizing, "prepare.tokenizer.vocab_size") == 4096
    assert "2,100 distinct characters" in sizing.settings["prepare.tokenizer.vocab_size"].reason
    assert value(sizing, "load.sequence_length") == 128


@settings(max_examples=40, deadline=None)
@given(
    text_bytes=st.integers(1, 10**13),
    characters=st.integers(1, 10**7),
    flops=st.floats(1e9, 1e15),
    device=st.sampled_from(["cpu", "cuda"]),
    hours=st.floats(0.01, 1000),
    dense=st.sampled_from([0, 300, 8000]),
    chat=st.booleans(),
)
def test_any_data_machine_and_time_give_a_sound_recipe(
    text_bytes: int, characters: int, flops: float, device: str, hours: float, dense: int, chat: bool
) -> None:
    facts = Facts(
        text_bytes=text_bytes,
        bytes_per_token=lambda vocabulary: 3.0,
        longest_characters=characters,
        bytes_per_character=1.5,
        dense_characters=dense,
        chat=chat,
        documents=1 + text_bytes // 1000,
    )
    sizing = size_run(facts, Speed(device=device, flops=flops, words="", memory_bytes=8 << 30), seconds=3600 * hours)
    width, heads = value(sizing, "model.width"), value(sizing, "model.heads")
    length, steps = value(sizing, "load.sequence_length"), value(sizing, "train.steps")
    assert width % heads == 0
    assert length >= 64
    assert 1 <= value(sizing, "train.log_every_steps") <= value(sizing, "train.validate_every_steps") <= steps
    assert steps * value(sizing, "train.batch_size") * length == sizing.tokens
    assert value(sizing, "prepare.tokenizer.vocab_size") >= 512
    assert 24 * sizing.parameters < 8 << 30
    if width > 64:  # larger than the smallest
        assert sizing.tokens > 0.9 * TOKENS_PER_PARAMETER * sizing.parameters


def test_what_is_forecast_is_tokens_over_speed() -> None:
    spec = resolve(Model(layers=3, width=128, heads=4), vocabulary=2048, sequence_length=256)
    quick, slow = (dataclasses.replace(LAPTOP, flops=flops) for flops in (4e11, 1e11))
    assert quick.tokens_per_s(spec, batch_tokens=2048) == pytest.approx(4 * slow.tokens_per_s(spec, batch_tokens=2048))
    single = dataclasses.replace(LAPTOP, bf16=False)
    assert single.tokens_per_s(spec, batch_tokens=2048) < LAPTOP.tokens_per_s(spec, batch_tokens=2048)
    sizing = size_run(BOOKS, slow, seconds=TEN_MINUTES)
    assert sizing.train_s > 0


def test_a_gpu_is_taken_where_there_is_one_and_assumed_where_one_is_asked_for() -> None:
    laptop = Machine(processor="p", cores=2, memory_bytes=8 << 30, bf16=True, gpus=())
    h200 = dataclasses.replace(laptop, gpus=(Gpu(name="NVIDIA H200", memory_bytes=140 << 30, capability=9.0),))
    assert speed_of(h200).flops == speed_of(h200, gpu=True).flops == 989e12
    assumed = speed_of(laptop, gpu=True)
    assert (assumed.device, assumed.memory_bytes) == ("cuda", ASSUMED_GPU.memory_bytes)
    assert "assumed" in assumed.words


def test_the_speed_of_a_core_is_measured() -> None:
    assert measured_core_flops(0.01) > 1e8
