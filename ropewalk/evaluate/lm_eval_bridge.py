"""Our models for lm-evaluation-harness: it asks, our scorer and generator answer.

    import lm_eval
    from ropewalk.evaluate.lm_eval_bridge import BridgedModel

    model = BridgedModel("runs/books/checkpoints/step-00001000")
    lm_eval.simple_evaluate(model, tasks=["arc_easy"])

Takes checkpoints and Hugging Face directories. Texts become tokens as evaluate/text_encoder.py says: for Hugging Face
directories exactly as in lm-evaluation-harness.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ropewalk.base.errors import MissingPackage
from ropewalk.base.seeds import seed_for

from .model_folder import open_model
from .task import Sampling

try:
    from lm_eval.api.model import LM
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError:
    raise MissingPackage("lm-eval", "the bridge to lm-evaluation-harness", "harness") from None

MAX_NEW_TOKENS = 256
"""Where a task does not say how long an answer may be, as in lm-evaluation-harness."""


class BridgedModel(LM):
    """The model in a folder, on this process's device."""

    def __init__(self, path: Path | str, *, seed: int = 0) -> None:
        super().__init__()
        self._model, held_out = open_model(Path(path), seed=seed)
        self._texts, self._seed = held_out.texts, seed

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy) of each continuation."""
        answers = self._model.loglikelihood(self._texts.pairs([request.args for request in requests]))
        return [(answer.log_probability, answer.greedy) for answer in answers]

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of each text, in the windows of lm-evaluation-harness: disjoint targets, as much context as
        fits."""
        pairs: list[tuple[list[int], list[int]]] = []
        of: list[int] = []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self._texts.prompts([text])[0]
                if self._texts.foreign
                else self._texts.document(text).tolist(),
                prefix_token=self._texts.before,
                max_seq_len=self._model.length,
                context_len=1,
            )
            pairs += [make_disjoint_window(window) for window in windows]
            of += [number] * (len(pairs) - len(of))
        found = [0.0] * len(requests)
        for number, answer in zip(of, self._model.loglikelihood(pairs), strict=True):
            found[number] += answer.log_probability
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """The completion of each prompt, without its stop text."""
        found: dict[int, str] = {}
        by_sampling: dict[Sampling, list[int]] = {}
        for number, request in enumerate(requests):
            by_sampling.setdefault(_sampling(request.args[1]), []).append(number)
        for sampling, numbers in by_sampling.items():
            prompts = self._texts.prompts([requests[number].args[0] for number in numbers])
            seeds = [seed_for(self._seed, "lm-eval", number) for number in numbers]
            drawn = self._model.generate(prompts, sampling, seeds=seeds)
            for number, prompt, completion in zip(numbers, prompts, drawn, strict=True):
                text = self._texts.detokenizer.continuation(prompt, completion).decode(errors="replace")
                found[number] = _stopped(text, sampling.stop)
        return [found[number] for number in range(len(requests))]


def _sampling(options: dict[str, Any]) -> Sampling:
    until = options.get("until") or ()
    temperature = float(options.get("temperature", 0.0)) if options.get("do_sample", True) else 0.0
    return Sampling(
        max_new_tokens=int(options.get("max_gen_toks", MAX_NEW_TOKENS)),
        temperature=temperature,
        top_k=int(options.get("top_k", 0)),
        top_p=float(options.get("top_p", 1.0)),
        stop=(until,) if isinstance(until, str) else tuple(until),
    )


def _stopped(text: str, stop: Sequence[str]) -> str:
    return text[: min((place for place in map(text.find, stop) if place >= 0), default=len(text))]
