"""How far a model's predictions are from its source's: the exact Kullback-Leibler divergence.

For the source, the inputs of its output layer are stored: the last hidden state of every compared
position and, once per source, the layer itself. From these its logits are recomputed next to the
candidate's, in matrix products of the same shape, and compared over the whole vocabulary. Nothing
is sampled, truncated or rounded, and a model against itself gives exactly zero. On a GPU a
comparison costs little more than the source's output layer: stored states are read while the
candidate computes, both rows of logits are read once by one kernel, and results stay on the GPU.

At most `MOST_POSITIONS` positions of a text are compared, evenly spaced; scores include their
number.
"""

import hashlib
import math
from array import array
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.model.shards import DTYPES, StoredTensor, read_header, write_whole
from quantkit.scoring.answering import Answerer, Observation, Request, sent
from quantkit.scoring.distribution import Distribution

MOST_POSITIONS = 65_536
MOST_BYTES_BESIDE = 1 << 30
"""The source's hidden states that are kept on the GPU; more stay in host memory."""
LOGITS_BYTES = 16 << 20
"""Of rows that are compared together on a CPU, in float32: about eight arrays are in its caches."""
NEAR = 0.5
SERIES = tuple((-1) ** n / math.factorial(n) for n in range(2, 9))
"""Of (d + exp(-d) - 1) / d^2: exact to float32 where |d| < `NEAR`."""
MOST_ORDINARY = 100.0
"""Differences of log-probabilities below it cannot overflow the series."""
DIGEST = ".digest"
DIGEST_WORDS = 1 << 22


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
    negative, and an error of either normaliser counts by its square. Near d = 0 the terms are p
    times the series of d + exp(-d) - 1, which neither cancels nor takes another exponential.
    """
    return kl_of(Distribution(source), Distribution(candidate))


def kl_of(source: Distribution, candidate: Distribution) -> torch.Tensor:
    """The same where both normalisers are known."""
    pair = source.logits, candidate.logits, source.normaliser, candidate.normaliser
    if source.logits.is_cuda:
        from quantkit.scoring import kernels

        return kernels.divergence(*pair, NEAR)
    size = max(1, LOGITS_BYTES // (4 * source.logits.shape[1]))
    parts = zip(*(torch.split(part, size) for part in pair), strict=True)
    return torch.cat([_kl(*part) for part in parts])


def _kl(
    source: torch.Tensor,
    candidate: torch.Tensor,
    source_normaliser: torch.Tensor,
    candidate_normaliser: torch.Tensor,
) -> torch.Tensor:
    mine = candidate.float() - candidate_normaliser[:, None]
    theirs = source.float() - source_normaliser[:, None]
    gap = theirs - mine
    p, far = theirs.exp(), float(gap.abs().amax())
    near = gap * SERIES[-1]
    for factor in SERIES[-2::-1]:
        near.add_(factor).mul_(gap)
    near.mul_(gap).mul_(p)
    if far < NEAR:
        return near.clamp_(min=0).sum(-1)
    q = mine.exp()
    if far < MOST_ORDINARY and bool(p.amin() > 0):
        # The same as below, in products: CPUs select by a mask at a tenth of their speed.
        is_near = gap.abs().lt_(NEAR)
        terms = gap.mul_(p).add_(q.sub_(p)).mul_(1 - is_near).add_(near.mul_(is_near))
        return terms.clamp_(min=0).sum(-1)
    terms = torch.where(gap.abs() < NEAR, near, p * gap + (q - p))
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
        own = head_of(model)
        stored = {name: part.cpu().contiguous() for name, part in own.items()}
        stored |= {name + DIGEST: digest_of(part) for name, part in own.items()}
        write_whole(path, stored)


def read_head(path: Path, model: Any) -> torch.nn.Module | None:
    """A source's output layer for comparison; None where the candidate's own is the same."""
    own, stored = head_of(model), read_header(path)
    digests = {name: tensor.read() for name, tensor in stored.items() if name.endswith(DIGEST)}
    same = {name + DIGEST: digest_of(part) for name, part in own.items()}
    if same.keys() == digests.keys() and all(torch.equal(same[n], digests[n]) for n in same):
        return None
    device = own["weight"].device
    parts = {n: t.read().to(device) for n, t in stored.items() if n not in digests}
    n_tokens, width = parts["weight"].shape
    layer = torch.nn.Linear(width, n_tokens, "bias" in parts, device="meta")
    layer.load_state_dict(parts, assign=True)
    return layer.requires_grad_(False)


def digest_of(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that tell tensors apart, computed where the tensor is: shape, dtype and every bit.

    Each word of 8 bytes is mixed with its position as SplitMix64 does, and the results are summed.
    A layer of half a gigabyte takes milliseconds on a GPU; reading it from a disk to compare takes
    longer than the candidate needs for its answers.
    """
    raw = tensor.detach().contiguous().view(torch.uint8).flatten()
    words = torch.nn.functional.pad(raw, (0, -len(raw) % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), DIGEST_WORDS):
        part = words[start : start + DIGEST_WORDS]
        total += _mixed(part, start).sum()
    facts = torch.tensor([*tensor.shape, tensor.element_size(), tensor.is_floating_point()])
    return torch.stack([total.cpu(), _mixed(facts, len(words)).sum()])


