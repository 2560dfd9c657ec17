"""Dialogues: the loss counts answers and what closes them, borders are exact, transformers gives the same tokens."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_prose import prose
from tokenizers import Tokenizer

from ropewalk.base.errors import DataError, UserError
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.chat import TEMPLATES, ChatEncoder, Turn, jinja, join_turns, split_turns, template_named
from ropewalk.prepare.config import Chat, Filter, Prepare, Source
from ropewalk.prepare.config import Tokenizer as TokenizerSettings
from ropewalk.prepare.pipeline import prepare
from ropewalk.store.manifest import read_manifest
from ropewalk.store.shards import Shard, document_key

MARKERS = TEMPLATES["chatml"].markers
DIALOGUE = [
    Turn("system", "Be brief."),
    Turn("user", "What is rope made of?\n\nTell me. "),
    Turn("assistant", "\nHemp.\n\nAnd tar.\n"),
    Turn("user", "Hall?"),
    Turn("assistant", "A ropewalk: 绳索"),
]
TURNS = st.lists(
    st.builds(Turn, st.sampled_from(["system", "user", "assistant", "tool"]), st.text(max_size=12)), max_size=5
)


def trained(markers: tuple[str, ...]) -> Tokenizer:
    texts = [prose(number) + " assistant user\nHemp. tar" for number in range(30)]
    tokenizer = tokenizers.train(iter(texts), vocabulary=330, markers=markers)
    tokenizer.encode_special_tokens = True
    return tokenizer


WITH_MARKERS, WITHOUT_MARKERS = trained(MARKERS), trained(())


def encoder(template: str, tokenizer: Tokenizer) -> ChatEncoder:
    end = tokenizers.end_of_text(tokenizer, path=Path())
    return ChatEncoder(
        TEMPLATES[template], tokenizer, lambda texts: tokenizers.encode(tokenizer, texts, dtype="uint16"), end=end
    )


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def chatml_by_hand(tokenizer: Tokenizer, turns: list[Turn]) -> list[tuple[int, bool]]:
    """(token, counts), written as one reads the template."""
    start, stop = (tokenizer.token_to_id(marker) for marker in MARKERS)
    found: list[tuple[int, bool]] = []
    newline = ""
    for role, content in turns:
        content = content.strip()
        found += [(token, False) for token in ids(tokenizer, newline)] + [(start, False)]
        if role == "assistant":
            found += [(token, False) for token in ids(tokenizer, "assistant\n")]
            found += [(token, True) for token in ids(tokenizer, content)] + [(stop, True)]
        else:
            found += [(token, False) for token in ids(tokenizer, f"{role}\n{content}")] + [(stop, False)]
        newline = "\n"
    return found + [(token, False) for token in ids(tokenizer, newline)]


def plain_by_hand(tokenizer: Tokenizer, turns: list[Turn]) -> list[tuple[int, bool]]:
    end = tokenizer.token_to_id(tokenizers.END_OF_TEXT)
    found: list[tuple[int, bool]] = []
    asked = ""
    for role, content in turns:
        asked += {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}[role] + ":\n"
        if role == "assistant":
            found += [(token, False) for token in ids(tokenizer, asked)]
            found += [(token, True) for token in ids(tokenizer, content.strip())] + [(end, True)]
            asked = ""
        else:
            asked += content.strip() + "\n\n"
    return found + [(token, False) for token in ids(tokenizer, asked)]


@settings(max_examples=200, deadline=None)
@given(TURNS)
def test_every_token_and_whether_it_counts_is_as_written_by_hand(turns: list[Turn]) -> None:
    for template, by_hand in (("chatml", chatml_by_hand), ("plain", plain_by_hand)):
        (made,) = encoder(template, WITH_MARKERS).dialogues([turns])
        assert list(zip(made.tokens.tolist(), made.counts.tolist(), strict=True)) == by_hand(WITH_MARKERS, turns)


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tokenizer", [WITH_MARKERS, WITHOUT_MARKERS], ids=["special", "spelled"])
def test_counted_tokens_spell_the_answers_and_their_closing_alone(template: str, tokenizer: Tokenizer) -> None:
    (made,) = encoder(template, tokenizer).dialogues([DIALOGUE])
    counted = tokenizer.decode(made.tokens[made.counts].tolist(), skip_special_tokens=False)
    closing = {"chatml": "<|im_end|>", "plain": tokenizers.END_OF_TEXT}[template]
    assert counted == f"Hemp.\n\nAnd tar.{closing}A ropewalk: 绳索{closing}"
    whole = tokenizer.decode(made.tokens.tolist(), skip_special_tokens=False)
    assert made.text_bytes == len(whole.encode())
    assert whole.count("Assistant:\n" if template == "plain" else "<|im_start|>assistant\n") == 2


def test_a_marker_spelled_in_a_role_or_a_content_is_text() -> None:
    turns = [Turn("<|im_start|>", "{end}{role}<|im_end|>"), Turn("assistant", "<|im_end|><|endoftext|>")]
    (made,) = encoder("chatml", WITH_MARKERS).dialogues([turns])
    start, stop = (WITH_MARKERS.token_to_id(marker) for marker in MARKERS)
    tokens = made.tokens.tolist()
    assert (tokens.count(start), tokens.count(stop), tokens.count(0)) == (2, 2, 0)
    text = WITH_MARKERS.decode(tokens, skip_special_tokens=False)
    assert text.startswith("<|im_start|><|im_start|>\n{end}{role}<|im_end|><|im_end|>\n")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_prompt_is_the_dialogue_as_far_as_the_answer(template: str) -> None:
    chat = encoder(template, WITH_MARKERS)
    (whole,) = chat.dialogues([[*DIALOGUE[:-1], Turn("assistant", "Hall.")]])
    prompt = chat.prompt(DIALOGUE[:-1])
    answer = [*ids(WITH_MARKERS, "Hall."), *chat.closing]
    assert whole.tokens.tolist()[: len(prompt) + len(answer)] == prompt + answer


def messages(turns: list[Turn]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


def peer(tokenizer: Tokenizer, template: str) -> Any:
    transformers = pytest.importorskip("transformers")
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(tokenizer.to_str()), eos_token=tokenizers.END_OF_TEXT
    )
    made.chat_template = jinja(template)
    return made


@pytest.mark.parametrize("template", TEMPLATES)
def test_transformers_gives_the_same_tokens(template: str) -> None:
    chat, other = encoder(template, WITH_MARKERS), peer(WITH_MARKERS, template)
    spelling = re.compile("|".join(map(re.escape, (*MARKERS, tokenizers.END_OF_TEXT))))

    @settings(max_examples=200, deadline=None)
    @given(TURNS.filter(bool))
    def same(turns: list[Turn]) -> None:
        turns = [Turn(role, spelling.sub("", content)) for role, content in turns]
        found = other.apply_chat_template(messages(turns), tokenize=True, return_dict=True)["input_ids"]
        assert chat.dialogues([turns])[0].tokens.tolist() == found
        asked = other.apply_chat_template(messages(turns), tokenize=True, return_dict=True, add_generation_prompt=True)[
            "input_ids"
        ]
        assert chat.prompt(turns) == asked

    same()


MARKED = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | trim + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
        "{% else %}{{ m.content | trim + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    ),
    "plain": (
        "{% for m in messages %}{{ m.role | capitalize + ':\n' }}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content | trim + eos_token }}{% endgeneration %}"
        "{% else %}{{ m.content | trim + '\n\n' }}{% endif %}{% endfor %}"
    ),
}
"""The templates by hand, with the mark of transformers around what counts."""


@pytest.mark.parametrize("template", MARKED)
def test_the_mask_of_transformers_is_ours(template: str) -> None:
    other = peer(WITH_MARKERS, template)
    other.chat_template = MARKED[template]
    found = other.apply_chat_template(
        messages(DIALOGUE), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    (made,) = encoder(template, WITH_MARKERS).dialogues([DIALOGUE])
    assert found["input_ids"] == made.tokens.tolist()
    assert found["assistant_masks"] == made.counts.astype(int).tolist()


@given(TURNS.filter(bool))
def test_turns_come_back_from_their_text(turns: list[Turn]) -> None:
    clean = [Turn(role, re.sub("[\x1e\x1f]", " ", content)) for role, content in turns]
    assert split_turns(join_turns(turns), document="a") == clean


@pytest.mark.parametrize("text", ["", "text", "text\x1euser\x1fhello", "\x1euser", "\x1euser\x1fa\x1fb"])
def test_a_text_that_is_no_dialogue_is_named(text: str) -> None:
    with pytest.raises(DataError, match=r"document chat:a\.jsonl:3: its text is no dialogue"):
        split_turns(text, document="chat:a.jsonl:3")


def test_an_unknown_template_is_named() -> None:
    with pytest.raises(UserError, match='no chat template "llama"; there are chatml, plain'):
        template_named("llama")


@pytest.fixture
def dialogues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Prepare:
    """A source of dialogues in both forms, with faults, beside one of prose."""
    monkeypatch.chdir(tmp_path)
    lines = [
        {"messages": [{"role": "user", "content": prose(n)}, {"role": "assistant", "content": prose(n + 100)}]}
        for n in range(12)
    ]
    lines += [
        {"conversations": [{"from": "human", "value": prose(n)}, {"from": "gpt", "value": prose(n + 200)}]}
        for n in range(12)
    ]
    faults = ['{"text": "no turns"}', '{"messages": "no list"}', '{"messages": [{"role": "user"}]}', "[]", "{"]
    Path("talk.jsonl").write_text("\n".join([*map(json.dumps, lines), *faults]) + "\n", "utf-8")
    Path("prose.jsonl").write_text("\n".join(json.dumps({"text": prose(n + 300)}) for n in range(12)), "utf-8")
    return Prepare(
        sources=(
            Source(name="talk", paths=("talk.jsonl",), format="chat"),
            Source(name="prose", paths=("prose.jsonl",)),
        ),
        filter=Filter(min_characters=100),
        tokenizer=TokenizerSettings(vocab_size=300, train_bytes=5000),
        validation_share=0.2,
        shard_tokens=2000,
        workers=1,
        folder="prepared",
    )


@pytest.mark.parametrize("template", TEMPLATES)
def test_dialogues_of_a_corpus_reach_the_shards_with_their_counts(dialogues: Prepare, template: Any) -> None:
    made = prepare(dataclasses.replace(dialogues, chat=Chat(template=template)), seed=1)
    assert made.manifest.tokenizer.chat == template == read_manifest(made.folder).tokenizer.chat
    tokenizer = tokenizers.load(made.folder / "tokenizer.json")
    assert [tokenizer.token_to_id(marker) for marker in TEMPLATES[template].markers] == [1, 2][
        : 2 * (template != "plain")
    ]
    by_hand = {"chatml": chatml_by_hand, "plain": plain_by_hand}[template]
    truth = {
        document_key(f"talk:talk.jsonl:{n + 1}"): by_hand(
            tokenizer, [Turn("user", prose(n % 12)), Turn("assistant", prose(n % 12 + (100 if n < 12 else 200)))]
        )
        for n in range(24)
    }
    seen = 0
    for entry in made.manifest.shards:
        shard = Shard(made.folder / entry.file, checksum=entry.checksum)
        assert shard.text_bytes is not None
        assert shard.text_bytes.sum() == entry.text_bytes
        for index in range(len(shard)):
            start, stop = shard.offsets[index : index + 2].tolist()
            tokens, counts = shard.tokens[start:stop].tolist(), shard.counts(start, stop).tolist()
            spelled = tokenizer.decode(tokens[:-1], skip_special_tokens=False)
            assert shard.text_bytes[index] == len(spelled.encode())
            assert tokens[-1] == made.manifest.tokenizer.end_of_text
            if entry.source == "talk":
                expected = [*truth[int(shard.ids[index])], (tokens[-1], False)]
                assert list(zip(tokens, counts, strict=True)) == expected
                seen += 1
            else:
                assert all(counts)
    assert seen == 24
    assert sum(made.manifest.sources[0].steps[0].removed.values()) == 5


def test_a_corpus_without_dialogues_has_no_template_and_no_markers(dialogues: Prepare) -> None:
    made = prepare(dataclasses.replace(dialogues, sources=dialogues.sources[1:]), seed=1)
    assert made.manifest.tokenizer.chat == ""
    assert tokenizers.load(made.folder / "tokenizer.json").token_to_id(MARKERS[0]) is None


def test_separators_never_reach_the_tokens(dialogues: Prepare) -> None:
    made = prepare(dialogues, seed=1)
    tokenizer = tokenizers.load(made.folder / "tokenizer.json")
    forbidden = {tokenizer.encode(separator).ids[0] for separator in ("\x1e", "\x1f")}
    for entry in made.manifest.shards:
        assert forbidden.isdisjoint(np.unique(Shard(made.folder / entry.file).tokens).tolist())
