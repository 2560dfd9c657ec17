"""A user's own kinds in a recipe: found, checked, written and read back; what is wrong is one line."""

from __future__ import annotations

import importlib
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import pytest

from ropewalk.base.errors import ConfigError, DataError
from ropewalk.config.plugins import Plugin, digest
from ropewalk.config.read import Resolved, flatten, read
from ropewalk.config.registry import Kind, Registry
from ropewalk.config.resolved import load_resolved, load_section, save_resolved
from ropewalk.config.schema import Range, SettingsOf, describe, fields_of
from ropewalk.config.write import plain, show

SHAPES = Registry("shape", {"round": Kind(target="colorsys:rgb_to_hsv"), "square": Kind(target="math:sqrt")})


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part."""

    kind: Annotated[str, SHAPES] = "round"
    """Its shape."""
    settings: Annotated[object, SettingsOf("kind")] = None
    """Settings of a user's shape."""
    size: Annotated[int, Range(least=1)] = 1
    """Its size."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Parts."""

    part: Part = field(default_factory=Part)
    """One."""
    parts: tuple[Part, ...] = ()
    """Others."""
    hooks: tuple[Annotated[str, Registry("hook", {})], ...] = ()
    """Names."""


STAR = """
from dataclasses import dataclass
from typing import Annotated

from ropewalk.config.schema import Range


@dataclass(frozen=True, kw_only=True)
class Star:
    \"""A star.\"""

    points: Annotated[int, Range(least=3)] = 5
    \"""How many points it has.\"""
    colour: str = "red"
    \"""Its colour.\"""

    def check(self):
        if self.points == 13:
            yield "points", "is unlucky"


def plain_star(): ...

five = 5
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "star.py").write_text(STAR)
    path = tmp_path / "r.toml"
    path.write_text('[part]\nkind = "star:Star"\nsize = 2\n\n[part.settings]\npoints = 7\n')
    return path


def problems(recipe: Path, text: str | None = None, *overrides: str) -> list[str]:
    if text is not None:
        recipe.write_text(textwrap.dedent(text))
    with pytest.raises(ConfigError) as caught:
        read(Whole, recipe, overrides)
    return [str(problem).replace(str(recipe.parent), "DIR") for problem in caught.value.problems]


def test_a_module_beside_the_recipe_brings_its_settings(recipe: Path) -> None:
    resolved = read(Whole, recipe, ["part.settings.colour=blue"])
    settings = resolved.value.part.settings
    assert type(settings).__name__ == "Star"
    assert (settings.points, settings.colour) == (7, "blue")
    assert resolved.origin("part.settings.points") == f"{recipe}:6"
    assert resolved.origin("part.settings.colour") == "command line: part.settings.colour=blue"
    assert resolved.plugins == {"star": Plugin(str(recipe.parent), digest(recipe.parent, "star"))}
    assert dict(flatten(resolved.value))["part.settings.points"] == 7
    assert plain(resolved.value)["part"]["settings"] == {"points": 7, "colour": "blue"}
    assert "[part.settings]\npoints = 7" in show(resolved, changed_only=True)


def test_built_in_kinds_leave_no_trace_of_own_settings() -> None:
    resolved = read(Whole, None, ["part.kind=square"])
    assert resolved.value.part.settings is None
    assert resolved.plugins == {}
    assert not [key for key, _ in flatten(resolved.value) if "settings" in key]
    assert "settings" not in show(resolved) + str(plain(resolved.value))
    assert describe(fields_of(Part)[0].kind) == '"round" | "square" | "module:attr"'


def test_a_saved_config_reads_back_in_another_folder(
    recipe: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe.write_text('parts = [{kind = "star:Star", settings = {points = 9}}]\nhooks = ["star:plain_star"]\n')
    resolved, run = read(Whole, recipe), tmp_path_factory.mktemp("run")
    save_resolved(run, resolved)
    monkeypatch.chdir(run)
    again: Resolved[Whole] = load_resolved(run, Whole)
    assert (again.value, again.origins, again.plugins) == (resolved.value, resolved.origins, resolved.plugins)
    assert load_resolved(run, Whole, ["parts.0.settings.points=4"]).value.parts[0].settings.points == 4
    assert load_section(run, "part", Part) == Part()


def test_nothing_is_imported_from_a_folder_that_a_run_names_relative_to_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "planted.py").write_text("raise SystemExit('imported')")
    save_resolved(tmp_path, Resolved(Whole(), {}, {"planted": Plugin(".", digest(tmp_path, "planted"))}))
    monkeypatch.chdir(tmp_path)
    for read_back in (lambda: load_resolved(tmp_path, Whole), lambda: load_section(tmp_path, "part", Part)):
        with pytest.raises(DataError, match=r"`plugins.planted`: the folder '.' is not absolute"):
            read_back()


def test_an_edited_module_and_one_of_the_same_name_elsewhere_are_read_anew(
    recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    first = read(Whole, recipe)
    (recipe.parent / "star.py").write_text(STAR.replace("= 5\n", "= 6\n"))
    edited = read(Whole, recipe)
    other = tmp_path_factory.mktemp("other")
    (other / "star.py").write_text(STAR.replace("= 5\n", "= 8\n"))
    (other / "r.toml").write_text('part.kind = "star:Star"')
    assert read(Whole, other / "r.toml").value.part.settings.points == 8
    assert edited.plugins != first.plugins
    assert type(edited.value.part.settings)().points == 6


def test_a_module_of_another_recipe_is_not_taken_for_one_that_is_installed(
    recipe: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    read(Whole, recipe)
    other = tmp_path_factory.mktemp("other") / "r.toml"
    other.write_text('part.kind = "star:Star"')
    assert "no module `star`" in problems(other)[0]
    # One that only a module of the user's imported, when it was called, is the user's too.
    (recipe.parent / "ring.py").write_text(STAR)
    read(Whole, recipe)
    assert importlib.import_module("ring").__file__ == str(recipe.parent / "ring.py")
    for name in ("star", "ring"):
        (other.parent / f"{name}.py").write_text(STAR.replace("= 5\n", "= 8\n"))
    other.write_text('parts = [{kind = "star:Star"}]')
    assert read(Whole, other).value.parts[0].settings.points == 8
    assert importlib.import_module("ring").__file__ == str(other.parent / "ring.py")
    other.write_text('parts = [{kind = "star:Star"}, {kind = "ring:Star"}]')
    assert read(Whole, other).value.parts[1].settings.points == 8


def test_what_is_wrong_is_one_line_with_its_place(recipe: Path) -> None:
    head, at = '[part]\nkind = "{}"\n', "DIR/r.toml:2: `part.kind`:"
    (recipe.parent / "broken.py").write_text("x = 1\nraise ValueError('no luck\\nat all')\n")
    (recipe.parent / "wrong.py").write_text("def (\n")
    (recipe.parent / "json.py").write_text("")
    (recipe.parent / "loose.py").write_text(STAR.replace("frozen=True, ", ""))
    assert problems(recipe, head.format("rond")) == [
        'DIR/r.toml:2: `part.kind`: no shape "rond"; did you mean "round"?'
    ]
    assert problems(recipe, head.format("a b:c")) == [
        f'{at} "a b:c" names no object; write "module:attr", for a file module.py beside the recipe'
    ]
    assert problems(recipe, head.format("star.py:Star")) == [
        f'{at} "star.py:Star" names a file, not a module; write "star:Star"'
    ]
    (missing,) = problems(recipe, head.format("nowhere:Star"))
    assert missing.startswith(f"{at} no module `nowhere`; there is no nowhere.py in DIR or ")
    assert problems(recipe, head.format("star:Sun")) == [
        f"{at} `DIR/star.py` has no `Sun`; it defines Star, plain_star"
    ]
    assert problems(recipe, head.format("star:five")) == [
        f"{at} `star:five` is no shape: it is a value of type int; name a frozen dataclass, a function, or a Kind"
    ]
    assert problems(recipe, head.format("broken:Star")) == [
        f"{at} importing `broken` failed: ValueError: no luck; correct DIR/broken.py:2"
    ]
    (syntax,) = problems(recipe, head.format("wrong:Star"))
    assert "importing `wrong` failed: SyntaxError" in syntax
    assert "DIR/wrong.py:1" in syntax
    (taken,) = problems(recipe, head.format("json:Star"))
    assert "`DIR/json.py` has the name of another module" in taken
    (loose,) = problems(recipe, head.format("loose:Star"))
    assert "dataclass that is not frozen" in loose


def test_own_settings_are_checked_as_ours(recipe: Path) -> None:
    own = '[part]\nkind = "star:Star"\n[part.settings]\n'
    assert problems(recipe, own + "point = 4\n") == [
        "DIR/r.toml:4: unknown key `part.settings.point`; did you mean `points`?"
    ]
    assert problems(recipe, own + "points = 2\ncolour = 3\n") == [
        "DIR/r.toml:4: `part.settings.points` is 2; it must be at least 3",
        "DIR/r.toml:5: `part.settings.colour` is 3; expected text",
    ]
    assert problems(recipe, own + "points = 13\n") == ["DIR/r.toml:4: `part.settings.points`: is unlucky"]
    assert problems(recipe, "[part]\nsettings.points = 4\n") == [
        'DIR/r.toml:2: `part.settings`: "round" has no settings table; '
        "remove the table; the settings of a built-in kind stand beside its name"
    ]
    assert problems(recipe, "", "part.kind=star:Star", "part.settings.points=two") == [
        'command line: part.settings.points=two: `part.settings.points` is "two"; expected integer'
    ]


def test_an_installed_package_offers_kinds_by_entry_points(
    recipe: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path_factory.mktemp("site")
    (site / "starry.py").write_text(STAR)
    (site / "starry-1.0.dist-info").mkdir()
    (site / "starry-1.0.dist-info/METADATA").write_text("Name: starry\nVersion: 1.0\n")
    (site / "starry-1.0.dist-info/entry_points.txt").write_text("[ropewalk.shapes]\nfive-points = starry:Star\n")
    monkeypatch.syspath_prepend(site)
    recipe.write_text('[part]\nkind = "five-points"\nsettings.points = 6\n')
    resolved = read(Whole, recipe)
    assert resolved.value.part.settings.points == 6
    assert resolved.plugins == {}, "an installed package may be upgraded"
