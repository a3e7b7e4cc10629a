"""How fast formats decode and prefill in vLLM, against the first folder: usually bf16.

    PYTHON_OF_VLLM benchmarks/vllm_speed.py --shape llama-8b --out FILE SOURCE CHECKPOINT...

Runs in vLLM's own environment; of quantkit it uses only what needs no other package. Every model is
loaded in a process of its own. With `--shape` only the `config.json` of each folder is read: its
format is put on a model of that shape with random weights, since speed does not depend on them; so
checkpoints of a small Llama stand for those of a large one.

A decoding step is the time of a batch with all its tokens less that with one token, over the
tokens between; prefill is one prompt and one token. The best of the repetitions counts.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from quantkit.bench.engines import kv_tokens_in, weight_bytes_in  # noqa: E402
from quantkit.engine.process import Child  # noqa: E402
from quantkit.errors import EngineError  # noqa: E402

WORKER = ROOT / "quantkit" / "bench" / "vllm_worker.py"
MARK = "RESULT "
SHAPES = {
    "llama-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}
SHORT = 32
"""Tokens of the prompts whose decoding is timed."""


def shaped(folder: Path, shape: str, into: Path) -> Path:
    """A folder with a config only: the format of one model on the shape of another."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "llama":
        raise SystemExit(f"{folder} is no Llama, whose shape --shape {shape} has")
    target = into / folder.resolve().name
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**config, **SHAPES[shape]}))
    return target


def cases(args: argparse.Namespace) -> list[dict[str, int]]:
    """What is timed of every model."""
    common = {"repeat": args.repeat, "warmup": 1}
    decode = [
        {"prompt_tokens": SHORT, "output_tokens": args.output + 1, "batch": n, **common}
        for n in args.batches
    ]
    return [*decode, {"prompt_tokens": args.prefill, "output_tokens": 1, "batch": 1, **common}]


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments of the engine: graphs for the batches that are timed, and no others."""
    longest = max(args.prefill, SHORT + args.output + 1) + 16
    return {
        "max_model_len": longest,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": max(longest, 2048),  # the prefill is one step
        "gpu_memory_utilization": args.gpu_utilization,
        "load_format": "dummy" if args.shape else args.load_format,
        "compilation_config": {"cudagraph_capture_sizes": sorted(args.batches)},
        **json.loads(args.engine),
    }


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model, or why there are none."""
    with tempfile.TemporaryDirectory() as scratch:
        spec = Path(scratch) / "spec.json"
        spec.write_text(
            json.dumps({"model": str(folder), "engine": engine(args), "cases": cases(args)})
        )
        line = [sys.executable, str(WORKER), str(spec)]
        environment = {k: v for k, v in SETTINGS.items() if k not in os.environ}
        try:
            with Child(line, environment=environment, name="vLLM") as child:
                words = _finished(child, args.timeout)
        except EngineError as error:
            return {"refused": str(error)}
    lines = [text for text in words.splitlines() if text.startswith(MARK)]
    result = json.loads(lines[-1].removeprefix(MARK))
    *decode, prefill = result["cases"]
    steps = {}
    for case in decode:
        n = case["output_tokens"] - 1
        best = (min(case["seconds"]) - min(case["prefill_seconds"])) / n
        steps[f"decode_{case['batch']}"] = {
            "step_s": best,
            "tokens_per_s": case["batch"] / best,
        }
    seconds = min(prefill["seconds"])
    return {
        **steps,
        "prefill": {"seconds": seconds, "tokens_per_s": prefill["prompt_tokens"] / seconds},
        "kv_tokens": kv_tokens_in(words),
        "weight_bytes": weight_bytes_in(words),
        "gpu_used_bytes": result["gpu_used_bytes"],
        "cold_start_s": result["cold_start_s"],
        "vllm": result["vllm"],
        "device": result["device"],
        "cases": result["cases"],
    }


def _finished(child: Child, timeout: float) -> str:
    """All that the worker wrote; an engine that falls over its own end has still measured."""
    try:
        return child.wait(timeout)
    except EngineError:
        if f"\n{MARK}" not in child.output():
            raise
        return child.output()


def with_ratios(models: dict[str, dict[str, Any]]) -> None:
    """How many times as fast as the first, beside every figure."""
    first = next(iter(models.values()))
    for found in models.values():
        for name, figure in found.items():
            if isinstance(figure, dict) and "tokens_per_s" in figure and name in first:
                figure["ratio"] = figure["tokens_per_s"] / first[name]["tokens_per_s"]


def show(models: dict[str, dict[str, Any]]) -> None:
    """A table: tokens a second, and times the first's."""
    names = [n for n, f in next(iter(models.values())).items() if isinstance(f, dict)]
    print(f"{'model':28}" + "".join(f"{name:>22}" for name in names) + f"{'KV tokens':>14}")
    for model, found in models.items():
        if "refused" in found:
            print(f"{model:28}refused: {found['refused'].splitlines()[0]}")
            continue
        cells = [f"{found[n]['tokens_per_s']:12,.0f} ({found[n]['ratio']:5.2f} x)" for n in names]
        kv = f"{found['kv_tokens']:14,}" if found["kv_tokens"] else f"{'?':>14}"
        print(f"{model:28}" + "".join(f"{cell:>22}" for cell in cells) + kv)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path, help="the one to compare with first")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape instead")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--output", type=int, default=128, help="decoding steps")
    parser.add_argument("--prefill", type=int, default=8192, help="tokens of the long prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--gpu-utilization", type=float, default=0.9)
    parser.add_argument("--engine", default="{}", help="further arguments of vLLM's LLM, as JSON")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    models: dict[str, dict[str, Any]] = {}
    result = {
        "what": "decode and prefill in vLLM, against the first model",
        "machine": platform.machine(),
        "shape": args.shape or "as they are",
        "engine": engine(args),
        "models": models,
    }
    with tempfile.TemporaryDirectory() as scratch:
        for given in args.folders:
            folder = shaped(given, args.shape, Path(scratch)) if args.shape else given
            models[given.resolve().name] = measure(folder, args)
            print(given.resolve().name, "done", flush=True)
            if "refused" in next(iter(models.values())):
                raise SystemExit(f"{given}: {models[given.resolve().name]['refused']}")
            with_ratios({n: m for n, m in models.items() if "refused" not in m})
            if args.out:  # after every model, so that a long run leaves what it has
                args.out.write_text(json.dumps(result, indent=2) + "\n")
    show(models)


if __name__ == "__main__":
    main()
