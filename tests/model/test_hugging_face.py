"""Models cross to Hugging Face's layouts and back: the same logits, the same text, and clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from ropewalk.base.errors import DataError, UserError
from ropewalk.checkpoint.format import read_checkpoint_manifest, verify_checkpoint
from ropewalk.checkpoint.read.load import load
from ropewalk.checkpoint.run_state import State
from ropewalk.checkpoint.write.save import save
from ropewalk.evaluate.generate import generate
from ropewalk.evaluate.task import Sampling
from ropewalk.flow import export_model, import_model
from ropewalk.model.config import Lora
from ropewalk.model.decoder import Decoder, build
from ropewalk.model.hugging_face.configs import NORM_EPSILON, choose_layout
from ropewalk.model.modules import make_norm
from ropewalk.model.spec import Spec
from ropewalk.model.trainable import with_lora
from tests.tiny import END, byte_tokenizer, random_batch, small_spec

# The bar of logits in float32, which two orders of the same sums keep at this size.
TOLERANCE = 1e-5

GPT2: dict[str, Any] = {"norm": "layer", "position": "learned", "mlp": "gelu-tanh", "bias": True}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-untied": {"tie_embeddings": False},
    "llama-grouped": {"kv_heads": 2, "mlp_width": 64},
    "llama-one-group-untied": {"kv_heads": 1, "tie_embeddings": False},
    "llama-bias-geglu": {"bias": True, "mlp": "geglu"},
    "llama-linear": {"rope_scaling": "linear", "rope_factor": 4.0, "rope_theta": 500.0},
    "llama-ntk": {"rope_scaling": "ntk", "rope_factor": 4.0},
    "gpt2": GPT2,
    "gpt2-untied": GPT2 | {"tie_embeddings": False},
    "gpt2-exact-gelu": GPT2 | {"mlp": "gelu"},
    "gpt2-relu2": GPT2 | {"mlp": "relu2"},
    "gpt2-without-bias": GPT2 | {"bias": False},
}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")


def spec_of(name: str) -> Spec:
    return small_spec(vocabulary=257, sequence_length=24, **MODELS[name])


def write_checkpoint(folder: Path, spec: Spec, *, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Commits a model whose norms and biases are not 1 and 0 either; its weights."""
    model = build(spec, seed=1)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=draw)
    weights = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    tokenizer = byte_tokenizer().to_str(pretty=True).encode()
    save(
        folder,
        State(step=0, tokens=0, seed=0, spec=spec, data={}, model=weights, optimizer={}, tokenizer=tokenizer),
    )
    return weights


def loaded(folder: Path) -> Decoder:
    state = load(folder / "step-00000000")
    model = Decoder(state.spec)
    model.load_state_dict(dict(state.model), assign=True)
    return model


@torch.no_grad()
def our_logits(model: Decoder) -> Tensor:
    return model.logits(model(random_batch(model.spec, rows=3).tokens))


@torch.no_grad()
def their_logits(folder: Path, spec: Spec) -> Tensor:
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    return model.eval()(random_batch(spec, rows=3).tokens).logits


def largest_difference(one: Tensor, other: Tensor) -> float:
    assert one.std() > 0.1, "logits that are all alike prove nothing"
    return float((one - other).abs().max())


@pytest.mark.parametrize("name", MODELS)
def test_transformers_computes_the_logits_of_an_exported_model(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    write_checkpoint(tmp_path / "ours", spec)
    made = export_model(tmp_path / "ours", tmp_path / "theirs")
    assert made["layout"] == name.split("-")[0]
    difference = largest_difference(our_logits(loaded(tmp_path / "ours")), their_logits(tmp_path / "theirs", spec))
    assert difference <= TOLERANCE


@pytest.mark.parametrize("targets", ["attention", "all"])
@pytest.mark.parametrize("name", ["llama-grouped", "llama-bias-geglu", "gpt2", "gpt2-without-bias"])
def test_adapters_are_merged_into_an_exported_model(name: str, targets: Any, tmp_path: Path) -> None:
    spec = with_lora(spec_of(name), Lora(rank=3, alpha=2.0, targets=targets))
    write_checkpoint(tmp_path / "ours", spec)
    made = export_model(tmp_path / "ours", tmp_path / "theirs")
    assert (made["parameters"], made["merged_rank"]) == (spec_of(name).parameters(), 3)
    expected = our_logits(loaded(tmp_path / "ours"))
    assert largest_difference(expected, their_logits(tmp_path / "theirs", spec)) <= TOLERANCE
    if name != "gpt2-without-bias":
        import_model(tmp_path / "theirs", tmp_path / "back")
        back = loaded(tmp_path / "back")
        assert back.spec == spec_of(name)
        assert largest_difference(expected, our_logits(back)) <= TOLERANCE


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("llama-ntk", "gpt2-without-bias")])
def test_export_then_import_is_the_identity(name: str, tmp_path: Path) -> None:
    spec = spec_of(name)
    weights = write_checkpoint(tmp_path / "ours", spec)
    export_model(tmp_path / "ours", tmp_path / "theirs")
    import_model(tmp_path / "theirs", tmp_path / "back")
    state = load(tmp_path / "back" / "step-00000000")
    assert state.spec == spec
    assert set(state.model) == set(weights)
    assert all(torch.equal(state.model[key], weights[key]) for key in weights)
    assert state.tokenizer == byte_tokenizer().to_str(pretty=True).encode()


