"""Rotary position embeddings of queries and keys in one kernel, where transformers needs ten.

The attention of most families calls `apply_rotary_pos_emb` of its own Python module. That name is
replaced while a block is loaded, and only if a trial has shown that the function computes what
Llama's does, bit for bit. Other calls of it, from other threads for instance, get the same numbers.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

NAME = "apply_rotary_pos_emb"

Pair = tuple[torch.Tensor, torch.Tensor]

_same: dict[tuple[object, torch.device], bool] = {}
"""Trial results."""


@contextmanager
def replaced(block: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Speed up the rotary embeddings of a block inside this context."""
    changed = []
    try:
        for names in _namespaces(block):
            own = names[NAME]
            if isinstance(own, partial) and own.func is _rotated:
                continue  # in another context that is still open
            if (own, device) not in _same:
                _same[own, device] = _gives_the_same(own, device)
            if _same[own, device]:
                names[NAME] = partial(_rotated, own)
                changed.append((names, own))
        yield
    finally:
        for names, own in changed:
            names[NAME] = own


def _namespaces(block: torch.nn.Module) -> list[dict[str, Any]]:
    """The Python modules in which a block's forwards find the function."""
    classes = {type(module) for module in block.modules()}
    found = [inspect.unwrap(kind.forward).__globals__ for kind in classes]
    return list({id(names): names for names in found if NAME in names}.values())


def rotate(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Pair:
    """x * cos + (the halves of x exchanged, the first negated) * sin, rounded after each step.

    Queries and keys are [batch, heads, positions, width]; cos and sin [batch or 1, positions,
    width].
    """
    if query.device.type == "cuda":
        from quantkit.model import kernels

        return kernels.rotate(query, key, cos, sin)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = (
        x * cos + torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1) * sin
        for x in (query, key)
    )
    return first, second


def _rotated(own: Callable[..., Pair], *given: Any, **named: Any) -> Pair:
    if named or len(given) != 4 or torch.is_grad_enabled() or not _fits(*given):
        return own(*given, **named)
    return rotate(*given)


def _fits(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    """Whether all of every head is rotated, and by numbers of the same type."""
    if query.ndim != 4 or key.ndim != 4:
        return False
    batch, _, positions, width = query.shape
    return (
        (key.shape[0], *key.shape[2:]) == (batch, positions, width)
        and cos.shape == sin.shape
        and cos.shape in ((batch, positions, width), (1, positions, width))
        and all(x.dtype == torch.bfloat16 and x.stride(-1) == 1 for x in (query, key, cos, sin))
        and all(x.is_contiguous() or x.transpose(1, 2).is_contiguous() for x in (query, key))
    )


@torch.no_grad()
def _gives_the_same(own: Callable[..., Any], device: torch.device) -> bool:
    """Whether a function gives the same bits, with random numbers in place of cosines too."""
    random = torch.Generator(device).manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=device).bfloat16()

    given = some(2, 9, 6, 64).transpose(1, 2), some(2, 9, 3, 64).transpose(1, 2)
    angles = some(2, 9, 64), some(2, 9, 64)
    try:
        expected = own(*given, *angles)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
        return False
    return (
        isinstance(expected, tuple)
        and len(expected) == 2
        and all(
            torch.equal(one, other) and one.stride() == other.stride()
            for one, other in zip(rotate(*given, *angles), expected, strict=True)
        )
    )
