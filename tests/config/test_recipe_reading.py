"""Strict reading: all problems at once, each with its place and its remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import ConfigError, Problem
from ropewalk.config.read import flatten, parse, parse_tree, read
from ropewalk.config.schema import CONTINUES, Range, describe, fields_of
from ropewalk.flow.recipe import Recipe

ProblemsOf = Callable[[Callable[[], object]], list[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A table."""

    size: Annotated[int, Range(least=1, most=1_000_000)] = 3
    """Its size."""
    rate: Annotated[float, Range(above=0)] | None = None
    """Its rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Whole:
    """Every kind of field."""

    name: str = "x"
    """Text."""
    label: str | None = None
    """Optional text."""
    ready: bool = False
    """Truth."""
    mode: Literal["fast", "slow"] | int = "fast"
    """A choice or a number."""
    shares: tuple[Annotated[float, Range(least=0, most=1)], ...] = ()
    """Numbers."""
    names: Annotated[tuple[str, ...] | None, CONTINUES] = None
    """An optional list."""
    part: Part = field(default_factory=lambda: Part(size=7))
    """A table whose defaults differ from its class's."""
    extra: Part | None = None
    """An optional table."""
    parts: tuple[Part, ...] = ()
    """Tables."""

    def check(self) -> Iterator[tuple[str, str]]:
        if self.ready and not self.shares:
            yield "shares", "ready without shares"
        for index, part in enumerate(self.parts):
            if part.size == 13:
                yield f"parts.{index}.size", "13 is unlucky"


def whole(text: str, *overrides: str) -> Whole:
    return parse(Whole, text, "w.toml", overrides).value


def test_all_problems_are_reported_at_once_with_file_and_line(problems_of: ProblemsOf) -> None:
    text = """name = 3
raedy = true
mode = "fsat"
shares = [0.5,
  2.0]
names = "x"
[part]
size = 0
[extra]
rate = -1
[[parts]]
size = true
[[parts]]
size = 1_000_001
colour = "red"
"""
    assert problems_of(lambda: whole(text)) == [
        "w.toml:2: unknown key `raedy`; did you mean `ready`?",
        "w.toml:1: `name` is 3; expected text",
        'w.toml:3: `mode` is "fsat"; did you mean "fast"?',
        "w.toml:4: `shares.1` is 2.0; it must be at least 0 and at most 1",
        'w.toml:6: `names` must be a list, not "x"; write ["x"]',
        "w.toml:8: `part.size` is 0; it must be at least 1 and at most 1000000",
        "w.toml:10: `extra.rate` is -1; it must be above 0",
        "w.toml:12: `parts.0.size` is true; expected integer",
        "w.toml:15: unknown key `parts.1.colour`; known here: size, rate",
        "w.toml:14: `parts.1.size` is 1000001; it must be at least 1 and at most 1000000",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("part = 3", "w.toml:1: `part` must be a table, not 3; write [part]"),
        ("parts = 3", "w.toml:1: `parts` must be a list, not 3; write [[parts]]"),
        ("\n[parts]\nsize = 3", "w.toml:2: `parts` must be a list, not a table; write [[parts]]"),
        ("parts = [1]", "w.toml:1: `parts.0` must be a table, not 1; write [[parts]]"),
        ("mode = 1.5", 'w.toml:1: `mode` is 1.5; expected "fast" | "slow" | integer'),
        ("shares = [true]", "w.toml:1: `shares.0` is true; expected number"),
        ("shares = [nan]", "w.toml:1: `shares.0` is nan; it must be at least 0 and at most 1"),
        ("[part]\nrate = inf", "w.toml:2: `part.rate` is inf; it must be a finite number"),
        ("ready = 1", "w.toml:1: `ready` is 1; expected true or false"),
        ("[part]\nsize = 3.0", "w.toml:2: `part.size` is 3.0; expected integer"),
        (f"mode = {2**63}", f"w.toml:1: `mode` is {2**63}; an integer has at most 64 bits"),
        (f"shares = [{10**400}]", f"w.toml:1: `shares.0` is {10**400}; an integer has at most 64 bits"),
        ("name = 1979-05-27", "w.toml:1: `name` is 1979-05-27; expected text"),
        ("ready = true", "w.toml: `shares`: ready without shares"),
        ("[[parts]]\n[[parts]]\nsize = 13", "w.toml:3: `parts.1.size`: 13 is unlucky"),
        ('"a.b" = 1\nreadi = 1\nready = true', "w.toml: `shares`: ready without shares"),
    ],
)
def test_each_problem_says_where_what_and_what_to_do(text: str, problem: str, problems_of: ProblemsOf) -> None:
    assert problem in problems_of(lambda: whole(text))


