"""Damage to any file that prepare reads back: made again to the same bits, or refused by name. Never other data."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from every_stage import every_stage, write_corpus

from ropewalk.base.errors import DataError, UserError
from ropewalk.base.progress import Silent
from ropewalk.prepare import build, chunks
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.config import Near, Prepare
from ropewalk.prepare.ledger import explain
from ropewalk.prepare.lookup import NgramIndex
from ropewalk.prepare.near.index import Index
from ropewalk.prepare.near.sketch import sketch
from ropewalk.prepare.pipeline import finished, prepare
from ropewalk.prepare.stages import DamagedArtifact, healed
from ropewalk.prepare.summary import write_summary
from ropewalk.prepare.trace import Tracer
from ropewalk.prepare.what_if import what_if
from ropewalk.store.kinds import kind_of, table
from ropewalk.store.shards import Shard, document_key

Damage = Callable[[Path, random.Random], None]


def flip(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def truncate(path: Path, draw: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: draw.randrange(path.stat().st_size)])


def zero(path: Path, draw: random.Random) -> None:
    data = bytearray(path.read_bytes())
    start = draw.randrange(len(data))
    size = len(data[start : start + 4096])
    data[start : start + size] = b"\0" * size
    path.write_bytes(data)


def delete(path: Path, draw: random.Random) -> None:
    path.unlink()


def replace(path: Path, draw: random.Random) -> None:
    """By a sound file of the same kind that was made from something else."""
    others = [other for other in sorted(path.parent.glob(f"*{path.suffix}")) if other != path]
    path.write_bytes(draw.choice(others).read_bytes()) if others else path.unlink()


DAMAGES: dict[str, Damage] = {d.__name__: d for d in (flip, truncate, zero, delete, replace)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prepare, str]:
    """A corpus that puts every stage to work, prepared once."""
    folder = tmp_path_factory.mktemp("damage")
    write_corpus(folder, documents=30)
    before = Path.cwd()
    os.chdir(folder)
    try:
        settings = every_stage(folder=str(folder / "prepared"))
        data = prepare(settings, seed=1)
    finally:
        os.chdir(before)
    return folder, settings, data.folder.name


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }


def stage_files(root: Path) -> list[Path]:
    files = [path for path in sorted((root / "stages").rglob("*")) if path.is_file() and path.name != ".lock"]
    return [path for path in files if path.parent.name != "used"]


def damage_and_prepare(
    made: tuple[Path, Prepare, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cases: list[tuple[str, str]]
) -> None:
    """Prepares again from stages of which one is damaged, the result being gone: it must be the same."""
    folder, settings, name = made
    root = Path(settings.folder)
    expected = contents(root / name)
    monkeypatch.chdir(folder)
    backup = tmp_path / "backup"
    shutil.copytree(root, backup)
    try:
        for stage, damage in cases:
            draw = random.Random(f"{stage} {damage}")
            candidates = [path for path in stage_files(root) if path.relative_to(root / "stages").parts[0] == stage]
            path = draw.choice(candidates)
            DAMAGES[damage](path, draw)
            shutil.rmtree(root / name)
            if draw.random() < 0.5:  # as after a change of settings: the stages that follow are made again
                for other in (root / "stages").iterdir():
                    if other.is_dir() and other.name != stage:
                        shutil.rmtree(other)
            prepare(settings, seed=1)
            assert contents(root / name) == expected, f"{damage} in {path.relative_to(root)}"
            shutil.rmtree(root)
            shutil.copytree(backup, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)
        shutil.copytree(backup, root)


def stage_names(made: tuple[Path, Prepare, str]) -> list[str]:
    root = Path(made[1].folder)
    return sorted({path.relative_to(root / "stages").parts[0] for path in stage_files(root)})


def test_every_kind_of_stage_file_that_is_damaged_is_made_again_to_the_same_bits(
    made: tuple[Path, Prepare, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = stage_names(made)
    assert {"read", "measure", "encode", "sketch", "tokenizer", "pieces", "cut", "substring"} <= set(names)
    kinds = list(DAMAGES)
    cases = [(name, kinds[number % len(kinds)]) for number, name in enumerate(names)]
    damage_and_prepare(made, tmp_path, monkeypatch, cases)


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_all_damage_to_all_stage_files_is_made_again_to_the_same_bits(
    made: tuple[Path, Prepare, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    damage_and_prepare(made, tmp_path, monkeypatch, [(name, damage) for name in stage_names(made) for _ in range(3)])


READS = ("manifest.json", "ledger.parquet", "statistics.parquet", "samples.parquet")


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("damage", ["flip", "truncate", "zero", "delete"])
def test_a_damaged_result_is_named_with_its_remedy_and_healed_by_prepare(
    made: tuple[Path, Prepare, str], monkeypatch: pytest.MonkeyPatch, name: str, damage: str
) -> None:
    folder, settings, data = made
    monkeypatch.chdir(folder)
    root = Path(settings.folder) / data
    expected = (root / name).read_bytes()
    document = pq.read_table(root / "ledger.parquet", columns=["id"])["id"][0].as_py()
    DAMAGES[damage](root / name, random.Random(f"{name} {damage}"))
    if (root / name).exists() and (root / name).read_bytes() == expected:
        return  # zeros over zeros
    try:
        readers = [lambda: write_summary(root, settings)]
        if name not in ("samples.parquet",):
            readers.append(lambda: what_if(root, settings, settings))
            readers.append(lambda: explain(root, document, sources=settings.sources))
        for read in readers:
            with pytest.raises(DataError, match=rf"{name}.*`ropewalk prepare` with its recipe"):
                read()
        assert finished(root) is None
        prepare(settings, seed=1)
    finally:
        healed_bytes = (root / name).read_bytes() if (root / name).exists() else b""
        (root / name).write_bytes(expected)
    assert healed_bytes == expected


def test_an_index_of_n_grams_that_is_damaged_is_refused_by_name(
    made: tuple[Path, Prepare, str], tmp_path: Path
) -> None:
    copy = tmp_path / made[2]
    shutil.copytree(Path(made[1].folder) / made[2], copy)
    path = next(copy.glob("ngrams-*"))
    entries = path / "00000.places"
    flip(entries, random.Random(3))
    index = NgramIndex(path)
    with pytest.raises(DataError, match=r"00000\.places.*is damaged.*run `ropewalk prepare` again"):
        index._opened(0)
    flip(path / "index.json", random.Random(3))
    with pytest.raises(DataError, match=r"index\.json.*is damaged"):
        NgramIndex(path)


def test_nobody_who_opens_a_damaged_shard_takes_it_for_what_was_written(
    made: tuple[Path, Prepare, str], tmp_path: Path
) -> None:
    root = tmp_path / made[2]
    shutil.copytree(Path(made[1].folder) / made[2], root)
    path = max(root.glob("*train*.tokens"), key=lambda path: path.stat().st_size)
    sound, shard = path.read_bytes(), Shard(path)
    ids = {document_key(name): name for name in pq.read_table(root / "ledger.parquet")["id"].to_pylist()}
    chosen = [ids[int(key)] for key in shard.ids[[0, -1]]]
    index, tokens = NgramIndex(next(root.glob("ngrams-*"))), shard.document(0)[:-1].tolist()
    asked = tokens if index.unit == "tokens" else tokenizers.load(root / "tokenizer.json").decode(tokens)

    readers: list[Callable[[], object]] = [
        lambda: [explain(root, name, sources=made[1].sources) for name in chosen],
        lambda: write_summary(root, made[1]).read_bytes(),
        lambda: Tracer(root).trace(path.name, shard.token_count - 1),
        lambda: NgramIndex(next(root.glob("ngrams-*"))).overlaps(asked),
    ]
    expected = [read() for read in readers]
    assert expected[3]
    draw, refused = random.Random(5), [0] * len(readers)
    end = shard.token_count * shard.layout.dtype.itemsize
    footer = len(sound) - 24 - int.from_bytes(sound[-24:-16], "little")
    for place in (*(draw.randrange(end) for _ in range(2)), *(draw.randrange(end, footer) for _ in range(7))):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1 << draw.randrange(8)]) + sound[place + 1 :])
        os.utime(path, ns=(place, place))
        for number, read in enumerate(readers):
            try:
                found, said = read(), path.name
            except DataError as error:
                found, said = expected[number], str(error)
                refused[number] += 1
            assert found == expected[number], f"reader {number} did not notice byte {place}"
            assert path.name in said
    assert min(refused) >= 6


def test_a_shard_with_damaged_tokens_is_not_kept_when_data_is_prepared_again(
    made: tuple[Path, Prepare, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, settings, data = made
    monkeypatch.chdir(folder)
    root = Path(settings.folder) / data
    path = sorted(root.glob("*.tokens"))[0]
    expected, manifest = path.read_bytes(), (root / "manifest.json").read_bytes()
    path.write_bytes(bytes([expected[0] ^ 1]) + expected[1:])
    (root / "manifest.json").unlink()
    prepare(settings, seed=1)
    assert (path.read_bytes(), (root / "manifest.json").read_bytes()) == (expected, manifest)


def test_every_file_of_prepared_data_is_of_a_known_kind(made: tuple[Path, Prepare, str]) -> None:
    root = Path(made[1].folder)
    unread = {"report.html"}
    names = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.name != ".lock"]
    assert [name for name in names if kind_of(f"prepared/{name}") is None and name not in unread] == []


def test_a_file_that_is_damaged_whenever_it_is_made_ends_the_work(tmp_path: Path) -> None:
    def work() -> None:
        raise DamagedArtifact(tmp_path / "x.arrow", "its bytes are not what was written")

    said: list[str] = []
    with pytest.raises(Exception, match="check the disk and the memory"):
        healed(work, say=said.append)
    assert len(said) == 1


def test_a_link_to_a_file_of_the_kernel_is_passed_over(settings: Prepare) -> None:
    Path("texts/messages.txt").symlink_to("/proc/kmsg")
    prepare(settings, seed=1)


def test_the_documentation_has_the_table_of_kinds() -> None:
    assert table() in (Path(__file__).parents[2] / "docs" / "formats.md").read_text("utf-8")


def test_a_damaged_index_of_near_duplicates_is_refused_by_name(tmp_path: Path) -> None:
    near, texts = Near(), pa.array(["one two three four five six seven eight nine ten"] * 2, pa.large_string())
    Index.open(tmp_path, near).append("first", [(pa.array(["a", "b"]), texts)])
    keys = [sketch(texts, near)]
    assert len(Index.open(tmp_path, near).known(keys).ids) == 2
    segment = next(tmp_path.glob("*.arrow"))
    for path in (segment, tmp_path / "index.json"):
        before = path.read_bytes()
        for damage in (flip, truncate, zero, delete):
            damage(path, random.Random(1))
            with pytest.raises(DataError, match=rf"{path.name}.*is damaged.*restore the index from a copy"):
                Index.open(tmp_path, near).known(keys)
            path.write_bytes(before)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(3))
def test_a_killed_worker_is_reported_and_the_same_command_ends_with_the_same_bits(
    made: tuple[Path, Prepare, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: int
) -> None:
    folder, settings, _ = made
    monkeypatch.chdir(folder)
    monkeypatch.setattr(build, "SPAWN_BYTES", 0)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4000)
    alone = prepare(dataclasses.replace(settings, folder=str(tmp_path / "alone"), workers=1), seed=1)
    several = dataclasses.replace(settings, folder=str(tmp_path / "several"), workers=2)

    class Killer(Silent):
        """Kills one worker after some progress, once."""

        left = 5 + 12 * moment

        def advance(self, done: float, note: str = "") -> None:
            self.left -= 1
            children = multiprocessing.active_children()
            if self.left == 0 and children:
                os.kill(children[0].pid or 0, signal.SIGKILL)

    with contextlib.suppress(UserError):
        prepare(several, seed=1, progress=Killer())
    again = prepare(several, seed=1)
    assert again.folder.name == alone.folder.name
    assert contents(again.folder) == contents(alone.folder)
