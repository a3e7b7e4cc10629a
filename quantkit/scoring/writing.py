"""Generates answers for lm-eval (`generate_until`) with our own decoder.

Prompts, stop rules and truncation are those of lm-eval's `hf` model, so that greedy answers are the
same. Answers are cached as they come: a stopped run resumes.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quantkit.scoring import rules
from quantkit.scoring.cache import TextCache
from quantkit.scoring.generation import Generator
from quantkit.scoring.rules import Rules


def defaults(folder: Path, model: Any) -> tuple[tuple[int, ...], float]:
    """Tokens that end an answer, and the repetition penalty, as transformers uses them."""
    from transformers import GenerationConfig

    config = model.generation_config
    if (folder / "generation_config.json").is_file():
        config = GenerationConfig.from_pretrained(folder)
    ends = config.eos_token_id
    if ends is None:
        ends = []
    # If it is not set, predictions are unchanged.
    penalty = getattr(config, "repetition_penalty", None) or 1.0
    return tuple(ends if isinstance(ends, list) else [ends]), float(penalty)


class Writer:
    """Generates the answers that tasks ask for."""

    def __init__(self, lm: Any, folder: Path, texts: TextCache, max_rows: int | None) -> None:
        self._lm, self._texts = lm, texts
        self._generator = Generator(lm.model, max_rows)
        self._ends, self._penalty = defaults(folder, lm.model)

    def rules(self, task: str, asked: dict[str, Any], seed: int) -> Rules:
        """A task's own settings."""
        usual = Rules(0, ends=self._ends, repetition_penalty=self._penalty, seed=seed)
        return rules.of_task(task, asked, self._lm, usual)

    def greedy(self, max_new: int) -> Rules:
        """The likeliest tokens until the model ends its answer."""
        return Rules(max_new, ends=self._ends, repetition_penalty=self._penalty)

    def fitting(self, task: str, prompt: Sequence[int], how: Rules) -> tuple[int, ...]:
        """The end of a prompt that leaves room for an answer."""
        return rules.fitting(task, prompt, how, self._lm.max_length)

    def texts(
        self,
        prompts: Sequence[tuple[int, ...]],
        how: Rules,
        advance: Callable[[int], None],
    ) -> tuple[list[str], int]:
        """Answers as text, and how many of them were cached."""
        from lm_eval.models.utils import postprocess_generated_text

        def text_of(tokens: Sequence[int]) -> str:
            return str(self._lm.tok_decode(tokens))

        keys = rules.keys_of(prompts, how)
        found = [self._texts.get(key) for key in keys]
        open_places = [place for place, text in enumerate(found) if text is None]
        advance(len(prompts) - len(open_places))
        wanted = [prompts[place] for place in open_places]
        for batch in self._generator.answers(wanted, how, text_of) if wanted else ():
            for number, tokens in batch:
                place = open_places[number]
                text = postprocess_generated_text(text_of(tokens), list(how.stops), None)
                found[place] = text
                self._texts.put(keys[place], text)
            advance(len(batch))
        return [text for text in found if text is not None], len(prompts) - len(open_places)

    def tokens(
        self,
        prompts: Sequence[tuple[int, ...]],
        how: Rules,
        advance: Callable[[int], None],
    ) -> list[tuple[int, ...]]:
        """Answers as tokens, cached under the same keys."""
        keys = [b"tokens" + key for key in rules.keys_of(prompts, how)]
        kept = [self._texts.get(key) for key in keys]
        found = [None if text is None else tuple(json.loads(text)) for text in kept]
        open_places = [place for place, tokens in enumerate(found) if tokens is None]
        advance(len(prompts) - len(open_places))
        wanted = [prompts[place] for place in open_places]
        for batch in self._generator.answers(wanted, how, str) if wanted else ():
            for number, tokens in batch:
                place = open_places[number]
                found[place] = tokens
                self._texts.put(keys[place], json.dumps(tokens))
            advance(len(batch))
        return [tokens for tokens in found if tokens is not None]
