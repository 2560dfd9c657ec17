"""A dialogue is what generation gives for the whole text that its template writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ropewalk.base.errors import UserError
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.evaluate.conversation import Conversation
from ropewalk.evaluate.from_checkpoint import load_model
from ropewalk.evaluate.generate import generate
from ropewalk.evaluate.task import Sampling
from ropewalk.flow import answer, chat
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.chat import TEMPLATES

from .tiny import CODE, PROSE, small, vivid

DRAW = {"temperature": 1.5, "top_k": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of random weights that sees 96 tokens, with markers for chatml."""
    tokenizer = tokenizers.train(iter(CODE + PROSE), vocabulary=300, markers=TEMPLATES["chatml"].markers)
    spec = small(vocabulary=300, sequence_length=96)
    weights = {name: tensor.float() for name, tensor in vivid(spec).state_dict().items()}
    known = {"step": 0, "tokens": 0, "seed": 0, "spec": spec, "data": {}, "optimizer": {}, "chat": "chatml"}
    return save(tmp_path_factory.mktemp("chat"), State(model=weights, tokenizer=tokenizer.to_str().encode(), **known))


def opened(path: Path, **settings: object) -> Conversation:
    return chat(path, **{"tokens": 12, "seed": 5, **DRAW, **settings})


def test_each_answer_follows_the_whole_dialogue_so_far(checkpoint: Path) -> None:
    model, _, tokenizer = load_model(checkpoint, device=torch.device("cpu"))
    end = tokenizer.token_to_id(tokenizers.END_OF_TEXT)

    def ids(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def turn(role: str, text: str) -> list[int]:
        return [1, *ids(f"{role}\n"), *ids(text), 2, *ids("\n")]

    conversation = opened(checkpoint, system="Be kind.", tokens=9)
    written = [end, *turn("system", "Be kind.")]
    for number, question in enumerate(("why?", "and then?")):
        written += [1, *ids(f"user\n{question}"), 2, *ids("\n"), 1, *ids("assistant\n")]
        (drawn,) = generate(model, [written], Sampling(9, **DRAW), seeds=[5 + number], end=end)
        expected = tokenizer.decode(drawn[: drawn.index(2)] if 2 in drawn else drawn)
        found = "".join(conversation.answer(question))
        assert expected.rstrip("\ufffd") == found
        assert conversation.ended == (2 in drawn or len(drawn) < 9)
        written += [*ids(found.strip()), 2, *ids("\n")]
    assert [(role, bool(text)) for role, text in conversation.turns] == [("user", True), ("assistant", True)] * 2


def test_the_first_answer_is_that_of_a_single_question_and_a_reset_gives_it_again(checkpoint: Path) -> None:
    conversation = opened(checkpoint)
    first = "".join(conversation.answer("why?"))
    assert first == "".join(answer(checkpoint, question="why?", tokens=12, seed=5, **DRAW))
    second = "".join(conversation.answer("why?"))
    assert second != first
    conversation.reset()
    assert ["".join(conversation.answer("why?")) for _ in range(2)] == [first, second]


def test_what_was_drawn_until_the_reader_stopped_is_the_answer_that_later_turns_refer_to(checkpoint: Path) -> None:
    conversation = opened(checkpoint)
    pieces = conversation.answer("why?")
    kept = next(pieces) + next(pieces)
    pieces.close()
    assert conversation.turns[-1].content == kept
    assert conversation.drawn < 12


def test_the_oldest_turns_go_where_the_context_ends_and_the_system_text_stays(checkpoint: Path) -> None:
    conversation = opened(checkpoint, system="Short.", tokens=20)
    seen = []
    for number in range(8):
        "".join(conversation.answer(f"question {number}"))
        seen.append(conversation.dropped)
        assert conversation.turns[-2].content == f"question {number}"
        assert len(conversation.turns) % 2 == 0
    assert seen[0] == 0
    assert set(seen) > {0}
    assert conversation.answers == 8
    before = list(conversation.turns)
    again = "".join(conversation.answer("question 8"))
    assert conversation.dropped
    alone = opened(checkpoint, system="Short.", tokens=20, seed=5 + 8)
    alone.turns = before[conversation.dropped :]
    assert "".join(alone.answer("question 8")) == again, "what was dropped is not seen"


def test_a_question_that_the_model_cannot_see_as_a_whole_is_refused(checkpoint: Path) -> None:
    conversation = opened(checkpoint, system="Short.")
    "".join(conversation.answer("why?"))
    with pytest.raises(UserError, match=r"this question with the system text has \d+ tokens; the model sees 96; short"):
        conversation.answer("why " * 200)
    assert "".join(conversation.answer("why?")), "and the conversation goes on"
