"""Whole files to look through while a corpus is catalogued: mapped where they are local, read where they are not."""

from __future__ import annotations

import numpy as np

from ropewalk.store.origin import Origin, is_url, local_path

from .unpack import Bytes


def file_bytes(file: str, origin: Origin) -> Bytes:
    """The bytes of a file; of a local one only the pages that are touched are read."""
    if is_url(file) or origin.size(file) == 0:
        return np.frombuffer(origin.read(file), np.uint8)
    return np.memmap(local_path(file), dtype=np.uint8, mode="r")
