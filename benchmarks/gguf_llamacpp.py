"""GGUF files in real llama.cpp: the same tokens as transformers, the same numbers as our weights.

    python benchmarks/gguf_llamacpp.py --model DIR [--texts 500] [--prompts 8] [--out FILE]

tokens  texts that llama.cpp and transformers turn into the same ids
logits  log-probabilities of the next token, llama.cpp against our dequantised weights in float32.
        llama.cpp rounds what a quantised layer sees to 8 bits; a second reference does the same,
        which shows how large a difference that makes
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import llamacpp
from odd_texts import texts
from recording import write

from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import versions
from quantkit.gguf import reader
from quantkit.gguf.layout import Layout
from quantkit.gguf.values import FLOATS
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.offline import without_hub
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import loading

CPU = torch.device("cpu")
TYPES = ("f16", "q8_0", "q6_k", "q4_k_m", "q2_k")
PROMPTS = (
    "The capital of France is",
    "def add(a, b):\n    return",
    "Water boils at a temperature of",
    "Once upon a time there was a",
    "1, 2, 3, 4, 5,",
    "Die Hauptstadt von Deutschland ist",
    "SELECT name FROM users WHERE",
    "The theory of relativity was developed by",
)
WORTH_COMPARING = -8.0
"""Tokens less likely than e^-8 are left out: what they get decides nothing."""


def eight_bits(size: int, module: torch.nn.Module, inputs: Any) -> Any:
    """Inputs in blocks of a size, each rounded to 8 bits by its largest value, as ggml does."""
    parts = inputs[0].reshape(-1, size)
    scale = parts.abs().amax(dim=-1, keepdim=True) / 127
    kept = scale.half().float() if size == 32 else scale  # small blocks keep it in 16 bits
    rounded = (parts / scale.clamp(min=1e-12)).round() * kept
    return (rounded.reshape(inputs[0].shape), *inputs[1:])


def rounding(model: Any, kinds: dict[str, GGMLQuantizationType]) -> None:
    """Make the layers of a model see what llama.cpp's see; its embedding is looked up as it is."""
    for name, kind in kinds.items():
        if kind not in FLOATS:
            size = GGML_QUANT_SIZES[kind][0]
            model.get_submodule(name).register_forward_pre_hook(partial(eight_bits, size))


def kinds_of(path: Path, source: ModelSource) -> dict[str, GGMLQuantizationType]:
    """The types of linear layers in a file."""
    layout, file = Layout.of(source), reader.read_file(path)
    found = {t.module: file.tensors[t.name].kind for t in layout.tensors if t.module}
    found.setdefault("lm_head", file.tensors["token_embd.weight"].kind)
    return found


def next_tokens(model: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model(torch.tensor([ids])).logits[0, -1].log_softmax(-1) for ids in prompts]


def gap(one: list[torch.Tensor], other: list[torch.Tensor]) -> dict[str, float]:
    """Nats between log-probabilities of tokens that matter: their mean and largest."""
    off = [(a - b)[b > WORTH_COMPARING].abs() for a, b in zip(one, other, strict=True)]
    return {
        "mean": round(statistics.fmean(part.mean().item() for part in off), 4),
        "largest": round(max(part.max().item() for part in off), 4),
    }


def compare(made: Checkpoint, source: ModelSource, prompts: list[list[int]]) -> dict[str, Any]:
    """llama.cpp and our weights, with inputs as they are and rounded as llama.cpp rounds them."""
    (path,) = made.folder.glob("*.gguf")
    exact = loading.load(made, CPU)
    ours = next_tokens(exact, prompts)
    rounding(exact, kinds_of(path, source))
    rounded = next_tokens(exact, prompts)
    with llamacpp.serve(path) as server:
        theirs = [llamacpp.next_token(server, ids, len(ours[0])) for ids in prompts]
    same = sum(int(a.argmax()) == int(b.argmax()) for a, b in zip(theirs, ours, strict=True))
    return {
        "prompts": len(prompts),
        "same_first_choice": same,
        "llama_cpp_to_ours": gap(theirs, ours),
        "ours_with_rounded_inputs_to_ours": gap(rounded, ours),
        "llama_cpp_to_ours_with_rounded_inputs": gap(theirs, rounded),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--texts", type=int, default=500)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    without_hub()
    source = ModelSource.open(args.model)
    tokenizer = load_tokenizer(source.folder)
    found: dict[str, Any] = {
        "what": "GGUF files in llama.cpp against transformers; nats for log-probabilities",
        "model": source.label,
        "machine": platform.machine(),
        "versions": versions(),
    }
    prompts = [tokenizer.encode(text) for text in PROMPTS[: args.prompts]]
    with tempfile.TemporaryDirectory() as scratch:
        recipes = [load(f"gguf-{kind}") for kind in TYPES]
        checkpoints = quantize(source, recipes, Path(scratch) / "out", "cpu")
        (first,) = checkpoints[0].folder.glob("*.gguf")
        chosen = texts(args.texts, tokenizer.get_added_vocab())
        with llamacpp.serve(first) as server:
            same = sum(llamacpp.tokenize(server, t) == tokenizer.encode(t) for t in chosen)
        found["tokens"] = {"texts": len(chosen), "same_ids": same}
        print(json.dumps(found["tokens"]), flush=True)
        found["logits"] = {}
        for made in checkpoints:
            found["logits"][made.label] = compare(made, source, prompts)
            print(made.label, json.dumps(found["logits"][made.label]), flush=True)
    if args.out:
        write(args.out, found)


if __name__ == "__main__":
    main()
