"""Lists of transforms: what a recipe may say, what it becomes."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest

from ropewalk.base.errors import ConfigError
from ropewalk.config.read import parse
from ropewalk.load.config import Load
from ropewalk.load.media.config import GEOMETRIC, SETTINGS, Media, Transform, TransformKind
from ropewalk.load.media.streams import Drawn
from ropewalk.load.media.transforms import STEPS, compiled

RECIPE = """
[[media]]
name = "photos"
path = "corpora/photos"
transforms = [
    { kind = "decode" },
    { kind = "random-resized-crop", size = 224, scale = [0.08, 1.0] },
    { kind = "flip", p = 0.5 },
    { kind = "normalise", mean = [0.485, 0.456, 0.406], std = [0.229, 0.224, 0.225] },
]
"""


def media(*steps: Transform, **changes: Any) -> Media:
    return Media(name="photos", path="x", transforms=(Transform(kind="decode"), *steps), **changes)


def drawn(count: int = 50) -> Drawn:
    return Drawn(5, np.arange(count, dtype=np.uint64), np.zeros(count, np.int64))


def test_every_kind_has_its_settings_and_every_geometric_kind_its_step() -> None:
    assert set(SETTINGS) == set(get_args(TransformKind))
    assert set(STEPS) == set(GEOMETRIC)


def test_a_recipe_becomes_a_chain() -> None:
    (source,) = parse(Load, RECIPE, "recipe.toml").value.media
    chain = compiled(source, gpu=False)
    assert [step.kind for step in source.transforms] == ["decode", "random-resized-crop", "flip", "normalise"]
    windows = chain.windows(np.tile([300, 400], (50, 1)), drawn())
    assert set(windows.height) == {224.0}
    assert 10 < windows.flips.sum() < 40
    assert chain.normalise is not None
    black, white = (level * chain.normalise.scale + chain.normalise.shift for level in (0, 255))
    assert black == pytest.approx([-0.485 / 0.229, -0.456 / 0.224, -0.406 / 0.225], abs=1e-5)
    assert white == pytest.approx([0.515 / 0.229, 0.544 / 0.224, 0.594 / 0.225], abs=1e-5)


WRONG = {
    ('"flip"', '"flp"'): 'transforms.2.kind` is "flp"; did you mean "flip"?',
    ("p = 0.5", "size = 9"): '`media.0.transforms.2.size`: is not a setting of "flip"; it takes p',
    ("p = 0.5", "q = 0.5"): "unknown key `media.0.transforms.2.q`",
    ("[0.08, 1.0]", "[0.5]"): "has 1 numbers; give 2",
    ("[0.08, 1.0]", "[1.0, 0.5]"): "1.0 is above 0.5; give the least first",
    ("size = 224, ", ""): '"random-resized-crop" needs a size in pixels',
    ('{ kind = "decode" },', ""): 'must begin with { kind = "decode" }',
    ('"decode" }', '"decode", executor = "gpu" }'): 'decoding is done by "cpu" or by "dali"',
    ('"decode" }', '"decode", executor = "dali" }'): "DALI does all of a source",
    ("p = 0.5", 'executor = "gpu" }, { kind = "resize", size = 9, executor = "cpu"'): "are one pass",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_list_is_refused_with_the_remedy(change: tuple[str, str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse(Load, RECIPE.replace(*change), "recipe.toml")
    assert WRONG[change] in str(error.value)


def test_python_users_get_the_same_checks() -> None:
    with pytest.raises(ConfigError, match="needs a size"):
        compiled(media(Transform(kind="centre-crop")), gpu=False)
    with pytest.raises(ConfigError, match='"gpu" where batches stay on the CPU; leave it at "auto"'):
        compiled(media(Transform(kind="flip", executor="gpu")), gpu=False)


def test_auto_takes_the_gpu_when_there_is_one_and_cpu_stays_cpu() -> None:
    steps = (Transform(kind="resize", size=9), Transform(kind="normalise"))
    assert compiled(media(*steps), gpu=True).resample_on == "gpu"
    assert compiled(media(*steps), gpu=False).resample_on == "cpu"
    chain = compiled(media(Transform(kind="resize", size=9, executor="cpu"), steps[1]), gpu=True)
    assert (chain.resample_on, chain.recolour_on) == ("cpu", "gpu")


def test_colours_are_changed_as_their_formulas_say() -> None:
    rgb = np.array([200.0, 90.0, 30.0])
    grey = rgb @ [0.299, 0.587, 0.114]
    towards = {"brightness": 0.0, "contrast": 127.5, "saturation": grey}
    for name, target in towards.items():
        step = Transform(kind="colour", **{name: 0.4})  # type: ignore[arg-type]
        maps = compiled(media(step, Transform(kind="normalise")), gpu=False).colour_maps(drawn(2000))
        assert maps is not None
        found = maps[:, :, :3] @ rgb + maps[:, :, 3]
        factors = (found - target) / (rgb - target)
        assert np.ptp(factors, axis=1) == pytest.approx(0, abs=1e-4)
        assert 0.6 <= factors.min() < 0.61
        assert 1.39 < factors.max() <= 1.4001


def test_no_colour_means_no_map() -> None:
    assert compiled(media(Transform(kind="normalise")), gpu=False).colour_maps(drawn()) is None
