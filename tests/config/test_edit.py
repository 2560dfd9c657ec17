"""Values are set in a TOML text; everything else stays as it was written."""

from __future__ import annotations

import tomllib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.config.edit import with_values

TEXT = """# a recipe
name = "books"  # of the run

[load]  # how data are read
sequence_length = 64
threads = 1   # one is enough

[[prepare.sources]]
name = "a"
paths = ["x # y"]
"""


def test_a_value_is_replaced_on_its_line_and_its_comment_stays() -> None:
    changed = with_values(TEXT, {"load.threads": 4}, name="books.toml")
    assert changed == TEXT.replace("threads = 1   # one", "threads = 4   # one")


def test_a_new_value_goes_under_the_header_of_its_table() -> None:
    changed = with_values(TEXT, {"load.prefetch_bytes": 99}, name="books.toml")
    assert changed == TEXT.replace("are read\n", "are read\nprefetch_bytes = 99\n")


@pytest.mark.parametrize("text", ["", 'name = "a"', "load.threads = 1\nseed = 2\n", "[load.remote]\nrequests = 3\n"])
def test_a_table_is_made_or_extended_however_it_is_spelled(text: str) -> None:
    values = {"load.prefetch_bytes": 7, "load.cache.ram_bytes": 5, "load.remote.policy": "fixed"}
    changed = tomllib.loads(with_values(text, values, name="a.toml"))
    before = tomllib.loads(text)
    assert changed["load"]["prefetch_bytes"] == 7
    assert changed["load"]["cache"] == {"ram_bytes": 5}
    assert changed["load"]["remote"] == {**before.get("load", {}).get("remote", {}), "policy": "fixed"}
    assert {key: value for key, value in changed.items() if key != "load"} == {
        key: value for key, value in before.items() if key != "load"
    }


def test_a_text_that_cannot_be_changed_safely_is_left_and_the_lines_are_told() -> None:
    with pytest.raises(UserError, match=r"books\.toml: .*\n  load\.threads = 4"):
        with_values("load = {threads = 1}\n", {"load.threads": 4}, name="books.toml")


@settings(deadline=None, max_examples=60)
@given(
    values=st.dictionaries(
        st.sampled_from(["load.threads", "load.sequence_length", "load.new", "seed", "name", "load.cache.folder"]),
        st.integers(-9, 10**12) | st.text("ab #\"'\\=[]", max_size=6) | st.booleans(),
        min_size=1,
    )
)
def test_what_is_set_is_read_and_no_line_is_lost(values: dict[str, object]) -> None:
    changed = with_values(TEXT, values, name="books.toml")
    tree = tomllib.loads(changed)
    for key, value in values.items():
        found = tree
        for part in key.split("."):
            found = found[part]
        assert found == value
    comments = [line.split("#", 1)[1] for line in TEXT.splitlines() if "#" in line and "paths" not in line]
    assert all(comment in changed for comment in comments)
