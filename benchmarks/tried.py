"""Ideas for few bits that quantkit does not have, each put around the product for the measurement.

    python benchmarks/tried.py --out FILE [--model demo --calibration python-docs --samples 48]
        [--windows 40 --length 512] [--work DIR] [--ideas NAME ...] [--recipes NAME ...]

rotated      the residual stream and the values of every head in a random orthogonal basis, folded
             into the weights; norms are folded first, and a tied head is untied (its bytes are not
             counted: only the linears of blocks are rounded).
by loss      every token counts in the Gram matrix by the squared gradient of the loss at the
             layer's output, with labels drawn from the model's own predictions, to a power.
by held-out  every linear takes the damping and the order of columns that held-out tokens favour.
biases       a finished checkpoint whose biases make up for the mean shift of each output.

Every idea runs with several recipes beside the same recipes as they are: the same tokens, the same
windows of held-out text, exact KL over the whole vocabulary. FILE is written after every row, and
rows that it holds are not made again.
"""

import argparse
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from fp4 import described, windows_of
from quality import compare
from recording import begun, write

from quantkit import device as devices
from quantkit import grid
from quantkit.calibration.tokens import CalibrationTokens
from quantkit.export.manifest import versions
from quantkit.methods import gptq, products
from quantkit.methods.columns import Factor
from quantkit.methods.contract import Linears, Rounded
from quantkit.methods.statistics import Statistics
from quantkit.model.architecture import Architecture
from quantkit.model.blocks import Decoder
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.collector import Collector
from quantkit.onepass.prepare import CalibrationChoice, load_tokens
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import loading

DAMPINGS = (0.01, 0.03, 0.1, 0.3, 1.0)
"""That every linear chooses from."""
POWERS = (0.5, 1.0)
"""Of a token's weight."""
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that read one input, and so share its Gram matrix."""
CAPS = (10.0,)
"""The largest weight of a token, over the mean: a few are thousands of times as large."""


def orthogonal(size: int, seed: int) -> torch.Tensor:
    """A random orthogonal matrix."""
    order = torch.Generator().manual_seed(seed)
    normal = torch.randn(size, size, generator=order, dtype=torch.float64)
    return torch.linalg.qr(normal).Q


def rotate(folder: Path, out: Path) -> None:
    """A decoder of Llama's kind with its stream and its values in other bases, in float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    inner, config = model.model, model.config
    embedding = inner.embed_tokens.weight.data
    head = torch.nn.Parameter(model.lm_head.weight.data.clone())  # tied or not
    config.tie_word_embeddings = False
    basis = orthogonal(config.hidden_size, 0)
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads

    def fold(norm: Any, *readers: Any) -> None:
        for one in readers:
            one.data.mul_(norm.weight.data)
        norm.weight.data.fill_(1.0)

    for index, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        readers = [attention.q_proj, attention.k_proj, attention.v_proj]
        fold(layer.input_layernorm, *(one.weight for one in readers))
        fold(layer.post_attention_layernorm, mlp.gate_proj.weight, mlp.up_proj.weight)
        for one in (*readers, mlp.gate_proj, mlp.up_proj):
            one.weight.data = one.weight.data @ basis
        for one in (attention.o_proj, mlp.down_proj):
            one.weight.data = basis.t() @ one.weight.data
            if one.bias is not None:
                one.bias.data = basis.t() @ one.bias.data
        for each in range(config.num_key_value_heads):
            turn = orthogonal(width, 1 + index * config.num_key_value_heads + each)
            rows = slice(each * width, (each + 1) * width)
            value = attention.v_proj
            value.weight.data[rows] = turn.t() @ value.weight.data[rows]
            if value.bias is not None:
                value.bias.data[rows] = turn.t() @ value.bias.data[rows]
            for query in range(each * shared, (each + 1) * shared):
                columns = slice(query * width, (query + 1) * width)
                output = attention.o_proj.weight.data
                output[:, columns] = output[:, columns] @ turn
    fold(inner.norm, head)
    model.lm_head.weight = torch.nn.Parameter(head.data @ basis)
    embedding.copy_(embedding @ basis)
    model.float().save_pretrained(out)
    load_tokenizer(folder).save_pretrained(out)


