"""Generation settings of an lm-eval task, the same for every engine."""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quantkit.errors import ScoreError

SUPPORTED = frozenset(
    {"until", "max_gen_toks", "do_sample", "temperature", "top_k", "top_p", "repetition_penalty"}
)
HARMLESS = frozenset({"num_beams", "use_cache", "pad_token_id"})
"""Accepted with the values that change nothing."""


@dataclass(frozen=True)
class Rules:
    """How answers are generated, and where they end."""

    max_new: int
    stops: tuple[str, ...] = ()
    """An answer ends before the first of these texts."""
    ends: tuple[int, ...] = ()
    """Tokens that end an answer."""
    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0
    seed: int = 0


def keys_of(prompts: Sequence[Sequence[int]], rules: Rules) -> list[bytes]:
    """Hashes of what was asked, 16 bytes each; a repeated prompt is a separate question."""
    times: dict[bytes, int] = {}
    keys = []
    for prompt in prompts:
        digest = hashlib.sha256(array("q", prompt).tobytes())
        digest.update(repr(rules).encode())
        number = times[digest.digest()] = times.get(digest.digest(), -1) + 1
        # Greedy answers to one prompt are the same answer.
        digest.update(str(number if rules.temperature else 0).encode())
        keys.append(digest.digest()[:16])
    return keys


def of_task(task: str, asked: dict[str, Any], lm: Any, usual: Rules) -> Rules:
    """A task's own settings, over the defaults of lm-eval's models."""
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

    given: dict[str, Any] = dict(normalize_gen_kwargs(asked, lm.max_gen_toks))
    unknown = set(given) - SUPPORTED - HARMLESS
    if unknown or given.get("num_beams", 1) != 1:
        name = sorted(unknown)[0] if unknown else "num_beams"
        raise ScoreError(
            f"task {task} sets {name}: {given[name]!r}, which is not "
            f"supported; supported are {', '.join(sorted(SUPPORTED))}"
        )
    end = lm.tok_decode([lm.eot_token_id], skip_special_tokens=False)
    stops = handle_stop_sequences(given["until"], eos=end)
    return Rules(
        max_new=int(given["max_gen_toks"]),
        stops=tuple(stop for stop in stops if stop),
        ends=usual.ends,
        temperature=float(given.get("temperature", 0.0)) if given["do_sample"] else 0.0,
        top_k=given.get("top_k"),
        top_p=given.get("top_p"),
        repetition_penalty=float(given.get("repetition_penalty", usual.repetition_penalty)),
        seed=usual.seed,
    )


def fitting(task: str, prompt: Sequence[int], rules: Rules, max_length: int) -> tuple[int, ...]:
    """The end of a prompt that leaves room for an answer, as lm-eval truncates it."""
    room = max_length - rules.max_new
    if room <= 0:
        raise ScoreError(
            f"task {task} needs {rules.max_new} tokens for the answer, and the window has "
            f"{max_length}; use a longer --max-length, or another task"
        )
    return tuple(prompt[-room:])
