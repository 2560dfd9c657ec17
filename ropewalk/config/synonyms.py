"""What other tools call our settings: nanoGPT, litgpt, axolotl, torchtitan, Megatron-LM and transformers.

Nothing is renamed in silence: a recipe with such a name is refused, and the message tells the setting that is meant.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from .positions import Path
from .schema import fields_of, item_of, section_of

SETTINGS: dict[str, tuple[str, ...]] = {
    "name": ("run_name", "experiment_name", "wandb_run_name", "project_name", "exp_name", "job.description"),
    "seed": ("random_seed", "manual_seed", "seed_offset"),
    # Data
    "prepare.sources.paths": (
        *("dataset", "datasets", "data", "data_dir", "data_path", "dataset_path", "data_files", "train_data"),
        *("train_file", "training.dataset", "training.dataset_path", "datasets.path", "train_files"),
    ),
    "prepare.sources.text_key": ("text_field", "text_column", "content_key", "json_keys", "datasets.field"),
    "prepare.sources.format": ("data_format", "datasets.type", "dataset_type"),
    "prepare.validation_share": (
        *("val_set_size", "val_split_fraction", "val_split", "validation_split", "test_size", "eval_split"),
        *("valid_ratio", "val_fraction", "holdout"),
    ),
    "prepare.tokenizer.file": ("tokenizer", "tokenizer_path", "tokenizer_name", "tokenizer_model", "tokenizer_config"),
    "prepare.tokenizer.vocab_size": ("padded_vocab_size", "n_vocab", "vocabulary_size"),
    "prepare.chat.template": ("chat_template", "prompt_style", "prompt_template"),
    "prepare.workers": ("num_proc", "dataset_processes", "dataset_num_proc"),
    "load.threads": ("num_workers", "dataloader_num_workers", "data_workers"),
    "load.packing": ("sample_packing", "pack_sequences", "packed"),
    "load.sequence_length": (
        *("block_size", "seq_len", "seq_length", "sequence_len", "max_seq_len", "max_seq_length", "context_length"),
        *(
            "context_size",
            "ctx_len",
            "n_ctx",
            "max_length",
            "max_position_embeddings",
            "model_max_length",
            "cutoff_len",
        ),
    ),
    # Model
    "model.layers": ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "depth", "num_blocks"),
    "model.width": ("n_embd", "n_embed", "d_model", "dim", "hidden_size", "embed_dim", "embedding_size"),
    "model.heads": ("n_head", "n_heads", "num_heads", "num_attention_heads"),
    "model.kv_heads": ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "n_query_groups", "num_query_groups"),
    "model.head_size": ("head_dim", "d_head", "kv_channels"),
    "model.mlp_width": ("intermediate_size", "ffn_hidden_size", "ffn_dim", "d_ff", "hidden_dim", "multiple_of"),
    "model.mlp": ("activation", "act_fn", "hidden_act", "activation_function", "mlp_class_name"),
    "model.norm": ("norm_type", "normalization", "norm_class_name"),
    "model.position": ("position_embedding_type", "pos_embedding", "positional_encoding"),
    "model.rope_theta": ("rope_base", "rotary_base"),
    "model.tie_embeddings": ("tie_word_embeddings", "weight_tying", "tied", "tie_weights"),
    "model.dropout": ("attn_dropout", "hidden_dropout", "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"),
    "model.init": ("init_method", "weight_init", "initializer_range", "init_std"),
    # Training
    "train.start_from": (
        *("init_from", "base_model", "model_name_or_path", "model_name", "pretrained", "checkpoint_dir", "model_path"),
        *("load_checkpoint", "pretrained_model", "from_checkpoint", "initial_load_path", "initial_checkpoint_dir"),
        *("checkpoint.initial_load_path", "from_pretrained"),
    ),
    "train.steps": (
        *("max_iters", "max_steps", "num_steps", "total_steps", "n_steps", "num_iterations", "iterations", "iters"),
        *("train_steps", "max_train_steps", "training_steps", "num_training_steps", "train_iters", "training.steps"),
    ),
    "train.batch_size": (
        *("batch_size", "global_batch_size", "total_batch_size", "effective_batch_size", "train_batch_size", "bs"),
    ),
    "train.batch_ramp.over_steps": ("rampup_batch_size", "batch_size_warmup"),
    "plan.microbatch_size": (
        *("micro_batch_size", "per_device_train_batch_size", "per_device_batch_size", "local_batch_size"),
        *("device_batch_size", "micro_batch", "mbs"),
    ),
    "train.schedule.peak_lr": (
        *("lr", "learning_rate", "max_lr", "base_lr", "peak_learning_rate", "max_learning_rate", "init_lr"),
    ),
    "train.schedule.final_lr_ratio": ("min_lr", "min_lr_ratio", "min_lr_factor", "min_learning_rate", "eta_min"),
    "train.schedule.warmup_steps": ("warmup_iters", "warmup", "warmup_ratio", "lr_warmup_steps", "num_warmup_steps"),
    "train.schedule.shape": (
        *("lr_scheduler", "lr_scheduler_type", "scheduler", "lr_schedule", "lr_decay_style", "decay_type", "decay_lr"),
    ),
    "train.schedule.decay_share": ("decay_ratio", "decay_steps", "lr_decay_iters", "cooldown_steps"),
    "train.optimizer.kind": (
        "optim",
        "optimizer",
        "optimizer_name",
        "optimizer_type",
        "optimizer.name",
        "optimizer.type",
    ),
    "train.optimizer.beta1": ("betas", "adam_beta1"),
    "train.optimizer.beta2": ("adam_beta2",),
    "train.optimizer.epsilon": ("eps", "adam_eps", "adam_epsilon"),
    "train.optimizer.weight_decay": ("wd", "decay"),
    "train.clip_norm": (
        *(
            "grad_clip",
            "max_grad_norm",
            "max_norm",
            "gradient_clipping",
            "clip_grad",
            "gradient_clip_val",
            "grad_norm_clip",
        ),
    ),
    "train.precision": (
        "dtype",
        "mixed_precision",
        "amp",
        "bf16",
        "fp16",
        "torch_dtype",
        "mixed_precision_param",
        "half",
    ),
    "train.frozen": ("freeze", "frozen_layers", "unfrozen_parameters", "freeze_layers"),
    "train.lora.rank": ("lora_r", "lora_rank", "adapter", "lora_dim"),
    "train.lora.alpha": ("lora_alpha",),
    "train.lora.targets": ("lora_target_modules", "target_modules", "lora_target_linear"),
    "train.early_stop.patience": ("early_stopping", "early_stopping_patience"),
    "train.log_every_steps": ("log_interval", "logging_steps", "log_freq", "log_every", "log_every_n_steps"),
    "train.validate_every_steps": (
        *("eval_interval", "eval_steps", "eval_every", "evals_per_epoch", "val_check_interval", "validation.freq"),
        *("validation_interval", "eval_freq", "val_interval"),
    ),
    "train.validation_sequences": (
        "eval_iters",
        "eval_batches",
        "limit_val_batches",
        "max_eval_samples",
        "val_batches",
    ),
    # Machine
    "plan.device": ("device", "accelerator", "device_type"),
    "plan.compile": ("torch_compile", "use_compile", "compile_model"),
    "parallel.shard": ("fsdp", "data_parallel_shard_degree", "dp_shard", "fsdp_config", "dp"),
    "parallel.replicate": ("ddp", "data_parallel_replicate_degree", "dp_replicate", "data_parallel_size"),
    "parallel.zero": ("zero_stage", "deepspeed", "zero_optimization"),
    "parallel.tensor": (
        *("tensor_parallel_degree", "tensor_parallel_size", "tensor_model_parallel_size", "tp", "tp_size", "tp_degree"),
    ),
    "parallel.pipeline": (
        *("pipeline_parallel_degree", "pipeline_parallel_size", "pipeline_model_parallel_size", "pp", "pp_size"),
    ),
    "parallel.schedule": ("pipeline_parallel_schedule", "pp_schedule"),
    "parallel.context": ("context_parallel_degree", "context_parallel_size", "cp", "cp_size"),
    "parallel.recompute": (
        *("gradient_checkpointing", "activation_checkpointing", "activation_checkpoint", "activation_checkpoint.mode"),
        *("recompute_granularity", "use_gradient_checkpointing", "enable_activation_checkpointing"),
    ),
    "parallel.offload": ("cpu_offload", "enable_cpu_offload", "offload_optimizer"),
    # Checkpoints
    "checkpoint.save_every_steps": (
        *("save_interval", "save_steps", "save_freq", "checkpoint_interval", "ckpt_interval", "checkpoint.interval"),
        *("checkpoint_every", "saves_per_epoch"),
    ),
    "checkpoint.keep_last": ("save_total_limit", "keep_latest_k", "save_top_k"),
}
"""Setting -> names that others have for it. A name with a dot stands for that whole key, others for any last part."""

REMARKS = {
    "min_lr": "as a share of `peak_lr`",
    "min_learning_rate": "as a share of `peak_lr`",
    "eta_min": "as a share of `peak_lr`",
    "warmup_ratio": "in steps",
    "decay_steps": "as a share of the steps",
    "lr_decay_iters": "a share of the steps, of `warmup-stable-decay`; other shapes decay until the last step",
    "cooldown_steps": "as a share of the steps",
    "betas": "and `beta2`",
    "bf16": '`precision = "bf16"`',
    "fp16": '`precision = "fp16"`',
    "local_batch_size": "`train.batch_size` counts the sequences of all devices",
    "per_device_train_batch_size": "`train.batch_size` counts the sequences of all devices",
    "eval_iters": "in sequences, not batches",
    "eval_batches": "in sequences, not batches",
    "adapter": "a table `[train.lora]` is enough",
    "initializer_range": "a kind of initialization",
    "init_std": "a kind of initialization",
    "multiple_of": "in features",
    "lr_scheduler": "`cosine`, `linear`, ...",
}
"""What differs besides the name."""

_EPOCHS = "a run counts steps, not epochs: set `train.steps`; `ropewalk new` chooses them for your data"
_FOLDER = (
    "a run lies in `runs/NAME`: set `name` in the recipe; `--runs FOLDER` on the command line takes another folder"
)
_RESUME = "nothing needs to be set: the same command continues a run from its newest checkpoint"
_TRACKERS = "no setting: `ropewalk monitor RUN --to tensorboard=FOLDER` or `--to csv=FILE` follows the run"
_PROCESSES = "no setting of this name: `--nproc N` starts N processes, and `[parallel]` says how they share the work"
_ACCUMULATE = (
    "it follows from `train.batch_size`, sequences of a step, and `plan.microbatch_size`, those computed at once"
)
_KERNELS = "no setting: the quickest attention kernel of the machine is chosen by measurement"
_QUANTIZED = "weights are not quantized; `[train.lora]` and `parallel.recompute` save memory"
ADVICE = {
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "n_epochs", "max_epochs"), _EPOCHS),
    **dict.fromkeys(
        ("max_tokens", "train_tokens", "total_tokens"),
        "set `train.steps`: each reads `train.batch_size` x `load.sequence_length` tokens",
    ),
    **dict.fromkeys(("out_dir", "output_dir", "save_dir", "dump_folder", "work_dir", "default_root_dir"), _FOLDER),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "auto_resume", "load_step", "resume_from"), _RESUME),
    **dict.fromkeys(("auto_resume_from_checkpoints", "always_save_checkpoint", "overwrite_output_dir"), _RESUME),
    **dict.fromkeys(("wandb", "wandb_log", "wandb_project", "wandb_entity", "use_wandb", "report_to"), _TRACKERS),
    **dict.fromkeys(("logger", "logger_name", "enable_wandb", "enable_tensorboard", "tensorboard"), _TRACKERS),
    **dict.fromkeys(
        ("devices", "num_devices", "num_gpus", "n_gpus", "gpus", "nproc_per_node", "num_processes"), _PROCESSES
    ),
    **dict.fromkeys(
        ("num_nodes", "nnodes"),
        "no setting: `ropewalk launch` writes a job for several machines, or start it with torchrun",
    ),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "grad_accum", "accumulate_grad_batches", "grad_accum_steps"), _ACCUMULATE
    ),
    **dict.fromkeys(
        ("flash_attention", "flash_attn", "attn_implementation", "sdp_attention", "xformers_attention"), _KERNELS
    ),
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "quantize", "bnb_4bit_compute_dtype"), _QUANTIZED),
    "lora_dropout": "adapters have no dropout of their own; `model.dropout` applies to the whole model",
    "eval_only": "`ropewalk evaluate RUN` measures a trained model",
    "push_to_hub": "nothing is sent to a hub; `ropewalk model export RUN FOLDER` writes a Hugging Face directory",
    "hub_model_id": "nothing is sent to a hub; `ropewalk model export RUN FOLDER` writes a Hugging Face directory",
}
"""Names for which there is no setting -> what to do."""
_MOST_PLACES = 3
"""Tables that are named when several have a setting of the name that was looked for."""

_KEY_OF = {name: key for key, names in SETTINGS.items() for name in names}


def meant_by(root: type, path: Path, *, on_command_line: bool = False) -> str:
    """What to write for the unknown key at `path`, when that is known: a setting of `root`, or advice; else empty."""
    words = _words(path)
    keys = settings_of(root)
    for name in (".".join(words), words[-1]):
        if name in ADVICE:
            return ADVICE[name]
        if (key := _KEY_OF.get(name)) in keys and key != ".".join(words):
            remark = f" ({REMARKS[name]})" if name in REMARKS else ""
            return _place(key, keys, name=words[-1], on_command_line=on_command_line) + remark
    found = [key for key in keys if key.rpartition(".")[2] == words[-1] and not key.startswith("train.phases.")]
    if not 0 < len(found) <= _MOST_PLACES:
        return ""
    places = [_place(key, keys, name=words[-1], on_command_line=on_command_line) for key in found]
    return " or ".join(places[:1] + [place.removeprefix("it belongs ") for place in places[1:]])


def table_meant_by(root: type, path: Path) -> str:
    """The table of `root` that has the name of the unknown one at `path`; empty where there is none."""
    tables = {key.rpartition(".")[0] for key in settings_of(root) if not key.startswith("train.phases.")}
    found = sorted(table for table in tables if table.rpartition(".")[2] == _words(path)[-1])
    return f"its table is `[{found[0]}]`" if len(found) == 1 else ""


def _words(path: Path) -> list[str]:
    return [part.lower().replace("-", "_") for part in path if isinstance(part, str)]


def leaves_of(tree: Mapping[str, Any], path: Path) -> Iterator[Path]:
    """The keys of all values below an unknown table."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from leaves_of(value, (*path, key))
        else:
            yield (*path, key)


@functools.cache
def settings_of(root: type) -> dict[str, bool]:
    """Every dotted key of a config, and whether its table is one of a list."""
    return dict(_settings(root, "", listed=False))


def _settings(cls: type, prefix: str, *, listed: bool) -> Iterator[tuple[str, bool]]:
    for field in fields_of(cls):
        item = item_of(field.kind)
        section = section_of(field.kind) or (section_of(item) if item is not None else None)
        if section is None or not dataclasses.is_dataclass(section):
            yield f"{prefix}{field.name}", listed
        else:
            yield from _settings(section, f"{prefix}{field.name}.", listed=item is not None)


def _place(key: str, keys: Mapping[str, bool], *, name: str, on_command_line: bool) -> str:
    """How one writes a setting that somebody called `name`: as `table.key`, or in a file its own name and its table."""
    table, _, own = key.rpartition(".")
    if on_command_line and not keys[key]:
        return f"it is `{key}`"
    where = f"in {f'`[[{table}]]`' if keys[key] else f'`[{table}]`'}" if table else "at the top of the recipe"
    return f"it belongs {where}" if own == name else f"it is `{own}` {where}"
