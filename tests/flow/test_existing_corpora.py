"""Corpora that other programs wrote are trained on where they lie, with the losses of the same tokens in our shards."""

from __future__ import annotations

import json
import random
from pathlib import Path

import fsspec
import pytest

from ropewalk.base.errors import ConfigError, DataError
from ropewalk.base.events import events_path, read_events, steps
from ropewalk.base.progress import Silent
from ropewalk.flow.external_corpus import adopt, check_mixtures, plan_adoption
from ropewalk.load.config import Corpus, Load
from ropewalk.load.loader import Loader
from ropewalk.store.manifest import read_manifest
from ropewalk.store.origin import Origin
from ropewalk.store.shards import Shard
from ropewalk.train.config import Share
from tests.cli.conftest import Call, call  # noqa: F401 - a fixture
from tests.foreign_corpora import write_litdata, write_mds, write_megatron, write_parquet, write_webdataset
from tests.tiny import END, WORDS, byte_tokenizer, write_prepared

RECIPE = """\
name = "{name}"
seed = 7
[load]
sequence_length = 32
tokenizer = "{tokenizer}"
[[load.corpus]]
path = "{path}"
{more}
[model]
layers = 2
width = 16
heads = 2
[train]
steps = 5
batch_size = 4
log_every_steps = 1
validate_every_steps = 5
validation_sequences = 4
threads = 1
schedule.warmup_steps = 2
[plan]
microbatch_size = 2
[evaluate]
max_bytes = 1000
samples = 1
prompt_tokens = 4
max_new_tokens = 4
"""


DEAD = "http://127.0.0.1:9"


def documents(count: int = 40) -> list[list[int]]:
    """Sentences in bytes, each closed."""
    draw = random.Random(3)
    tokenizer = byte_tokenizer()
    end = tokenizer.token_to_id(END)
    return [[*tokenizer.encode(" ".join(draw.choices(WORDS, k=draw.randint(8, 20)))).ids, end] for _ in range(count)]


def held_out(all_documents: list[list[int]], share: float) -> int:
    """By the words of `validation_share`: the fewest last documents that have that share of the tokens."""
    total, count = sum(map(len, all_documents)), 0
    while sum(map(len, all_documents[len(all_documents) - count :])) < share * total:
        count += 1
    return max(1, count)


def recipe(folder: Path, name: str, path: str, *, more: str = "", tokenizer: str = "tokenizer.json") -> Path:
    file = folder / f"{name}.toml"
    file.write_text(RECIPE.format(name=name, path=path, more=more, tokenizer=tokenizer))
    return file


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in steps(read_events(events_path(run)))]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    byte_tokenizer().save("tokenizer.json")
    return tmp_path


def test_a_megatron_corpus_trains_with_the_losses_of_our_own_shards(workplace: Path, call: Call) -> None:  # noqa: F811
    written = documents()
    count = held_out(written, 0.01)
    write_megatron(workplace / "theirs" / "corpus", written, dtype="uint16")
    write_prepared(workplace / "ours", {"corpus": [written[:25], written[25:-count]]}, {"corpus": [written[-count:]]})
    one = recipe(workplace, "theirs", "theirs/corpus", more='format = "megatron"')
    two = recipe(workplace, "ours", "ours", tokenizer="")
    for file in (one, two):
        ended = call("run", str(file), "--json")
        assert ended.status == 0, ended.err
    found = losses(workplace / "runs" / "theirs")
    assert len(found) == 5
    assert found == losses(workplace / "runs" / "ours")
    results = [json.loads((workplace / "runs" / n / "evaluation/results.json").read_text()) for n in ("theirs", "ours")]
    assert results[0]["tasks"]["held-out"]["loss"] == results[1]["tasks"]["held-out"]["loss"]
    assert not list((workplace / "prepared").rglob("*train*.tokens")), "nothing that is trained on was copied"
    before = sorted((workplace / "prepared").rglob("*"))
    assert call("run", str(one), "--json").status == 0
    assert sorted((workplace / "prepared").rglob("*")) == before
    (workplace / "theirs").rename(workplace / "moved")
    recipe(workplace, "theirs", "moved/corpus", more='format = "megatron"')
    ended = call("train", str(one), "--json")
    assert ended.status == 0, ended.err
    skipped = [event["stage"] for event in read_events(events_path(workplace / "runs" / "theirs")) if "stage" in event]
    assert skipped[-1] == "train", "a run goes on with a copy of its corpus elsewhere"
    assert losses(workplace / "runs" / "theirs") == found


