"""K-quants by GPTQ beside llama.cpp's own rounding: the same tokens, importance, types and bytes.

    python benchmarks/gguf_best.py --out FILE [--model demo --calibration python-docs]
        [--samples 128 --calibration-length 2048] [--windows 40 --length 512 --text FILE]
        [--types q2_k q3_k_m q4_k_m] [--mixed] [--work DIR]

Both files of a type come from one pass: `gguf-TYPE` holds the bytes that llama.cpp's quantiser
writes with the pass's importance matrix (tests hold them against ggml itself), `gguf-best-TYPE` the
same scales with GPTQ's levels. Each is compared with the source on whole windows of held-out text,
as `fp4.py` does it. With --mixed a third file has a type chosen for each tensor (`quantkit quantize
--size --for llama.cpp`), in no more bytes than llama.cpp's. FILE is written after every type, and
those that it holds are not made again.
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

from fp4 import described, windows_of
from quality import compare
from recording import begun, recorded

from quantkit import device as devices
from quantkit.export.manifest import versions
from quantkit.mixed import run as mixed
from quantkit.mixed.budget import Budget
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import loading

TYPES = ("q2_k", "q3_k_m", "q4_k_m")
IMPORTANCE = "imatrix.gguf"
"""Lies beside the model in its folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--name", help="of the model, where its folder has another")
    parser.add_argument("--calibration", default="python-docs")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--calibration-length", type=int)
    parser.add_argument("--windows", type=int, default=40)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--mixed", action="store_true")
    parser.add_argument("--work", type=Path, default=Path("gguf-best"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.source = ModelSource.open(args.model)
    device = devices.choose(args.device)
    windows = windows_of(args)
    about = described(
        args,
        windows,
        "KL divergence of K-quants by GPTQ beside llama.cpp's rounding, in the same bytes",
    )
    about["model"] = args.name or about["model"]
    known = begun(args.out, about)
    source = loading.load(args.source, device)
    result: dict[str, Any] = {
        **about,
        "versions": versions(),
        "source": known.get("source") or compare(source, source, windows),
        "types": known.get("types", {}),
        "recorded": recorded(),
    }
    for kind in args.types:
        if kind in result["types"]:
            continue
        shutil.rmtree(args.work, ignore_errors=True)
        recipes = [load(f"gguf-{kind}"), load(f"gguf-best-{kind}")]
        choice = CalibrationChoice(args.calibration, args.samples, args.calibration_length)
        started = time.monotonic()
        made = quantize(args.source, recipes, args.work, args.device, calibration=choice)
        seconds = time.monotonic() - started

        def judged(one: Any) -> dict[str, Any]:
            return {
                **compare(source, loading.load(one, device), windows),
                "tensor_bytes": one.manifest.size_bytes,
                "file_bytes": sum(
                    p.stat().st_size for p in one.folder.glob("*.gguf") if p.name != IMPORTANCE
                ),
                "seconds": one.manifest.seconds,
            }

        usual, ours = map(judged, made)
        result["types"][kind] = {
            "llama.cpp": usual,
            "quantkit": ours,
            "kl_ratio": ours["kl_mean"] / usual["kl_mean"],
            "seconds_of_both": seconds,
        }
        if args.mixed:
            asked = mixed.MixedOptions(Budget(size_bytes=usual["file_bytes"]), engine="llama.cpp")
            started = time.monotonic()
            found = mixed.quantize(
                args.source, asked, args.work / "mixed", args.device, choice, Run()
            )
            (chosen,) = found.checkpoints
            result["types"][kind]["mixed"] = {
                **judged(chosen),
                "seconds_with_table": time.monotonic() - started,
                "units": mixed.unit_counts(found.choice),
            }
        args.out.write_text(json.dumps(result, indent=2) + "\n")
        print(kind, json.dumps(result["types"][kind]), flush=True)
    shutil.rmtree(args.work, ignore_errors=True)


if __name__ == "__main__":
    main()