@pytest.mark.parametrize(
    ("text", "beginning"),
    [
        ("a = 1\nb = = 2\nc = 3", "w.toml:2: not valid TOML: Invalid value; the line reads `b = = 2`"),
        ("name = 'a'\nname = 'b'", "w.toml:2: not valid TOML: "),
        ("\n\nname = [1,\n", "w.toml:3: not valid TOML: "),
        ("# \u2028\x0c\nname = ", "w.toml:"),
        ("a = 1\r\nb\r\n", "w.toml:2: not valid TOML: "),
        ("[part]\n[part]\n", "w.toml:2: not valid TOML: "),
        ("mode = " + "9" * 5000 + "\nready = true\n", "w.toml:1: not valid TOML: "),
        ("shares = " + "[" * 3000 + "]" * 3000, "w.toml: lists or tables are nested too deeply; "),
    ],
)
def test_a_syntax_error_names_its_line(text: str, beginning: str, problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(lambda: whole(text))
    assert problem.startswith(beginning)


@given(st.text("a=[]{}\"'\n.#1 \\", max_size=30))
def test_no_text_whatever_raises_anything_but_config_errors(text: str) -> None:
    problems: list[Problem] | None = None
    try:
        parse(Whole, text, "w.toml")
    except ConfigError as error:
        problems = error.problems
    assert problems is None or problems
    assert all(problem.where.startswith("w.toml") for problem in problems or ())


def test_missing_keys_are_explained_with_type_and_documentation(problems_of: ProblemsOf) -> None:
    (first,) = problems_of(lambda: parse(Recipe, "seed = 1", "r.toml"))
    assert first.startswith("r.toml: `name` is missing; add `name = ...` (text): Name of the run")
    (second,) = problems_of(lambda: parse(Recipe, "name = 'x'\n[[prepare.sources]]\nname = 'a'", "r.toml"))
    assert second.startswith("r.toml:2: `prepare.sources.0.paths` is missing; add `paths = ...`")
    (third,) = problems_of(lambda: parse(Recipe, "name = 'x'\n[prepare]\nworkers = 1", "r.toml"))
    assert "`prepare.sources`: there is none; add a [[prepare.sources]] table" in third


def test_the_recipes_own_contradictions_are_found(smallest: str, problems_of: ProblemsOf) -> None:
    text = smallest + "[model]\nheads = 3\n[train]\nsteps = 10\nschedule.warmup_steps = 50\n[plan]\nmicrobatch_size = 5"
    found = problems_of(lambda: parse(Recipe, text, "r"))
    assert [problem.split(": ")[:2] for problem in found] == [
        ["r:6", "`model.heads`"],
        ["r:9", "`train.schedule.warmup_steps`"],
        ["r:11", "`plan.microbatch_size`"],
    ]


def test_ranges_of_optional_fields_hold(smallest: str, problems_of: ProblemsOf) -> None:
    text = smallest + "weight = -1\n[model]\nkv_heads = 0\n[plan]\nmicrobatch_size = 0\n"
    assert [problem.split(";")[0] for problem in problems_of(lambda: parse(Recipe, text, "r"))] == [
        "r:5: `prepare.sources.0.weight` is -1",
        "r:7: `model.kv_heads` is 0",
        "r:9: `plan.microbatch_size` is 0",
    ]


def test_a_field_default_stands_under_a_table_that_is_partly_written() -> None:
    assert whole("").part == Whole().part == Part(size=7)
    assert whole("[part]\nrate = 2").part == Part(size=7, rate=2.0)
    assert whole("[extra]\nrate = 2").extra == Part(size=3, rate=2.0)


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("name=two words", "name", "two words"),
        ("name=3", "name", "3"),
        ("name=true", "name", "true"),
        ('name="quoted"', "name", "quoted"),
        ("name=", "name", ""),
        ("name=a=b", "name", "a=b"),
        ("label=[x]", "label", "[x]"),
        (" name = spaced ", "name", "spaced"),
        ("mode=slow", "mode", "slow"),
        ("mode='slow'", "mode", "slow"),
        ("mode=4", "mode", 4),
        ("shares=[1, 0.5]", "shares", (1.0, 0.5)),
        ("shares=[]", "shares", ()),
        ('names=["a", "b"]', "names", ("a", "b")),
        ("part.rate=1e-3", "part", Part(size=7, rate=1e-3)),
        ("part.rate=2", "part", Part(size=7, rate=2.0)),
        ("part={rate = 2}", "part", Part(size=7, rate=2.0)),
        ("extra.size=4", "extra", Part(size=4)),
        ("parts=[{size = 4}]", "parts", (Part(size=4),)),
        ("parts.1.size=5", "parts", (Part(size=1), Part(size=5))),
    ],
)
def test_an_override_means_what_it_looks_like(override: str, key: str, value: Any) -> None:
    assert getattr(whole("parts = [{size = 1}, {size = 2}]", override), key) == value


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("name", "command line: `name` is not an override; write section.key=value"),
        ("=3", "command line: `=3` is not an override; write section.key=value"),
        ("part..size=3", "command line: `part..size=3` is not an override; write section.key=value"),
        ("part.size=big", 'command line: part.size=big: `part.size` is "big"; expected integer'),
        ("part.size=1\nb=2", 'command line: part.size=1\nb=2: `part.size` is "1\\nb=2"; expected integer'),
        ("mode=fsat", 'command line: mode=fsat: `mode` is "fsat"; did you mean "fast"?'),
        ("prat.size=3", "command line: prat.size=3: unknown key `prat`; did you mean `part`?"),
        ("part.a.b=3", "command line: part.a.b=3: unknown key `part.a`; known here: size, rate"),
        ("part.size.x=3", "command line: `part.size.x` cannot be set; override a key of a table"),
        ("part.size.x.y=3", "command line: no such key `part.size.x.y`; `x` is not in the recipe"),
        ("parts.2.size=3", "command line: no such key `parts.2.size`; `2` is not in the recipe"),
        ("parts.-1.size=3", "command line: no such key `parts.-1.size`; `-1` is not in the recipe"),
        ("parts.0={}", "command line: `parts.0` cannot be set; override a key of a table"),
        ("parts.²=1", "command line: `parts.²` cannot be set; override a key of a table"),
        ("names.0=a", "command line: `names.0` cannot be set; override a key of a table"),
        ("part=3", "command line: part=3: `part` must be a table, not 3; write [part]"),
        (
            "name=a\0b",
            'command line: name=a\0b: `name` is "a\\u0000b"; leave out the zero character; no file name holds one',
        ),
        ("name=\udcff", "command line: 'name=\\udcff' is not UTF-8 text; write it as UTF-8"),
    ],
)
def test_a_wrong_override_is_named_as_such(override: str, problem: str, problems_of: ProblemsOf) -> None:
    text = "[part]\nsize = 1\n[[parts]]\n[[parts]]\n"
    assert problems_of(lambda: whole(text, override)) == [problem]


