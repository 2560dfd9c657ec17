"""Prints, as JSON, what lm-evaluation-harness asks a model for the tasks of some folders that bring their data.

    python tests/evaluate/harness/lm_eval_prompts.py tests/evaluate/harness/tasks ropewalk/evaluate/suites/*/ > \
        tests/evaluate/harness/lm_eval_prompts.json

made the file of that name, in an environment with lm-eval 0.4.13; torch is not needed. Output: by style of the chat
template, then by task: the number of requests, the SHA-256 of all, and the first one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

STYLES = ("none", "single-turn", "multi-turn")
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] | trim }}</{{ message['role'] }}>\n"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""A chat template of our own."""


def copy(folder: Path, into: Path) -> bool:
    """Copies the tasks that bring their data, with metrics that lm-eval has; whether there are any."""
    texts = {path.name: path.read_text("utf-8") for path in folder.iterdir() if path.is_file()}
    public = re.compile(r"^dataset_path: (?!json)", re.MULTILINE)
    kept = {name: text for name, text in texts.items() if not (name.endswith(".yaml") and public.search(text))}
    for name, text in kept.items():
        (into / name).write_text(re.sub(r"metric: (rougeL|token_f1)", "metric: exact_match", text), "utf-8")
    return any(name.endswith(".yaml") for name in kept)


def template(messages: list[dict[str, str]], *, add_generation_prompt: bool = True) -> str:
    """As transformers renders it: without a generation prompt the last message is left open."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    text = environment.from_string(TEMPLATE).render(messages=messages, add_generation_prompt=add_generation_prompt)
    if add_generation_prompt:
        return text
    last = messages[-1]["content"].strip()
    return text[: text.rindex(last) + len(last)]


def digest(requests: list[list[str]]) -> dict[str, Any]:
    """What is kept of the requests of a task: each is its texts, without settings of generation."""
    text = json.dumps(requests, ensure_ascii=False)
    return {
        "count": len(requests),
        "digest": hashlib.sha256(text.encode()).hexdigest(),
        "first": requests[0],
    }


def prompts(folder: Path, style: str) -> dict[str, Any]:
    """What every task of the folder asks, in order."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(folder), include_defaults=False)
    found = {}
    for name in sorted(manager.all_subtasks):
        loaded = manager.load([name])
        task = loaded["tasks"][name]
        task.set_fewshot_seed(1234)
        if task.config.num_fewshot is None:
            task.set_config(key="num_fewshot", value=0)
        task.build_all_requests(
            apply_chat_template=style != "none",
            fewshot_as_multiturn=style == "multi-turn",
            chat_template=template if style != "none" else None,
            tokenizer_name="none",
        )
        asked = [[part for part in instance.args if isinstance(part, str)] for instance in task.instances]
        found[name] = digest(asked)
    return found


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    out: dict[str, dict[str, Any]] = {style: {} for style in STYLES}
    for argument in map(Path, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as temporary:
            if copy(argument, Path(temporary)):
                # lm-eval looks for data files in the working folder.
                with contextlib.chdir(temporary):
                    for style in STYLES:
                        out[style] |= prompts(Path(temporary), style)
    print(json.dumps(out, ensure_ascii=False, indent=1))
