"""A training step of Hugging Face transformers with the same shapes, for `ropewalk bench train --peer`.

It uses what users of the library use: its model, autocast, torch's fused AdamW and gradient clipping. Body and loss
are called separately so that profiles distinguish them; both are the library's own, and `compiled` compiles both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ropewalk.base.errors import MissingPackage, UserError
from ropewalk.model.spec import Spec
from ropewalk.parallel.labels import label
from ropewalk.parallel.precision import autocast
from ropewalk.plan.plan import Plan

from ..config import Optimizer
from .step_benchmark import LEARNING_RATE, random_batch
from .step_profiler import StepFunction


def transformers_step(
    spec: Spec, plan: Plan, *, device: torch.device, optimizer: Optimizer, clip_norm: float, compiled: bool
) -> StepFunction:
    """A training step of Hugging Face transformers."""
    with device:  # on the CPU, initialization of billions of weights would take minutes
        model = transformers_model(spec).train()
    if plan.recompute == "full":
        model.gradient_checkpointing_enable()
    body: Callable[..., Any] = model.base_model
    head, cross_entropy = model.get_output_embeddings(), model.loss_function

    def loss_of(hidden: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = cross_entropy(logits=head(hidden), labels=labels, vocab_size=spec.vocabulary)
        return loss

    if compiled:
        body, loss_of = torch.compile(body), torch.compile(loss_of)
    parameters = list(model.parameters())
    update = torch.optim.AdamW(
        parameters,
        lr=LEARNING_RATE,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )
    pieces = random_batch(spec, rows=plan.batch_size, device=device).tokens.split(plan.microbatch_size)

    def step() -> Tensor:
        total = torch.zeros((), device=device)
        for tokens in pieces:
            with autocast(plan.precision, device):
                with label("forward"):
                    hidden = body(input_ids=tokens, use_cache=False).last_hidden_state
                with label("loss"):
                    loss = loss_of(hidden, tokens) / len(pieces)
            with label("backward"):
                loss.backward()
            total += loss.detach()
        with label("clip and guard"):
            torch.nn.utils.clip_grad_norm_(parameters, clip_norm)
        with label("update"):
            update.step()
            update.zero_grad(set_to_none=True)
        return total

    return step


def transformers_model(spec: Spec) -> Any:
    """The library's GPT-2 or Llama model with these shapes and torch's attention (the library's default)."""
    try:
        import transformers
    except ModuleNotFoundError:
        raise MissingPackage("transformers", "the peer `transformers`", "dev") from None
    if spec.position == "learned":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=spec.vocabulary,
                n_positions=spec.sequence_length,
                n_embd=spec.width,
                n_layer=spec.layers,
                n_head=spec.heads,
                n_inner=spec.mlp_width,
                resid_pdrop=0.0,
                embd_pdrop=0.0,
                attn_pdrop=0.0,
            )
        )
    if spec.position == "rope" and spec.norm == "rms" and spec.mlp == "swiglu":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=spec.vocabulary,
                hidden_size=spec.width,
                intermediate_size=spec.mlp_width,
                num_hidden_layers=spec.layers,
                num_attention_heads=spec.heads,
                num_key_value_heads=spec.kv_heads,
                max_position_embeddings=spec.sequence_length,
                tie_word_embeddings=spec.tie_embeddings,
            )
        )
    raise UserError("the peer `transformers` only has models like GPT-2 or Llama; choose another size")
