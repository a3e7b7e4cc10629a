"""What 4 bits cost on real models: quantkit, llm-compressor and AutoRound on the same token ids.

    python benchmarks/quality.py --model DIR --name NAME --origin TEXT --group-size 128
        --calibration FILE [FILE ...] --text FILE --work DIR --out FILE [--path PACKAGE=DIRS ...]

Runs every command of `peers_speed.py whole` that --work has no result of, and scores each of them
with one evaluator: each checkpoint is read and dequantised by compressed-tensors' own code into the
same transformers model in bfloat16, inputs unquantised, and compared with the source on all whole
windows of --text. Perplexity leaves out the first token of each window; KL divergence (over the
whole vocabulary, log-softmax in float32) and top-1 agreement count every position.

One call per model; all calls write to the same FILE, after every checkpoint.
"""

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import peers
import torch
from peers_speed import NOTES, add_common, build_set, provenance, set_record, whole
from safetensors import safe_open

from quantkit.export.checkpoint import Checkpoint
from quantkit.model.skeleton import skeleton
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.offline import without_hub
from quantkit.scoring import loading

RUNS = [run for run in peers.RUNS if run != "quantkit-one-pass"]
"""One pass makes the same checkpoints as the first three."""


def windows_of(tokenizer: Any, text: Path, length: int) -> torch.Tensor:
    """All whole windows of a text [windows, length]."""
    ids = torch.tensor(tokenizer(text.read_text(encoding="utf-8"), verbose=False)["input_ids"])
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def perplexity(model: Any, tokenizer: Any, text: Path, length: int) -> float:
    """Over all whole windows of the text, the first token of each not predicted."""
    windows = windows_of(tokenizer, text, length)
    total = 0.0
    for window in windows.to(model.device).split(4):
        logits = model(window).logits[:, :-1].float()
        flat = logits.reshape(-1, logits.shape[-1])
        total += torch.nn.functional.cross_entropy(
            flat, window[:, 1:].reshape(-1), reduction="sum"
        ).item()
    return math.exp(total / (windows.shape[0] * (length - 1)))


def perplexity_of(target: ModelSource | Checkpoint, text: Path, length: int, device: str) -> float:
    """The same for a folder."""
    model = loading.load(target, torch.device(device))
    return perplexity(model, load_tokenizer(target.folder), text, length)


