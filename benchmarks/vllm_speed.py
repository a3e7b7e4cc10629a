"""How fast formats decode and prefill in vLLM, against the first folder: usually bf16.

    PYTHON_OF_VLLM benchmarks/vllm_speed.py --shape llama-8b --out FILE SOURCE CHECKPOINT...

Runs in vLLM's own environment; of quantkit it uses only what needs no other package. Every model is
loaded in a process of its own, several at a time with `--together`, and timed alone. With `--shape`
only the `config.json` of each folder is read: its format is put on a model of that shape with
random weights, since speed does not depend on them; so checkpoints of a small Llama stand for those
of a large one.

A decoding step is the time of a batch with all its tokens less that with one token, over the
tokens between; prefill is one prompt and one token. The best of the repetitions counts.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from recording import write  # noqa: E402

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
    "llama-3b": {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "llama-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
}
GPTQ_LAYERS = [f"self_attn.{name}_proj" for name in "qkvo"] + [
    f"mlp.{name}_proj" for name in ("gate", "up", "down")
]
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
}
KV_BYTES = 3 * 2**30
"""Cache of each engine where several share a GPU: ample for the batches that are timed."""
SHORT = 32
"""Tokens of the prompts whose decoding is timed."""


def shaped(folder: Path, shape: str, into: Path) -> Path:
    """A folder with a config only: the format of one model on the shape of another."""
    config = json.loads((folder / "config.json").read_text())
    if config.get("model_type") != "llama":
        raise SystemExit(f"{folder} is not a Llama, whose shape --shape {shape} has")
    quantised = config.get("quantization_config", {})
    if quantised.get("quant_method") == "gptq":  # else it looks into the weights for what is
        quantised["modules_in_block_to_quantize"] = GPTQ_LAYERS
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
    share: dict[str, Any] = {"gpu_memory_utilization": args.gpu_utilization}
    if args.together > 1:  # they would count each other's memory, so each is told what to take
        share = {"gpu_memory_utilization": 0.9 / args.together, "kv_cache_memory_bytes": KV_BYTES}
    longest = max(args.prefill, SHORT + args.output + 1) + 16
    return {
        "max_model_len": longest,
        "max_num_seqs": max(args.batches),
        "max_num_batched_tokens": max(longest, 2048),  # the prefill is one step
        **share,
        "load_format": "dummy" if args.shape else args.load_format,
        "compilation_config": {"cudagraph_capture_sizes": sorted(args.batches)},
        **json.loads(args.engine),
    }


class Timed:
    """One model in a process of its own: loading, then timed in its turn."""

    def __init__(self, name: str, folder: Path, args: argparse.Namespace, beside: ExitStack):
        self.name, self.args = name, args
        self.turn = Path(beside.enter_context(tempfile.TemporaryDirectory()))
        self.refused: str | None = None
        spec = self.turn / "spec.json"
        asked = {"engine": engine(args), "cases": cases(args), "turn": str(self.turn)}
        spec.write_text(json.dumps({"model": str(folder), **asked}))
        environment = {k: v for k, v in SETTINGS.items() if k not in os.environ}
        line = [sys.executable, str(WORKER), str(spec)]
        self.child = beside.enter_context(Child(line, environment=environment, name="vLLM"))

    def wait_until_loaded(self) -> None:
        """Returns when the model is loaded, or will never be."""
        deadline = time.monotonic() + self.args.timeout
        while not (self.turn / "ready").exists():
            try:
                self.child.check()
                if time.monotonic() > deadline:
                    raise self.child.failure(f"not loaded within {self.args.timeout:.0f} s")
            except EngineError as error:
                self.refused = str(error)
                return
            time.sleep(0.1)

    def measure(self) -> dict[str, Any]:
        """Figures of the model, or why there are none."""
        if self.refused:
            return {"refused": self.refused}
        (self.turn / "go").touch()
        try:
            words = _finished(self.child, self.args.timeout)
        except EngineError as error:
            return {"refused": str(error)}
        return figures(words)


def figures(words: str) -> dict[str, Any]:
    """What the worker measured, from all that it and its engine wrote."""
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
    """A table: tokens per second, and times the first's."""
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
    parser.add_argument(
        "--together", type=int, default=1, help="engines that load at a time; timed one by one"
    )
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
        for start in range(0, len(args.folders), args.together):
            group = args.folders[start : start + args.together]
            with ExitStack() as beside:
                timed = [
                    Timed(
                        given.resolve().name,
                        shaped(given, args.shape, Path(scratch)) if args.shape else given,
                        args,
                        beside,
                    )
                    for given in group
                ]
                for each in timed:  # all, so that nobody loads while another is timed
                    each.wait_until_loaded()
                for each in timed:
                    models[each.name] = each.measure()
                    print(each.name, "refused" if "refused" in models[each.name] else "done")
                    sys.stdout.flush()
                    if "refused" in next(iter(models.values())):
                        raise SystemExit(f"{each.name}: {models[each.name]['refused']}")
                    with_ratios({n: m for n, m in models.items() if "refused" not in m})
                    if args.out:  # after every model, so that a long run leaves what it has
                        write(args.out, result)
    show(models)


if __name__ == "__main__":
    main()
