"""Rounds a layer's inputs as the serving engine will, so that scores include that error."""

import torch

from quantkit.recipe import ActivationScheme

FP8 = torch.float8_e4m3fn


def attach(model: torch.nn.Module, modules: list[str], scheme: ActivationScheme) -> None:
    """Make the named linear layers of a model see rounded inputs."""
    assert scheme.dynamic, "static scales come from calibration"

    def round_inputs(
        module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        return (round_per_token(inputs[0], scheme), *inputs[1:])

    for name in modules:
        model.get_submodule(name).register_forward_pre_hook(round_inputs)


def round_per_token(values: torch.Tensor, scheme: ActivationScheme) -> torch.Tensor:
    """Quantise and dequantise with one scale for each token, as vLLM's dynamic kernels do."""
    wide = values.float()
    largest = wide.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12)
    if scheme.type == "float":
        scale = largest / 448.0
        rounded = (wide / scale).clamp(-448.0, 448.0).to(FP8).float()
    else:
        scale = largest / 127.0
        rounded = (wide / scale).round().clamp(-128.0, 127.0)
    return (rounded * scale).to(values.dtype)
