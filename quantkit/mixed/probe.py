"""How rounding one unit alone changes the model's predictions.

A few samples go through the blocks once more per unit, with that unit rounded and everything else
unquantised. All of them advance together with the pass, block by block: those whose unit is in an
earlier block continue, those whose unit is in this one start from the source's own states.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.mixed.rounding import probe_change
from quantkit.model.blocks import Decoder
from quantkit.model.shards import DTYPES
from quantkit.onepass.visit import Visit

if TYPE_CHECKING:
    from quantkit.onepass.padding import Keep

TOKENS = {"cuda": 4096, "cpu": 1024}
TIMES = 3.0
"""How many times as large a change is probed. KL grows with its square, while what comes from the
rounding of bfloat16 states that differ at all stays the same: up to half of what a change of usual
size shows. Much larger ones leave the range in which the square holds.
"""


@dataclass
class Outer:
    """Embedding and output head, where these are units too; one unit may be both."""

    ids: torch.Tensor
    """Token ids of the samples, in the order of the pass."""
    embedding: str = ""
    """The unit's name; empty if it is not a unit."""
    head: str = ""
    """The same; the embedding's unit where they are tied."""
    inputs: torch.Tensor | None = None
    """The head's input, once it is known."""


class Probe:
    """States of a few samples, by the unit that was changed on their way."""

    def __init__(self, outer: Outer | None = None) -> None:
        self.outer = outer
        self._clean: torch.Tensor | None = None
        self._states: dict[str, torch.Tensor] = {}
        self._keep: Keep = None
        self.is_lost = False
        """Whether this family's blocks pass on more than hidden states, which is not supported."""

    def begin(self, visit: Visit) -> None:
        """Keep the states of a few samples before the first block."""
        n_samples = visit.padding.n_samples(TOKENS[visit.decoder.device.type])
        self._clean, self._states = visit.first(n_samples), {}
        self._keep = visit.padding.first(n_samples)
        if self.outer is not None and self.outer.embedding:
            self._states[self.outer.embedding] = self._embedded(visit.decoder, self.outer)

    def advance(self, visit: Visit, changes: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Run one block; `changes` holds what is added to parameters, by unit."""
        if visit.call.carried or visit.call.shared:
            self.is_lost = True
        if self.is_lost:
            return
        assert self._clean is not None
        before = self._clean
        self._run(visit)
        arguments = visit.call.of_first(len(before), visit.decoder.device)
        for unit, moved in changes.items():
            parameters = {n: visit.state[n].float() + TIMES * d for n, d in moved.items()}
            self._states[unit] = visit.run({**visit.state, **parameters}, before, arguments)

    def _run(self, visit: Visit) -> None:
        """All states through the block as it is: as many samples at once as the pass itself has in
        a batch, since a few tokens leave a GPU idle.
        """
        assert self._clean is not None
        decoder, n_samples = visit.decoder, len(self._clean)
        names, states = list(self._states), [*self._states.values(), self._clean]
        n_states = visit.stream.hidden.batch_size // n_samples if visit.call.is_plain else 1
        done: list[torch.Tensor] = []
        with decoder.loaded(visit.index, visit.state) as block:
            for start in range(0, len(states), max(1, n_states)):
                some = torch.cat(states[start : start + max(1, n_states)])
                arguments = visit.call.of_first(len(some), decoder.device)
                done += torch.split(decoder.run(block, some, arguments), n_samples)
        *others, self._clean = done
        self._states = dict(zip(names, others, strict=True))

    def _embedded(self, decoder: Decoder, outer: Outer) -> torch.Tensor:
        """The first states with the embedding rounded; some families scale the embedding's
        output.
        """
        assert self._clean is not None
        table, dtype = outer_weight(decoder, outer.embedding)
        moved = probe_change(table, dtype)
        ids = outer.ids[: len(self._clean)].to(table.device)
        plain, states = table[ids], self._clean.float()
        factor = (states * plain).sum() / plain.square().sum()
        return (states + factor * TIMES * moved[ids]).to(self._clean.dtype)

    @property
    def n_tokens(self) -> int:
        """Without padding."""
        if self._clean is None or self.is_lost:
            return 0
        return (
            self._clean.shape[0] * self._clean.shape[1] if self._keep is None else len(self._keep)
        )

    def divergences(self, decoder: Decoder, calibration: CalibrationTokens) -> dict[str, float]:
        """Mean KL in nats per token of changes of usual size, by unit; empty where the samples were
        lost.
        """
        if self.is_lost or self._clean is None:
            return {}
        ids = calibration.ids[: len(self._clean)]
        lengths = calibration.lengths
        head = self.outer.head if self.outer is not None else ""
        zero = torch.zeros((), dtype=torch.float64, device=decoder.device)
        totals = dict.fromkeys((*self._states, *([head] if head else [])), zero)
        read: list[torch.Tensor] = []
        kept: list[torch.Tensor] = []
        layer = decoder.model.get_output_embeddings()
        with decoder.head() as logits:
            for sample in range(len(ids)):
                one = slice(sample, sample + 1)
                n_real = ids.shape[1] if lengths is None else int(lengths[sample])
                hook = layer.register_forward_pre_hook(
                    lambda _, inputs, n=n_real: read.append(inputs[0].flatten(0, -2)[:n])
                )
                wanted = logits(self._clean[one], ids[one])[:n_real].log_softmax(-1)
                hook.remove()
                if head:
                    kept.append(wanted.cpu())
                for unit, states in self._states.items():
                    if unit != head:
                        found = _kl(wanted, logits(states[one], ids[one])[:n_real])
                        totals[unit] = totals[unit] + found
        if head and self.outer is not None:
            self.outer.inputs = torch.cat(read)
            weight, dtype = outer_weight(decoder, head)
            changed = {_parameter(decoder, head): weight + TIMES * probe_change(weight, dtype)}
            states = self._states.get(head, self._clean)
            with decoder.head(changed) as logits:
                for sample, wanted in enumerate(kept):
                    one = slice(sample, sample + 1)
                    found = logits(states[one], ids[one])[: len(wanted)]
                    totals[head] = totals[head] + _kl(wanted.to(found.device), found)
        n_tokens = self.n_tokens * TIMES**2
        return {unit: max(0.0, float(total) / n_tokens) for unit, total in totals.items()}


def _kl(wanted: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """KL summed over positions, from log-probabilities to logits."""
    found = logits.log_softmax(-1)
    return torch.nn.functional.kl_div(found, wanted, reduction="sum", log_target=True).double()


def _parameter(decoder: Decoder, module: str) -> str:
    """The model's own name of a weight outside the blocks."""
    stored = f"{module}.weight"
    names = {s: n for n, s in decoder.links.stored.items()}
    return names.get(stored, stored)


def outer_weight(decoder: Decoder, module: str) -> tuple[torch.Tensor, torch.dtype]:
    """A weight outside the blocks in float32 on the device, and its stored dtype."""
    stored = decoder.source.tensors[f"{module}.weight"]
    return stored.read().to(decoder.device).float(), DTYPES[stored.dtype]