def token_weights(
    source: ModelSource, tokens: CalibrationTokens, device: torch.device
) -> dict[str, torch.Tensor]:
    """The squared gradient of the loss at each linear's output, by token."""
    model = loading.load(source, device).float()
    found: dict[str, list[torch.Tensor]] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        def seen(_module: Any, _inputs: Any, outputs: tuple[torch.Tensor, ...]) -> None:
            squares = outputs[0].float().square().sum(-1).flatten()
            found.setdefault(name, []).append(squares.detach().cpu())

        module.register_full_backward_hook(seen)

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and ".layers." in f".{name}":
            watch(name, module)
    order = torch.Generator(device).manual_seed(0)
    model.requires_grad_(False)
    for row in tokens.ids.to(device):
        states = model.get_input_embeddings()(row[None]).detach().requires_grad_(True)
        logits = model(inputs_embeds=states).logits[0].float()
        drawn = torch.multinomial(logits.detach().softmax(-1), 1, generator=order)[:, 0]
        torch.nn.functional.cross_entropy(logits, drawn, reduction="sum").backward()
    own = {name: torch.cat(parts) for name, parts in found.items()}
    together = {name: [name] for name in own}
    for name in own:
        for parts in SHARED:
            place, _, last = name.rpartition(".")
            if last in parts:
                together[name] = [f"{place}.{part}" for part in parts]
    return {name: torch.stack([own[n] for n in names]).sum(0) for name, names in together.items()}


@contextmanager
def weighted(weights: dict[str, torch.Tensor], power: float, cap: float) -> Iterator[None]:
    """Every Gram matrix over tokens with these weights."""
    names: dict[int, str] = {}
    seen: dict[str, int] = {}
    opened, see, add = Decoder.open, Collector._see, Statistics.add
    current: list[torch.Tensor] = []

    def named(source: ModelSource, device: torch.device) -> Decoder:
        decoder = opened(source, device)
        names.update((id(module), name) for name, module in decoder.model.named_modules())
        return decoder

    def watched(self: Any, name: str, keep: Any, module: Any, inputs: Any) -> None:
        whole = names[id(module)]
        own = weights[whole]
        start = seen.get(whole, 0) % len(own)  # a block is seen once per recipe
        stop = start + inputs[0].flatten(0, -2).shape[0]
        seen[whole] = stop
        share = (own / own.mean())[start:stop].pow(power).clamp(max=cap)
        current[:] = [(share / share.mean()).sqrt()]
        see(self, name, keep, module, inputs)

    def scaled(self: Any, inputs: torch.Tensor) -> None:
        flat = inputs.reshape(-1, inputs.shape[-1])
        add(self, flat * current[0][:, None].to(flat))

    Decoder.open = staticmethod(named)
    Collector._see = watched
    Statistics.add = scaled
    try:
        yield
    finally:
        Decoder.open, Collector._see, Statistics.add = opened, see, add


@contextmanager
def by_held_out() -> Iterator[None]:
    """Damping and order that every stack of linears chooses by held-out tokens."""
    plain, factor = gptq.ColumnByColumn.round, gptq.factor

    def chosen(self: Any, linears: Linears) -> Rounded:
        held = linears.inputs.held_out
        assert held is not None
        matrix, best = products.Halves.of(held), (float("inf"), None)
        for damping in DAMPINGS:
            for ordered in (True, False):
                gptq.factor = lambda gram, d=damping, o=ordered: damped(gram, d, o)
                made = plain(self, linears)
                change = grid.dequantize(made.quantized, linears.scheme).sub_(linears.weight)
                error = float(products.row_energies(change, matrix).sum())
                if error < best[0]:
                    best = error, made
        gptq.factor = factor
        assert best[1] is not None
        return best[1]

    def damped(gram: torch.Tensor, damping: float, ordered: bool) -> Factor | None:
        size = len(gram)
        order = (
            torch.argsort(gram.diagonal(), descending=True, stable=True)
            if ordered
            else torch.arange(size, device=gram.device)
        )
        turned = gram[order][:, order].double()
        turned.diagonal().add_(damping * turned.diagonal().mean())
        upper = torch.linalg.cholesky(torch.linalg.inv(turned), upper=True)
        return Factor(upper.float().contiguous(), order, damping)

    gptq.ColumnByColumn.round = chosen
    try:
        yield
    finally:
        gptq.ColumnByColumn.round, gptq.factor = plain, factor


