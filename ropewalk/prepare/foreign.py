"""Tokenizers of strangers: loaded within limits, and tried in a process of their own before any text is encoded here.

A `tokenizer.json` may hold regular expressions that take exponential time, replacements that make a text a thousand
times longer, and tables that make the library panic. One that is made of parts with known cost alone, as ours are, is
loaded at once. Any other first encodes and decodes some texts in a child process with a limit of processor time and
memory. Nothing in such a file is executed; chat templates of others are never run, only compared with ours.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ropewalk.base.errors import DamagedTokenizer
from ropewalk.base.untrusted import Refused, parse_json, read_inside

from .tokenizer import MOST_BYTES, end_of_text, vocabulary_size

CPU_S = 20
"""Processor seconds for the trial; tokenizers in use take about one."""
MEMORY_BYTES = 3 << 30
_WALL_S = 600.0
"""When the child process does not get to use its processor time: it is stopped, not the tokenizer's fault."""

_KNOWN_PARTS = {
    None,
    *("ByteLevel", "Whitespace", "WhitespaceSplit", "Digits", "Punctuation", "BertPreTokenizer", "UnicodeScripts"),
    *("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Sequence"),
    *("BPEDecoder", "WordPiece", "Fuse", "ByteFallback"),
}
"""Steps whose time and result grow with the text and nothing else."""

