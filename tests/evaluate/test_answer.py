"""Answers: the question is written by the template, the answer ends where the template closes it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.evaluate.from_checkpoint import generate_text, load_model, until
from ropewalk.evaluate.generate import generate
from ropewalk.evaluate.task import Sampling
from ropewalk.flow import answer
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.chat import TEMPLATES

from .tiny import CODE, PROSE, small, vivid


@given(st.lists(st.integers(0, 2)), st.lists(st.integers(0, 2), min_size=1, max_size=4))
def test_tokens_end_before_the_first_closing(tokens: list[int], closing: list[int]) -> None:
    places = [i for i in range(len(tokens)) if tokens[i : i + len(closing)] == closing]
    assert list(until(iter(tokens), closing)) == (tokens[: places[0]] if places else tokens)


def test_what_cannot_be_the_closing_is_not_held_back() -> None:
    drawn = iter([1, 2, 1, 2, 3])
    shown = until(drawn, [1, 2, 3])
    # After 1 2 1 only the last 1 can begin the closing.
    assert [next(shown), next(drawn)] == [1, 2]


@pytest.fixture(params=["chatml", "spelled", "plain"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    """A model of random weights with its template; `spelled`: chatml where the tokenizer has no markers."""
    template = "plain" if request.param == "plain" else "chatml"
    markers = TEMPLATES["chatml"].markers if request.param == "chatml" else ()
    tokenizer = tokenizers.train(iter(CODE + PROSE), vocabulary=300, markers=markers)
    spec = small(vocabulary=300, sequence_length=64)
    weights = {name: tensor.float() for name, tensor in vivid(spec).state_dict().items()}
    state = State(
        step=0,
        tokens=0,
        seed=0,
        spec=spec,
        data={},
        model=weights,
        optimizer={},
        tokenizer=tokenizer.to_str().encode(),
        chat=template,
    )
    return save(tmp_path, state), request.param


def test_an_answer_is_what_generation_gives_between_opening_and_closing(checkpoint: tuple[Path, str]) -> None:
    path, form = checkpoint
    model, _, tokenizer = load_model(path, device=torch.device("cpu"))
    end = tokenizer.token_to_id(tokenizers.END_OF_TEXT)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    prompt, closing = {
        "plain": (ids("User:\nwhy?\n\nAssistant:\n"), [end]),
        "spelled": (ids("<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"), ids("<|im_end|>")),
        "chatml": ([1, *ids("user\nwhy?"), 2, *ids("\n"), 1, *ids("assistant\n")], [2]),
    }[form]
    for seed in range(40):
        options = {"temperature": 30.0, "top_k": 0}
        (drawn,) = generate(model, [[end, *prompt]], Sampling(60, **options), seeds=[seed], end=end)
        places = [place for place in range(len(drawn)) if drawn[place : place + len(closing)] == closing]
        if places or form != "chatml":
            break
    assert places or form != "chatml", "no seed draws the marker"
    expected = tokenizer.decode(drawn[: places[0]] if places else drawn)
    sampling = {"max_new_tokens": 60, **options}
    found = "".join(generate_text(path, question="why? ", template=_template(form), sampling=sampling, seed=seed))
    # Bytes that begin no character at the very end are held back.
    assert expected.startswith(found)
    assert set(expected.removeprefix(found)) <= {"\ufffd"}
    assert "".join(answer(path, question="why?", tokens=60, seed=seed, **options)) == found


def _template(form: str) -> str:
    return "plain" if form == "plain" else "chatml"


def test_a_model_without_dialogues_asks_for_a_template(tmp_path: Path) -> None:
    spec = small(vocabulary=300)
    tokenizer = tokenizers.train(iter(CODE), vocabulary=300).to_str().encode()
    weights = vivid(spec).state_dict()
    path = save(
        tmp_path,
        State(step=0, tokens=0, seed=0, spec=spec, data={}, model=weights, optimizer={}, tokenizer=tokenizer),
    )
    with pytest.raises(UserError, match=r"chat template is not known; name one with --template \(chatml, plain\)"):
        answer(path, question="why?")
    assert isinstance("".join(answer(path, question="why?", template="plain", tokens=3)), str)
