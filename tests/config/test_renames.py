"""Every renamed key is refused with its new name, and `recipe upgrade` changes names and nothing else."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ropewalk.base.errors import ConfigError, UserError
from ropewalk.cli.main import main
from ropewalk.config.read import parse
from ropewalk.config.renames import ADDED, MOVED, RENAMED, VALUES, old_names, upgraded
from ropewalk.config.schema import fields_of, item_of, section_of
from ropewalk.config.upgrade import upgraded_text
from ropewalk.config.write import plain
from ropewalk.flow.recipe import Recipe

OLD = """\
# A recipe as it was.
name = "old"  # stays

[[prepare.sources]]
name = "a"
paths = ["x.txt"]
licence = "MIT"   # of the files
licence_key = "meta.licence"
[prepare]
compress = "zstd"
stages = "drop"  # licence, batch_rows
[prepare.filter]
min_bytes = 60
max_bytes = 90000
[prepare.filter.gopher]
max_hash_share = 0.2
max_ellipsis_share = 0.3
[ prepare.substring ]   # moved
action = "remove"
min_left_bytes = 10
[prepare.deduplicate.near]
kind = "simhash"
distance = 2
[prepare.deduplicate]
bloom.items = 5000
bloom.false_positives = 1e-5
[prepare.tokenizer]
vocabulary = 300

[load]
ahead_bytes = 5000000
adapt = true
remote = {ahead_bytes = 2000000, requests = 3, policy = 'climb'}
[[load.media]]
name = "ahead_bytes = 7"
path = "pictures"
batch = 4
ahead_bytes = 9

[model]
hidden = 64
rope_base = 500.0
tied = false
norm_place = "both"
[plan]
microbatch_rows = 2
[parallel]
context_kind = "ulysses"
activations = "packed"
fusion_bytes = 9
compression = "powersgd"
compression_rank = 2
[train]
validate_rows = 3
layers_every_steps = 5
batch_rows = 8
batch_ramp = {from_rows = 2, over_steps = 6}
mixture = [
  {source = "a", most_epochs = 3.0},  # most_epochs
]
schedule.final_share = 0.2
schedule.min_gain = 0.25
guard.memory_steps = 9
guard.most_in_a_row = 3
early_stop = {min_gain = 0.125}
[[train.phases]]
steps = 100
batch_rows = 4
mixture = [{source = "a", most_epochs = 4.0}]
[train.phases.batch_ramp]
from_rows = 2
over_steps = 6
[train.phases.schedule]
final_share = 0.3
min_gain = 0.5
[checkpoint]
packing = "on"
overhead = 0.25
[evaluate]
new_tokens = 7
"""


def old_keys(tree: Any, table: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every value by dotted key, without the numbers of items."""
    if isinstance(tree, list):
        return {key: value for item in tree for key, value in old_keys(item, table).items()}
    if not isinstance(tree, dict):
        return {".".join(table): tree}
    return {key: value for name, child in tree.items() for key, value in old_keys(child, (*table, name)).items()}


def moved_back(key: str) -> str:
    return next((key.replace(new, old, 1) for old, new in MOVED.items() if key.startswith(f"{new}.")), key)


def test_the_text_has_every_renamed_key_and_value() -> None:
    found = old_keys(tomllib.loads(OLD))
    assert found.keys() >= {moved_back(key) for key in RENAMED}
    assert all(found[key] in values for key, values in VALUES.items())


