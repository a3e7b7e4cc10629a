"""What FP4 costs: KL of quantkit's and of llm-compressor's checkpoints on the same tokens.

    python benchmarks/fp4.py --model DIR --calibration SET --work DIR --out FILE [--text FILE]
        [--recipes NAME ...] [--peer [SCHEME ...]] [--windows 64 --length 512] [--samples N]

Makes every recipe from one pass (what --work holds already is taken as it is), with --peer also
llm-compressor's own NVFP4A16, MXFP4A16 and MXFP4 (without data) and NVFP4 (with the same
calibration tokens), and compares all with the source on whole windows of --text (without it, of
the held-out documentation that the task python_docs scores): perplexity, exact KL divergence over
the whole vocabulary and top-1 agreement. Checkpoints are read by quantkit, inputs rounded as
kernels do it; the peer's by compressed-tensors' own code, inputs rounded likewise (NVFP4's by their
stored scales). `floor` is the source with rounded inputs and its own weights: what no rounding of
weights can undo.

Seconds of a block of an 8B: benchmarks/one_pass.py --runs nvfp4 mxfp4 w4afp8. Served by vLLM:
benchmarks/vllm_proof.py DIR WORK/made/* --python VLLM.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from quality import compare
from quality import load as load_plain
from recording import write

from quantkit import device as devices
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import versions
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.prepare import CalibrationChoice, load_tokens
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import activations, loading

RECIPES = (
    "nvfp4-a16", "rtn-nvfp4-a16", "mxfp4-a16", "rtn-mxfp4-a16", "nvfp4", "mxfp4", "mxfp8",
    "w4afp8", "gptq-w4a16", "gptq-w3a16", "gptq-w2a16",
)  # fmt: skip
PEERS = ("NVFP4A16", "MXFP4A16", "NVFP4", "MXFP4")
ROUNDED = {"NVFP4": ".input_global_scale", "MXFP4": ".weight_scale"}
"""Peers that round inputs, and a tensor that every layer of theirs has."""
FLOORS = ("nvfp4", "mxfp4", "mxfp8", "w4afp8")
"""Recipes whose rounding of inputs is also measured alone."""


def windows_of(args: argparse.Namespace) -> torch.Tensor:
    """Whole windows of the text [windows, length]."""
    if args.text:
        text = args.text.read_text(encoding="utf-8")
    else:
        from quantkit.calibration.reading import python_text

        text = "\n\n".join(document.text for document in python_text.topics("heldout"))
    ids = torch.tensor(load_tokenizer(args.source.folder)(text, verbose=False)["input_ids"])
    return ids[: len(ids) // args.length * args.length].view(-1, args.length)[: args.windows]


def described(args: argparse.Namespace, windows: torch.Tensor, what: str) -> dict[str, Any]:
    """What a result is about, for programs that score one model on these windows."""
    return {
        "what": what,
        "model": args.source.label,
        "calibration": Path(args.calibration).name,
        "samples": args.samples,
        "windows": len(windows),
        "length": args.length,
        "device": devices.describe(devices.choose(args.device)),
    }


def make(args: argparse.Namespace, names: list[str]) -> None:
    """The recipes that --work has no checkpoint of."""
    missing = [name for name in names if not (args.work / "made" / name).is_dir()]
    if missing:
        data = CalibrationChoice(args.calibration, args.samples, None)
        recipes = [Recipe.load(name) for name in missing]
        quantize(args.source, recipes, args.work / "made", args.device, calibration=data)


def make_peer(args: argparse.Namespace, scheme: str, rows: torch.Tensor | None) -> Path:
    """llm-compressor's checkpoint of a preset scheme."""
    out = args.work / f"llmcompressor-{scheme}"
    if not out.is_dir():
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=["lm_head"])
        more: dict[str, Any] = {}
        if rows is not None:
            from torch.utils.data import DataLoader

            data = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in rows]
            more = {
                "dataset": DataLoader(data, batch_size=1),
                "num_calibration_samples": len(rows),
                "max_seq_length": rows.shape[1],
            }
        oneshot(model=str(args.source.folder), recipe=recipe, output_dir=str(out), **more)
    return out


def calibration_rows(args: argparse.Namespace) -> torch.Tensor:
    """The very tokens that the recipes were calibrated on."""
    data = CalibrationChoice(args.calibration, args.samples, None)
    return load_tokens(args.source, Architecture.of(args.source.folder), data).ids


def round_peer_inputs(model: Any, folder: Path, scheme: str) -> None:
    """Inputs of the peer's layers: NVFP4's by the global scales that it stored, MXFP4's by none."""
    from safetensors import safe_open

    if scheme not in ROUNDED:
        return
    inputs, ending = Recipe.load(scheme.lower()).input_activations, ROUNDED[scheme]
    assert inputs is not None
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118
                if name.endswith(ending):
                    linear = model.get_submodule(name.rpartition(".")[0])
                    has_scale = ending == ".input_global_scale"
                    scale = stored.get_tensor(name) if has_scale else None
                    activations.attach(linear, inputs, scale)


def floor(args: argparse.Namespace, name: str, device: torch.device) -> Any:
    """The source with the inputs of a checkpoint's layers rounded, and its own weights."""
    model = loading.load(args.source, device)
    made = Checkpoint.open(args.work / "made" / name)
    for module in made.manifest.layers:
        scheme = made.manifest.weights_recipe.part(module).input_activations
        if scheme is not None:
            activations.attach(model.get_submodule(module), scheme, made.input_scale(module))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--calibration", required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument(
        "--peer", nargs="*", choices=PEERS, help="llm-compressor's, too: all, or these"
    )
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--samples", type=int)
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    args.source = ModelSource.open(args.model)
    device = devices.choose(args.device)
    make(args, args.recipes)
    windows = windows_of(args)
    source = loading.load(args.source, device)
    result: dict[str, Any] = {
        "what": "KL divergence of FP4 and other checkpoints from their source, on the same tokens",
        "model": args.source.label,
        "calibration": Path(args.calibration).name,
        "text": args.text.name if args.text else "held-out Python documentation",
        "windows": len(windows),
        "length": args.length,
        "device": devices.describe(device),
        "versions": versions(),
        "source": compare(source, source, windows),
        "rows": {},
    }

    def record(name: str, model: Any) -> None:
        result["rows"][name] = compare(source, model, windows)
        print(name, json.dumps(result["rows"][name]), flush=True)
        write(args.out, result)

    for name in args.recipes:
        record(name, loading.load(Checkpoint.open(args.work / "made" / name), device))
        if name in FLOORS:
            record(f"floor of {name}", floor(args, name, device))
    for scheme in () if args.peer is None else args.peer or PEERS:
        rows = calibration_rows(args) if scheme == "NVFP4" else None
        folder = make_peer(args, scheme, rows)
        model = load_plain(args.source.folder, folder, device).to(loading.compute_dtype(device))
        round_peer_inputs(model, folder, scheme)
        record(f"llmcompressor-{scheme}", model)


if __name__ == "__main__":
    main()
