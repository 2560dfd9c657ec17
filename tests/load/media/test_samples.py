"""Where samples lie: folders, tars, shards, behind paths and URLs."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from ropewalk.base.errors import DataError
from ropewalk.load.media.samples import Samples, open_samples
from ropewalk.store.blobs import Blob, write_arrays, write_blobs
from ropewalk.store.origin import Origin
from ropewalk.store.shards import document_key

from .pictures import encoded, picture


def contents(samples: Samples) -> dict[str, tuple[int, bytes]]:
    """Label and bytes by name."""
    found = {}
    for index in range(len(samples)):
        item = samples.item(index)
        data = samples.encoded(index, Origin().fetch([item])[0])
        found[item.name] = samples.label(index), bytes(data)
        assert samples.keys[index] == document_key(item.name)
    return found


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def test_a_folder_a_class(tmp_path: Path) -> None:
    files = {f"{kind}/{n}.{ending}": f"{kind}{n}".encode() for kind in "ba" for n, ending in ((1, "jpg"), (2, "PNG"))}
    for name, data in {**files, "a/notes.txt": b"no picture"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    samples = open_samples(str(tmp_path))
    assert list(samples.classes) == ["a", "b"]
    assert contents(samples) == {name: ("ab".index(name[0]), data) for name, data in files.items()}


def test_pictures_without_folders_have_no_label(tmp_path: Path) -> None:
    (tmp_path / "x.jpg").write_bytes(b"1")
    assert contents(open_samples(str(tmp_path))) == {"x.jpg": (-1, b"1")}
    assert contents(open_samples(str(tmp_path / "x.jpg"))) == {"x.jpg": (-1, b"1")}


def test_tars_of_webdataset_with_classes_and_long_names(tmp_path: Path) -> None:
    deep = "/".join(["a_rather_long_folder_name"] * 6)
    write_tar(tmp_path / "train-0.tar", {"7.jpg": b"seven", "7.cls": b"70", "8.cls": b"80", "8.jpg": b"eight"})
    write_tar(tmp_path / "train-1.tar", {f"{deep}/9.left.png": b"nine", f"{deep}/9.json": b"{}"})
    assert contents(open_samples(str(tmp_path))) == {
        "train-0.tar/7.jpg": (70, b"seven"),
        "train-0.tar/8.jpg": (80, b"eight"),
        f"train-1.tar/{deep}/9.left.png": (-1, b"nine"),
    }


def test_a_class_that_is_no_number_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "t.tar", {"7.jpg": b"", "7.cls": b"dog"})
    with pytest.raises(DataError, match=r"t\.tar: 7\.cls: a class is a whole number, not b'dog'"):
        open_samples(str(tmp_path))


@pytest.mark.parametrize("compression", ["off", "zstd"])
def test_shards_with_labels_in_their_notes(tmp_path: Path, compression: str) -> None:
    pictures = [encoded(picture(n)) for n in range(5)]
    for number, part in enumerate((range(3), range(3, 5))):
        notes = [None, 11, {"label": 12}, {"caption": "a"}, True]
        blobs = [Blob(f"p{n}", pictures[n], "image/jpeg", notes[n]) for n in part]
        write_blobs(tmp_path / f"{number}.blobs", blobs, compression=compression)  # type: ignore[arg-type]
    labels = [-1, 11, 12, -1, -1]
    expected = {f"p{n}": (labels[n], pictures[n]) for n in range(5)}
    assert contents(open_samples(str(tmp_path))) == expected


def test_a_shard_of_arrays_holds_no_pictures(tmp_path: Path) -> None:
    write_arrays(tmp_path / "a.blobs", [Blob("one", np.zeros(3, np.uint8))], dtype="uint8")
    with pytest.raises(DataError, match=r"a\.blobs: this shard holds arrays, not pictures"):
        open_samples(str(tmp_path))


def test_a_folder_behind_a_url(tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.pipe("/samples/a/1.jpg", b"one")
    memory.pipe("/samples/b/2.jpg", b"two")
    assert contents(open_samples("memory://samples")) == {"a/1.jpg": (0, b"one"), "b/2.jpg": (1, b"two")}
    assert contents(open_samples("memory://samples/a/1.jpg")) == {"1.jpg": (-1, b"one")}


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_without_samples_is_an_error(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(DataError, match=r"no samples found; it should be or hold files that end in \.jpg"):
        open_samples(str(tmp_path / ("" if there else "absent")))