def test_corpora_behind_a_url_train_with_the_losses_of_local_ones(workplace: Path, call: Call) -> None:  # noqa: F811
    written = documents()
    count = held_out(written, 0.01)
    write_megatron(workplace / "theirs" / "corpus", written, dtype="int32")
    write_prepared(workplace / "ours", {"corpus": [written[:-count]]}, {"corpus": [written[-count:]]})
    for path in (p for name in ("theirs", "ours") for p in (workplace / name).iterdir()):
        with fsspec.open(f"memory://ropewalk-urls/{path.parent.name}/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    places = {
        "local": "ours",
        "ours-remote": "memory://ropewalk-urls/ours",
        "theirs-remote": "memory://ropewalk-urls/theirs",
        # Nobody listens there: all that the run needs is with the mirror.
        "ours-mirrored": f"{DEAD}/ours",
        "theirs-mirrored": f"{DEAD}/theirs",
    }
    mirror = f'[load.remote]\ntimeout_s = 5.0\nmirrors = [{{of = "{DEAD}", at = "memory://ropewalk-urls"}}]\n'
    for name, place in places.items():
        more = mirror if place.startswith(DEAD) else ""
        ended = call("train", str(recipe(workplace, name, place, more=more)), "--json")
        assert ended.status == 0, ended.err
        assert losses(workplace / "runs/local") == losses(workplace / "runs" / name)


@pytest.mark.parametrize("write", [write_mds, write_litdata, write_webdataset, write_parquet])
def test_every_format_gives_the_batches_of_the_same_documents(workplace: Path, write: object) -> None:
    written = documents()
    write(workplace / "corpus", written)  # type: ignore[operator]
    write_megatron(workplace / "line", written, dtype="int32")
    batches = []
    for path in ("corpus", "line"):
        load = Load(corpus=(Corpus(path=path),), tokenizer="tokenizer.json")
        made = adopt(load, root=Path("prepared"), adoption=plan_adoption(load), progress=Silent())
        loader = Loader(made.folder, sequence_length=16, batch_size=8, seed=1)
        batches.append([loader.next() for _ in range(6)])
        loader.close()
    for one, two in zip(*batches, strict=True):
        assert one.tokens.equal(two.tokens)
        assert one.targets.equal(two.targets)
        assert one.documents.equal(two.documents)


def test_documents_held_out_are_the_last_ones_closed_and_counted(workplace: Path) -> None:
    written = [document[:-1] for document in documents()]
    write_megatron(workplace / "open", written)
    load = Load(corpus=(Corpus(path="open", validation_share=0.2),), tokenizer="tokenizer.json")
    made = adopt(load, root=Path("prepared"), adoption=plan_adoption(load), progress=Silent())
    count = held_out(written, 0.2)
    assert count > 2
    (entry,) = made.manifest.shards_of("validation")
    shard = Shard(made.folder / entry.file, checksum=entry.checksum)
    end = made.manifest.tokenizer.end_of_text
    assert [shard.document(n).tolist() for n in range(len(shard))] == [[*d, end] for d in written[-count:]]
    assert entry.text_bytes == sum(map(len, written[-count:]))
    (trained,) = made.manifest.shards_of("train")
    assert (trained.documents, trained.tokens) == (len(written) - count, sum(map(len, written[:-count])))


def test_a_prepared_folder_behind_a_url_is_referred_to_with_its_held_out_shards_at_hand(workplace: Path) -> None:
    written = documents()
    write_prepared(workplace / "ours", {"notes": [written[:30]]}, {"notes": [written[30:]]})
    for path in (workplace / "ours").iterdir():
        with fsspec.open(f"memory://ropewalk-adopt/ours/{path.name}", "wb") as file:
            file.write(path.read_bytes())
    load = Load(corpus=(Corpus(path="memory://ropewalk-adopt/ours"),))
    made = adopt(load, root=Path("prepared"), adoption=plan_adoption(load), progress=Silent())
    train, validation = made.manifest.shards_of("train"), made.manifest.shards_of("validation")
    assert [entry.file for entry in train] == ["memory://ropewalk-adopt/ours/notes-train-00000.tokens"]
    assert len(Shard(made.folder / validation[0].file, checksum=validation[0].checksum)) == 10
    assert Origin().size(train[0].file) == train[0].file_bytes


