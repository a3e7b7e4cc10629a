"""Log-probabilities by our own reader, and how far the engine's type alone moves them.

Weights are dequantised by our code, inputs of layers and the cache are rounded where the format
does that, and the rest is transformers in float32. Done once more in the type that the engine
computes in, it tells what that type's rounding is worth, which no engine can be blamed for.
"""

from dataclasses import dataclass
from typing import Any

import torch

from quantkit.engine.vllm_job import Answer
from quantkit.export.checkpoint import Checkpoint
from quantkit.model.source import ModelSource
from quantkit.proof.prompts import Prompts
from quantkit.score import loading

LOGITS_BYTES = 256 << 20


@dataclass(frozen=True)
class LogProbabilities:
    """Of the tokens that the engine wrote [prompts, tokens], and of the prompts that it read."""

    written: torch.Tensor
    read: torch.Tensor


@dataclass(frozen=True)
class Reference:
    """What an engine should say, and the same in the engine's type."""

    exact: LogProbabilities
    rounded: LogProbabilities


def of(
    target: ModelSource | Checkpoint,
    prompts: Prompts,
    answer: Answer,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
) -> Reference:
    """Both, one after the other, so that only one model is in memory at a time."""
    exact, rounded = (
        _log_probabilities(target, prompts, answer.tokens, device, kind, trust_remote_code)
        for kind in (torch.float32, dtype)
    )
    return Reference(exact, rounded)


@torch.no_grad()
def _log_probabilities(
    target: ModelSource | Checkpoint,
    prompts: Prompts,
    written: list[list[int]],
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> LogProbabilities:
    model = loading.load(target, device, trust_remote_code, dtype)
    whole = [before + after for before, after in zip(prompts.generate, written, strict=True)]
    return LogProbabilities(
        log_probabilities(model, torch.tensor(whole))[:, -prompts.max_tokens :],
        log_probabilities(model, torch.tensor(prompts.score)),
    )


@torch.no_grad()
def log_probabilities(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Of every token but the first of every row [rows, tokens - 1], in float32 on the host."""
    device = next(model.parameters()).device
    vocabulary = int(model.get_output_embeddings().weight.shape[0])
    rows = max(1, LOGITS_BYTES // (4 * vocabulary * ids.shape[1]))
    found = []
    for part in torch.split(ids, rows):
        part = part.to(device)
        logits = model(input_ids=part, use_cache=False).logits[:, :-1].float()
        own = logits.gather(-1, part[:, 1:, None])[..., 0]
        found.append((own - logits.logsumexp(-1)).cpu())
    return torch.cat(found)
