"""Parse, print, parse is identity, for recipes drawn from the schema itself."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import DataError
from ropewalk.base.seal import sealed_toml
from ropewalk.config import read as reading
from ropewalk.config.read import Resolved, parse, parse_tree
from ropewalk.config.resolved import load_resolved, load_section, load_value, save_resolved
from ropewalk.config.schema import Field, PluginName, fields_of, item_of, options_of, section_of
from ropewalk.config.write import dump, literal, plain, show
from ropewalk.flow.recipe import Recipe
from ropewalk.load.config import Load

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"))  # which no file name may hold


def configs(cls: type) -> st.SearchStrategy[Any]:
    """Any value of a config dataclass that its types and ranges allow."""
    return st.builds(cls, **{field.name: values(field, field.kind) for field in fields_of(cls)})


def values(field: Field, kind: Any) -> st.SearchStrategy[Any]:
    section, item = section_of(kind), item_of(kind)
    if section:
        drawn = configs(section)
    elif item is PluginName:
        drawn = st.just(())  # tests/config/test_plugins.py
    elif item is not None:
        drawn = st.lists(values(field, item), max_size=3).map(tuple)
    else:
        ours = [option for option in options_of(kind) if option is not PluginName]  # tests/config/test_plugins.py
        drawn = st.one_of([scalars(field, option) for option in ours])
    return st.none() | drawn if type(None) in get_args(kind) else drawn


def scalars(field: Field, kind: Any) -> st.SearchStrategy[Any]:
    if get_origin(kind) is Literal:
        return st.sampled_from(get_args(kind))
    if kind is str:
        return NAMES
    if kind is bool:
        return st.booleans()
    numbers = st.integers(-(2**63), 2**63 - 1) if kind is int else st.floats(allow_nan=False, allow_infinity=False)
    bounds = field.range and [field.range.least, field.range.above, field.range.most, field.range.below]
    if not bounds:
        return numbers
    low = next((b for b in bounds[:2] if b is not None), None)
    high = next((b for b in bounds[2:] if b is not None), None)
    if kind is int:
        return st.integers(low, min(high or 2**63 - 1, 2**63 - 1)).filter(field.range.admits)
    return st.floats(low, high, allow_nan=False, allow_infinity=False).filter(field.range.admits)


@pytest.fixture(scope="module")
def unchecked() -> Iterator[None]:
    """Relations between settings are off: almost no random recipe would meet them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading, "Checked", type("Never", (), {}))
        yield


ORIGINS = st.dictionaries(st.sampled_from(["name", "seed", "train.schedule.peak_lr"]), NAMES)


@settings(max_examples=50, deadline=None)
@given(configs(Recipe), ORIGINS)
def test_parse_print_parse_is_identity(unchecked: None, recipe: Recipe, origins: dict[str, str]) -> None:
    resolved = Resolved(recipe, origins)
    tree = tomllib.loads(dump(resolved))
    assert tree.pop("origins") == origins
    assert parse_tree(Recipe, tree, "printed") == recipe
    assert parse(Recipe, show(resolved), "shown").value == recipe


@given(NAMES | st.floats(allow_nan=False) | st.booleans() | st.integers(-(2**63), 2**63) | st.lists(NAMES).map(tuple))
def test_a_literal_is_read_back_as_the_same_value_and_type(value: Any) -> None:
    back = tomllib.loads(f"value = {literal(value)}")["value"]
    assert back == (list(value) if isinstance(value, tuple) else value)
    assert isinstance(value, tuple) or type(back) is type(value)


def test_a_resolved_config_is_saved_and_loaded_with_its_origins(tmp_path: Path, smallest: str) -> None:
    resolved = parse(Recipe, smallest, "\U0001f9f5\x7f.toml", ["train.steps=77", "prepare.folder=a\nb\t\U0001f600"])
    save_resolved(tmp_path / "run", resolved)
    assert load_resolved(tmp_path / "run", Recipe) == resolved
    assert load_section(tmp_path / "run", "load", Load) == resolved.value.load
    assert load_value(tmp_path / "run", "name") == "tiny"
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "steps = 77" in text
    assert "# command line: train.steps=77" in text
    assert "# kv_heads = not set (integer)" in text


def test_the_resolved_config_holds_every_value(tmp_path: Path, smallest: str) -> None:
    resolved = parse(Recipe, smallest, "r.toml")
    tree = tomllib.loads(dump(resolved))
    del tree["origins"]

    def without_none(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without_none(child) for key, child in value.items() if child is not None}
        return [without_none(child) for child in value] if isinstance(value, list) else value

    assert tree == without_none(plain(resolved.value))


def test_a_run_that_is_missing_damaged_newer_or_lacking_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not a run directory"):
        load_resolved(tmp_path, Recipe)
    for text, words in (
        ("format = ", "damaged"),
        ("format = 3", "damaged"),
        ("", "damaged"),
        (sealed_toml("format = 4\n").decode(), "upgrade ropewalk"),
    ):
        (tmp_path / "config.toml").write_text(text)
        with pytest.raises(DataError, match=words):
            load_resolved(tmp_path, Recipe)
    (tmp_path / "config.toml").write_text("format = 1")
    assert load_section(tmp_path, "load", Load) == Load()
    with pytest.raises(DataError, match="`name` is missing"):
        load_value(tmp_path, "name")


def test_only_what_was_changed_is_shown_on_request(smallest: str) -> None:
    resolved = parse(Recipe, smallest, "r.toml", ["model.layers=2"])
    assert show(resolved, changed_only=True).splitlines() == [
        'name = "tiny"  # r.toml:1',
        "",
        "[[prepare.sources]]",
        'name = "a"         # r.toml:3',
        'paths = ["x.txt"]  # r.toml:4',
        "",
        "[model]",
        "layers = 2  # command line: model.layers=2",
    ]


def config_classes(cls: type = Recipe) -> Iterator[type]:
    """Every dataclass reachable from the recipe."""
    yield cls
    for field in fields_of(cls):
        section = section_of(field.kind) or section_of(item_of(field.kind))
        if section:
            yield from config_classes(section)


@pytest.mark.parametrize("cls", dict.fromkeys(config_classes()), ids=lambda cls: cls.__name__)
def test_every_field_is_documented_and_every_optional_one_is_none_by_default(cls: type) -> None:
    assert (cls.__doc__ or "").strip()
    assert not (cls.__doc__ or "").startswith(f"{cls.__name__}("), "the class has no docstring of its own"
    assert [field.name for field in fields_of(cls) if not field.doc.strip()] == []
    optional = [field for field in fields_of(cls) if type(None) in get_args(field.kind)]
    assert [field.name for field in optional if field.default is not None] == []
    assert dataclasses.fields(cls)
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
