"""What each idea for few bits is worth, alone and together, on one model and one set of tokens.

    python benchmarks/best_bits.py --out FILE [--model demo --calibration python-docs --samples 48]
        [--windows 40 --length 512] [--work DIR] [--variants NAME ...] [--also JSON ...]

Every variant is a recipe with other options; `--also` takes further ones, with constants of modules
too: '{"recipe": "gptq-w4a16", "options": {"tune": 50},
"set": {"quantkit.onepass.tuning.INSIDE": 0.4}}'. All are calibrated on the same tokens and compared
with the source on whole windows of held-out text, as `fp4.py` does it: perplexity, exact KL
divergence over the whole vocabulary and top-1 agreement. FILE is written after every variant, and
those that it holds are not made again.
"""

import argparse
import importlib
import json
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp4 import described, windows_of
from quality import compare
from recording import begun, recorded

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import loading

OFF: dict[str, Any] = {"sweeps": 0, "signed": False, "tune": 0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "w4 GPTQ with AWQ's scales": ("best-w4a16", OFF),
    "w4 and two sweeps": ("best-w4a16", OFF | {"sweeps": 2}),
    "w4 and signed scales": ("best-w4a16", OFF | {"signed": True}),
    "w4 and both": ("best-w4a16", {"tune": 0}),
    "w4 and tuning": ("best-w4a16", {}),
    "w3 GPTQ with AWQ's scales": ("best-w3a16", OFF),
    "w3 and two sweeps": ("best-w3a16", OFF | {"sweeps": 2}),
    "w3 and signed scales": ("best-w3a16", OFF | {"signed": True}),
    "w3 and both": ("best-w3a16", {"tune": 0}),
    "w3 and tuning": ("best-w3a16", {}),
    "w2 GPTQ with AWQ's scales": ("best-w2a16", OFF),
    "w2 and two sweeps": ("best-w2a16", OFF | {"sweeps": 2}),
    "w2 and signed scales": ("best-w2a16", OFF | {"signed": True}),
    "w2 and both": ("best-w2a16", {"tune": 0}),
    "w2 and tuning": ("best-w2a16", {}),
    "nvfp4 with held-out choice": ("nvfp4", {}),
    "nvfp4 and two sweeps": ("nvfp4", {"sweeps": 2}),
}


@contextmanager
def constants(asked: Mapping[str, Any]) -> Iterator[None]:
    """Other values of constants, by module and name."""
    places = {key: key.rpartition(".")[::2] for key in asked}
    before = {k: getattr(importlib.import_module(m), n) for k, (m, n) in places.items()}
    try:
        for key, (module, name) in places.items():
            value = asked[key]
            if isinstance(value, list):
                named = hasattr(before[key], "_fields")
                value = type(before[key])(*value) if named else tuple(value)
            setattr(importlib.import_module(module), name, value)
        yield
    finally:
        for key, (module, name) in places.items():
            setattr(importlib.import_module(module), name, before[key])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--calibration", default="python-docs")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--calibration-length", type=int)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--also", nargs="+", default=[], metavar="JSON")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--work", type=Path, default=Path("best-bits"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.source = ModelSource.open(args.model)
    device = devices.choose(args.device)
    windows = windows_of(args)
    about = described(
        args, windows, "perplexity and KL divergence of ideas for few bits, alone and together"
    )
    known = begun(args.out, about)
    source = loading.load(args.source, device)
    result: dict[str, Any] = {
        **about,
        "versions": versions(),
        "source": known.get("source") or compare(source, source, windows),
        "rows": known.get("rows", {}),
        "recorded": recorded(),
    }
    further = {text: json.loads(text) for text in args.also}
    for name in [*args.variants, *further]:
        if name in result["rows"]:
            continue
        asked = further.get(name, {})
        base, options = VARIANTS.get(name) or (asked["recipe"], asked.get("options", {}))
        recipe = Recipe.load(base)
        size = {"group_size": args.group_size or recipe.weights.group_size}
        weights = recipe.weights.model_copy(update=size)
        changed = {"options": recipe.options | options, "weights": weights}
        recipe = recipe.model_copy(update=changed)
        shutil.rmtree(args.work, ignore_errors=True)
        started = time.monotonic()
        choice = CalibrationChoice(args.calibration, args.samples, args.calibration_length)
        with constants(asked.get("set", {})):
            (made,) = quantize(args.source, [recipe], args.work, args.device, calibration=choice)
        seconds = time.monotonic() - started
        found = compare(source, loading.load(made, device), windows)
        result["rows"][name] = {
            "recipe": base,
            "options": recipe.options,
            **({"set": asked["set"]} if "set" in asked else {}),
            "change_percent": 100 * (found["perplexity"] / result["source"]["perplexity"] - 1),
            "seconds": seconds,
            **found,
        }
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(name, json.dumps(result["rows"][name]), flush=True)
    shutil.rmtree(args.work, ignore_errors=True)


if __name__ == "__main__":
    main()
