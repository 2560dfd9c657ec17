"""`[model]`, `[plan]` and `[evaluate]`."""

from __future__ import annotations

from tests.evaluate.harness.opened import FOLDER
from tests.wiring.rows import Row, planned
from tests.wiring.verbs import asked, evaluated, limited, named, stepped

LEARNED = ('model.position="learned"',)
ASKED = ('evaluate.tasks=["tests.evaluate.perturb.test_robustness:Asked"]',)
REPLIES, SHORT = ('evaluate.tasks=["dialogue"]',), "evaluate.max_new_tokens=12"
SPACED = 'evaluate.perturbations=["extra_spaces"]'
FILES = (f'evaluate.task_folders=["{FOLDER}"]',)
STRETCHED = ('model.rope_scaling="linear"', "model.rope_factor=2")

ROWS = [
    Row("model.layers", "3", "weights names"),
    Row("model.width", "24", "weights names"),
    Row("model.heads", "1", "losses"),
    Row("model.head_size", "4", "weights names"),
    Row("model.kv_heads", "1", "weights names"),
    Row("model.mlp_width", "48", "weights names"),
    Row("model.bias", "true", "weights names"),
    Row("model.norm", "layer", "losses"),
    Row("model.norm_position", "post", "losses"),
    Row("model.qk_norm", "true", "weights names"),
    Row("model.mlp", "gelu", "losses"),
    Row("model.position", "alibi", "losses"),
    Row("model.rope_theta", "100", "losses"),
    Row("model.rope_scaling", "ntk", "losses", STRETCHED),
    Row("model.rope_factor", "4", "losses", STRETCHED),
    Row("model.window", "4", "losses"),
    Row("model.documents", "separate", "losses"),
    Row("model.dropout", "0.5", "losses"),
    Row("model.init", "gaussian", "losses"),
    Row("model.tie_embeddings", "false", "weights names"),
    Row("model.vocabulary", "300", "weights names"),
    Row("model.positions", "32", "weights names", LEARNED),
    Row("plan.microbatch_size", "1", "ops", by=stepped),
    Row("plan.device", "cuda", "error", by=planned),
    Row("plan.memory_bytes", "1000", "error", by=planned),
    Row("plan.compile", "on", "plan", by=planned),
    Row("plan.deterministic", "true", "deterministic(device)"),
    Row("plan.fp8", "all", "plan", by=planned),
    Row("plan.tuning", "off", "plan", by=planned),
    Row("evaluate.tasks", '["held-out"]', "tasks", by=evaluated),
    Row("evaluate.task_folders", f'["{FOLDER}"]', "asked", ('evaluate.tasks=["cloze"]',), by=named),
    Row("evaluate.datasets", f'"{FOLDER}/here.toml"', "asked", ('evaluate.tasks=["arc_easy"]',), by=named),
    Row("evaluate.trusted_folders", f'["{FOLDER}"]', "asked", (*FILES, 'evaluate.tasks=["processed"]'), by=named),
    Row("evaluate.fewshot", "1", "asked", (*FILES, 'evaluate.tasks=["cloze"]'), by=named),
    Row("evaluate.chat_template", "multi-turn", "asked", (*FILES, 'evaluate.tasks=["cloze"]'), by=named),
    Row("evaluate.max_bytes", "1000", "bytes", by=evaluated),
    Row("evaluate.samples", "1", "samples", by=evaluated),
    Row("evaluate.limit", "2", "questions", by=limited),
    Row("evaluate.prompt_tokens", "3", "prompts", by=evaluated),
    Row("evaluate.max_new_tokens", "2", "completions", by=evaluated),
    Row("evaluate.temperature", "0", "completions", by=evaluated),
    Row("evaluate.top_k", "1", "completions", by=evaluated),
    Row("evaluate.perturbations", '["extra_spaces"]', "tasks", ASKED, by=evaluated),
    Row("evaluate.bias_folder", "elsewhere", "error", ('evaluate.tasks=["crows-pairs"]',), by=asked),
    Row("evaluate.toxicity_judge", "perspective", "error", ('evaluate.tasks=["toxicity"]',), by=asked),
    Row("evaluate.judge_sheet", "nowhere.csv", "error", REPLIES, by=asked),
    Row("evaluate.dialogues", "nowhere.jsonl", "error", REPLIES, by=asked),
    Row("evaluate.relevance_judge", "lexical_consistency", "measured", (*REPLIES, SHORT), by=evaluated),
    Row("evaluate.consistency_judge", "lexical_relevance", "measured", (*REPLIES, SHORT), by=evaluated),
    Row("evaluate.perturbation_strength", "10", "measured", (*ASKED, SPACED), by=evaluated),
    Row("evaluate.top_p", "0.1", "completions", by=evaluated),
    Row("evaluate.min_p", "0.9", "completions", by=evaluated),
    Row("evaluate.repetition_penalty", "5.0", "completions", by=evaluated),
]
