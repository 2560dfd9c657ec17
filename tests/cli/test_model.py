"""`ropewalk model export | import | grow` on a finished run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import Call

RUN = "runs/tiny"


def generated(call: Call, checkpoint: str) -> str:
    ended = call("generate", checkpoint, "--prompt", "def rope", "--temperature", "0", "--tokens", "12", "--json")
    assert ended.status == 0, ended.err
    return json.loads(ended.out)["completion"]


def test_a_model_goes_out_and_comes_back_with_the_same_text(trained: Path, call: Call) -> None:
    made = json.loads(call("model", "export", RUN, "theirs", "--json").out)
    assert (made["folder"], made["layout"], made["step"]) == ("theirs", "llama", 6)
    assert "imported/step-00000000: " in call("model", "import", "theirs", "imported").out
    assert generated(call, "imported") == generated(call, RUN)


def test_a_grown_model_says_what_it_preserves_and_writes_the_same_text(trained: Path, call: Call) -> None:
    sizes = ["model.layers=3", "model.width=64", "model.mlp_width=200"]
    ended = call("model", "grow", RUN, "grown", *sizes)
    assert "2 -> 3" in ended.out
    assert "preserved" in ended.out
    assert generated(call, "grown") == generated(call, RUN)
    stacked = json.loads(call("model", "grow", RUN, "stacked", "model.layers=4", "--new-blocks", "stack", "--json").out)
    assert not stacked["preserving"]
    assert stacked["sizes"]["layers"] == [2, 4]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", RUN, "corpus"], "corpus: exists"),
        (["export", RUN, "out", "--layout", "gpt2"], "`model.norm` layer, not rms"),
        (["import", "nowhere", "out"], "nothing is fetched"),
        (["import", "corpus", "out"], "no such Hugging Face config"),
        (["grow", RUN, "out", "model.layer=3"], "did you mean `layers`?"),
        (["grow", RUN, "out", "model.layers=1"], "models only grow"),
    ],
    ids=lambda value: " ".join(value[:1]) if isinstance(value, list) else "",
)
def test_a_request_that_cannot_be_met_exits_with_2_and_leaves_nothing(
    arguments: list[str], words: str, trained: Path, call: Call
) -> None:
    ended = call("model", *arguments)
    assert ended.status == 2
    assert words in ended.err
    assert not Path("out").exists()
