"""Converts checkpoints: `model export | import | grow`. Nothing is trained."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.format import resolve_checkpoint
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.model_check import advise_on_damage
from ropewalk.config.read import parse
from ropewalk.model.growth.larger import Growth, larger
from ropewalk.model.hugging_face.configs import Layout, choose_layout
from ropewalk.model.spec import Spec
from ropewalk.model.trainable import with_lora

from .plan_recipe import needs_torch
from .run_stages import Result


def export_model(checkpoint: Path, folder: Path, *, layout: Layout | Literal["auto"] = "auto") -> Result:
    """Writes a checkpoint (of a run: its newest) as a Hugging Face directory, adapters merged; where and in which
    layout."""
    resolve_checkpoint(checkpoint)
    refuse_to_overwrite(folder)
    directory = needs_torch("ropewalk.model.hugging_face.directory", "exporting a model")
    # Resolved only now: importing torch takes seconds, in which a run may prune.
    path, state = _load(checkpoint)
    chosen = choose_layout(state.spec, layout)
    directory.write_directory(
        folder, spec=state.spec, weights=state.model, tokenizer=state.tokenizer, layout=chosen, chat=state.chat
    )
    return {
        "folder": str(folder),
        "layout": chosen,
        "checkpoint": str(path),
        "step": state.step,
        "parameters": with_lora(state.spec, None).parameters(),
        "merged_rank": state.spec.lora_rank,
    }


def import_model(folder: Path, checkpoints: Path, *, dtype: Literal["keep", "float32"] = "keep") -> Result:
    """Writes the model of a local Hugging Face directory as a checkpoint of step 0 below `checkpoints`."""
    refuse_to_overwrite(checkpoints)
    directory = needs_torch("ropewalk.model.hugging_face.directory", "importing a model")
    found = directory.read_directory(folder, dtype=dtype)
    path = _save(checkpoints, spec=found.spec, weights=found.weights, tokenizer=found.tokenizer, chat=found.chat)
    return {
        "checkpoint": str(path),
        "layout": found.layout,
        "dtype": str(found.weights["embedding.weight"].dtype).removeprefix("torch."),
        "parameters": found.spec.parameters(),
        "end_of_text": found.end_of_text,
    }


def grow_model(
    checkpoint: Path,
    checkpoints: Path,
    overrides: Sequence[str],
    *,
    new_blocks: Literal["identity", "stack"] = "identity",
    noise: float = 0.0,
    seed: int = 0,
) -> Result:
    """Writes a larger model that starts as `checkpoint` as one of step 0 below `checkpoints`.

    `overrides` are sizes, as `model.layers=8`; adapters are merged first; the result says whether logits are preserved.
    """
    resolve_checkpoint(checkpoint)
    sizes = parse(Growth, "", "", overrides).value.model
    refuse_to_overwrite(checkpoints)
    growth = needs_torch("ropewalk.model.growth.growth", "growing a model")
    path, state = _load(checkpoint)
    spec = larger(state.spec, sizes)
    grown = growth.grow(state.model, state.spec, spec, new_blocks=new_blocks, noise=noise, seed=seed)
    made = _save(checkpoints, spec=spec, weights=grown.weights, tokenizer=state.tokenizer, chat=state.chat)
    names = ("layers", "width", "heads", "kv_heads", "mlp_width")
    return {
        "checkpoint": str(made),
        "from": str(path),
        "preserving": grown.preserving,
        "parameters_before": with_lora(state.spec, None).parameters(),
        "parameters": spec.parameters(),
        "sizes": {name: [getattr(state.spec, name), getattr(spec, name)] for name in names},
    }


def _load(checkpoint: Path) -> tuple[Path, Any]:
    """Resolves and reads a checkpoint."""
    reading = needs_torch("ropewalk.checkpoint.read.load", "reading a checkpoint")
    with leased(checkpoint) as path, advise_on_damage(path):
        return path, reading.load_weights(path)


def _save(folder: Path, *, spec: Spec, weights: Any, tokenizer: bytes, chat: str) -> Path:
    """Writes a checkpoint of step 0: no optimizer state, no position in the data."""
    writing = needs_torch("ropewalk.checkpoint.write.save", "writing a checkpoint")
    state = writing.State(
        step=0, tokens=0, seed=0, spec=spec, data={}, model=weights, optimizer={}, tokenizer=tokenizer, chat=chat
    )
    path: Path = writing.save(folder, state)
    return path


def refuse_to_overwrite(folder: Path) -> None:
    """Raises UserError if `folder` is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: exists; name a folder that does not, or move this one away")
