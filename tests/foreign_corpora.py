"""Corpora as other programs write them, written here from the descriptions of their formats."""

from __future__ import annotations

import gzip
import io
import json
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

Documents = list[list[int]]
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(prefix: Path, documents: Documents, *, dtype: str = "uint16", sequences: int = 1) -> str:
    """NAME.bin and NAME.idx; every document in up to `sequences` sequences."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    lengths, boundaries = [], [0]
    for document in documents:
        cuts = np.array_split(np.arange(len(document)), sequences)
        lengths += [len(cut) for cut in cuts]
        boundaries.append(len(lengths))
    width = np.dtype(dtype).itemsize
    Path(f"{prefix}.bin").write_bytes(b"".join(np.array(d, dtype).tobytes() for d in documents))
    pointers, at = [], 0
    for length in lengths:
        pointers.append(at)
        at += length * width
    Path(f"{prefix}.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(boundaries))
        + struct.pack(f"<{len(lengths)}i", *lengths)
        + struct.pack(f"<{len(lengths)}q", *pointers)
        + struct.pack(f"<{len(boundaries)}q", *boundaries)
    )
    return str(prefix)


def mds_array(tokens: list[int], dtype: str, *, named: bool, shaped: bool) -> bytes:
    """An `ndarray` cell; `named` and `shaped`: the encoding says type and shape."""
    codes = {"uint8": 8, "uint16": 16, "uint32": 32, "int32": 33, "int64": 65}
    head = b"" if named else bytes([codes[dtype]])
    if not shaped:
        size = len(tokens)
        log = 0 if size < 256 else 1 if size < 65536 else 2
        head += bytes([1 << 2 | log]) + size.to_bytes(1 << log, "little")
    return head + np.array(tokens, dtype).tobytes()


def write_mds(
    folder: Path,
    documents: Documents,
    *,
    encoding: str = "ndarray:int32",
    dtype: str = "int32",
    compression: str = "",
    shards: int = 2,
) -> str:
    """Shards with the columns `kind` (uint8), `source` (str) and `tokens`."""
    folder.mkdir(parents=True, exist_ok=True)
    names, encodings, sizes = ["kind", "source", "tokens"], ["uint8", "str", encoding], [1, None, None]
    named, shaped = encoding.count(":") >= 1, encoding.count(":") == 2
    if shaped:
        sizes[2] = len(documents[0]) * np.dtype(dtype).itemsize
    listed = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), shards)):
        samples = []
        for document in (documents[n] for n in part):
            source = f"file-{len(document)}".encode()
            cell = (
                np.array(document, dtype).tobytes()
                if encoding == "bytes"
                else mds_array(document, dtype, named=named, shaped=shaped)
            )
            heads = [len(source)] + ([] if shaped else [len(cell)])
            samples.append(struct.pack(f"<{len(heads)}I", *heads) + b"\x07" + source + cell)
        config = json.dumps({"columns": names}).encode()
        at = 4 + 4 * (len(samples) + 1) + len(config)
        offsets = [at]
        for sample in samples:
            at += len(sample)
            offsets.append(at)
        raw = struct.pack(f"<I{len(offsets)}I", len(samples), *offsets) + config + b"".join(samples)
        name = f"shard.{number:05d}.mds"
        pack: dict[str, Callable[[bytes], bytes]] = {
            "zstd": zstandard.ZstdCompressor().compress,
            "gz": gzip.compress,
        }
        packed = {"basename": f"{name}.{compression}", "bytes": 0, "hashes": {}} if compression else None
        (folder / (packed["basename"] if packed else name)).write_bytes(  # type: ignore[operator]
            pack[compression](raw) if compression else raw
        )
        listed.append(
            {
                "version": 2,
                "format": "mds",
                "column_names": names,
                "column_encodings": encodings,
                "column_sizes": sizes,
                "compression": compression or None,
                "samples": len(samples),
                "raw_data": {"basename": name, "bytes": len(raw), "hashes": {}},
                "zip_data": packed,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return str(folder)


def write_litdata(
    folder: Path, documents: Documents, *, code: int = 15, loader: str = "TokensLoader", compression: str = ""
) -> str:
    """Two chunks; `compression` "", "chunk" or "batch"; with another loader than TokensLoader items have two leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    dtype = {13: "int16", 15: "int32", 17: "int64", 20: "uint16"}[code]
    listed = []
    for number, part in enumerate(np.array_split(np.arange(len(documents)), 2)):
        bodies = [np.array(documents[n], dtype).tobytes() for n in part]
        if loader != "TokensLoader":
            bodies = [struct.pack("<II", 5, len(body)) + b"title" + body for body in bodies]
        name = f"chunk-0-{number}.bin"
        if compression == "batch":
            data = _framed(bodies)
        else:
            at = 4 + 4 * (len(bodies) + 1)
            offsets = np.cumsum([at, *map(len, bodies)])
            data = struct.pack(f"<I{len(offsets)}I", len(bodies), *offsets) + b"".join(bodies)
        if compression == "chunk":
            name, data = f"chunk-0-{number}.zstd.bin", zstandard.ZstdCompressor().compress(data)
        (folder / name).write_bytes(data)
        tokens = sum(len(documents[n]) for n in part)
        listed.append({"chunk_bytes": len(data), "chunk_size": len(bodies), "dim": tokens, "filename": name})
    formats = [f"no_header_tensor:{code}"] if loader == "TokensLoader" else ["str", f"no_header_tensor:{code}"]
    config = {
        "compression": "zstd" if compression else None,
        "compression_level": "batch" if compression == "batch" else None,
        "data_format": formats,
        "item_loader": loader,
        "encryption": None,
    }
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": config}))
    return str(folder)


