"""Checkpoints as other tools write them: by compressed-tensors' own code, or ours without a trace.

GPTQ, AWQ and native FP8 files have the layouts of AutoGPTQ, AutoAWQ and vLLM, whose libraries do
not install beside the others: ours are written to the same specification, and a folder without
`quantkit.json` and with their config is what those tools leave.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from quantkit.model.shards import write_whole
from quantkit.model.source import read_tensors


def by_library(source: Path, folder: Path, scheme: str) -> tuple[Path, Any]:
    """A preset of compressed-tensors, rounded to nearest: the folder, and what its model says."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    group = QuantizationScheme(targets=["Linear"], **PRESET_SCHEMES[scheme])
    config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    for module in model.modules():
        found = getattr(module, "quantization_scheme", None)
        if found is None:
            continue
        weight, args = module.weight.data.float(), found.weights
        whole = None
        if hasattr(module, "weight_global_scale"):
            # One for all layers, since engines take one for those that they fuse.
            whole = generate_gparam(-torch.ones(1), torch.ones(1))
            module.weight_global_scale.data = whole
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data = torch.tensor([448.0 * 6 / 8])
        if hasattr(module, "input_scale"):
            module.input_scale.data = torch.tensor([8 / 448.0], dtype=torch.float32)
        parts = _sharing(weight, args)
        low, high = parts.amin(-1), parts.amax(-1)
        scale, zero = calculate_qparams(low, high, args, global_scale=whole)
        module.weight_scale.data = scale.reshape(module.weight_scale.shape).to(
            module.weight_scale.dtype
        )
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.data = zero.reshape(module.weight_zero_point.shape).to(
                module.weight_zero_point.dtype
            )
        module.quantization_status = QuantizationStatus.FROZEN
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        expected = model(ids).logits.float()
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    for path in source.iterdir():
        if not (folder / path.name).exists() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    return folder, expected


def _sharing(weight: torch.Tensor, args: Any) -> torch.Tensor:
    """Weights that share a scale, in the last dimension."""
    strategy = str(getattr(args.strategy, "value", args.strategy))
    rows, columns = weight.shape
    if strategy == "tensor":
        return weight.reshape(1, 1, -1)
    if strategy == "block":
        high, wide = args.block_structure
        blocks = weight.reshape(rows // high, high, columns // wide, wide)
        return blocks.transpose(1, 2).flatten(2)
    return weight.reshape(rows, -1, args.group_size or columns)


def disowned(made: Path, folder: Path) -> Path:
    """One of our checkpoints as if somebody else had written it."""
    shutil.copytree(made, folder)
    for name in ("quantkit.json", "README.md", "scales.safetensors"):
        (folder / name).unlink(missing_ok=True)
    return folder


def changed(made: Path, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with some tensors replaced, or left out where None."""
    shutil.copytree(made, folder)
    stored = {name: tensor.read() for name, tensor in read_tensors(folder).items()}
    for name, tensor in tensors.items():
        if tensor is None:
            del stored[name]
        else:
            stored[name] = tensor
    write_whole(folder / "model.safetensors", stored)
    return folder


def configured(folder: Path, **changes: Any) -> Path:
    """Change keys of `quantization_config`."""
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["quantization_config"] |= changes
    path.write_text(json.dumps(config))
    return folder
