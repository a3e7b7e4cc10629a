"""Shared by all ways of generating answers: the next token, and where an answer ends."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quantkit.scoring.rules import Rules, keys_of

MIN_SHARED = 32
"""Shorter prefixes are computed again for every row."""


class Choice:
    """The next token of every row."""

    def __init__(
        self, prompts: Sequence[tuple[int, ...]], rules: Rules, device: torch.device
    ) -> None:
        from transformers import (
            RepetitionPenaltyLogitsProcessor,
            TemperatureLogitsWarper,
            TopKLogitsWarper,
            TopPLogitsWarper,
        )

        self._prompts, self._device = prompts, device
        self._penalty: Any = None
        if rules.repetition_penalty != 1:
            self._penalty = RepetitionPenaltyLogitsProcessor(rules.repetition_penalty)
        self._warpers: list[Any] = []
        self._sources: dict[int, torch.Generator] | None = None
        if rules.temperature:
            self._warpers.append(TemperatureLogitsWarper(rules.temperature))
            if rules.top_k:
                self._warpers.append(TopKLogitsWarper(rules.top_k))
            if rules.top_p is not None and rules.top_p < 1:
                self._warpers.append(TopPLogitsWarper(rules.top_p))
            self._sources = {
                place: torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
                for place, key in enumerate(keys_of(prompts, rules))
            }

    @property
    def is_plain(self) -> bool:
        """Whether it is the likeliest token, which depends on the logits alone."""
        return self._penalty is None and self._sources is None

    def __call__(
        self,
        logits: torch.Tensor,
        places: Sequence[int],
        written: torch.Tensor,
        counts: Sequence[int],
    ) -> torch.Tensor:
        """For rows that answer these prompts, with this many tokens of `written` so far."""
        if self._penalty is not None:
            logits = self._penalized(logits.float(), places, written, counts)
        if self._sources is None:
            return logits.argmax(-1)
        logits = logits.float()
        for warper in self._warpers:
            logits = warper(None, logits)
        # One random number per row: the token where the cumulative probability reaches it.
        drawn = torch.tensor(
            [torch.rand(1, generator=self._sources[place]).item() for place in places],
            device=self._device,
        )
        sums = logits.softmax(-1).cumsum(-1)
        at = torch.searchsorted(sums, (drawn * sums[:, -1])[:, None], right=True)[:, 0]
        return at.clamp(max=logits.shape[-1] - 1)

    def _penalized(
        self,
        logits: torch.Tensor,
        places: Sequence[int],
        written: torch.Tensor,
        counts: Sequence[int],
    ) -> torch.Tensor:
        rows = []
        for row, place in enumerate(places):
            prompt = torch.tensor(self._prompts[place], device=self._device)
            seen = torch.cat([prompt, written[row, : counts[row]]])
            rows.append(self._penalty(seen[None], logits[row : row + 1].clone()))
        return torch.cat(rows)


def ended(
    tokens: Sequence[int], rules: Rules, text_of: Callable[[Sequence[int]], str]
) -> tuple[int, ...] | None:
    """The tokens of an answer, if it has ended."""
    tokens = tuple(tokens[: rules.max_new])
    for place, token in enumerate(tokens):
        if token in rules.ends:
            return tokens[: place + 1]
    if len(tokens) == rules.max_new:
        return tokens
    text = text_of(tokens) if rules.stops else ""
    return tokens if any(stop in text for stop in rules.stops) else None


def shared(prompts: Sequence[tuple[int, ...]], own: int = 1) -> int:
    """Length of the prompts' common prefix; each keeps some tokens of its own."""
    if len(prompts) < 2:
        return 0
    first, last = min(prompts), max(prompts)
    most = min(map(len, prompts)) - own
    same = next((i for i in range(min(most, len(first))) if first[i] != last[i]), most)
    return same if same >= MIN_SHARED else 0
