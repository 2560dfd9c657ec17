"""Reads the shape, chat template and weight file names of a Hugging Face directory. No torch.

A directory may be untrusted: every file is read within limits (`base/untrusted.py`).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedModel
from ropewalk.base.untrusted import Refused, parse_json, read_inside
from ropewalk.prepare.chat import TEMPLATES, jinja

from ..spec import Spec
from .configs import CONFIG, Layout, describe_config

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
_JSON_BYTES = 64 << 20
"""Maximum size of a config or index; an index of a hundred thousand tensors has 10 MB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """A directory's model, before its weights and tokenizer are read."""

    layout: Layout
    spec: Spec
    norm_epsilon: float
    """Epsilon of the norms these weights were trained with."""
    chat: str
    """Name of its chat template, if it is one of ours."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightFiles:
    """The weight files of a directory."""

    names: tuple[str, ...]
    tensors: Set[str]
    """Files named by the index; empty without an index."""
    named_by: Path
    """The index, or the only file."""


def describe_directory(folder: Path) -> Description:
    """Reads the description of `folder`; a DamagedModel says what cannot be imported."""
    if not folder.is_dir():
        raise DamagedModel(f"{folder}: no such directory; nothing is fetched from a hub, name a local one")
    config = _read_json(folder / CONFIG, what="Hugging Face config")
    described = describe_config(config, path=folder / CONFIG)
    return Description(
        layout=described.layout,
        spec=described.spec,
        norm_epsilon=described.norm_epsilon,
        chat=_chat(folder / TOKENIZER_CONFIG),
    )


def weight_files(folder: Path) -> WeightFiles:
    """The single weight file, or the files named by the index; a DamagedModel if there is neither."""
    if (folder / WEIGHTS).is_file():
        return WeightFiles(names=(WEIGHTS,), tensors=frozenset(), named_by=folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise DamagedModel(f"{folder}: no {WEIGHTS} and no {INDEX}; other formats (pickled .bin files) are not read")
    index = _read_json(folder / INDEX, what="index of weights")
    places: Any = index.get("weight_map", {})
    if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        raise DamagedModel(f"{folder / INDEX}: its `weight_map` is not an object of names of files")
    if not places:
        raise DamagedModel(f"{folder / INDEX}: its `weight_map` is empty; copy the whole directory")
    for file in set(places.values()):
        if Path(file).name != file or not file.isprintable() or len(file) > 255:
            raise DamagedModel(f"{folder / INDEX}: it names `{file}`, which is not in the same folder")
    return WeightFiles(names=tuple(sorted(set(places.values()))), tensors=frozenset(places), named_by=folder / INDEX)


def link_roots(folder: Path) -> list[Path]:
    """Allowed targets of symlinks: Hugging Face's cache stores `snapshots/ID/` as links to `blobs/`."""
    place = folder.resolve()
    return [place.parents[1] / "blobs"] if len(place.parents) > 1 and place.parent.name == "snapshots" else []


def _chat(path: Path) -> str:
    """The name of the chat template in a `tokenizer_config.json`; empty if missing or not ours."""
    described = _read_json(path, what="tokenizer config") if path.is_file() else {}
    written = described.get("chat_template")
    return next((name for name in TEMPLATES if written == jinja(name)), "")


def _read_json(path: Path, *, what: str) -> dict[str, Any]:
    """Reads the object in a small, untrusted JSON file."""
    try:
        tree = parse_json(read_inside(path, most_bytes=_JSON_BYTES, roots=link_roots(path.parent)))
    except FileNotFoundError:
        raise DamagedModel(f"{path}: no such {what}") from None
    except (Refused, OSError) as error:
        raise DamagedModel(f"{path}: this {what} is damaged: {error}") from None
    if not isinstance(tree, dict):
        raise DamagedModel(f"{path}: this {what} is damaged: not an object")
    return tree
