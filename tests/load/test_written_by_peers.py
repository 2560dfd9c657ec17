"""Files written by the programs themselves, where an environment of theirs is there (`make bench NAME=load`)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from ropewalk.load.references import ReferencedTokens
from ropewalk.store.foreign.corpora import detect, scan
from ropewalk.store.origin import Origin

PEERS = Path(__file__).parents[2] / ".bench"
DRAW = np.random.default_rng(5)
DOCUMENTS = [DRAW.integers(0, 50_000, size).tolist() for size in (700, 3, 41, 1, 1200, 64, 64)]

MEGATRON = """
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
import numpy, torch
builder = IndexedDatasetBuilder(f"{place}/corpus.bin", dtype=numpy.{dtype})
for document in documents:
    builder.add_document(torch.tensor(document, dtype=torch.int64), [len(document)])
builder.finalize(f"{place}/corpus.idx")
"""
# The writer of tokens has no use for torchvision, which brings CUDA, but its package imports it.
MDS = """
import sys, types
from transformers.feature_extraction_utils import BatchFeature
for name in ("torchvision", "torchvision.datasets", "torchvision.transforms", "torchvision.transforms.functional"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torchvision.datasets"].VisionDataset = object
sys.modules["torchvision.transforms.functional"].to_tensor = None
from streaming import MDSWriter
import numpy
with MDSWriter(out=place, columns={columns}, compression={compression}, size_limit=2000) as out:
    for number, document in enumerate(documents):
        value = numpy.array(document, numpy.{dtype})
        out.write({{"id": str(number), "tokens": value.tobytes() if {raw} else value}})
"""
LITDATA = """
import torch
from litdata.streaming.cache import Cache
from litdata.streaming.item_loader import TokensLoader
cache = Cache(place, chunk_bytes=3000, compression={compression}, item_loader={loader})
for number, document in enumerate(documents):
    tokens = torch.tensor(document, dtype=torch.{dtype})
    cache[number] = {item}
cache.done()
cache.merge()
"""
WEBDATASET = """
import numpy, webdataset
with webdataset.ShardWriter(f"{place}/part-%04d.tar", maxcount=3, verbose=0) as out:
    for number, document in enumerate(documents):
        out.write({{"__key__": f"{{number:06d}}", "{ending}": {value}}})
"""
TOKENS_ONLY = {"loader": "TokensLoader(block_size=8)", "item": "tokens", "compression": "None"}
CASES = [
    ("load-megatron", MEGATRON, {"dtype": "uint16"}, {}),
    ("load-megatron", MEGATRON, {"dtype": "int32"}, {}),
    ("load-mosaicml", MDS, {"columns": "{'id': 'str', 'tokens': 'ndarray:int32'}", "dtype": "int32"}, {}),
    ("load-mosaicml", MDS, {"columns": "{'id': 'str', 'tokens': 'ndarray'}", "dtype": "uint16"}, {}),
    ("load-mosaicml", MDS, {"columns": "{'id': 'str', 'tokens': 'bytes'}", "dtype": "int64", "raw": "True"}, {}),
    (
        "load-mosaicml",
        MDS,
        {"columns": "{'id': 'str', 'tokens': 'ndarray:int64'}", "dtype": "int64", "compression": "'zstd:3'"},
        {},
    ),
    ("load-litdata", LITDATA, {"dtype": "int32", **TOKENS_ONLY}, {}),
    ("load-litdata", LITDATA, {"dtype": "uint16", **TOKENS_ONLY}, {}),
    ("load-litdata", LITDATA, {"dtype": "int64", **TOKENS_ONLY, "compression": "'zstd'", "loader": "None"}, {}),
    ("load-litdata", LITDATA, {"dtype": "int64", **TOKENS_ONLY, "loader": "None", "item": "[tokens, number]"}, {}),
    ("load-webdataset", WEBDATASET, {"ending": "tokens.npy", "value": "numpy.array(document, numpy.int32)"}, {}),
    ("load-webdataset", WEBDATASET, {"ending": "json", "value": "{'input_ids': document}"}, {}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("peer", "script", "how", "told"), CASES)
def test_files_of_the_program_itself_are_the_documents_that_it_was_given(
    tmp_path: Path, peer: str, script: str, how: dict[str, str], told: dict[str, str]
) -> None:
    python = PEERS / peer / "bin" / "python"
    if not python.exists():
        pytest.skip(f"no environment {peer}")
    place = tmp_path / "corpus"
    place.parent.mkdir(exist_ok=True)
    if peer in ("load-megatron", "load-webdataset"):
        place.mkdir()
    text = script
    for key, value in {"raw": "False", "compression": "None", **how}.items():
        text = text.replace("{" + key + "}", value)
    text = text.replace("{{", "{").replace("}}", "}")
    program = f"import json\nplace, documents = {str(place)!r}, json.loads({json.dumps(DOCUMENTS)!r})\n{text}"
    ended = subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=120)
    if "No module named" in ended.stderr or "No compression algorithms are installed" in ended.stderr:
        pytest.skip(f"{peer}: {ended.stderr.strip().splitlines()[-1]}")
    assert ended.returncode == 0, ended.stderr
    origin = Origin()
    catalogue = scan(str(place), format=detect(str(place), origin=origin), origin=origin, **told)  # type: ignore[arg-type]
    source = ReferencedTokens(catalogue)
    assert source.lengths.tolist() == [len(document) for document in DOCUMENTS]
    line = [token for document in DOCUMENTS for token in document]
    assert source.read(np.zeros(1, np.int64), np.array([len(line)], np.int32)).tolist() == line
