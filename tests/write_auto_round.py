"""Writes tests/data/auto_round.safetensors: layers of AutoRound, and what its own reader makes.

    python tests/write_auto_round.py      # with AutoRound and torch; no GPU, no quantkit

AutoRound rounds a small model to nearest and exports it in its own layout, GPTQ's and AWQ's. Beside
what one layer of each holds stands the weight that AutoRound's module multiplies by.
"""

import json
import tempfile
from importlib.metadata import version
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

OUT = Path(__file__).parent / "data" / "auto_round.safetensors"
LAYER = "model.layers.0.self_attn.o_proj"
LAYOUTS = {"auto-round": "auto_round", "gptq": "auto_gptq", "awq": "auto_awq"}


def main() -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

    config = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, vocab_size=64, tie_word_embeddings=True,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    from auto_round import AutoRound

    words = {str(number): number for number in range(64)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, "0")))
    held: dict[str, torch.Tensor] = {}
    told = {"auto-round": version("auto-round")}
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        model.save_pretrained(plain)
        for name, layout in LAYOUTS.items():
            source = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
            maker = AutoRound(
                source, tokenizer, scheme="W4A16", group_size=32, iters=0, disable_opt_rtn=True,
                device_map="cpu",
            )  # fmt: skip
            out = Path(scratch) / name
            maker.quantize_and_save(str(out), format=layout)
            made = next(path.parent for path in out.rglob("config.json"))
            told[name] = json.dumps(json.loads((made / "config.json").read_text()))
            with safe_open(made / "model.safetensors", "pt") as file:
                for part in file.keys():  # noqa: SIM118
                    if part.startswith(f"{LAYER}."):
                        held[f"{name}.{part.rpartition('.')[2]}"] = file.get_tensor(part)
            if layout == "auto_round":
                reader = AutoModelForCausalLM.from_pretrained(
                    made, dtype=torch.float32, device_map="cpu"
                ).get_submodule(LAYER)
                with torch.no_grad():
                    eye = torch.eye(128, dtype=torch.float16)
                    held["expected"] = reader(eye).t().float().contiguous()
    OUT.parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, OUT, told)


if __name__ == "__main__":
    main()
