"""llm-compressor on the same work as `one_pass.py` and `quality.py`: the peer that we compare with.

    python benchmarks/peer_llmcompressor.py speed gptq|awq [--blocks 2 --samples 128 --length 2048]
    python benchmarks/peer_llmcompressor.py quality gptq-sym|gptq-asym|awq-asym|fp8-dynamic
        --model DIR --calibration FILE --text FILE

Needs a GPU and `llmcompressor`. Seconds a block are those of all blocks over
their number.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from data_free import make_model
from quality import perplexity

from quantkit.offline import without_hub
from quantkit.storage import write_json


def scheme(kind: str, group_size: int) -> list[Any]:
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier

    if kind.startswith("fp8"):
        return [QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=["lm_head"])]
    method, _, zero_points = kind.partition("-")
    weights = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": group_size,
        "symmetric": zero_points == "sym",
    }
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    if method == "gptq":
        return [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
    return [AWQModifier(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


def compress(model: Any, recipe: list[Any], tokens: torch.Tensor | None) -> float:
    from llmcompressor import oneshot
    from torch.utils.data import DataLoader

    data = {}
    if tokens is not None:
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in tokens]
        data = {
            "dataset": DataLoader(rows, batch_size=1),
            "num_calibration_samples": len(tokens),
            "max_seq_length": tokens.shape[1],
        }
    torch.cuda.synchronize()
    started = time.monotonic()
    oneshot(model=model, recipe=recipe, **data)
    torch.cuda.synchronize()
    return time.monotonic() - started


def speed(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 32000, (args.samples, args.length), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder) / "model", args.blocks, 4096, 14336, 32000)
        model = AutoModelForCausalLM.from_pretrained(Path(folder) / "model", dtype="auto")
        kind = "gptq-sym" if args.kind == "gptq" else "awq-asym"
        torch.cuda.reset_peak_memory_stats()
        seconds = compress(model, scheme(kind, 128), tokens)
    return {
        "seconds_a_block": seconds / args.blocks,
        "peak_device_bytes": torch.cuda.max_memory_allocated(),
    }


def quality(args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to("cuda")
    tokens = None
    if not args.kind.startswith("fp8"):
        text = args.calibration.read_text(encoding="utf-8")
        ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
        tokens = ids[: args.samples * args.length].view(args.samples, args.length)
    seconds = compress(model, scheme(args.kind, args.group_size), tokens)
    value = perplexity(model.to("cuda").eval(), tokenizer, args.text, args.length)
    return {"perplexity": value, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("speed", "quality"))
    parser.add_argument("kind")
    parser.add_argument("--model")
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without_hub()
    result = speed(args) if args.what == "speed" else quality(args)
    result = {"peer": "llm-compressor", "kind": args.kind, **result}
    print(json.dumps(result), flush=True)
    if args.out:
        write_json(args.out, result)


if __name__ == "__main__":
    main()