TEXTS = tuple(
    part * (2000 // len(part)) + "!"
    for part in ("a", " ", "0", "aA", "a1", "\n", "'s", "-", "é", "水", "ab ", "a'", "0,", "\t ", "x\n", "Aa0-_ ")
)
"""Repeats, which make a regular expression with nested repeats try all ways of cutting them."""


def load_foreign(content: bytes, *, path: Path, vocabulary: int | None = None, texts: Sequence[str] = ()) -> Tokenizer:
    """The tokenizer in `content`, ready to encode: text that spells a special token stays text. DamagedTokenizer, which
    names `path`, unless it loads, knows an end of text and no more than `vocabulary` tokens (None: any number), and has
    encoded some texts and `texts` within the limits above: these then end here too."""
    if len(content) > MOST_BYTES:
        raise DamagedTokenizer(f"{path}: this tokenizer has {len(content)} bytes, at most {MOST_BYTES} are read")
    if not _is_known(content, path=path):
        _try_out(content, (*TEXTS, *texts), path=path)
    tokenizer = _loaded(content, path=path)
    size = vocabulary_size(tokenizer)
    if vocabulary is not None and size > vocabulary:
        raise DamagedTokenizer(
            f"{path}: it has {size} tokens, the model only {vocabulary}; it belongs to another model"
        )
    end_of_text(tokenizer, path=path)
    return tokenizer


def same_meaning(theirs: bytes, ours: bytes, *, path: Path, vocabulary: int | None = None) -> bool:
    """Whether the tokenizer in `theirs`, the file `path`, gives the same token ids as the trusted one in `ours`."""
    if theirs == ours:
        return True
    loaded, own = load_foreign(theirs, path=path, vocabulary=vocabulary), _loaded(ours, path=path)
    return bool(loaded.to_str() == own.to_str())


def try_text(content: bytes, text: str, *, path: Path) -> None:
    """Raises DamagedTokenizer where the tokenizer in `content`, which `load_foreign` has loaded, needs more than the
    limits above for `text`."""
    if not _is_known(content, path=path):
        _try_out(content, (text,), path=path)


@contextlib.contextmanager
def encoding(path: Path) -> Iterator[None]:
    """The tokenizer of `path` is used in this block: where the library panics, that is a DamagedTokenizer."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise DamagedTokenizer(f"{path}: this tokenizer fails on the text: {str(error)[:200]}") from None


def read_foreign(path: Path, *, vocabulary: int, roots: Sequence[Path] = ()) -> Tokenizer:
    """As `load_foreign`, from a file, which may be a link that ends below one of `roots`."""
    try:
        content = read_inside(path, most_bytes=MOST_BYTES, roots=roots)
    except FileNotFoundError:
        raise DamagedTokenizer(
            f"{path}: no such tokenizer; write it with `AutoTokenizer.from_pretrained(...).save_pretrained`"
        ) from None
    except (Refused, OSError) as error:
        raise DamagedTokenizer(f"{path}: this tokenizer cannot be read: {error}") from None
    return load_foreign(content, path=path, vocabulary=vocabulary)


def _loaded(content: bytes, *, path: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(content.decode())
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        if not tokenizer.get_vocab(with_added_tokens=True):
            raise ValueError("it has no tokens")
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # plain Exception, or the PanicException of the library, which is none
        first = str(error).partition("\n")[0][:200]
        raise DamagedTokenizer(
            f"{path}: not a Hugging Face `tokenizer.json`: {first}; save it with `tokenizer.save(path)`"
        ) from None
    return tokenizer


def _is_known(content: bytes, *, path: Path) -> bool:
    """Whether all steps of the tokenizer are of known cost."""
    try:
        tree = parse_json(content)
    except Refused as error:
        raise DamagedTokenizer(f"{path}: not a Hugging Face `tokenizer.json`: {error}") from None
    if not isinstance(tree, dict):
        raise DamagedTokenizer(f"{path}: not a Hugging Face `tokenizer.json`: not an object")
    parts = [part for key in ("normalizer", "pre_tokenizer", "decoder") for part in _parts(tree.get(key), depth=8)]
    model = tree.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    return len(parts) <= 16 and kind in ("BPE", "Unigram", "WordLevel") and all(_is_cheap(part) for part in parts)


def _is_cheap(part: Any) -> bool:
    return part is None or (
        isinstance(part, dict) and isinstance(part.get("type"), str) and part["type"] in _KNOWN_PARTS
    )


def _parts(tree: Any, *, depth: int) -> Iterator[Any]:
    """The steps of a sequence, one by one; what is nested deeper than any sequence comes as what it is not."""
    if not isinstance(tree, dict) or tree.get("type") != "Sequence":
        yield tree
        return
    lists = [tree[key] for key in ("normalizers", "pretokenizers", "decoders") if isinstance(tree.get(key), list)]
    if not depth or not lists:
        yield "too deep"
        return
    for steps in lists:
        for step in steps:
            yield from _parts(step, depth=depth - 1)


def _try_out(content: bytes, texts: Sequence[str], *, path: Path) -> None:
    """Encodes and decodes `texts` in a process whose time and memory are limited."""
    head = json.dumps({"texts": list(texts), "cpu_s": CPU_S, "memory_bytes": MEMORY_BYTES}).encode()
    try:
        ended = subprocess.run(
            [sys.executable, "-P", "-c", _TRIAL],
            input=len(head).to_bytes(8, "little") + head + content,
            capture_output=True,
            timeout=_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise DamagedTokenizer(f"{path}: trying this tokenizer out took longer than {_WALL_S:.0f} s") from None
    if ended.returncode == 0:
        return
    if ended.returncode == _REFUSED:
        why = f"it fails on a text ({ended.stdout.decode(errors='replace').strip()[:200]})"
    else:
        why = f"to encode short texts takes it more than {CPU_S} s of processor time or {MEMORY_BYTES >> 30} GiB"
    raise DamagedTokenizer(
        f"{path}: this tokenizer is not used: {why}; look at the regular expressions and replacements in it"
    )


_REFUSED = 3
_TRIAL = f"""
import json, os, resource, sys
data = sys.stdin.buffer.read()
size = int.from_bytes(data[:8], "little")
head, content = json.loads(data[8 : 8 + size]), data[8 + size :].decode()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
from tokenizers import Tokenizer
spent = int(resource.getrusage(resource.RUSAGE_SELF).ru_utime)
resource.setrlimit(resource.RLIMIT_CPU, (spent + head["cpu_s"], spent + head["cpu_s"] + 1))
resource.setrlimit(resource.RLIMIT_AS, (head["memory_bytes"], head["memory_bytes"]))
try:
    tokenizer = Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    for text in head["texts"]:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.decode(ids)
    for number in range(min(256, tokenizer.get_vocab_size(with_added_tokens=True))):
        tokenizer.decode([number] * 8)
except MemoryError:
    raise
except BaseException as error:
    print(type(error).__name__, str(error).splitlines()[0] if str(error) else "")
    sys.stdout.flush()
    os._exit({_REFUSED})
os._exit(0)
"""
