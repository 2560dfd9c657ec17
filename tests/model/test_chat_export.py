"""The chat template goes to Hugging Face's directories and comes back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ropewalk.checkpoint.format import read_checkpoint_manifest, resolve_checkpoint
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.flow import export_model, import_model
from ropewalk.model.decoder import build
from ropewalk.prepare import tokenizer as tokenizers
from ropewalk.prepare.chat import TEMPLATES, ChatEncoder, Turn
from tests.tiny import small_spec

TURNS = [Turn("user", "What is\n\na rope? "), Turn("assistant", " A rope: 绳索.\n"), Turn("user", "And now?")]


def write_checkpoint(folder: Path, chat: str) -> None:
    markers = TEMPLATES[chat].markers if chat else ()
    tokenizer = tokenizers.train(iter(["user assistant What is a rope? A rope."] * 3), vocabulary=300, markers=markers)
    spec = small_spec(vocabulary=tokenizer.get_vocab_size(), sequence_length=24)
    weights = build(spec, seed=1).state_dict()
    content = tokenizer.to_str().encode()
    state = State(
        step=0, tokens=0, seed=0, spec=spec, data={}, model=weights, optimizer={}, tokenizer=content, chat=chat
    )
    save(folder, state)


@pytest.mark.parametrize("chat", TEMPLATES)
def test_transformers_reads_the_template_and_gives_our_tokens(chat: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_checkpoint(tmp_path / "checkpoints", chat)
    export_model(tmp_path / "checkpoints", tmp_path / "hf")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf", local_files_only=True)
    ours = tokenizers.load(tmp_path / "hf" / "tokenizer.json")
    end = tokenizers.end_of_text(ours, path=tmp_path)
    encoder = ChatEncoder(TEMPLATES[chat], ours, lambda texts: tokenizers.encode(ours, texts, dtype="uint16"), end=end)
    messages = [{"role": role, "content": content} for role, content in TURNS]
    found = theirs.apply_chat_template(messages, tokenize=True, return_dict=True, add_generation_prompt=True)
    assert found["input_ids"] == encoder.prompt(TURNS)
    stops = json.loads((tmp_path / "hf" / "generation_config.json").read_text())["eos_token_id"]
    assert stops == (end if chat == "plain" else [end, ours.token_to_id("<|im_end|>")])


@pytest.mark.parametrize("chat", ["", *TEMPLATES])
def test_the_template_comes_back_by_its_name(chat: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "checkpoints", chat)
    export_model(tmp_path / "checkpoints", tmp_path / "hf")
    assert ("chat_template" in json.loads((tmp_path / "hf" / "tokenizer_config.json").read_text())) == bool(chat)
    import_model(tmp_path / "hf", tmp_path / "back")
    assert read_checkpoint_manifest(resolve_checkpoint(tmp_path / "back")).chat == chat
