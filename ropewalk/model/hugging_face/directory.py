"""Reads and writes a model as a Hugging Face directory: config, weights, tokenizer. Local files only, no download."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ropewalk.base.errors import DamagedModel
from ropewalk.base.files import committed_file, committed_folder, write_json
from ropewalk.base.untrusted import Refused, open_inside
from ropewalk.prepare.chat import ChatEncoder, jinja, template_named
from ropewalk.prepare.foreign import load_foreign, read_foreign
from ropewalk.prepare.tokenizer import encode, end_of_text

from ..spec import Spec
from .configs import CONFIG, NORM_EPSILON, Layout, config_of
from .convert import Imported, to_hugging_face
from .description import TOKENIZER, TOKENIZER_CONFIG, describe_directory, link_roots, weight_files

WEIGHTS = "model.safetensors"
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""Supported dtypes of weights, by their safetensors names."""
GENERATION = "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The model in a directory."""

    layout: Layout
    spec: Spec
    weights: Imported
    """Read lazily."""
    tokenizer: bytes
    end_of_text: str
    chat: str
    """Name of its chat template, if it is one of ours."""


def write_directory(
    folder: Path, *, spec: Spec, weights: Mapping[str, Tensor], tokenizer: bytes, layout: Layout, chat: str = ""
) -> None:
    """Atomically writes the model to `folder`, loadable by `transformers` and tools that read its layouts.

    The tokenizer's file is unchanged: it adds no token before a text. The end of text is also `bos_token`, since in
    training a document follows one. `chat` names the dialogue template.
    """
    loaded = load_foreign(tokenizer, path=Path(TOKENIZER), vocabulary=spec.vocabulary)
    end = end_of_text(loaded, path=Path(TOKENIZER))
    dtype = str(weights["embedding.weight"].dtype).removeprefix("torch.")
    data = safetensors.torch.save(to_hugging_face(weights, spec, layout), metadata={"format": "pt"})
    with committed_folder(folder) as partial:
        write_json(partial / CONFIG, config_of(spec, layout, end_of_text=end, dtype=dtype))
        write_json(partial / GENERATION, {"bos_token_id": end, "eos_token_id": _stops(loaded, end=end, chat=chat)})
        described = _tokenizer_config(loaded, end=end, length=spec.sequence_length, chat=chat)
        write_json(partial / TOKENIZER_CONFIG, described)
        for name, content in ((TOKENIZER, tokenizer), (WEIGHTS, data)):
            with committed_file(partial / name) as file:
                file.write(content)


def read_directory(folder: Path, *, dtype: Literal["keep", "float32"] = "keep") -> Found:
    """The model in `folder`, weights as stored or widened to float32; a DataError says what cannot be imported. Weights
    are read lazily, whole or in part."""
    described = describe_directory(folder)
    tokenizer, end = _read_tokenizer(folder, vocabulary=described.spec.vocabulary)
    tensors = _open_weights(folder, widens=dtype == "float32")
    _check_dtypes(folder, tensors, mixed=dtype == "float32")
    same_epsilon = described.norm_epsilon == NORM_EPSILON[described.spec.norm]
    if not same_epsilon and dtype == "keep" and any(tensor.dtype in ("BF16", "F16") for tensor in tensors.values()):
        raise DamagedModel(
            f"{folder}: its norms add {described.norm_epsilon:g}, ours {NORM_EPSILON[described.spec.norm]:g}; the "
            "weights must be rescaled, which half precision would round: widen them with --dtype float32"
        )
    try:
        weights = Imported(tensors, described.spec, described.layout, norm_epsilon=described.norm_epsilon)
    except DamagedModel as error:
        raise DamagedModel(f"{folder}: {error}") from None
    return Found(
        layout=described.layout,
        spec=described.spec,
        weights=weights,
        tokenizer=tokenizer.to_str(pretty=True).encode(),
        end_of_text=str(tokenizer.id_to_token(end)),
        chat=described.chat,
    )


