"""The log-probabilities that an engine should report, and the effect of its dtype's rounding.

Weights are dequantised by our code, inputs of layers and the cache are rounded where the format
does that, and the rest is transformers in float32. Computed once more in the engine's dtype, this
shows the effect of that dtype's rounding, which no engine can be blamed for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.scoring import loading

LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class Reference:
    """Log-probabilities of all tokens but the first of each text [texts, tokens]."""

    exact: torch.Tensor
    """In float32."""
    rounded: torch.Tensor
    """In the engine's dtype."""

    def last(self, n_tokens: int) -> "Reference":
        """Only the end of every text."""
        return Reference(self.exact[:, -n_tokens:], self.rounded[:, -n_tokens:])


def references(
    target: ModelSource | Checkpoint,
    texts: Sequence[list[list[int]]],
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> list[Reference]:
    """One per set of texts of one length; only one model is in memory at a time."""
    found = []
    for kind in (torch.float32, dtype):
        model = loading.load(target, device, trust_remote_code, kind)
        found.append([log_probabilities(model, torch.tensor(ids)) for ids in texts])
        del model
    return [Reference(exact, rounded) for exact, rounded in zip(*found, strict=True)]


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of every token but the first [rows, tokens - 1], in float32 on the host."""
    device = next(model.parameters()).device
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    rows = max(1, LOGITS_BYTES // (4 * vocabulary * ids.shape[1]))
    found = []
    for part in torch.split(ids, rows):
        part = part.to(device)
        with WideProducts():
            logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        own = logits.gather(-1, part[:, 1:, None])[..., 0]
        found.append((own - logits.logsumexp(-1)).cpu())
    return torch.cat(found)


class WideProducts(TorchFunctionMode):
    """Matrix products of 16-bit numbers on a CPU: accumulated in float32, rounded once.

    That is what kernels with hardware support for these dtypes do. Without such hardware torch
    falls back to loops that take some 300 times as long as float32.
    """

    PRODUCTS = frozenset(
        {
            torch.nn.functional.linear,
            torch.nn.functional.scaled_dot_product_attention,
            torch.matmul,
            torch.bmm,
            torch.Tensor.matmul,
            torch.Tensor.__matmul__,
        }
    )

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in self.PRODUCTS or not (args and _is_narrow(args[0])):
            return func(*args, **kwargs)
        wide = func(*map(_widened, args), **{k: _widened(v) for k, v in kwargs.items()})
        return wide.to(args[0].dtype)


def _is_narrow(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dtype in (torch.bfloat16, torch.float16)
    )


def _widened(value: Any) -> Any:
    return value.float() if _is_narrow(value) else value