def test_an_override_of_any_depth_is_a_wrong_value(problems_of: ProblemsOf) -> None:
    (problem,) = problems_of(lambda: whole("", "part.size=" + "[" * 5000))
    assert problem.endswith("expected integer")


def test_problems_of_file_and_overrides_come_together(problems_of: ProblemsOf) -> None:
    found = problems_of(lambda: whole("raedy = 1", "x", "part.size=0", "ready=true"))
    assert [problem.split(":")[0] for problem in found] == ["command line", "w.toml", "command line", "w.toml"]


def test_each_value_knows_its_origin() -> None:
    text = 'name = "a"\nshares = [\n 0.5]\n[part]\nsize = 2\n[[parts]]\nsize = 3\n[[parts]]\nrate = 1'
    resolved = parse(Whole, text, "w.toml", ["part.size=9", "mode=slow"])
    assert resolved.origins == {
        "name": "w.toml:1",
        "shares": "w.toml:2",
        "part.size": "command line: part.size=9",
        "mode": "command line: mode=slow",
        "parts.0.size": "w.toml:7",
        "parts.1.rate": "w.toml:9",
    }
    assert resolved.origin("ready") == resolved.origin("parts.1.size") == "default"


def test_a_table_replaced_by_an_override_forgets_the_lines_of_the_file() -> None:
    text = "[[parts]]\nsize = 3\nrate = 1\n[part]\nrate = 5\n"
    resolved = parse(Whole, text, "w.toml", ["parts=[{size = 4}]", "part={size = 6}"])
    assert resolved.origins == {
        "parts.0.size": "command line: parts=[{size = 4}]",
        "part.size": "command line: part={size = 6}",
    }