def dequantized(folder: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters of a compressed-tensors checkpoint, or of a plain one, by their names."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme

    config = json.loads((folder / "config.json").read_text()).get("quantization_config") or {}
    scheme = compressor = None
    if "config_groups" in config:
        (group,) = config["config_groups"].values()
        scheme = QuantizationScheme.model_validate(group)
        compressor = BaseCompressor.get_value_from_registry(config["format"])
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt", device=str(device)) as stored:
            names = set(stored.keys())
            scaled = {n.removesuffix("_scale") for n in names if n.endswith(".weight_scale")}
            for weight in sorted(scaled):
                parts = {n for n in names if n == weight or n.startswith(f"{weight}_")}
                module = weight.removesuffix("weight")
                state = {n.removeprefix(module): stored.get_tensor(n) for n in parts}
                yield weight, compressor.decompress(state, scheme)["weight"]
                names -= parts
            for name in sorted(names):
                if not name.endswith(INPUT_SCALES):
                    yield name, stored.get_tensor(name)


INPUT_SCALES = (".input_scale", ".input_global_scale", ".input_zero_point")
"""What a checkpoint stores for its inputs, which is not a parameter of the model."""


def load(source: Path, folder: Path, device: torch.device) -> Any:
    """The source's architecture in bfloat16 with a checkpoint's weights."""
    model = skeleton(source, dtype=torch.bfloat16)
    state = {name: value.to(torch.bfloat16) for name, value in dequantized(folder, device)}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    model.tie_weights()
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    if wrong := [*(name for name in missing if name not in tied), *unexpected]:
        raise ValueError(f"{folder} does not hold the model's parameters: {wrong[0]}")
    return model.to(device).eval()


@torch.no_grad()
def compare(source: Any, model: Any, windows: torch.Tensor) -> dict[str, Any]:
    """Perplexity, exact KL divergence from the source, and agreement on the likeliest token."""
    loss, agreed, divergences = 0.0, 0, []
    for window in windows.to(model.device).split(1):
        reference = source(window).logits[0].float().log_softmax(-1)
        found = model(window).logits[0].float().log_softmax(-1)
        agreed += int((reference.argmax(-1) == found.argmax(-1)).sum())
        loss -= found[:-1].gather(1, window[0, 1:, None]).double().sum().item()
        terms = reference.exp() * (reference - found)
        divergences.append(terms.sum(-1, dtype=torch.float64).cpu())
    values = torch.cat(divergences)
    return {
        "perplexity": math.exp(loss / (windows.shape[0] * (windows.shape[1] - 1))),
        "kl_mean": values.mean().item(),
        "kl_median": values.median().item(),
        "kl_p99": values.quantile(0.99).item(),
        "top1_agreement": agreed / windows.numel(),
    }


def described(folder: Path) -> dict[str, Any]:
    """What a checkpoint's files say of it."""
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    (group,) = config["config_groups"].values()
    return {
        "group_size": group["weights"]["group_size"],
        "symmetric": group["weights"]["symmetric"],
        "weight_bytes": sum(path.stat().st_size for path in folder.glob("*.safetensors")),
    }


def parser_of(what: str) -> argparse.ArgumentParser:
    """Options of programs that make checkpoints of one model and score them."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--origin", required=True, help="where the source's weights come from")
    parser.add_argument("--calibration", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--max-windows", type=int, help="score no more than these")
    parser.add_argument("--group-size", type=int, default=128)
    add_common(parser)
    return parser


def begin(args: argparse.Namespace, what: str) -> tuple[dict[str, Any], Path]:
    """The result so far, of models that FILE holds, and the token ids that every run gets."""
    args.path = dict(args.path)
    without_hub()
    args.work.mkdir(parents=True, exist_ok=True)
    tokens = args.work / "set"
    build_set(args.model, args.calibration, args.samples, args.length, tokens, args.path)
    known = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result = {
        "what": what,
        **provenance(args.commit),
        **NOTES,
        "models": known.get("models", {}),
    }
    result["versions"] |= known.get("versions", {})
    return result, tokens


def scored_text(args: argparse.Namespace, tokens: Path, windows: torch.Tensor) -> dict[str, Any]:
    """What scores of a model depend on, beside its checkpoints."""
    return {
        "origin": args.origin,
        "tokens": set_record(tokens),
        "text": args.text.name,
        "windows": len(windows),
        "length": args.length,
    }


def scored_before(result: dict[str, Any], name: str, about: dict[str, Any]) -> dict[str, Any]:
    """What FILE has of a model, unless it was scored on something else."""
    before: dict[str, Any] = result["models"].get(name, {})
    return {} if any(before.get(key) != value for key, value in about.items()) else before


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--runs", nargs="+", default=RUNS)
    args = parser.parse_args()
    result, tokens = begin(
        args, "perplexity, exact KL divergence and top-1 agreement of 4-bit checkpoints"
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = windows_of(load_tokenizer(args.model), args.text, args.length)[: args.max_windows]
    source = load(args.model, args.model, device)
    about = scored_text(args, tokens, windows)
    before = scored_before(result, args.name, about)
    entry = result["models"][args.name] = {
        "recorded": result["recorded"],
        **about,
        "source": before.get("source") or compare(source, source, windows),
        "rows": [],
    }
    scored = {row["run"]: row for row in before.get("rows", []) if "perplexity" in row}
    for name in args.runs:
        row = scored.get(name) or whole(
            name, args.model, tokens, args.group_size, args.work, args.path, args.limit
        )
        result["versions"] |= row.pop("versions", {})
        row.pop("stage_seconds", None)
        if name not in scored and row["error"] is None:
            (folder,) = peers.checkpoints(row["run"], args.work / row["run"] / "out").values()
            try:
                model = load(args.model, folder, device)
                row |= described(folder) | compare(source, model, windows)
            except Exception as error:  # a checkpoint that cannot be read is a result too
                row["error"] = f"{type(error).__name__}: {error}"
            model = None
        entry["rows"].append(row)
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