def _framed(bodies: list[bytes], rows: int = 3) -> bytes:
    frames = [bodies[start : start + rows] for start in range(0, len(bodies), rows)]
    packed = [zstandard.ZstdCompressor().compress(b"".join(frame)) for frame in frames]
    head = 24 + 4 * (len(bodies) + 1) + 24 * len(frames)
    table, at, first = b"", head, 0
    for frame, data in zip(frames, packed, strict=True):
        table += struct.pack("<IIQII", first, len(frame), at, len(data), sum(map(len, frame)))
        at, first = at + len(data), first + len(frame)
    prefix = struct.pack("<8sHHIII", b"LDFZ01\0\0", 1, 0, len(bodies), rows, len(frames))
    offsets = np.cumsum([0, *map(len, bodies)]).astype("<u4").tobytes()
    return prefix + offsets + table + b"".join(packed)


def write_webdataset(
    folder: Path, documents: Documents, *, ending: str = "tokens.npy", dtype: str = "int32", packed: bool = False
) -> str:
    """Two archives of samples with tokens and a text beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(documents)), 2)):
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as archive:
            for place in part:
                for name, data in (("txt", b"beside"), (ending, _cell(documents[place], ending, dtype))):
                    member = tarfile.TarInfo(f"set/{place:06d}.{name}")
                    member.size = len(data)
                    archive.addfile(member, io.BytesIO(data))
        content = gzip.compress(stream.getvalue()) if packed else stream.getvalue()
        (folder / f"part-{number:04d}.tar{'.gz' if packed else ''}").write_bytes(content)
    return str(folder)


def _cell(document: list[int], ending: str, dtype: str) -> bytes:
    if ending.endswith("npy"):
        stream = io.BytesIO()
        np.save(stream, np.array(document, dtype))
        return stream.getvalue()
    if ending.endswith("json"):
        return json.dumps({"input_ids": document, "id": 3}).encode()
    return np.array(document, dtype).tobytes()


def write_parquet(folder: Path, documents: Documents, *, dtype: str = "int32", compression: str = "zstd") -> str:
    """Two files of several row groups with the columns `text` and `input_ids`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(np.array_split(np.arange(len(documents)), 2)):
        rows = [documents[place] for place in part]
        columns: dict[str, Any] = {
            "text": [str(len(row)) for row in rows],
            "input_ids": pa.array(rows, pa.list_(pa.from_numpy_dtype(np.dtype(dtype)))),
        }
        pq.write_table(pa.table(columns), folder / f"part-{number}.parquet", row_group_size=3, compression=compression)
    return str(folder)