def test_a_recipe_file_is_read_with_its_path_in_every_place(tmp_path: Path, problems_of: ProblemsOf) -> None:
    path = tmp_path / "tiny.toml"
    path.write_bytes("\ufeffname = 'x'\r\nmode = 'slow'\r\n".encode())
    assert read(Whole, path).origins == {"name": f"{path}:1", "mode": f"{path}:2"}
    assert read(Whole).value == Whole()
    assert problems_of(lambda: read(Whole, tmp_path / "tinny.toml")) == [
        f"{tmp_path}/tinny.toml: no such recipe; did you mean `{path}`?"
    ]
    assert "name a .toml file" in problems_of(lambda: read(Whole, tmp_path))[0]
    path.write_bytes(b"name = '\xff'")
    assert "save it as UTF-8" in problems_of(lambda: read(Whole, path))[0]


def test_plain_values_are_read_under_the_name_of_their_place(problems_of: ProblemsOf) -> None:
    assert parse_tree(Whole, {"part": {"size": 4}}, "here") == Whole(part=Part(size=4))
    assert problems_of(lambda: parse_tree(Whole, {"mode": "x"}, "here")) == [
        'here: `mode` is "x"; expected "fast" | "slow" | integer'
    ]


def test_flatten_lists_every_leaf() -> None:
    keys = dict(flatten(Whole(parts=(Part(size=4),))))
    assert keys["parts.0.size"] == 4
    assert keys["part.size"] == 7
    assert keys["shares"] == ()
    assert "part" not in keys


def test_a_class_describes_its_fields() -> None:
    fields = {field.name: field for field in fields_of(Whole)}
    assert fields["names"].continues
    assert not fields["name"].continues
    assert fields["shares"].range == Range(least=0, most=1)
    assert fields["part"].doc == "A table whose defaults differ from its class's."
    assert [describe(fields[name].kind) for name in ("label", "names", "extra", "parts")] == [
        "text",
        "list of text",
        "table",
        "list of table",
    ]


def test_a_wrong_value_does_not_hide_contradictions_between_the_others(smallest: str, problems_of: ProblemsOf) -> None:
    text = smallest.replace('name = "', 'name = "../', 1) + '[model]\nlayers = "abc"\nheads = 3\n[train]\nsteps = "x"\n'
    found = "\n".join(problems_of(lambda: parse(Recipe, text, "r")))
    for part in ("`name`", "`model.layers`", "3 heads do not divide", "`train.steps`"):
        assert part in found


def test_a_contradiction_with_a_wrong_value_is_not_made_up(smallest: str, problems_of: ProblemsOf) -> None:
    text = smallest + '[model]\nwidth = "wide"\nheads = 3\n'
    (only,) = problems_of(lambda: parse(Recipe, text, "r"))
    assert "`model.width`" in only
