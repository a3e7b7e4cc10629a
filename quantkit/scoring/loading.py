"""Loads a source or a checkpoint, ours or not, as a transformers model that can be scored.

Weights are dequantised by our own reader, so that every format uses the same code; inputs of
layers, and keys and values, are rounded where the format does that at run time.
"""

from typing import Any

import torch

from quantkit import formats
from quantkit.errors import CheckpointError
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.foreign import ForeignCheckpoint
from quantkit.model import experts
from quantkit.model.architecture import EXPERT, Architecture
from quantkit.model.links import Links, parameter_names
from quantkit.model.skeleton import attentions, find_blocks, skeleton, usual_names
from quantkit.model.source import ModelSource, read_config, refuse_experts
from quantkit.scoring import activations


def load(
    target: ModelSource | Checkpoint,
    device: torch.device,
    trust_remote_code: bool = False,
    dtype: torch.dtype | None = None,
) -> Any:
    """The model, ready for a forward pass; in float32 on a CPU and bfloat16 on a GPU by default."""
    dtype = dtype or compute_dtype(device)
    if isinstance(target, Checkpoint) and target.manifest.source.name.endswith(".gguf"):
        raise CheckpointError(
            f"{target.folder} was made from a GGUF file, which has no config that transformers "
            "reads; score it in llama.cpp with --backend llama.cpp"
        )
    if isinstance(target, ModelSource):
        trust_remote_code = target.trust_remote_code
        Architecture.of(target.folder, trust_remote_code, target.tensors).check(target)
    model = skeleton(target.folder, trust_remote_code, dtype)
    found = _links(model, target)
    n_separated = experts.separate(model, target.folder)
    experts.stack(model, dict(found.stacked))
    # The experts of code that a model brings may be separate already.
    if not n_separated and not any(EXPERT.search(f"{name}.") for name, _ in model.named_modules()):
        refuse_experts(read_config(target.folder), target.folder, "but quantkit finds no experts")
    if isinstance(target, ForeignCheckpoint):
        stored = {name: _cast(target.read(name), dtype) for name in target.tensors}
    elif isinstance(target, ModelSource):
        stored = {name: _cast(t.read(), dtype) for name, t in target.tensors.items()}
    else:
        stored = dict(target.state(dtype))
    try:
        missing, _ = model.load_state_dict(found.state(stored), strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(
            f"{target.folder} does not fit its config; run `quantkit verify`"
        ) from error
    model.tie_weights()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if gone := [name for name in missing if name not in tied]:
        raise CheckpointError(f"{target.folder} lacks {gone[0]}; run `quantkit verify`")
    if isinstance(target, Checkpoint) and not target.is_gguf:
        _round_inputs(model, target, found)
        _round_cache(model, target, found)
    elif isinstance(target, ForeignCheckpoint):
        _round_declared(model, target, found)
    return model.to(device).eval()


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, many of which have no bfloat16 hardware."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _links(model: Any, target: ModelSource | Checkpoint) -> Links:
    """Links between the model's parameters and the files of a source or checkpoint."""
    if isinstance(target, ModelSource):
        return Links.of(model, parameter_names(target.tensors, is_quantized=False))
    if target.is_gguf:
        return Links.of(model, usual_names(model))
    return Links.of(model, parameter_names(target.tensors, is_quantized=True))


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _round_inputs(model: Any, checkpoint: Checkpoint, links: Links) -> None:
    recipe = checkpoint.manifest.weights_recipe
    names = {links.module(name): name for name, _ in model.named_modules() if name}
    for module in checkpoint.manifest.layers:
        if (scheme := recipe.part(module).input_activations) is not None:
            stored = checkpoint.input_scale(module)
            activations.attach(model.get_submodule(names[module]), scheme, stored)


def _round_declared(model: Any, foreign: ForeignCheckpoint, links: Links) -> None:
    """The same for what another tool's checkpoint declares."""
    names = {links.module(name): name for name, _ in model.named_modules() if name}
    for module in foreign.layers:
        if (scheme := foreign.part(module).inputs) is not None:
            if module not in names:
                raise CheckpointError(
                    f"{foreign.folder}: the inputs of {module} are rounded when it is served, and "
                    "quantkit finds no such layer to round them at"
                )
            stored = foreign.input_scale(module, scheme)
            activations.attach(model.get_submodule(names[module]), scheme, stored)
    if foreign.declared.kv_cache:
        own: dict[str, torch.Tensor] = {}
        for attention in attentions(model):
            for kind in ("k", "v"):
                scale = foreign.cache_scale(links.module(attention), kind)
                if scale is not None:
                    own[f"{attention}.{kind}_scale"] = scale
        activations.attach_to_cache(model, own)


def _round_cache(model: Any, checkpoint: Checkpoint, links: Links) -> None:
    if checkpoint.manifest.weights_recipe.kv_cache is None:
        return
    scales = {name: tensor.read() for name, tensor in checkpoint.kv_scales.items()}
    blocks, _ = find_blocks(model)
    own: dict[str, torch.Tensor] = {}
    for attention in attentions(model):
        if not attention.startswith(f"{blocks}."):
            continue
        stored = links.module(attention)
        for spec in formats.kv_specs(stored, checkpoint.manifest.source.dtype):
            if spec.name not in scales:
                raise CheckpointError(
                    f"{checkpoint.folder} lacks {spec.name}; run `quantkit verify`"
                )
            own[attention + spec.name.removeprefix(stored)] = scales[spec.name]
    activations.attach_to_cache(model, own)
