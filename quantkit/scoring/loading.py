"""Loads a source or one of our checkpoints as a transformers model that can be scored.

Weights are dequantised by our own reader, so that every format goes through one code; inputs of
layers, and keys and values, are rounded where the format does that at run time.
"""

from typing import Any

import torch

from quantkit import formats
from quantkit.errors import CheckpointError
from quantkit.export.checkpoint import Checkpoint
from quantkit.model import experts
from quantkit.model.architecture import Architecture, attentions, skeleton
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
        Architecture.of(target.folder, trust_remote_code).check(target)
    model = skeleton(target.folder, trust_remote_code, dtype)
    if not experts.separate(model, target.folder):
        refuse_experts(read_config(target.folder), target.folder, "but quantkit finds no experts")
    if isinstance(target, ModelSource):
        state = {name: t.read().to(dtype) for name, t in target.tensors.items()}
    else:
        state = dict(target.state(dtype))
    try:
        missing, _ = model.load_state_dict(state, strict=False, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{target.folder} does not fit its config; run verify") from error
    model.tie_weights()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if gone := [name for name in missing if name not in tied]:
        raise CheckpointError(f"{target.folder} lacks {gone[0]}; run verify")
    if isinstance(target, Checkpoint) and not target.is_gguf:
        _round_inputs(model, target)
        _round_cache(model, target)
    return model.to(device).eval()


def compute_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU; float32 on a CPU, many of which have no bfloat16 hardware."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _round_inputs(model: Any, checkpoint: Checkpoint) -> None:
    scheme = checkpoint.manifest.weights_recipe.input_activations
    if scheme is None:
        return
    modules = list(checkpoint.manifest.layers)
    static = {}
    if not scheme.dynamic:
        static = {name: checkpoint.tensors[f"{name}.input_scale"].read() for name in modules}
    activations.attach(model, modules, scheme, static)


def _round_cache(model: Any, checkpoint: Checkpoint) -> None:
    if checkpoint.manifest.weights_recipe.kv_cache is None:
        return
    scales = {name: tensor.read() for name, tensor in checkpoint.kv_scales.items()}
    for attention in attentions(model):
        for spec in formats.kv_specs(attention, checkpoint.manifest.source.dtype):
            if spec.name not in scales:
                raise CheckpointError(f"{checkpoint.folder} lacks {spec.name}; run verify")
    activations.attach_to_cache(model, scales)
