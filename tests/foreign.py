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


MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def save_gpt_oss(folder: Path) -> Path:
    """A small random gpt-oss in 16 bits, the same every time, without a tokenizer.

    vLLM 0.26 on Hopper has no kernel for MXFP4 experts with 128 rows or fewer.
    """
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, num_local_experts=4, num_experts_per_tok=2,
        vocab_size=4096, max_position_embeddings=512, bos_token_id=0, eos_token_id=0,
        pad_token_id=0, layer_types=["sliding_attention", "full_attention"], dtype="bfloat16",
        rope_parameters={  # as published: vLLM asks for all of these
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096,
        },
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GptOssForCausalLM(config).to(torch.bfloat16)
    # Else all tokens are about as likely, and no damage shows in their probabilities.
    model.lm_head.weight.data *= 8
    model.save_pretrained(folder)
    return folder


def in_mxfp4(source: Path, folder: Path) -> Path:
    """gpt-oss with its experts in blocks of 32 FP4 numbers, to OCP's specification."""
    shutil.copytree(source, folder)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(source).items():
        values = tensor.read()
        if name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            blocks, scales = _blocks(values.transpose(1, 2).float())
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            stored[name] = values
    write_whole(folder / "model.safetensors", stored)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["quantization_config"] = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                   "model.embed_tokens", "lm_head"],
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return folder


def _blocks(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two numbers per byte, the first in the lower half, and an exponent for 32."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponent = groups.abs().amax(-1).log2().floor() - 2
    scaled = groups / exponent.exp2()[..., None]
    nearest = (scaled.abs()[..., None] - torch.tensor(MAGNITUDES)).abs().argmin(-1)
    codes = (nearest + 8 * (scaled < 0)).reshape(*groups.shape[:-1], 16, 2)
    packed = codes[..., 0] + 16 * codes[..., 1]
    return packed.to(torch.uint8), (exponent + 127).to(torch.uint8)


NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""The numbers of NF4, as bitsandbytes has them."""


def in_bitsandbytes(source: Path, folder: Path, bits: int) -> Path:
    """Its layouts, to its specification: NF4 in blocks of 64, or 8 bits per row."""
    shutil.copytree(source, folder)
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in read_tensors(source).items():
        values = tensor.read()
        if not name.endswith("_proj.weight"):
            stored[name] = values
        elif bits == 8:
            rows = values.float().abs().amax(1)
            stored[name] = (values.float() * 127 / rows[:, None]).round().to(torch.int8)
            stored[f"{name[:-7]}.SCB"] = rows
            stored[f"{name[:-7]}.weight_format"] = torch.tensor(0, dtype=torch.uint8)
        else:
            stored |= _nf4(name, values.float())
    write_whole(folder / "model.safetensors", stored)
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes", "load_in_4bit": bits == 4, "load_in_8bit": bits == 8,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8", "llm_int8_skip_modules": None,
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return folder


def _nf4(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    codes = ((blocks / largest[:, None])[..., None] - torch.tensor(NF4)).abs().argmin(-1)
    pairs = codes.reshape(-1, 2)
    told = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*weight.shape]}
    state = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    return {
        name: (pairs[:, 0] * 16 + pairs[:, 1]).to(torch.uint8)[:, None],
        f"{name}.absmax": largest,
        f"{name}.quant_map": torch.tensor(NF4),
        f"{name}.quant_state.bitsandbytes__nf4": state,
    }