def theirs(
    kind: str, folder: Path, *, shard_bytes: int | str = "1GB", dtype: Any = torch.float32, **settings: Any
) -> Any:
    """A model made and saved by transformers, with our tokenizer beside it."""
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

    torch.manual_seed(3)
    # With deviation 0.3 instead of 0.1, float32 itself rounds our logits by 1.04e-5 (measured against float64).
    shared = {"vocab_size": 257, "bos_token_id": 256, "eos_token_id": 256, "initializer_range": 0.1}
    if kind == "llama":
        sizes = {"hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = LlamaConfig(**{**shared, **sizes, "max_position_embeddings": 24, **settings})
    else:
        sizes = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 24}
        config = GPT2Config(**{**shared, **sizes, **settings})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape).to(dtype)
    model.save_pretrained(folder, max_shard_size=shard_bytes)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer(), eos_token=END, bos_token=END)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"num_key_value_heads": 2, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}),
        ("llama", {"num_key_value_heads": 1, "head_dim": 8, "attention_bias": True, "mlp_bias": True}),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}),
        ("llama", {"rms_norm_eps": 1e-5, "tie_word_embeddings": True}),
        ("llama", {"rms_norm_eps": 1e-2}),
        ("gpt2", {}),
        ("gpt2", {"tie_word_embeddings": False, "activation_function": "gelu", "n_inner": 24}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
    ],
    ids=str,
)
def test_an_imported_model_computes_the_logits_of_transformers(
    kind: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    model = theirs(kind, tmp_path / "theirs", **settings)
    made = import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = loaded(tmp_path / "ours")
    assert made["parameters"] == ours.spec.parameters() == sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        expected = model(random_batch(ours.spec, rows=3).tokens).logits
    assert largest_difference(our_logits(ours), expected) <= TOLERANCE


def test_sharded_weights_are_read_through_their_index(tmp_path: Path) -> None:
    model = theirs("llama", tmp_path / "theirs", shard_bytes=8_000)
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    import_model(tmp_path / "theirs", tmp_path / "ours")
    ours = loaded(tmp_path / "ours")
    with torch.no_grad():
        expected = model(random_batch(ours.spec, rows=3).tokens).logits
    assert largest_difference(our_logits(ours), expected) <= TOLERANCE
    next((tmp_path / "theirs").glob("model-00002*")).unlink()
    with pytest.raises(DataError, match=r"model-00002.* is missing"):
        import_model(tmp_path / "theirs", tmp_path / "again")


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_half_precision_is_kept_or_widened_as_asked(half: torch.dtype, tmp_path: Path) -> None:
    model = theirs("llama", tmp_path / "theirs", dtype=half)
    kept = import_model(tmp_path / "theirs", tmp_path / "kept")
    wide = import_model(tmp_path / "theirs", tmp_path / "wide", dtype="float32")
    assert (kept["dtype"], wide["dtype"]) == (str(half).removeprefix("torch."), "float32")
    assert {t.dtype for t in load(tmp_path / "kept/step-00000000").model.values()} == {half}
    ours = loaded(tmp_path / "wide")
    with torch.no_grad():
        expected = model.float()(random_batch(ours.spec, rows=3).tokens).logits
    assert largest_difference(our_logits(ours), expected) <= TOLERANCE
    export_model(tmp_path / "kept", tmp_path / "out")
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == kept["dtype"]


def test_another_epsilon_asks_for_float32(tmp_path: Path) -> None:
    theirs("llama", tmp_path / "theirs", dtype=torch.bfloat16, rms_norm_eps=1e-5)
    with pytest.raises(DataError, match="--dtype float32"):
        import_model(tmp_path / "theirs", tmp_path / "ours")
    assert import_model(tmp_path / "theirs", tmp_path / "ours", dtype="float32")["dtype"] == "float32"


def test_our_epsilons_are_those_of_the_modules() -> None:
    assert {norm: make_norm(small_spec(norm=norm)).eps for norm in NORM_EPSILON} == NORM_EPSILON


@pytest.mark.parametrize("name", ["llama-grouped", "gpt2"])
def test_the_tokenizer_and_greedy_text_are_the_same(name: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    write_checkpoint(tmp_path / "ours", spec_of(name))
    export_model(tmp_path / "ours", tmp_path / "theirs")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    text = "def rope(walk):\n    return 'Seil – 绳' .strip ( )\n"
    ids = tokenizer(text).input_ids
    assert ids == byte_tokenizer().encode(text).ids
    assert tokenizer.decode(ids) == text
    assert (tokenizer.eos_token, tokenizer.eos_token_id, len(tokenizer)) == (END, 256, 257)

    prompt = [256, *byte_tokenizer().encode("rope").ids]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    assert model.generation_config.eos_token_id == 256
    drawn = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=256)[0]
    (expected,) = generate(loaded(tmp_path / "ours"), [prompt], Sampling(16), seeds=[0], end=256)
    assert [token for token in drawn.tolist()[len(prompt) :] if token != 256] == expected


def test_an_import_is_a_whole_checkpoint_of_step_0(tmp_path: Path) -> None:
    theirs("gpt2", tmp_path / "theirs")
    made = import_model(tmp_path / "theirs", tmp_path / "ours")
    assert made["checkpoint"] == str(tmp_path / "ours/step-00000000")
    assert made["end_of_text"] == END
    assert verify_checkpoint(Path(made["checkpoint"])) == []
    manifest = read_checkpoint_manifest(Path(made["checkpoint"]))
    assert (manifest.step, manifest.tokens, manifest.data) == (0, 0, {})
    with pytest.raises(UserError, match="exists"):
        import_model(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    ("settings", "asked", "words"),
    [
        ({"norm_position": "post"}, "auto", ["no Hugging Face layout", "`model.norm_position` pre, not post"]),
        ({"window": 4}, "llama", ["`llama` does not hold", "`model.window` not set, not 4"]),
        (
            {"qk_norm": True, "mlp": "relu2"},
            "llama",
            ["`model.qk_norm` False", "`model.mlp` swiglu or geglu, not relu2"],
        ),
        ({"position": "alibi"}, "auto", ["llama needs `model.position` rope", "`model.position` learned, not alibi"]),
        (GPT2 | {"kv_heads": 2}, "auto", ["gpt2 needs `model.kv_heads` 4, not 2"]),
        ({}, "gpt2", ["`model.norm` layer, not rms"]),
    ],
)
def test_a_model_that_no_layout_holds_is_refused_by_option(settings: dict, asked: Any, words: list[str]) -> None:
    with pytest.raises(UserError) as error:
        choose_layout(small_spec(**settings), asked)
    assert [word for word in words if word not in str(error.value)] == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, ["config.json", '"mamba"', "llama and gpt2"]),
        ({"hidden_act": "relu"}, ["hidden_act", "relu", "silu"]),
        ({"attention_bias": True}, ["mlp_bias"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}}, ["llama3", "linear"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
        ({"vocab_size": 100}, ["tokenizer.json", "257 tokens", "100"]),
        ({"intermediate_size": 48}, ["gate_proj", "the config says"]),
        ({"num_hidden_layers": 3}, ["model.layers.2.", "missing"]),
        ({"num_hidden_layers": 1}, ["model.layers.1.", "nothing is known"]),
        ({"hidden_size": "wide"}, ["hidden_size", '"wide"']),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_directory_that_cannot_be_imported_says_why(change: dict, words: list[str], tmp_path: Path) -> None:
    spec = spec_of("llama-untied")
    write_checkpoint(tmp_path / "ours", spec)
    export_model(tmp_path / "ours", tmp_path / "theirs")
    config = tmp_path / "theirs/config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), **change}))
    with pytest.raises(DataError) as error:
        import_model(tmp_path / "theirs", tmp_path / "back")
    assert [word for word in words if word not in str(error.value)] == []
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "cut"])
def test_a_missing_or_damaged_file_is_named(file: str, damage: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "ours", spec_of("llama"))
    export_model(tmp_path / "ours", tmp_path / "theirs")
    path = tmp_path / "theirs" / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(DataError, match=file):
        import_model(tmp_path / "theirs", tmp_path / "back")


def test_the_names_of_the_first_gpt2_are_understood(tmp_path: Path) -> None:
    """No prefix, masks among the weights, and a copy of the tied head."""
    spec = spec_of("gpt2")
    weights = write_checkpoint(tmp_path / "ours", spec)
    export_model(tmp_path / "ours", tmp_path / "theirs")
    path = tmp_path / "theirs/model.safetensors"
    old = {name.removeprefix("transformer."): tensor for name, tensor in safetensors.torch.load_file(path).items()}
    old |= {"h.0.attn.bias": torch.ones(1, 1, 4, 4), "lm_head.weight": old["wte.weight"].clone()}
    safetensors.torch.save_file(old, path)
    import_model(tmp_path / "theirs", tmp_path / "back")
    state = load(tmp_path / "back/step-00000000")
    assert all(torch.equal(state.model[key], weights[key]) for key in weights)


def test_nothing_is_fetched(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing is fetched"):
        import_model(Path("meta-llama/Llama-3"), tmp_path / "ours")
