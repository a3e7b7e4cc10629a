"""How far a model's predictions are from its source's: the exact Kullback-Leibler divergence.

For the source, the inputs of its output layer are stored: the last hidden state of every compared
position and, once per source, the layer itself. From these its logits are recomputed next to the
candidate's, in matrix products of the same shape, and compared over the whole vocabulary. Nothing
is sampled, truncated or rounded, and a model against itself gives exactly zero.

At most `MOST_POSITIONS` positions of a text are compared, evenly spaced; scores include their
number.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.model.shards import read_header, write_whole
from quantkit.scoring.answering import Answerer, Request, Seen
from quantkit.scoring.distribution import Distribution

MOST_POSITIONS = 65_536
MOST_BYTES_BESIDE = 1 << 30
"""The source's hidden states that are kept on the GPU; more stay in host memory."""
LOGITS_BYTES = {"cuda": 128 << 20, "cpu": 16 << 20}
"""Per model, in float32; about eight arrays of that size are in use."""


def tokens_digest(requests: Sequence[Request], is_text: torch.Tensor) -> str:
    """Identifies a text with its windows and counted positions."""
    digest = hashlib.sha256(is_text.numpy().tobytes())
    for request in requests:
        for part in (request.context, request.continuation):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(array("q", part).tobytes())
    return digest.hexdigest()[:32]


def chosen(is_text: torch.Tensor) -> torch.Tensor:
    """Compared positions: all of a text's own tokens, or every second, third and so on."""
    places = is_text.nonzero()[:, 0]
    return places[:: max(1, -(-len(places) // MOST_POSITIONS))]


def kl(source: torch.Tensor, candidate: torch.Tensor) -> torch.Tensor:
    """KL(source || candidate) of rows of logits, in nats.

    Summed as p d + q - p with d = ln p - ln q: no term is negative, so rounding cannot make the sum
    negative, and an error of either normaliser counts by its square. Near d = 0 the terms are
    computed as p (d + expm1(-d)), which does not cancel.
    """
    mine = candidate.float() - Distribution(candidate).normaliser[:, None]
    theirs = source.float() - Distribution(source).normaliser[:, None]
    gap = theirs - mine
    p, q = theirs.exp(), mine.exp()
    near = p * (gap + torch.expm1(-gap))
    terms = torch.where(gap.abs() < 1, near, p * gap + (q - p))
    # A token that the source rules out adds the probability that the candidate gives it.
    return torch.where(p > 0, terms, q).clamp_(min=0).sum(-1)


def head_of(model: Any) -> dict[str, torch.Tensor]:
    """The weights of a model's output layer."""
    layer = model.get_output_embeddings()
    found = {"weight": layer.weight.detach()}
    if getattr(layer, "bias", None) is not None:
        found["bias"] = layer.bias.detach()
    return found


def write_head(path: Path, model: Any) -> None:
    """Store a source's output layer, once for all texts."""
    if not path.is_file():
        write_whole(path, {name: part.cpu().contiguous() for name, part in head_of(model).items()})


def read_head(path: Path, model: Any) -> torch.nn.Module | None:
    """A source's output layer for comparison; None where the candidate's own is the same."""
    own = head_of(model)
    stored = {name: tensor.read() for name, tensor in read_header(path).items()}
    stored = {name: part.to(own["weight"].device) for name, part in stored.items()}
    if own.keys() == stored.keys() and all(torch.equal(own[n], stored[n]) for n in own):
        return None
    n_tokens, width = stored["weight"].shape
    layer = torch.nn.Linear(width, n_tokens, "bias" in stored, device="meta")
    layer.load_state_dict(stored, assign=True)
    return layer.requires_grad_(False)


@dataclass(frozen=True)
class Reference:
    """The inputs of the source's output layer, by compared position."""

    places: torch.Tensor
    hidden: torch.Tensor

    @classmethod
    def read(cls, path: Path) -> "Reference":
        stored = read_header(path)
        return cls(stored["places"].read(), stored["hidden"].read())

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_whole(path, {"places": self.places, "hidden": self.hidden.cpu()})


class Recorder:
    """Observes the source."""

    def __init__(self, is_text: torch.Tensor) -> None:
        self._places = chosen(is_text)
        self._rows = _rows(self._places, len(is_text))
        self._hidden: torch.Tensor | None = None

    def see(self, seen: Seen) -> None:
        if self._hidden is None:
            self._hidden = _room(len(self._places), seen.hidden)
        rows, at = _compared(self._rows, seen)
        self._hidden[rows.to(self._hidden.device)] = seen.hidden[at].to(self._hidden.device)

    @property
    def reference(self) -> Reference:
        hidden = torch.zeros(0, 0) if self._hidden is None else self._hidden
        return Reference(self._places, hidden)


class Divergence:
    """Observes a candidate: its distance from the source, and whether both predict the same."""

    def __init__(
        self,
        reference: Reference,
        n_tokens: int,
        answerer: Answerer,
        head: torch.nn.Module | None,
    ) -> None:
        self.places = reference.places
        self._rows = _rows(reference.places, n_tokens)
        self._hidden = reference.hidden
        self._answerer = answerer
        self._head = head
        self.kl = torch.zeros(len(self.places))
        """In nats, by compared position."""
        self.agrees = torch.zeros(len(self.places), dtype=torch.bool)

    def see(self, seen: Seen) -> None:
        rows, at = _compared(self._rows, seen)
        device = seen.hidden.device
        if self._hidden.device != device and self._hidden.nbytes <= MOST_BYTES_BESIDE:
            self._hidden = self._hidden.to(device)
        size = max(1, LOGITS_BYTES[device.type] // (4 * self._answerer.vocabulary))
        for some, where in zip(torch.split(rows, size), torch.split(at, size), strict=True):
            theirs = self._hidden[some.to(self._hidden.device)].to(device)
            source = self._answerer.logits(theirs, self._head)
            candidate = self._answerer.logits(seen.hidden[where])
            self.kl[some] = kl(source, candidate).cpu()
            same = Distribution(source).likeliest() == Distribution(candidate).likeliest()
            self.agrees[some] = same.cpu()


def _rows(places: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """By position: its index among the compared ones, or -1."""
    rows = torch.full((n_tokens,), -1)
    rows[places] = torch.arange(len(places))
    return rows


def _compared(rows: torch.Tensor, seen: Seen) -> tuple[torch.Tensor, torch.Tensor]:
    """For an observed batch: rows of the reference, and their positions in the batch."""
    found = rows[seen.places]
    at = (found >= 0).nonzero()[:, 0]
    return found[at], at.to(seen.hidden.device)


def _room(n_positions: int, like: torch.Tensor) -> torch.Tensor:
    """On the GPU where it fits, so that recording is asynchronous."""
    size = n_positions * like.shape[1] * like.element_size()
    device = like.device if size <= MOST_BYTES_BESIDE else torch.device("cpu")
    return torch.zeros(n_positions, like.shape[1], dtype=like.dtype, device=device)
