"""Base models: what training starts from, checked before anything runs. No torch.

A base is a run (its newest checkpoint), a checkpoint or a Hugging Face directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropewalk.base.errors import DamagedModel, DataError
from ropewalk.base.untrusted import Refused, open_inside
from ropewalk.checkpoint.format import TOKENIZER, identity, read_checkpoint_manifest, resolve_checkpoint
from ropewalk.checkpoint.policy.lease import leased
from ropewalk.checkpoint.read.model_check import advise_on_damage, check_weights
from ropewalk.checkpoint.shard_file import ShardFile
from ropewalk.model.hugging_face.configs import CONFIG
from ropewalk.model.spec import model_values

from ..run_stages import fingerprint

MOST_TOKENS = 2048
"""Maximum default sequence length for a Hugging Face model without learned positions. Such models state the longest
sequence they can read, up to 131,072 tokens, which nobody should train on unasked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Base:
    """What training starts from."""

    place: str
    """As the recipe names it."""
    path: str
    """The checkpoint or directory it resolves to."""
    model: Mapping[str, Any]
    """Its `[model]` settings."""
    sequence_length: int | None
    """Sequence length if the recipe sets none."""
    tokenizer: str
    """Its `tokenizer.json`."""
    chat: str = ""
    """Name of its chat template, empty if it has none."""
    taken: Mapping[str, tuple[Any, str]] | None = None
    """Other values that a run took over from the base, with their origins, if the run remembers them and the base
    itself was not read; None if it was read."""


def open_base(place: str) -> Base:
    """The base at `place`, checked except for the bytes of its weights; raises DataError if it cannot be used."""
    if not Path(place).exists():
        remedy = "name a run, a checkpoint or a local Hugging Face directory; nothing is fetched from a hub"
        raise DataError(f"{place}: no such folder; {remedy}")
    return _open_directory(place) if _is_directory(place) else _open_checkpoint(place)


def can_grow(base: Base) -> bool:
    """Whether `ropewalk model grow` accepts it."""
    return not _is_directory(base.path)


def identity_of(place: str) -> str:
    """A hash that identifies the weights at `place`; empty if there are none."""
    if _is_directory(place):
        # Sizes and times identify the files without reading gigabytes.
        files = sorted(Path(place).glob("*.safetensors"))
        return fingerprint([(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files])
    try:
        return identity(read_checkpoint_manifest(resolve_checkpoint(Path(place))))
    except DataError:
        return ""


@contextlib.contextmanager
def kept(places: Iterable[str]) -> Iterator[None]:
    """Protects the checkpoints among `places` from deletion within the block."""
    with contextlib.ExitStack() as leases:
        for place in places:
            if place and not _is_directory(place):
                with contextlib.suppress(DataError):  # reported by the code that needs it
                    leases.enter_context(leased(Path(place)))
        yield


def _is_directory(place: str) -> bool:
    """Whether this is a Hugging Face directory."""
    return (Path(place) / CONFIG).is_file()


def _open_checkpoint(place: str) -> Base:
    path = resolve_checkpoint(Path(place))
    with advise_on_damage(path):
        manifest = read_checkpoint_manifest(path)
        spec = check_weights(manifest, path)
        for name, entry in manifest.files.items():
            payload = ShardFile(path / name, entry)  # checks existence and size
            if name == TOKENIZER:
                payload.read(0, entry.bytes)
    return Base(
        place=place,
        path=str(path),
        model=model_values(spec),
        sequence_length=spec.sequence_length,
        tokenizer=str(path / TOKENIZER),
        chat=manifest.chat,
    )


def _open_directory(place: str) -> Base:
    import safetensors

    from ropewalk.model.hugging_face.description import describe_directory, link_roots, weight_files

    path = Path(place)
    described = describe_directory(path)
    for name in weight_files(path).names:
        try:
            with open(open_inside(path / name, roots=link_roots(path)), "rb"):
                safetensors.safe_open(path / name, framework="np")
        except FileNotFoundError:
            raise DamagedModel(f"{path / name}: this file of weights is missing; copy the whole directory") from None
        except (Refused, OSError, ValueError, safetensors.SafetensorError) as error:
            raise DamagedModel(f"{path / name}: this file of weights is damaged: {error}; copy it again") from None
    if not (path / TOKENIZER).is_file():
        remedy = "write it with `AutoTokenizer.from_pretrained(...).save_pretrained`"
        raise DamagedModel(f"{path / TOKENIZER}: no such tokenizer; {remedy}")
    longest = described.spec.sequence_length
    return Base(
        place=place,
        path=place,
        model=model_values(described.spec),
        sequence_length=longest if described.spec.learned_positions else min(longest, MOST_TOKENS),
        tokenizer=str(path / TOKENIZER),
        chat=described.chat,
    )
