"""Verbs about prepared data: `prepare explain | what-if | report | prune`. They prepare it first if needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ropewalk.base.errors import UserError
from ropewalk.base.progress import Progress, Silent
from ropewalk.config.read import Resolved
from ropewalk.monitor.report.preparation import write_page
from ropewalk.prepare.ledger import Story
from ropewalk.prepare.ledger import explain as explain_document
from ropewalk.prepare.pipeline import Prepared
from ropewalk.prepare.pipeline import prepare as prepare_data
from ropewalk.prepare.prune import Pruned, prune
from ropewalk.prepare.stages import FOLDER as STAGES
from ropewalk.prepare.summary import write_summary
from ropewalk.prepare.what_if import WhatIf
from ropewalk.prepare.what_if import what_if as compare
from ropewalk.store.manifest import read_manifest

from .preflight import check_outputs
from .run_or_recipe import Given, RecipeLike, given, recipe_words, resolve_recipe

_SHORT, _FULL = "filter.", "prepare.filter."


def explain(
    recipe: RecipeLike, document: str, overrides: Sequence[str] = (), *, progress: Progress | None = None
) -> Story:
    """The outcome of one document of the recipe's corpus."""
    meant = given(recipe, overrides)
    folder = _prepared(meant, progress).folder
    return explain_document(folder, document, sources=meant.resolved.value.prepare.sources)


def what_if(
    recipe: RecipeLike, changes: Sequence[str], overrides: Sequence[str] = (), *, progress: Progress | None = None
) -> WhatIf:
    """Documents that other thresholds (`filter.min_characters=100`) would keep or remove, from the statistics alone."""
    wrong = [change for change in changes if not change.startswith((_SHORT, _FULL))]
    if wrong or not changes:
        others = [*wrong, *overrides]
        told = f"`{others[0]}` is none of them" if others else "name at least one"
        raise UserError(f"what-if changes settings of the filter, as filter.min_characters=100; {told}")
    if isinstance(recipe, Resolved):
        raise UserError("what-if changes settings of a recipe file; give its path")
    full = [change if change.startswith(_FULL) else f"prepare.{change}" for change in changes]
    then = resolve_recipe(recipe, [*overrides, *full])
    now = given(recipe, overrides)
    return compare(_prepared(now, progress).folder, now.resolved.value.prepare, then.value.prepare)


def prepare_report(recipe: RecipeLike, overrides: Sequence[str] = (), *, progress: Progress | None = None) -> Path:
    """Draws `report.html` beside the prepared data of the recipe."""
    meant = given(recipe, overrides)
    folder = _prepared(meant, progress).folder
    write_summary(folder, meant.resolved.value.prepare, recipe=recipe_words(meant.resolved))
    return write_page(folder)


def prune_stages(
    recipe: RecipeLike, overrides: Sequence[str] = (), *, dry_run: bool = False, progress: Progress | None = None
) -> Pruned:
    """Deletes results of prepare stages that the recipe's data does not need; with `dry_run` only counts them."""
    folder = _prepared(given(recipe, overrides), progress).folder
    return prune(folder.parent / STAGES, folder.name, dry_run=dry_run)


def _prepared(meant: Given, progress: Progress | None) -> Prepared:
    meant.check_inputs()
    recipe = meant.resolved.value
    if recipe.load.corpus:
        raise UserError("this recipe trains on an existing corpus (`load.corpus`): no document was prepared")
    if meant.prepared:
        return Prepared(folder=meant.prepared, manifest=read_manifest(meant.prepared), reused=True)
    check_outputs(meant.resolved)
    return prepare_data(
        recipe.prepare, seed=recipe.seed, progress=progress or Silent(), recipe=recipe_words(meant.resolved)
    )