def correct_biases(source: torch.nn.Module, model: torch.nn.Module, ids: torch.Tensor) -> int:
    """Move the biases of a dequantised model by the mean shift of their outputs."""
    theirs = dict(source.named_modules())
    sums: dict[str, torch.Tensor] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and module.bias is not None:

            def seen(module: Any, inputs: tuple[torch.Tensor, ...], name: str = name) -> None:
                flat = inputs[0].flatten(0, -2).double()
                sums[name] = sums.get(name, 0) + flat.sum(0) / ids.numel()

            handles.append(module.register_forward_pre_hook(seen))
    with torch.no_grad():
        for row in ids:
            model(row[None].to(next(model.parameters()).device))
        for handle in handles:
            handle.remove()
        for name, mean in sums.items():
            module, own = model.get_submodule(name), theirs[name]
            shift = (own.weight.double() - module.weight.double()) @ mean
            module.bias.add_(shift.to(module.bias.dtype))
    return len(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="python-docs")
    parser.add_argument("--samples", type=int, default=48)
    parser.add_argument("--calibration-length", type=int, default=512)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--text", type=Path)
    ideas = ["as they are", "rotated", "by loss", "by held-out", "biases"]
    parser.add_argument("--ideas", nargs="+", default=ideas)
    parser.add_argument("--recipes", nargs="+", default=["gptq-w4a16", "gptq-w3a16", "gptq-w2a16"])
    parser.add_argument("--work", type=Path, default=Path("tried"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.source = ModelSource.open(args.model)
    device = devices.choose(args.device)
    windows = windows_of(args)
    about = described(
        args,
        windows,
        "perplexity and KL divergence of ideas for few bits that quantkit does not have",
    )
    known = begun(args.out, about)
    args.work.mkdir(parents=True, exist_ok=True)
    plain = loading.load(args.source, device)
    result: dict[str, Any] = {
        **about,
        "versions": versions(),
        "source": known.get("source") or compare(plain, plain, windows),
        "rows": known.get("rows", []),
    }
    choice = CalibrationChoice(args.calibration, args.samples, args.calibration_length)
    architecture = Architecture.of(args.source.folder, False, args.source.tensors)
    tokens = load_tokens(args.source, architecture, choice)

    def measure(idea: str, name: str, source: Any, reference: Any, held_out: bool = False) -> None:
        if any(row["idea"] == idea and row["recipe"] == name for row in result["rows"]):
            return
        recipe = Recipe.load(name)
        if held_out:
            recipe = recipe.model_copy(update={"options": recipe.options | {"held_out": True}})
        folder = args.work / "out"
        shutil.rmtree(folder, ignore_errors=True)
        started = time.monotonic()
        (made,) = quantize(source, [recipe], folder, args.device, calibration=choice)
        seconds = time.monotonic() - started
        model = loading.load(made, device)
        row = {"idea": idea, "recipe": name, "seconds": seconds}
        if idea == "biases":
            row["n_biases"] = correct_biases(plain, model, tokens.ids)
        found = compare(reference, model, windows)
        change = 100 * (found["perplexity"] / result["source"]["perplexity"] - 1)
        result["rows"].append(row | {"change_percent": change, **found})
        write(args.out, result)
        print(json.dumps(result["rows"][-1]), flush=True)

    for idea in args.ideas:
        for name in args.recipes:
            if idea == "rotated":
                turned = args.work / "rotated"
                if not turned.exists():
                    rotate(args.source.folder, turned)
                other = ModelSource.open(str(turned))
                if "rotated_from_source" not in result:
                    same = compare(plain, loading.load(other, device), windows)
                    result["rotated_from_source"] = same
                measure(idea, name, other, plain)
            elif idea == "by loss":
                if not hasattr(args, "weights"):
                    args.weights = token_weights(args.source, tokens, device)
                for power in POWERS:
                    for cap in CAPS:
                        with weighted(args.weights, power, cap):
                            measure(f"by loss, to the power of {power:g}", name, args.source, plain)
            elif idea == "by held-out":
                measure("with an eighth held out", name, args.source, plain, held_out=True)
                with by_held_out():
                    measure(idea, name, args.source, plain, held_out=True)
            else:
                measure(idea, name, args.source, plain)


if __name__ == "__main__":
    main()