def _stops(tokenizer: Tokenizer, *, end: int, chat: str) -> int | list[int]:
    """Stop tokens of generation: the end of text, and the end of an answer if different."""
    if not chat:
        return end
    encoder = ChatEncoder(
        template_named(chat), tokenizer, lambda texts: encode(tokenizer, texts, dtype="uint32"), end=end
    )
    return [end, *encoder.closing] if len(encoder.closing) == 1 and encoder.closing != [end] else end


def _tokenizer_config(tokenizer: Tokenizer, *, end: int, length: int, chat: str) -> dict[str, Any]:
    token = tokenizer.id_to_token(end)
    return {
        **({"chat_template": jinja(chat)} if chat else {}),
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token,
        "eos_token": token,
        "model_max_length": length,
        # Otherwise decoding turns " ." into ".".
        "clean_up_tokenization_spaces": False,
    }


def _read_tokenizer(folder: Path, *, vocabulary: int) -> tuple[Tokenizer, int]:
    """The tokenizer and the id of its end of text; disables truncation and padding."""
    path = folder / TOKENIZER
    tokenizer = read_foreign(path, vocabulary=vocabulary, roots=link_roots(folder))
    return tokenizer, end_of_text(tokenizer, path=path)


class _Stored:
    """A tensor in a safetensors file."""

    def __init__(self, file: Any, name: str, *, widens: bool) -> None:
        self._file, self._name, self._widens = file, name, widens
        about = file.get_slice(name)
        self.shape = tuple(about.get_shape())
        self.dtype: str = about.get_dtype()
        """The format's name for the dtype, such as `BF16`."""

    def read(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        if offset == (0,) * len(shape) and shape == self.shape:
            found: Tensor = self._file.get_tensor(self._name)
        elif 0 in shape:
            found = torch.empty(shape, dtype=DTYPES[self.dtype])
        else:
            places = tuple(slice(begin, begin + side) for begin, side in zip(offset, shape, strict=True))
            found = self._file.get_slice(self._name)[places]
        return found.float() if self._widens else found


def _open_weights(folder: Path, *, widens: bool) -> dict[str, _Stored]:
    """All tensors of a single file, or of the files named by the index."""
    files = weight_files(folder)
    found: dict[str, _Stored] = {}
    for file in files.names:
        found |= _open_file(folder / file, widens=widens)
    missing = sorted(files.tensors - set(found))
    if missing:
        raise DamagedModel(f"{files.named_by}: tensors named here are in no file: {', '.join(missing[:3])}")
    return found


def _open_file(path: Path, *, widens: bool) -> dict[str, _Stored]:
    try:
        # The library opens any path, and blocks forever on a FIFO.
        os.close(open_inside(path, roots=link_roots(path.parent)))
        file = safetensors.safe_open(path, framework="pt")
        return {name: _Stored(file, name, widens=widens) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except FileNotFoundError:
        raise DamagedModel(f"{path}: this file of weights is missing; copy the whole directory") from None
    except Refused as error:
        raise DamagedModel(f"{path}: this file of weights is not read: {error}") from None
    except (safetensors.SafetensorError, ValueError, OSError) as error:
        raise DamagedModel(f"{path}: this file of weights is damaged: {error}; copy it again") from None


def _check_dtypes(folder: Path, tensors: Mapping[str, _Stored], *, mixed: bool) -> None:
    """Refuses quantized weights, and different dtypes unless `mixed`."""
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.dtype.lstrip("B").startswith("F")}
    names = ", ".join(sorted(str(DTYPES.get(dtype, dtype)) for dtype in dtypes))
    if not dtypes <= set(DTYPES):
        raise DamagedModel(f"{folder}: weights of {names} are quantized; not read")
    if len(dtypes) > 1 and not mixed:
        raise DamagedModel(f"{folder}: weights of several types ({names}); make them one with --dtype float32")
