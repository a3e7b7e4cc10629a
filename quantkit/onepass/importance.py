"""How much each input of a linear layer matters: its mean square, in the unquantised model.

This is the diagonal of G / n. llama.cpp calls the collection of all of them an importance matrix.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from quantkit.model.architecture import EXPERT
from quantkit.onepass.padding import Keep, real
from quantkit.onepass.ranks import Ranks


class Importance:
    """Sums of squared inputs by layer, for all linears of the decoder blocks."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self.n_tokens: dict[str, int] = {}
        self.perplexity: float | None = None
        """Number of observed tokens, where known."""

    @contextmanager
    def watching(
        self, block: torch.nn.Module, name_of: Callable[[str], str], keep: Keep = None
    ) -> Iterator[None]:
        """Count the tokens of the forward pass within, at the positions to keep.

        `name_of` returns the full name of a module of the block.
        """
        alive: dict[int, tuple[torch.Tensor, torch.Tensor, int]] = {}
        handles = [
            module.register_forward_pre_hook(partial(self._see, name_of(name), keep, alive))
            for name, module in block.named_modules()
            if isinstance(module, torch.nn.Linear)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _see(
        self,
        name: str,
        keep: Keep,
        alive: dict[int, tuple[torch.Tensor, torch.Tensor, int]],
        module: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
    ) -> None:
        (tensor,) = inputs
        # Layers that read one tensor share its sum; it is kept, so that no identity is reused.
        if id(tensor) not in alive:
            flat = tensor if EXPERT.search(name) else real(tensor, keep)
            flat = flat.reshape(-1, tensor.shape[-1])
            norm = torch.linalg.vector_norm(flat, 2, 0, dtype=torch.float32)
            alive[id(tensor)] = tensor, norm.square(), len(flat)
        _, square, n_tokens = alive[id(tensor)]
        if name in self._sums:
            self._sums[name] += square
        else:
            self._sums[name] = square.clone()
            self.n_tokens[name] = 0
        self.n_tokens[name] += n_tokens

    def add_up(self, ranks: Ranks, device: torch.device) -> None:
        """Add what other ranks have seen; the first knows all layers."""
        shapes = ranks.share({name: len(found) for name, found in self._sums.items()})
        self._sums = {
            name: self._sums[name] if name in self._sums else torch.zeros(width, device=device)
            for name, width in shapes.items()
        }
        counts = torch.tensor([self.n_tokens.get(name, 0) for name in shapes], device=device)
        ranks.sum_([counts, *self._sums.values()])
        self.n_tokens = dict(zip(shapes, counts.tolist(), strict=True))

    def forget(self) -> None:
        """Start over."""
        self._sums.clear()
        self.n_tokens.clear()

    def means(self) -> dict[str, torch.Tensor]:
        """Mean squares by layer, on the CPU."""
        return {name: (s / self.n_tokens[name]).cpu() for name, s in self._sums.items()}
