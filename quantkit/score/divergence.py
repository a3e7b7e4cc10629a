"""How far a model's predictions are from its source's, token by token.

Of the source's distribution at every position the 48 likeliest tokens are kept, and 16 drawn at
random from all the others, by their probability: 388 bytes a token. The first part of the
divergence is then exact and the second, usually a small one, is estimated without bias; its noise
is part of the standard error over documents. Log-probabilities are kept in steps of 1/4096, which
is off by 0.00013 at most.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.model.shards import read_header, write_whole
from quantkit.score.answering import Request
from quantkit.score.distribution import Distribution

KEPT = 48
DRAWN = 16
STEPS = 4096
MIDDLE = 32760
"""Moves steps, which are negative, into the range of 16-bit integers."""
MOST_BYTES_BESIDE = 1 << 30
LOWEST = -15.99
"""Log-probabilities below are kept as this: what is that unlikely weighs nothing."""


def tokens_digest(requests: Sequence[Request]) -> str:
    """Tells one text, cut into these windows, from all others."""
    digest = hashlib.sha256()
    for request in requests:
        for part in (request.context, request.continuation):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(array("q", part).tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True)
class Reference:
    """The source's predictions: [tokens, KEPT likeliest in order, then DRAWN others]."""

    ids: torch.Tensor
    steps: torch.Tensor
    rest: torch.Tensor
    """The mass of all but the likeliest."""

    @classmethod
    def empty(cls, n_tokens: int, device: torch.device | None = None) -> "Reference":
        """Room for a text's predictions, beside the model where that fits."""
        if n_tokens * (KEPT + DRAWN) * 6 > MOST_BYTES_BESIDE:
            device = None
        return cls(
            torch.zeros(n_tokens, KEPT + DRAWN, dtype=torch.int32, device=device),
            torch.zeros(n_tokens, KEPT + DRAWN, dtype=torch.int16, device=device),
            torch.zeros(n_tokens, device=device),
        )

    def record(self, predicted: Distribution, places: torch.Tensor) -> None:
        """A watcher for the source."""
        generator = torch.Generator(predicted.normaliser.device).manual_seed(int(places[0]))
        likeliest = predicted.top(KEPT)
        ids = torch.cat([likeliest, predicted.draw(DRAWN, likeliest, generator)], 1)
        kept = predicted.log_probabilities(ids).clamp_(min=LOWEST)
        rest = 1 - kept[:, :KEPT].exp().sum(-1)
        steps = (kept.mul_(STEPS).round_() + MIDDLE).to(torch.int16)
        where = self.rest.device
        places = places.to(where)
        self.ids[places] = ids.to(where, torch.int32)
        self.steps[places] = steps.to(where)
        self.rest[places] = rest.clamp_(min=0).to(where)

    def write(self, path: Path) -> None:
        """Keep it; the file appears whole or not at all."""
        parts = {"ids": self.ids, "steps": self.steps, "rest": self.rest}
        write_whole(path, {name: part.cpu() for name, part in parts.items()})

    @classmethod
    def read(cls, path: Path) -> "Reference":
        stored = read_header(path)
        return cls(stored["ids"].read(), stored["steps"].read(), stored["rest"].read())


class Divergence:
    """Per token: how far from the source, and whether both would say the same.

    Where the reference fits, it lies beside the model, so that comparing makes nobody wait.
    """

    def __init__(self, reference: Reference, device: torch.device | None = None) -> None:
        n_tokens = reference.ids.shape[0]
        if reference.ids.nbytes + reference.steps.nbytes > MOST_BYTES_BESIDE:
            device = None
        parts = (reference.ids, reference.steps, reference.rest)
        self._reference = Reference(*(part.to(device) for part in parts)) if device else reference
        self._kl = torch.zeros(n_tokens, device=device)
        self._agrees = torch.zeros(n_tokens, dtype=torch.bool, device=device)

    @property
    def kl(self) -> torch.Tensor:
        """In nats."""
        return self._kl.cpu()

    @property
    def agrees(self) -> torch.Tensor:
        return self._agrees.cpu()

    def see(self, predicted: Distribution, places: torch.Tensor) -> None:
        """A watcher for the candidate."""
        device = predicted.normaliser.device
        places = places.to(self._kl.device)
        ids = self._reference.ids[places].to(device).long()
        source = (self._reference.steps[places].to(device).float() - MIDDLE) / STEPS
        gap = source - predicted.log_probabilities(ids)
        kl = (source[:, :KEPT].exp() * gap[:, :KEPT]).sum(-1)
        kl += self._reference.rest[places].to(device) * gap[:, KEPT:].mean(-1)
        self._kl[places] = kl.to(self._kl.device)
        self._agrees[places] = (predicted.likeliest() == ids[:, 0]).to(self._kl.device)
