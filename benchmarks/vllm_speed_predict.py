"""What the roofline of `quantkit recommend` predicts, beside what vllm_speed.py has measured.

    python benchmarks/vllm_speed_predict.py RESULT.json --gpu H200 [--model MODEL] [--out FILE]

Runs in quantkit's own environment, while the measurement runs in vLLM's. Adds `predicted` to every
model of the result: tokens per second and the ratio to the first model, each with the slow end, the
typical value and the fast end. A ratio compares two models at the same end, since both run on the
same device; so its range is narrower than that of the speeds.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from vllm_speed import SHAPES, SHORT

import quantkit
from quantkit import resources
from quantkit.advise import efficiency, formats, shape, speed, work
from quantkit.advise.formats import Format
from quantkit.advise.shape import ModelShape
from quantkit.hardware import gpus
from quantkit.hardware.gpus import GPU
from quantkit.recipe import load, split_addition
from quantkit.storage import write_json

SUFFIXES = ("compressed-tensors", "gptq", "awq", "fp8", "llmcompressor")
"""What a folder's name may have behind the recipe's: the form of the files, or who made them."""
OUTPUT, PREFILL = 128, 8192
"""Where a result does not have its cases."""
ENDS = ("low", "typical", "high")


def shape_of(result: dict[str, Any], model: str | None) -> ModelShape:
    """The model that was timed: a shape by its name, or what --model names."""
    if model is not None:
        return shape.of(model)
    if result["shape"] not in SHAPES:
        raise SystemExit(
            f"the result is of models {result['shape']}; name their source with --model"
        )
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        **SHAPES[result["shape"]],
    }
    return shape.from_config(config, result["shape"])


def format_of(name: str, is_first: bool) -> Format | None:
    """The format that a folder's name speaks of; the first is a source as it is."""
    known = resources.names("recipes")
    ends = ("", *(f"-{suffix}" for suffix in SUFFIXES))
    for end in ends:
        base, addition = split_addition(name.removesuffix(end))
        if name.endswith(end) and base in known:
            return formats.of(load(base if addition is None else f"{base}+{addition}"))
    return formats.of(None) if is_first else None


def figures(case: speed.Case, measured: dict[str, Any]) -> dict[str, list[float]]:
    """Tokens per second at the slow end, in the middle and at the fast end, by what was timed."""
    ends = efficiency.of(case.format.engine, case.gpu.vendor)
    timed = {f"decode_{one['batch']}": one for one in measured.get("cases", [])[:-1]}
    found = {}
    for name in measured:
        if batch := re.fullmatch(r"decode_(\d+)", name):
            users = int(batch[1])
            one = timed.get(name, {"prompt_tokens": SHORT, "output_tokens": OUTPUT + 1})
            depth = int(one["prompt_tokens"]) + int(one["output_tokens"]) // 2
            found[name] = [users / speed.step_seconds(case, users, depth, end) for end in ends]
        elif name == "prefill":
            cases = measured.get("cases") or [{"prompt_tokens": PREFILL}]
            prompt = int(cases[-1]["prompt_tokens"])
            found[name] = [prompt / speed.prefill_seconds(case, prompt, end) for end in ends]
    return found


def predict(result: dict[str, Any], of_model: ModelShape, gpu: GPU) -> list[str]:
    """Put `predicted` beside every model's figures; names of those that no recipe has."""
    first: dict[str, list[float]] | None = None
    unknown = []
    for name, measured in result["models"].items():
        form = format_of(name, is_first=first is None)
        if form is None:
            unknown.append(name)
            continue
        case = speed.Case(of_model, work.of(of_model, form), form, gpu)
        found = figures(case, measured)
        first = first or found
        measured["predicted"] = {
            what: {
                "tokens_per_s": dict(zip(ENDS, rates, strict=True)),
                "ratio": _ratio(rates, first[what]) if what in first else None,
            }
            for what, rates in found.items()
        }
    result["predicted_for"] = {"gpu": gpu.name, "quantkit": quantkit.__version__}
    return unknown


def _ratio(rates: list[float], first: list[float]) -> dict[str, float]:
    ratios = [own / base for own, base in zip(rates, first, strict=True)]
    return {"low": min(ratios), "typical": ratios[efficiency.TYPICAL], "high": max(ratios)}


def table(result: dict[str, Any]) -> list[str]:
    """Ratios to the first model: measured, and the predicted range."""
    models = result["models"]
    names = list(next(iter(models.values()))["predicted"])
    title = "times the first model"
    wide = max(map(len, [title, *models]))
    lines = [f"{title:{wide}}" + "".join(f"{name:>26}" for name in names)]
    lines.append(" " * wide + f"{'measured    predicted':>26}" * len(names))
    for model, found in models.items():
        if "refused" in found or "predicted" not in found:
            why = "refused by the engine" if "refused" in found else "no recipe has this name"
            lines.append(f"{model:{wide}}  {why}")
            continue
        cells = []
        for name in names:
            span = found["predicted"][name]["ratio"]
            inside = " " if span["low"] <= found[name]["ratio"] <= span["high"] else "*"
            told = f"{span['low']:.2f}-{span['high']:.2f}"
            cells.append(f"{found[name]['ratio']:.2f}{inside}  {told:>11}")
        lines.append(f"{model:{wide}}" + "".join(f"{cell:>26}" for cell in cells))
    return [*lines, "* outside of the range"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("result", type=Path, help="what vllm_speed.py wrote")
    parser.add_argument("--gpu", required=True, help="what it was measured on")
    parser.add_argument("--model", help="the source, where the result has no shape by name")
    parser.add_argument("--out", type=Path, help="default: the result itself")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    unknown = predict(result, shape_of(result, args.model), gpus.find(args.gpu))
    write_json(args.out or args.result, result)
    print("\n".join(table(result)))
    for name in unknown:
        print(f"{name}: no recipe has this name, so nothing is predicted", file=sys.stderr)


if __name__ == "__main__":
    main()
