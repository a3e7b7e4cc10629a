"""Keys and values of rows of different length, and attention to them.

Every row has as much room as the longest; lengths are on the device, so that a step over many rows
is the same kernels whatever they are. transformers calls our attention by its name, without a mask.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import Cache, DynamicLayer

ROWS = "quantkit_rows"
"""The name under which transformers knows our attention."""
OTHER_ATTENTION = ("sliding_window", "softcap", "s_aux", "position_bias")
"""Attention features of some families that this one does not support."""


class Unsupported(Exception):
    """This model needs a different attention."""


class Rows(Cache):  # type: ignore[misc]
    """Keys and values of many rows, each with its own length."""

    def __init__(self, layers: "list[RowLayer]") -> None:
        super().__init__(layers=layers)
        self.n = 0
        """Number of leading rows that a step processes."""
        self.longest = 0
        """Upper bound of row lengths after the step, as far as the host knows."""
        n_rows, device = layers[0].keys.shape[0], layers[0].keys.device
        self.positions = torch.zeros(n_rows, dtype=torch.long, device=device)
        """Position of the token that is fed next."""
        self.numbers = torch.arange(n_rows, device=device)
        for layer in layers:
            layer.rows = self


class RowLayer(DynamicLayer):  # type: ignore[misc]
    """The rows of one model layer."""

    rows: Rows

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.dtype, self.device, self.is_initialized = keys.dtype, keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        n = self.rows.n
        where = self.rows.numbers[:n], slice(None), self.rows.positions[:n]
        self.keys[where] = key_states[:, :, 0]
        self.values[where] = value_states[:, :, 0]
        return self.keys[:n], self.values[:n]


_current: list[Rows] = []
"""The rows that a step processes, for the attention inside the model."""


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one new token per row to all tokens of the row."""
    if any(more.get(name) is not None for name in OTHER_ATTENTION) or query.shape[2] != 1:
        raise Unsupported
    rows = _current[-1]
    lengths = rows.positions[: rows.n] + 1
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    n, n_heads, _, width = query.shape
    grouped = query.reshape(n, key.shape[1], n_heads // key.shape[1], width)
    if query.is_cuda and width == value.shape[-1] and width in (32, 64, 128, 256):
        from quantkit.scoring import kernels

        found = kernels.row_attention(grouped, key, value, lengths, scale)
    else:
        # Columns beyond the longest row are never read.
        key, value = key[:, :, : rows.longest], value[:, :, : rows.longest]
        found = row_attention(grouped, key, value, lengths, scale)
    return found.reshape(n, 1, n_heads, value.shape[-1]), None


def row_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of queries to the first `lengths` tokens of each row.

    Queries are [rows, key heads, group, width]. All queries that share a key head are one matrix,
    so keys are read once.
    """
    inside = torch.arange(key.shape[2], device=key.device) < lengths[:, None]
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=inside[:, None, None, :], scale=scale
    )


@contextmanager
def attending(configs: Sequence[Any], rows: Rows) -> Iterator[None]:
    """Use our attention in a model with these configs."""
    AttentionInterface.register(ROWS, _attention)
    usual = [config._attn_implementation_internal for config in configs]
    _current.append(rows)
    for config in configs:
        config._attn_implementation_internal = ROWS
    try:
        yield
    finally:
        _current.pop()
        for config, name in zip(configs, usual, strict=True):
            config._attn_implementation_internal = name
