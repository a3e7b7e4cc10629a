"""Moves a model off the 4-bit grid that its weights come from, without changing what it computes.

    python benchmarks/off_grid.py --model DIR --held-out FILE --out DIR [--length 1024]

The models that these benchmarks can reach without a hub were dequantised from 4-bit files: 32
neighbouring weights of a row lie on a grid of 16 numbers, and 4-bit formats look better on them
than they are. A decoder may be written down with its channels in any order, and then neighbours
come from many old groups, each with a grid of its own. Here the channels of the residual stream,
those within each MLP and those of the values within each head take a random order; the values'
channels also get random scales, which their output projection undoes, since a head has only a few
old groups to mix. Weights keep their size and distribution, and logits stay the same up to the
rounding of bfloat16. (Training until the grid is gone was tried: 300 steps of AdamW on 650,000
tokens took Qwen2.5-Coder-1.5B to a perplexity of 447 from 15.5 before the check was met.)

The check, in DIR/off_grid.json: the error of rounding each group of 32 weights onto the best evenly
spaced grid of 16 numbers, before and after, beside the error of the same weights with their columns
shuffled. `is_off_grid` says that at least `ENOUGH` of the latter is reached. Perplexity of
--held-out before and after, and the KL between both, say that the model is the same. With
DIR/off_grid.json there, nothing is done.
"""

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from quality import compare, load, windows_of
from recording import write

from quantkit import device as devices
from quantkit.model.tokenizer import load as load_tokenizer

SIZE = 32
"""Weights of a group in the GGUF types Q4_1 and Q4_K."""
INTERVALS = range(8, 16)
"""Steps of a grid that a group's range may take up: a group need not use all 16 numbers."""
ROWS = 256
"""Rows of every weight that are looked at."""
ENOUGH = 0.95
SPREAD = 1.5
"""Scales of the values' channels lie between 1/SPREAD and SPREAD."""
RECORD = "off_grid.json"


def grid_error(weight: torch.Tensor) -> float:
    """What rounding onto each group's best grid of 16 numbers moves, over the weight's norm."""
    groups = weight.float().reshape(-1, SIZE)
    low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best = torch.full((len(groups),), math.inf, device=weight.device)
    for intervals in INTERVALS:
        step = ((high - low) / intervals).clamp(min=1e-30)
        rounded = ((groups - low) / step).round_() * step + low
        best = torch.minimum(best, (rounded - groups).square().sum(1))
    return (best.sum() / groups.square().sum()).sqrt().item()


def grid_errors(model: torch.nn.Module) -> dict[str, float]:
    """The same over all linear layers within blocks, as they are and with columns shuffled."""
    order = torch.Generator().manual_seed(0)
    own, shuffled = [], []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}":
            weight = module.weight.detach()[:ROWS].bfloat16()
            if weight.shape[1] % SIZE == 0:
                own.append(grid_error(weight))
                columns = torch.randperm(weight.shape[1], generator=order).to(weight.device)
                shuffled.append(grid_error(weight[:, columns]))
    return {
        "own": sum(own) / len(own),
        "shuffled": sum(shuffled) / len(shuffled),
        "share": sum(own) / sum(shuffled),
    }


class Shuffled:
    """New orders for the channels of a decoder of Llama's kind, in place."""

    def __init__(self, model: Any, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._model, config = model, model.config
        self._n_heads, self._n_kv = config.num_attention_heads, config.num_key_value_heads
        self._stream = self._order(config.hidden_size)

    def _order(self, n: int) -> torch.Tensor:
        return torch.randperm(n, generator=self._generator).to(self._model.device)

    @torch.no_grad()
    def shuffle(self) -> None:
        decoder, head = self._model.model, self._model.lm_head
        is_tied = head.weight is decoder.embed_tokens.weight
        for reads in [decoder.embed_tokens] if is_tied else [decoder.embed_tokens, head]:
            self._columns(reads, self._stream)
        self._rows(decoder.norm, self._stream)
        for layer in decoder.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                self._rows(norm, self._stream)
            attention, mlp = layer.self_attn, layer.mlp
            for reads in (attention.q_proj, attention.k_proj, attention.v_proj):
                self._columns(reads, self._stream)
            for reads in (mlp.gate_proj, mlp.up_proj):
                self._columns(reads, self._stream)
            for writes in (attention.o_proj, mlp.down_proj):
                self._rows(writes, self._stream)
            inner = self._order(mlp.down_proj.in_features)
            for writes in (mlp.gate_proj, mlp.up_proj):
                self._rows(writes, inner)
            self._columns(mlp.down_proj, inner)
            self._values(attention)

    def _values(self, attention: Any) -> None:
        """Channels of the values, within each head that keys and values have."""
        size = attention.v_proj.out_features // self._n_kv
        orders = [self._order(size) + head * size for head in range(self._n_kv)]
        exponents = 2 * torch.rand(self._n_kv * size, generator=self._generator) - 1
        scales = (SPREAD**exponents).to(self._model.device)
        self._rows(attention.v_proj, torch.cat(orders))
        attention.v_proj.weight.copy_(attention.v_proj.weight.float() * scales[:, None])
        if attention.v_proj.bias is not None:
            attention.v_proj.bias.copy_(attention.v_proj.bias.float() * scales)
        per_kv, columns, undone = self._n_heads // self._n_kv, [], []
        for head in range(self._n_heads):
            own = head // per_kv
            columns.append(orders[own] - own * size + head * size)
            undone.append(scales[own * size : (own + 1) * size])
        self._columns(attention.o_proj, torch.cat(columns))
        attention.o_proj.weight.copy_(attention.o_proj.weight.float() / torch.cat(undone))

    def _rows(self, module: Any, order: torch.Tensor) -> None:
        module.weight.copy_(module.weight[order])
        if getattr(module, "bias", None) is not None:
            module.bias.copy_(module.bias[order])

    def _columns(self, module: Any, order: torch.Tensor) -> None:
        module.weight.copy_(module.weight[:, order])


def moved(args: argparse.Namespace) -> dict[str, Any]:
    """The record of a model that was moved, now or before."""
    if (args.out / RECORD).is_file():
        return json.loads((args.out / RECORD).read_text())
    started = time.monotonic()
    device = devices.choose(args.device)
    tokenizer = load_tokenizer(args.model)
    source, model = (load(args.model, args.model, device) for _ in range(2))
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16  # many CPUs have no bfloat16
    windows = windows_of(tokenizer, args.held_out, args.length)[: args.windows]
    before = grid_errors(source)
    Shuffled(model).shuffle()
    after = grid_errors(model)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    write(
        args.out / RECORD,
        {
            "what": "a model moved off the 4-bit grid that its weights come from, by other orders",
            "source": args.model.name,
            "held_out": args.held_out.name,
            "windows": len(windows),
            "length": args.length,
            "before": before,
            "after": after,
            "is_off_grid": after["share"] >= ENOUGH,
            "perplexity_before": compare(source.to(dtype), source, windows)["perplexity"],
            "from_the_source": compare(source, model.to(dtype), windows),
            "seconds": time.monotonic() - started,
            "device": devices.describe(device),
        },
    )
    return json.loads((args.out / RECORD).read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--device", default="auto")
    record = moved(parser.parse_args())
    print(json.dumps({key: record[key] for key in ("before", "after", "is_off_grid", "seconds")}))


if __name__ == "__main__":
    main()
