"""`ropewalk chat`: from a pipe every line is a turn; at a terminal it prompts, streams and can be stopped."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ropewalk.cli.main import main
from ropewalk.evaluate.conversation import Conversation
from tests.screen import terminal, written

from .conftest import Call, Ended

RUN = "runs/tiny"
Talk = Callable[..., Ended]


@pytest.fixture
def talk(trained: Path, call: Call, monkeypatch: pytest.MonkeyPatch) -> Talk:
    def run(text: str, *options: str) -> Ended:
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        return call("chat", RUN, "--tokens", "8", *options)

    return run


def test_every_line_of_a_pipe_is_a_turn(talk: Talk, call: Call) -> None:
    told = talk("def rope\n\nwhy\n/reset\ndef rope\n/exit\nnever\n", "--json", "--seed", "3")
    assert told.status == 0
    first, second, again = map(json.loads, told.out.splitlines())
    assert [each["prompt"] for each in (first, second, again)] == ["def rope", "why", "def rope"]
    assert (first["turn"], second["turn"], again["turn"]) == (1, 2, 1)
    assert first == again
    alone = call("generate", RUN, "--chat", "def rope", "--template", "plain", "--tokens", "8", "--seed", "3", "--json")
    assert json.loads(alone.out)["completion"] == first["answer"]
    plain = talk("def rope\nwhy\n", "--seed", "3")
    assert plain.out == f"{first['answer']}\n{second['answer']}\n"
    assert plain.err.count("turns are written by the template `plain`") == 1


def test_a_full_context_drops_turns_and_says_so_and_unknown_commands_are_named(talk: Talk) -> None:
    told = talk("rope\nwalk\nstrand\n/resett\n//usr\n")
    assert "the oldest 2 turns went: the model sees 32 tokens" in told.err
    assert "there is no command /resett" in told.err
    assert json.loads(talk("//usr\n", "--json").out)["prompt"] == "/usr"
    long = talk("rope " * 99)
    assert (long.status, "the model sees 32; shorten it" in long.err) == (2, True)
    assert talk("rope \udcff\n").status == 2


def at_a_terminal(text: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, str, str]:
    """(status, what is on the terminal, what else was said) of a chat in which somebody types `text`."""
    errors = io.StringIO()
    with terminal(80) as (stream, master), os.fdopen(os.dup(stream.fileno()), "r") as keyboard:
        os.write(master, text.encode())
        monkeypatch.setattr(sys, "stdin", keyboard)
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", errors)
        with pytest.raises(SystemExit) as stop:
            main(["chat", RUN, "--tokens", "8"])
        stream.flush()
        return int(stop.value.code or 0), written(master), errors.getvalue()


def test_at_a_terminal_it_prompts_and_answers_until_the_end_of_input(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, shown, said = at_a_terminal(f"rope\n{'walk ' * 50}\nstrand\n\x04", monkeypatch)
    assert status == 0
    assert shown.count("you> ") == 4
    assert "the model sees 32; shorten it" in said, "a question that is too long does not end the conversation"
    assert "Ctrl-D ends" in said


def test_ctrl_c_stops_an_answer_and_at_the_prompt_the_chat(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Conversation] = []
    answer = Conversation.answer

    def interrupted(self: Conversation, question: str):
        heard.append(self)
        yield "one \x1b[2Jtwo"
        yield from answer(self, question)
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "answer", interrupted)
    status, shown, _ = at_a_terminal("rope\nwalk\n/exit\n", monkeypatch)
    assert status == 0
    assert shown.count("you> ") == 3
    assert "one \ufffd[2Jtwo" in shown, "a model cannot write codes to the terminal"
    assert [(each.answers, each.turns[-2].content) for each in heard] == [(2, "walk")] * 2

    def interrupt(prompt: str) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("builtins.input", interrupt)
    assert at_a_terminal("", monkeypatch)[0] == 0


def test_ctrl_c_ends_a_pipe(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: Conversation, question: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "answer", interrupt)
    told = talk("rope\n")
    assert told.status == 130
