"""Statistics of many rows of logits, without ever writing another array of their size.

Logits are read once, in blocks of 64 tokens: the largest of each block and the sum of exponentials
relative to it. Normaliser and likeliest token follow from these and from a single block.
"""

from functools import cached_property

import torch

BLOCK = 64


class Distribution:
    """Rows of logits [positions, vocabulary], in any floating-point dtype."""

    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits
        self._peaks, self._sums = block_sums(logits)
        self.normaliser = (self._peaks + self._sums.log()).logsumexp(-1)
        """Logit minus this is the log-probability; in float32, as everything below."""

    def log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of some tokens per row [positions, tokens]."""
        return self.logits.gather(1, ids).float() - self.normaliser[:, None]

    @cached_property
    def likeliest(self) -> torch.Tensor:
        """One token per row; the first on ties."""
        vocabulary = self.logits.shape[1]
        within = torch.arange(BLOCK, device=self.logits.device)
        ids = self._peaks.argmax(-1, keepdim=True) * BLOCK + within
        values = self.logits.gather(1, ids.clamp(max=vocabulary - 1))
        values.masked_fill_(ids >= vocabulary, float("-inf"))
        best: torch.Tensor = ids.gather(1, values.argmax(-1, keepdim=True))[:, 0]
        return best


def block_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of every block, and the block's sum of exp(logit - largest), in float32."""
    if logits.is_cuda:
        from quantkit.scoring import kernels

        return kernels.block_sums(logits, BLOCK)
    short = -logits.shape[1] % BLOCK
    if short:
        logits = torch.nn.functional.pad(logits, (0, short), value=float("-inf"))
    blocks = logits.view(len(logits), -1, BLOCK).float()
    # Finite, so that a block of impossible tokens has a sum of zero rather than NaN.
    peaks = blocks.amax(-1).clamp_(min=-1e30)
    return peaks, (blocks - peaks[:, :, None]).exp_().sum(-1)
