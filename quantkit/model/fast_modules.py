"""Norms and gated units of a block in one kernel each, where transformers needs six or three.

Between its matrix products a block does little but read and write memory. A module is replaced
while its block is loaded, and only if a trial has shown that its class computes the same: an RMS
norm as in Llama, and down(silu(gate(x)) * up(x)). Rotary embeddings likewise, by `rotary`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch.nn import functional

from quantkit.model import rotary

WIDEST = 16384
"""The longest vector that a program can hold."""
SAME = 0.95
"""Share of a trial's numbers that must be equal; rounding in another place changes one in four."""

Forward = Callable[[torch.Tensor], torch.Tensor]

_same: dict[tuple[object, ...], bool] = {}
"""Trial results, by class and settings."""


@contextmanager
def accelerated(block: torch.nn.Module) -> Iterator[None]:
    """Speed up the modules of a loaded block inside this context; on a GPU in bf16."""
    changed = []
    fit = next((p.device for p in block.parameters() if _is_fit(p)), None)
    try:
        for module in block.modules():
            forward = _forward_of(module)
            if forward is not None:
                module.forward = forward
                changed.append(module)
        with nullcontext() if fit is None else rotary.replaced(block, fit):
            yield
    finally:
        for module in changed:
            del module.forward


def norm(states: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """RMS-normalise every vector, times the weight."""
    if states.device.type == "cuda":
        from quantkit.model import kernels

        return kernels.norm(states.contiguous(), weight, epsilon)
    wide = states.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(states.dtype)


def gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of `gate`, times `up`."""
    if gate.device.type == "cuda":
        from quantkit.model import kernels

        return kernels.gated(gate.contiguous(), up.contiguous())
    return functional.silu(gate) * up


def _forward_of(module: torch.nn.Module) -> Forward | None:
    if "forward" in vars(module):
        return None
    forward: Forward
    if _is_norm(module):
        forward = partial(_normed, module)
    elif _is_gated(module):
        forward = partial(_fed_forward, module)
    else:
        return None
    alike = _alike(module)
    if alike not in _same:
        _same[alike] = _gives_the_same(module, forward)
    return forward if _same[alike] else None


def _alike(module: torch.nn.Module) -> tuple[object, ...]:
    """What modules that share a trial have in common: a class may compute differently by
    settings.
    """
    plain = (bool, int, float, str)
    settings = ((k, v) for k, v in vars(module).items() if isinstance(v, plain) or callable(v))
    return type(module), repr(module), *settings


def _is_norm(module: torch.nn.Module) -> bool:
    if not type(module).__name__.endswith("RMSNorm"):
        return False
    parameters = dict(module.named_parameters())
    weight = parameters.get("weight")
    return (
        len(parameters) == 1
        and isinstance(_epsilon(module), float)
        and weight is not None
        and weight.ndim == 1
        and len(weight) <= WIDEST
        and _is_fit(weight)
    )


def _epsilon(module: torch.nn.Module) -> float | None:
    found = getattr(module, "variance_epsilon", None)
    return getattr(module, "eps", None) if found is None else found


def _is_gated(module: torch.nn.Module) -> bool:
    parts = dict(module.named_children())
    linears = [parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        all(isinstance(linear, torch.nn.Linear) and _is_fit(linear.weight) for linear in linears)
        and set(parts) <= {"act_fn"}
        and not list(module.parameters(recurse=False))
    )


def _is_fit(weight: torch.Tensor) -> bool:
    return weight.device.type == "cuda" and weight.dtype == torch.bfloat16


def _normed(module: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    weight, epsilon = module.weight, _epsilon(module)
    if torch.is_grad_enabled() or states.dtype != weight.dtype:  # kernels have no gradients
        return _own(module, states)
    assert isinstance(weight, torch.Tensor)
    assert epsilon is not None
    return norm(states, weight, epsilon)


def _fed_forward(module: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    if torch.is_grad_enabled():
        return _own(module, states)
    gate, up, down = (module.get_submodule(f"{name}_proj") for name in ("gate", "up", "down"))
    made: torch.Tensor = down(gated(gate(states), up(states)))
    return made


def _own(module: torch.nn.Module, states: torch.Tensor) -> torch.Tensor:
    """The output of the module's own class."""
    made: torch.Tensor = type(module).forward(module, states)
    return made


@torch.no_grad()
def _gives_the_same(module: torch.nn.Module, forward: Forward) -> bool:
    """Whether a module's own forward gives the same numbers, with random weights.

    Weights of norms are often near 1, where another way of using them would not show.
    """
    own = dict(module.named_parameters())
    weight = next(iter(own.values()))
    random = torch.Generator(weight.device).manual_seed(0)

    def like(parameter: torch.Tensor, spread: float) -> torch.Tensor:
        shape, device = parameter.shape, parameter.device
        made = torch.randn(shape, generator=random, device=device) * spread
        return made.to(parameter.dtype)

    states = like(weight.new_empty(8, weight.shape[-1]), 2.0)
    other = {name: like(parameter, weight.shape[-1] ** -0.5) for name, parameter in own.items()}
    if weight.ndim == 1:
        other = {name: 1 + like(parameter, 0.5) for name, parameter in own.items()}
    try:
        expected = torch.func.functional_call(module, other, (states,))
        found = torch.func.functional_call(_Trial(module, forward), _under(other), (states,))
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return False
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        return False
    return float((expected == found).float().mean()) >= SAME


class _Trial(torch.nn.Module):
    """A module with a replaced forward."""

    def __init__(self, module: torch.nn.Module, forward: Forward) -> None:
        super().__init__()
        self.module = module
        self._forward = forward

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self._forward(states)


def _under(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"module.{name}": parameter for name, parameter in parameters.items()}
