"""A model as a Hugging Face directory: config, weights, tokenizer. Local files only; nothing is fetched."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import safetensors.torch
import torch
from tokenizers import Tokenizer
from torch import Tensor

from ropewalk.base.errors import DataError
from ropewalk.base.files import committed_file, committed_folder, read_json, write_json
from ropewalk.prepare.chat import TEMPLATES, ChatEncoder, jinja, template_named
from ropewalk.prepare.tokenizer import encode, end_of_text, load, vocabulary_size

from .convert import from_hugging_face, to_hugging_face
from .layouts import CONFIG, NORM_EPSILON, Layout, config_of, describe_config
from .spec import Spec

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG, GENERATION = "tokenizer.json", "tokenizer_config.json", "generation_config.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The model of a directory."""

    layout: Layout
    spec: Spec
    weights: dict[str, Tensor]
    tokenizer: bytes
    end_of_text: str
    chat: str
    """Name of its chat template, where it is one of ours."""


def write_directory(
    folder: Path, *, spec: Spec, weights: Mapping[str, Tensor], tokenizer: bytes, layout: Layout, chat: str = ""
) -> None:
    """Commits the model as `folder`, which `transformers` and tools that read its layouts load; all of it or nothing.

    The tokenizer's file is written as it is: it puts no token before a text. The end of text is named as the first
    token (`bos_token`) too, since a document in training follows one. `chat` names the template of dialogues.
    """
    loaded = Tokenizer.from_buffer(tokenizer)
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
    """The model in `folder`, weights as stored or widened to float32; a DataError says what cannot be imported."""
    if not folder.is_dir():
        raise DataError(f"{folder}: no such directory; nothing is fetched from a hub, name a local one")
    config = read_json(folder / CONFIG, what="Hugging Face config")
    if not isinstance(config, dict):
        raise DataError(f"{folder / CONFIG}: this Hugging Face config is damaged: not an object")
    described = describe_config(config, path=folder / CONFIG)
    tokenizer, end = _read_tokenizer(folder, vocabulary=described.spec.vocabulary)
    tensors = _read_weights(folder)
    if dtype == "float32":
        tensors = {name: tensor.float() for name, tensor in tensors.items()}
    _check_dtypes(folder, tensors)
    same_epsilon = described.norm_epsilon == NORM_EPSILON[described.spec.norm]
    if not same_epsilon and any(tensor.element_size() < 4 for tensor in tensors.values()):
        raise DataError(
            f"{folder}: its norms add {described.norm_epsilon:g}, ours {NORM_EPSILON[described.spec.norm]:g}; the "
            "weights must be rescaled, which half precision would round: widen them with --dtype float32"
        )
    try:
        weights = from_hugging_face(tensors, described.spec, described.layout, norm_epsilon=described.norm_epsilon)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from None
    return Found(
        layout=described.layout,
        spec=described.spec,
        weights=weights,
        tokenizer=tokenizer.to_str(pretty=True).encode(),
        end_of_text=str(tokenizer.id_to_token(end)),
        chat=_read_chat(folder / TOKENIZER_CONFIG),
    )


def _stops(tokenizer: Tokenizer, *, end: int, chat: str) -> int | list[int]:
    """The tokens at which generation stops: the end of text, and what closes an answer where that is another one."""
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
        # Otherwise " ." becomes "." when text is decoded.
        "clean_up_tokenization_spaces": False,
    }


def _read_chat(path: Path) -> str:
    """The name of the chat template in a `tokenizer_config.json`, empty when there is none or it is not ours."""
    described = read_json(path, what="tokenizer config") if path.is_file() else None
    written = described.get("chat_template") if isinstance(described, dict) else None
    return next((name for name in TEMPLATES if written == jinja(name)), "")


def _read_tokenizer(folder: Path, *, vocabulary: int) -> tuple[Tokenizer, int]:
    """The tokenizer and the id of its end of text; truncation and padding are switched off."""
    path = folder / TOKENIZER
    if not path.is_file():
        raise DataError(
            f"{path}: no such tokenizer; write it with `AutoTokenizer.from_pretrained(...).save_pretrained`"
        )
    tokenizer = load(path)
    size = vocabulary_size(tokenizer)
    if size > vocabulary:
        raise DataError(f"{path}: it has {size} tokens, the model only {vocabulary}; it belongs to another model")
    return tokenizer, end_of_text(tokenizer, path=path)


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of one file, or of the files that the index names."""
    if (folder / WEIGHTS).is_file():
        return _read_file(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise DataError(f"{folder}: no {WEIGHTS} and no {INDEX}; other formats (pickled .bin files) are not read")
    index = read_json(folder / INDEX, what="index of weights")
    places: dict[str, str] = index.get("weight_map", {}) if isinstance(index, dict) else {}
    found: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        if Path(file).name != file:
            raise DataError(f"{folder / INDEX}: it names `{file}`, which is not in the same folder")
        found |= _read_file(folder / file)
    missing = sorted(set(places) - set(found))
    if missing or not found:
        raise DataError(f"{folder / INDEX}: tensors named here are in no file: {', '.join(missing[:3]) or 'all'}")
    return found


def _read_file(path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise DataError(f"{path}: this file of weights is missing; copy the whole directory") from None
    except (safetensors.SafetensorError, json.JSONDecodeError) as error:
        raise DataError(f"{path}: this file of weights is damaged: {error}; copy it again") from None


def _check_dtypes(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    known = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    dtypes = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if not dtypes <= set(known):
        raise DataError(f"{folder}: weights of {', '.join(sorted(map(str, dtypes)))} are quantized; not read")
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise DataError(f"{folder}: weights of several types ({names}); make them one with --dtype float32")
