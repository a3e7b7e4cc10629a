"""Mixtures of experts through the second engine, ready for `vllm_generate.py`.

    python benchmarks/moe_llmcompressor.py DIR [--recipes gptq-w4a16,fp8-dynamic]

Needs the extra `llmcompressor`, and is meant for a GPU. Makes two small models, quantises each
with `--engine llmcompressor`, verifies the results, and prints the folders, the source first:

    random   a random Qwen 3 MoE model with 8 experts, 2 of them active
    demo     the demo model with its MLPs divided among experts (Qwen 2), the same function as
             before, so that a serving engine that mixes up a tensor writes no sentences any more

Sizes are such that vLLM's Marlin kernels take them: groups of 128 divide every layer.
"""

import argparse
import shutil
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from quantkit.cli.main import main as quantkit
from quantkit.model.source import ModelSource
from quantkit.resources import DEMO_MODEL
from quantkit.storage import write_json

SHARED, N_EXPERTS, PER_EXPERT = 256, 4, 128  # how the 768 neurons of the demo model are divided


def save(folder: Path, config: PretrainedConfig, state: dict[str, torch.Tensor] | None) -> None:
    """A model folder in bfloat16, with the demo model's tokenizer."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    if state is not None:
        from safetensors.torch import save_file

        save_file(state, folder / "model.safetensors", {"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)


def make_random(folder: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    save(folder, config, None)


def make_demo(folder: Path) -> None:
    """Some neurons of each MLP for a shared expert, the others in equal parts for four more.

    With routers of zeros all experts answer with a weight of 1/4, and the shared one with 1/2;
    their last projections are multiplied by as much. Powers of two, so nothing is rounded.
    """
    source = ModelSource.open("demo")
    dense = source.config
    config = Qwen2MoeConfig(
        **{
            key: dense[key]
            for key in (
                "vocab_size",
                "hidden_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "max_position_embeddings",
                "rms_norm_eps",
                "rope_parameters",
                "tie_word_embeddings",
                "bos_token_id",
                "eos_token_id",
                "pad_token_id",
            )
        },
        intermediate_size=dense["intermediate_size"],
        moe_intermediate_size=PER_EXPERT,
        shared_expert_intermediate_size=SHARED,
        num_experts=N_EXPERTS,
        num_experts_per_tok=N_EXPERTS,
        norm_topk_prob=True,
    )
    state: dict[str, torch.Tensor] = {}
    for name, tensor in source.tensors.items():
        values = tensor.read()
        block, _, part = name.partition(".mlp.")
        if part:
            axis = 1 if part.startswith("down") else 0
            sizes = [SHARED, *[PER_EXPERT] * N_EXPERTS]
            shared, *experts = values.split(sizes, dim=axis)
            state[f"{block}.mlp.shared_expert.{part}"] = shared * (2 if axis else 1)
            for index, expert in enumerate(experts):
                state[f"{block}.mlp.experts.{index}.{part}"] = expert * (N_EXPERTS if axis else 1)
            width = int(dense["hidden_size"])
            state[f"{block}.mlp.gate.weight"] = values.new_zeros(N_EXPERTS, width)
            state[f"{block}.mlp.shared_expert_gate.weight"] = values.new_zeros(1, width)
            continue
        state[name] = values
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            state[name.replace("weight", "bias")] = values.new_zeros(values.shape[0])
    save(folder, config, {name: tensor.contiguous() for name, tensor in state.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--recipes", default="gptq-w4a16,fp8-dynamic")
    parser.add_argument("--samples", default="64")
    parser.add_argument("--length", default="256")
    args = parser.parse_args()
    made: dict[str, list[str]] = {}
    for kind, make in {"random": make_random, "demo": make_demo}.items():
        source = args.folder / kind / "source"
        make(source)
        made[kind] = [str(source)]
        for recipe in args.recipes.split(","):
            out = source.parent
            command = ["quantize", source, "-r", recipe, "--engine", "llmcompressor", "-o", out]
            command += ["--calibration", "python-docs", "--samples", args.samples]
            for call in (
                [*command, "--length", args.length],
                ["verify", out / f"{recipe}-llmcompressor"],
            ):
                if code := quantkit([str(word) for word in call]):
                    raise SystemExit(code)
            made[kind].append(str(out / f"{recipe}-llmcompressor"))
    write_json(args.folder / "folders.json", made)
    for kind, folders in made.items():
        print(kind, *folders)


if __name__ == "__main__":
    main()
