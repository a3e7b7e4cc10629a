"""What scoring needs of many rows of logits, without ever writing another array of their size.

Logits are read once, in blocks of 64 tokens: the largest of each block and the sum of exponentials
relative to it. Normaliser, likeliest tokens and random draws all follow from these and from a few
blocks that are looked into.
"""

import torch

BLOCK = 64


class Distribution:
    """Rows of logits [positions, vocabulary], in any floating type."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits
        self._peaks, self._sums = block_sums(logits)
        self.normaliser = (self._peaks + self._sums.log()).logsumexp(-1)
        """Logit minus this is the log-probability; in float32, as all that follows."""

    def log_probabilities(self, ids: torch.Tensor) -> torch.Tensor:
        """Of some tokens of every row [positions, tokens]."""
        return self._logits.gather(1, ids).float() - self.normaliser[:, None]

    def likeliest(self) -> torch.Tensor:
        """One token a row; of equals the first."""
        blocks = self._peaks.argmax(-1, keepdim=True)
        ids, values = self._inside(blocks)
        best: torch.Tensor = ids[:, 0].gather(1, values[:, 0].argmax(-1, keepdim=True))[:, 0]
        return best

    def top(self, n: int) -> torch.Tensor:
        """The likeliest tokens, falling; what is equal is in no order but for the first."""
        # They lie in the n blocks with the largest peaks.
        blocks = self._peaks.topk(min(n, self._peaks.shape[1])).indices
        ids, values = (found.flatten(1) for found in self._inside(blocks))
        chosen = ids.gather(1, values.topk(min(n, self._logits.shape[1])).indices)
        best = self.likeliest()[:, None]
        at = (chosen == best).byte().argmax(-1, keepdim=True)
        chosen.scatter_(1, at, chosen[:, :1].clone())
        chosen[:, :1] = best
        return chosen

    def draw(self, n: int, but: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """Tokens at random by their probability, none of those in `but`; one may come twice."""
        theirs = but // BLOCK
        share = (self._logits.gather(1, but).float() - self._peaks.gather(1, theirs)).exp()
        left = self._sums.scatter_add(1, theirs, -share).clamp_(min=0)
        weight = left * (self._peaks - self._peaks.amax(-1, keepdim=True)).exp()
        blocks = weight.clamp_(min=1e-30).multinomial(n, replacement=True, generator=generator)
        ids, values = self._inside(blocks)
        chances = (values.float() - self._peaks.gather(1, blocks)[:, :, None]).exp()
        within = (but % BLOCK)[:, None].expand(-1, n, -1)
        same = (theirs[:, None] == blocks[:, :, None]).float()
        excluded = torch.zeros_like(chances).scatter_reduce_(2, within, same, "amax")
        sums = (chances * (1 - excluded)).cumsum(-1)
        drawn = torch.rand(
            (*blocks.shape, 1), generator=generator, device=sums.device, dtype=sums.dtype
        )
        at = (sums <= drawn * sums[..., -1:]).sum(-1).clamp_(max=BLOCK - 1)
        chosen: torch.Tensor = ids.gather(2, at[:, :, None])[:, :, 0]
        return chosen.clamp_(max=self._logits.shape[1] - 1)

    def _inside(self, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of some blocks [positions, blocks, BLOCK] and their logits."""
        vocabulary = self._logits.shape[1]
        ids = blocks[:, :, None] * BLOCK + torch.arange(BLOCK, device=blocks.device)
        flat = ids.flatten(1)
        values = self._logits.gather(1, flat.clamp(max=vocabulary - 1))
        return ids, values.masked_fill_(flat >= vocabulary, float("-inf")).view(ids.shape)


def block_sums(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest logit of every block, and the block's sum of exp(logit - largest), in float32."""
    if logits.is_cuda:
        from quantkit.score import kernels

        return kernels.block_sums(logits, BLOCK)
    short = -logits.shape[1] % BLOCK
    padded = torch.nn.functional.pad(logits, (0, short), value=float("-inf"))
    blocks = padded.view(len(logits), -1, BLOCK).float()
    # Finite, so that a block of impossible tokens has a sum of nothing rather than of nonsense.
    peaks = blocks.amax(-1).clamp_(min=-1e30)
    return peaks, (blocks - peaks[:, :, None]).exp_().sum(-1)
