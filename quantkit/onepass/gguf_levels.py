"""Levels of K-quants for GGUF files, chosen by GPTQ from the statistics of the source's stream.

All files share the statistics that other recipes read. A block's bytes are kept in the file's
journal once it is solved, so a stopped run resumes after it; the file itself is written at the end,
from what was kept.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import MethodError
from quantkit.export.manifest import Layer
from quantkit.gguf import by_gram
from quantkit.gguf.layout import Layout
from quantkit.gguf.plan import GGUFPlan, layer_of
from quantkit.gguf.tensors import GGUFTensor
from quantkit.model.blocks import Decoder
from quantkit.onepass.clock import Clock
from quantkit.onepass.journal import Journal
from quantkit.onepass.visit import Observation, Visit


@dataclass(frozen=True)
class FileLevels:
    """One file, and what is finished of it."""

    plan: GGUFPlan
    journal: Journal

    @property
    def blocks(self) -> dict[str, Callable[[], torch.Tensor]]:
        """Bytes of what is solved, by the names of tensors in the file."""
        found: dict[str, Callable[[], torch.Tensor]] = {}
        for index in range(self.journal.n_done):
            found |= self.journal.stored_parts(_name(index))
        return found


@dataclass
class _Block:
    """One file's part of a block: what is solved so far, by the tensor's linears."""

    solved: dict[str, dict[str, by_gram.Solved]] = field(default_factory=dict)
    tensors: dict[str, GGUFTensor] = field(default_factory=dict)

    def add(self, tensor: GGUFTensor, part: str, solved: by_gram.Solved) -> None:
        self.tensors[tensor.name] = tensor
        self.solved.setdefault(tensor.name, {})[part] = solved

    def bytes(self) -> dict[str, torch.Tensor]:
        """All experts of a tensor one after another, as the file has them."""
        return {
            name: torch.cat([parts[part].data for part in self.tensors[name].parts])
            for name, parts in self.solved.items()
        }

    def layers(self) -> dict[str, Layer]:
        """What each layer lost."""
        found = {}
        for name, parts in self.solved.items():
            every = list(parts.values())
            change, weight, error, output = map(sum, zip(*(p.sums for p in every), strict=True))
            dampings = [p.damping for p in every if p.damping is not None]
            found[layer_of(self.tensors[name])] = Layer(
                relative_error=(change / max(weight, 1e-30)) ** 0.5,
                output_error=error / max(output, 1e-30),
                damping=max(dampings, default=None),
                fallback=not dampings,
            )
        return found


class Levels:
    """Watches the source's stream, and solves every block for every file."""

    n_samples = 0
    """It needs the statistics of inputs, not inputs themselves."""

    def __init__(self, files: Sequence[FileLevels], clock: Clock) -> None:
        self._files = files
        self._clock = clock
        self._tensors = [by_gram.chosen(file.plan) for file in files]
        self.modules = frozenset(module for found in self._tensors for module in found)

    @property
    def n_done(self) -> int:
        """Blocks that all files have."""
        return min(file.journal.n_done for file in self._files)

    def of(self, plan: GGUFPlan) -> FileLevels | None:
        """What is solved of one file; None where llama.cpp's rounding serves it."""
        return next((file for file in self._files if file.plan is plan), None)

    def arrive(self, visit: Visit) -> None:
        """Nothing is needed before a block."""

    def see(self, visit: Visit, found: Observation) -> None:
        """Solve the block for every file that lacks it."""
        pending = [i for i, file in enumerate(self._files) if file.journal.n_done <= visit.index]
        made = {i: _Block() for i in pending}
        for leader, members in found.collector.groups.items():
            modules = {visit.module(name): name for name in members}
            inputs: by_gram.Inputs | None = None
            for i in pending:
                file, tensors = self._files[i], self._tensors[i]
                with self._clock.on(visit.decoder.device, file.plan.recipe.name):
                    for module, tensor in _pairs(modules, tensors):
                        if inputs is None:  # worked out once for all that read them
                            inputs = by_gram.Inputs.of(found.collector.statistics[leader])
                        weight = visit.state[f"{modules[module]}.weight"]
                        solved = _solve(file.plan, tensor, weight, inputs)
                        made[i].add(tensor, f"{module}.weight", solved)
        for i in pending:
            journal = self._files[i].journal
            if data := made[i].bytes():
                journal.store(_name(visit.index), data)
            journal.record(visit.index, made[i].layers(), {}, [])

    def finish(self, decoder: Decoder, calibration: CalibrationTokens) -> None:
        """Every block was kept as it was solved."""


def _pairs(
    modules: Iterable[str], tensors: Mapping[str, list[GGUFTensor]]
) -> list[tuple[str, GGUFTensor]]:
    """Linears with the tensors that hold them."""
    return [(module, tensor) for module in modules for tensor in tensors.get(module, ())]


def _name(index: int) -> str:
    return f"{index:05d}.blocks"


def _solve(
    plan: GGUFPlan, tensor: GGUFTensor, weight: torch.Tensor, inputs: by_gram.Inputs
) -> by_gram.Solved:
    assert isinstance(plan.layout, Layout)  # calibration needs a model in Hugging Face form
    kind = plan.kinds[tensor.name]
    arranged = plan.layout.arranged(tensor, weight)
    solved = by_gram.quantize(arranged.reshape(-1, arranged.shape[-1]), kind, inputs)
    if not all(value < float("inf") for value in solved.sums):
        raise MethodError(f"{kind.name} gave non-finite values for {tensor.parts[0]}")
    return solved