def kinds(cls: type, table: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in fields_of(cls):
        section = section_of(field.kind) or section_of(item_of(field.kind))
        found[f"{table}{field.name}"] = field
        if section:
            found |= kinds(section, f"{table}{field.name}.")
    return found


def test_new_names_exist_and_old_ones_do_not() -> None:
    known = kinds(Recipe)
    for old, new in RENAMED.items():
        assert f"{old.rpartition('.')[0]}.{new}" in known
        assert old not in known
    assert known.keys() >= set(MOVED.values())
    assert not known.keys() & MOVED.keys()


def test_every_renamed_key_is_refused_with_its_new_name(
    problems_of: Callable[[Callable[[], object]], list[str]],
) -> None:
    problems = "\n".join(problems_of(lambda: parse(Recipe, OLD, "old.toml")))
    for old, new in RENAMED.items():
        if moved_back(old) == old:
            leaf = old.rpartition(".")[2]
            assert f"{leaf}`; it is now `{new}`; `ropewalk recipe upgrade old.toml` rewrites the recipe" in problems
    assert "unknown key `prepare.substring`; it is now `prepare.deduplicate.substring`" in problems
    assert "did you mean" not in problems.replace('did you mean "hill-climb"', "")
    assert "is missing" not in problems, "the old name gives it"


def test_on_the_command_line_the_new_key_is_named(problems_of: Callable[[Callable[[], object]], list[str]]) -> None:
    text = 'name = "a"\n[[prepare.sources]]\nname = "a"\npaths = ["x"]\n'
    (problem,) = problems_of(lambda: parse(Recipe, text, "a.toml", ["train.batch_rows=4"]))
    assert problem == "command line: train.batch_rows=4: unknown key `train.batch_rows`; it is now `train.batch_size`"


def test_an_upgraded_recipe_reads_as_the_same_config_and_keeps_comments_and_layout() -> None:
    text, changes = upgraded_text(OLD, name="old.toml")
    tree = plain(parse(Recipe, text, "old.toml").value)
    assert old_keys(tomllib.loads(text)).items() <= old_keys(tree).items()
    comments = [line.partition("#")[2] for line in OLD.split("\n")]
    assert [line.partition("#")[2] for line in text.split("\n")] == comments
    assert 'artifacts = "drop"  # licence, batch_rows' in text
    assert "[ prepare.deduplicate.substring ]   # moved" in text
    assert 'name = "ahead_bytes = 7"' in text, "a value is no name"
    assert len(changes) >= len(RENAMED) + len(MOVED) + len(VALUES)
    assert upgraded_text(text, name="old.toml") == (text, [])


def test_old_and_new_values_are_the_same_but_for_their_names() -> None:
    old = tomllib.loads(OLD)
    new = upgraded(old)
    assert sorted(map(str, old_keys(old).values())) == sorted(
        str(value).replace("hill-climb", "climb") for value in old_keys(new).values()
    )
    assert {table: old_names(new[table], table) for table in new if isinstance(new[table], dict)} == {
        table: value for table, value in old.items() if isinstance(value, dict)
    }


def test_the_verb_writes_the_file_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "old.toml"
    path.write_bytes(OLD.replace("\n", "\r\n").encode())
    with pytest.raises(SystemExit) as ended:
        main(["recipe", "upgrade", str(path), "--json"])
    assert not ended.value.code
    told = json.loads(capsys.readouterr().out)
    assert {"line": 28, "before": "prepare.tokenizer.vocabulary", "after": "prepare.tokenizer.vocab_size"} in told[
        "changes"
    ]
    assert path.read_bytes().decode() == upgraded_text(OLD, name="")[0].replace("\n", "\r\n")
    with pytest.raises(SystemExit):
        main(["recipe", "upgrade", str(path)])
    assert capsys.readouterr().out == f"{path}: nothing to upgrade\n"


def test_a_recipe_that_cannot_be_changed_safely_is_left_and_told() -> None:
    quoted = '[train]\n"batch_rows" = 4\n'
    with pytest.raises(UserError, match="rename by hand"):
        upgraded_text(quoted, name="a.toml")
    with pytest.raises(ConfigError, match="are the same setting"):
        upgraded_text("[train]\nbatch_rows = 4\nbatch_size = 4\n", name="a.toml")
    with pytest.raises(ConfigError, match="are the same table"):
        upgraded_text("[prepare.substring]\n[prepare.deduplicate.substring]\n", name="a.toml")
    with pytest.raises(ConfigError, match=r"a\.toml:2: not valid TOML"):
        upgraded_text("[train]\nbatch_rows = \n", name="a.toml")


RUNNABLE = 'name = "r"\n[[prepare.sources]]\nname = "a"\npaths = ["x.txt"]\n'


def test_settings_younger_than_hashes_are_left_out_at_their_defaults() -> None:
    """Runs from before them stay trained and evaluated."""
    recipe = parse(Recipe, RUNNABLE, "r.toml").value
    for key, default in ADDED.items():
        table, name = key.split(".")
        settings = plain(getattr(recipe, table))
        if name in settings:
            assert settings[name] == default, f"the default of {key} in config/renames.py"
            assert name not in old_names(settings, table)
        assert name in old_names({**settings, name: "another"}, table)
