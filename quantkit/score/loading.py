"""Loads a source or one of our checkpoints as a transformers model that can be scored.

Weights are dequantised by our own reader, so that every format goes through one code; inputs of
layers are rounded where the format does that at run time.
"""

from pathlib import Path
from typing import Any

import torch

from quantkit.export.checkpoint import Checkpoint
from quantkit.model.architecture import skeleton
from quantkit.model.source import ModelSource
from quantkit.score import activations


def load(target: ModelSource | Checkpoint, device: torch.device) -> Any:
    """The model in float32 on a CPU and in bfloat16 on a GPU, ready for a forward pass."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = skeleton(target.folder, isinstance(target, ModelSource) and target.trust_remote_code)
    if isinstance(target, ModelSource):
        state = {name: t.read().to(dtype) for name, t in target.tensors.items()}
    else:
        state = dict(target.state(dtype))
    missing, _ = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    assert not [name for name in missing if name not in tied], f"not loaded: {missing}"
    if isinstance(target, Checkpoint):
        _round_inputs(model, target)
    return model.to(device).eval()


def _round_inputs(model: Any, checkpoint: Checkpoint) -> None:
    scheme = checkpoint.manifest.recipe.input_activations
    if scheme is None:
        return
    modules = list(checkpoint.manifest.layers)
    static = {}
    if not scheme.dynamic:
        static = {name: checkpoint.tensors[f"{name}.input_scale"].read() for name in modules}
    activations.attach(model, modules, scheme, static)


def tokenizer(path: Path) -> Any:
    """The tokenizer of a model folder."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)
