"""Stage results that no longer serve: counted, deleted on request, and never those that the data was made from."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from ropewalk.base.errors import DataError, UserError
from ropewalk.prepare.config import Near, Prepare, Substring, Tokenizer
from ropewalk.prepare.pipeline import prepare
from ropewalk.prepare.prune import USED, prune
from ropewalk.prepare.stages import sharing


def files(stages: Path) -> set[Path]:
    return {path for stage in stages.iterdir() if stage.is_dir() for path in stage.rglob("*") if path.is_file()}


def with_everything(settings: Prepare) -> Prepare:
    return dataclasses.replace(
        settings,
        deduplicate=dataclasses.replace(
            settings.deduplicate,
            lines=True,
            near=Near(shingle_words=3),
            substring=Substring(action="remove", length=30),
        ),
    )


def test_what_earlier_settings_left_goes_and_nothing_that_the_data_was_made_from(settings: Prepare) -> None:
    settings = with_everything(settings)
    stages = Path(settings.folder) / "stages"
    made = prepare(settings, seed=1)
    needed = files(stages)
    prepare(dataclasses.replace(settings, tokenizer=Tokenizer(vocab_size=290)), seed=1)
    left_over = files(stages) - needed
    listed = {path for path in left_over if path.parent.name == USED}
    left_over -= listed
    needed |= listed
    assert left_over
    counted = prune(stages, made.folder.name, dry_run=True)
    assert files(stages) == needed | left_over
    assert (counted.files, counted.bytes) == (len(left_over), sum(path.stat().st_size for path in left_over))
    assert (counted.kept_files, counted.kept_bytes) == (len(needed), sum(path.stat().st_size for path in needed))
    assert prune(stages, made.folder.name) == counted
    assert files(stages) == needed
    assert prune(stages, made.folder.name).files == 0


def test_after_a_prune_the_same_data_is_made_from_what_was_kept(settings: Prepare, tree, monkeypatch) -> None:
    settings = with_everything(settings)
    made = prepare(settings, seed=1)
    expected = tree(made.folder)
    prepare(dataclasses.replace(settings, filter=dataclasses.replace(settings.filter, min_characters=325)), seed=1)
    prune(Path(settings.folder) / "stages", made.folder.name)
    (made.folder / "manifest.json").unlink()
    monkeypatch.setattr("ropewalk.prepare.screen.read_records", None)
    monkeypatch.setattr("ropewalk.prepare.build.encode_chunk", None)
    again = prepare(settings, seed=1)
    assert not again.reused
    assert tree(again.folder) == expected


def test_stages_in_use_are_left_alone(settings: Prepare) -> None:
    made = prepare(settings, seed=1)
    stages = Path(settings.folder) / "stages"
    with sharing(stages), pytest.raises(UserError, match="another process"):
        prune(stages, made.folder.name)


def test_data_that_does_not_say_what_it_was_made_from_is_refused_with_a_remedy(settings: Prepare) -> None:
    made = prepare(settings, seed=1)
    listed = Path(settings.folder) / "stages" / USED / f"{made.folder.name}.json"
    assert json.loads(listed.read_text())["stages"]
    listed.unlink()
    with pytest.raises(DataError, match="made again when it is needed"):
        prune(Path(settings.folder) / "stages", made.folder.name)