def _mixed(words: torch.Tensor, start: int) -> torch.Tensor:
    """SplitMix64 of words and their positions; products wrap around."""
    places = torch.arange(start + 1, start + 1 + len(words), device=words.device)
    mixed = places.mul_(-7046029254386353131).bitwise_xor_(words)
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        # Shifts of signed numbers are arithmetic, which is as good for mixing.
        mixed.bitwise_xor_(mixed >> shift).mul_(factor)
    return mixed.bitwise_xor_(mixed >> 31)


@dataclass(frozen=True)
class Reference:
    """The inputs of the source's output layer, by compared position."""

    places: torch.Tensor
    _hidden: "torch.Tensor | Future[torch.Tensor]"

    @property
    def hidden(self) -> torch.Tensor:
        return self._hidden.result() if isinstance(self._hidden, Future) else self._hidden

    @classmethod
    def read(cls, path: Path, device: torch.device) -> "Reference":
        """Read the file while the device computes; on a GPU straight into its memory."""
        stored = read_header(path)
        places, hidden = stored["places"].read(), stored["hidden"]
        pool = ThreadPoolExecutor(1)
        if device.type == "cpu" or hidden.size_bytes > MOST_BYTES_BESIDE:
            reading = pool.submit(hidden.read)
        else:
            room = torch.empty(hidden.shape, dtype=DTYPES[hidden.dtype], device=device)
            reading = pool.submit(_fill, room, hidden, _beside(device))
        pool.shutdown(wait=False)
        return cls(places, reading)

    def write(self, path: Path) -> None:
        """Write the file atomically."""
        write_whole(path, {"places": self.places, "hidden": self.hidden.cpu()})


def _beside(device: torch.device) -> torch.cuda.Stream:
    """A stream for copies beside the work of the current one, after what it has already."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def _fill(room: torch.Tensor, stored: StoredTensor, stream: torch.cuda.Stream) -> torch.Tensor:
    with torch.cuda.stream(stream):
        room.copy_(stored.read())
    stream.synchronize()
    return room


class Recorder:
    """Observes the source."""

    def __init__(self, is_text: torch.Tensor) -> None:
        self._places = chosen(is_text)
        self._rows = _rows(self._places, len(is_text))
        self._hidden: torch.Tensor | None = None

    def see(self, seen: Observation) -> None:
        if self._hidden is None:
            self._hidden = _room(len(self._places), seen.hidden)
        rows, at = _compared(self._rows, seen)
        device = self._hidden.device
        self._hidden[sent(rows, device)] = seen.hidden[at].to(device)

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
        self._reference = reference
        self._answerer = answerer
        self._head = head
        # On the device until the end: the host waits for nothing in between.
        self._kl = torch.zeros(len(self.places), device=answerer.device)
        self._agrees = torch.zeros(len(self.places), dtype=torch.bool, device=answerer.device)

    @property
    def kl(self) -> torch.Tensor:
        """In nats, by compared position."""
        return self._kl.cpu()

    @property
    def agrees(self) -> torch.Tensor:
        return self._agrees.cpu()

    def see(self, seen: Observation) -> None:
        rows, at = _compared(self._rows, seen)
        if not len(rows):
            return
        candidate, device = seen.predicted, seen.hidden.device
        if len(at) < len(seen.places):  # both are computed in products of the same shape
            candidate = Distribution(self._answerer.logits(seen.hidden[at]))
        hidden = self._reference.hidden
        places = sent(rows, device)
        theirs = hidden[places if hidden.device == device else rows].to(device)
        source = Distribution(self._answerer.logits(theirs, self._head))
        self._kl[places] = kl_of(source, candidate)
        self._agrees[places] = source.likeliest == candidate.likeliest


def _rows(places: torch.Tensor, n_tokens: int) -> torch.Tensor:
    """By position: its index among the compared ones, or -1."""
    rows = torch.full((n_tokens,), -1)
    rows[places] = torch.arange(len(places))
    return rows


def _compared(rows: torch.Tensor, seen: Observation) -> tuple[torch.Tensor, torch.Tensor]:
    """For an observed batch: rows of the reference, and their positions in the batch."""
    found = rows[seen.places]
    at = (found >= 0).nonzero()[:, 0]
    return found[at], sent(at, seen.hidden.device)


def _room(n_positions: int, like: torch.Tensor) -> torch.Tensor:
    """On the GPU where it fits, so that recording is asynchronous."""
    size = n_positions * like.shape[1] * like.element_size()
    device = like.device if size <= MOST_BYTES_BESIDE else torch.device("cpu")
    return torch.zeros(n_positions, like.shape[1], dtype=like.dtype, device=device)