def test_several_corpora_are_mixed_by_tokens_or_by_weight(workplace: Path) -> None:
    written = documents()
    write_megatron(workplace / "a", written)
    write_mds(workplace / "b", written[:20])
    write_prepared(workplace / "c", {"x": [written[:10]], "y": [written[10:20]]}, {"x": [written[20:22]]}, x=3.0, y=1.0)

    def weights(*given: float | None) -> dict[str, float]:
        corpora = tuple(Corpus(path=n, name=n, weight=w) for n, w in zip("abc", given, strict=True))
        load = Load(corpus=corpora, tokenizer="tokenizer.json")
        made = adopt(load, root=Path("prepared"), adoption=plan_adoption(load), progress=Silent())
        return {source.name: source.weight for source in made.manifest.sources}

    assert weights(0.5, 0.3, 0.2) == pytest.approx({"a": 0.5, "b": 0.3, "x": 0.15, "y": 0.05})
    by_tokens = weights(None, None, None)
    assert by_tokens["a"] == sum(map(len, written[: -held_out(written, 0.01)]))
    assert by_tokens["x"] + by_tokens["y"] == pytest.approx(sum(map(len, written[:20])))
    assert by_tokens["x"] == pytest.approx(3 * by_tokens["y"])


def test_the_hash_is_of_the_content_and_the_folder_of_the_place(workplace: Path) -> None:
    write_megatron(workplace / "one" / "m", documents())
    write_megatron(workplace / "two" / "m", documents())
    write_megatron(workplace / "three" / "m", documents(41))
    plans = [
        plan_adoption(Load(corpus=(Corpus(path=f"{n}/m"),), tokenizer="tokenizer.json"))
        for n in ("one", "two", "three")
    ]
    assert plans[0].hash == plans[1].hash != plans[2].hash
    assert len({plan.place for plan in plans}) == 3


def test_what_is_missing_or_contradictory_is_told_before_anything_runs(workplace: Path, call: Call) -> None:  # noqa: F811
    write_megatron(workplace / "m", documents())
    for file, words in (
        (recipe(workplace, "gone", "nowhere"), 'nothing is at "nowhere"'),
        (recipe(workplace, "untold", "m", more='format = "megatron"', tokenizer=""), "has no tokenizer of its own"),
        (recipe(workplace, "lost", "m", tokenizer="no.json"), 'no file "no.json"'),
        (recipe(workplace, "both", "m", more='[[prepare.sources]]\nname = "a"\npaths = ["m.idx"]'), "one of the two"),
        (recipe(workplace, "odd", "m", more='name = "a b"'), "names files"),
    ):
        ended = call("train", str(file))
        assert (ended.status, words in ended.err) == (2, True), ended.err
    assert not (workplace / "prepared").exists()


def test_a_corpus_of_another_tokenizer_or_source_is_refused(workplace: Path) -> None:
    write_megatron(workplace / "m", [[5, 6], [300, 2], [1]])
    load = Load(corpus=(Corpus(path="m", validation_share=0.5),), tokenizer="tokenizer.json")
    with pytest.raises(DataError, match="holds token 300, the vocabulary has 257"):
        adopt(load, root=Path("prepared"), adoption=plan_adoption(load), progress=Silent())
    write_prepared(workplace / "ours", {"notes": [documents()]}, {"notes": [documents(2)]})
    manifest = read_manifest(workplace / "ours")
    with pytest.raises(ConfigError, match='no source "note"; there are notes'):
        check_mixtures(manifest, {"train.mixture": (Share(source="note", weight=1.0),)})
    write_megatron(workplace / "one", [[1, 2]])
    single = Load(corpus=(Corpus(path="one"),), tokenizer="tokenizer.json")
    with pytest.raises(DataError, match="1 documents of 2 tokens; at least two are needed"):
        adopt(single, root=Path("prepared"), adoption=plan_adoption(single), progress=Silent())
