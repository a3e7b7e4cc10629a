"""How much each input of a linear layer matters: the mean of its square, on the source's own path.

This is the diagonal of G / n. llama.cpp calls the collection of all of them an importance matrix.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch


class Importance:
    """Sums of squared inputs by layer, for all linears of the decoder blocks."""

    def __init__(self) -> None:
        self._sums: dict[str, torch.Tensor] = {}
        self.n_tokens: dict[str, int] = {}

    @contextmanager
    def watching(self, block: torch.nn.Module, prefix: str) -> Iterator[None]:
        """Count the tokens of the forward pass within."""
        alive: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        handles = [
            module.register_forward_pre_hook(partial(self._see, prefix + name, alive))
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
        alive: dict[int, tuple[torch.Tensor, torch.Tensor]],
        module: torch.nn.Module,
        inputs: tuple[torch.Tensor, ...],
    ) -> None:
        (tensor,) = inputs
        flat = tensor.reshape(-1, tensor.shape[-1])
        # Layers that read one tensor share its sum; it is kept, so that no identity is used twice.
        if id(tensor) not in alive:
            norm = torch.linalg.vector_norm(flat, 2, 0, dtype=torch.float32)
            alive[id(tensor)] = tensor, norm.square()
        square = alive[id(tensor)][1]
        if name in self._sums:
            self._sums[name] += square
        else:
            self._sums[name] = square.clone()
            self.n_tokens[name] = 0
        self.n_tokens[name] += len(flat)

    def forget(self) -> None:
        """Begin again."""
        self._sums.clear()
        self.n_tokens.clear()

    def means(self) -> dict[str, torch.Tensor]:
        """Mean squares by layer, on the CPU."""
        return {name: (s / self.n_tokens[name]).cpu() for name, s in self._sums.items()}
