"""Fifteen speeds that `recommend` predicts before anybody has measured them, then vLLM's own.

    python benchmarks/speed_points.py predict --out benchmarks/results/speed_points-predicted.json
    PYTHON_OF_VLLM benchmarks/speed_points.py measure PREDICTED --out FILE
    python benchmarks/speed_points.py compare PREDICTED MEASURED

Predictions are committed before the measurement, which reads the models' configs from them: shapes
with random weights, since speed does not depend on those. `measure` needs vLLM and, of quantkit,
only what needs no other package. One run takes some minutes on an H200: seven engines, four of
which load at a time, and each is timed alone. A point counts as met where the measured speed lies
in the predicted range.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(ROOT))

from recording import write  # noqa: E402
from vllm_speed import SHORT, Timed, with_ratios  # noqa: E402

OUTPUT = 128
TOGETHER = 4
"""Engines that share the GPU's memory; of the models below any four neighbours fit into 139 GiB."""
KV_BYTES = 4 * 2**30
"""Cache of each: room for the most users that are timed, with all their tokens."""
ENDS = ("low", "typical", "high")
DENSE = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-14b": DENSE | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 152064, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
    "llama-24b": DENSE | {
        "hidden_size": 5120, "intermediate_size": 32768, "num_hidden_layers": 40,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "vocab_size": 131072, "max_position_embeddings": 32768, "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16",
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "max_position_embeddings": 40960, "tie_word_embeddings": False, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "rope_theta": 1000000.0,
    },
}  # fmt: skip
POINTS: list[tuple[str, str | None, list[int]]] = [
    ("llama-14b", None, [4, 32]),
    ("llama-14b", "fp8-dynamic", [4, 32]),
    ("llama-14b", "awq-gptq-w4a16", [4, 32]),
    ("llama-24b", "fp8-dynamic", [16, 128]),
    ("llama-24b", "awq-gptq-w4a16", [1, 16]),
    ("qwen3-30b-a3b", None, [1, 16]),
    ("qwen3-30b-a3b", "fp8-dynamic", [1, 16, 64]),
]
"""Shape, recipe and users; none of them in an earlier result of ours."""


def predict(gpu: str) -> dict[str, Any]:
    """Configs of the models, and ranges of tokens per second for all users together."""
    import quantkit
    from quantkit import formats as forms
    from quantkit.advise import efficiency, formats, shape, speed, weights, work
    from quantkit.hardware import gpus
    from quantkit.recipe import Recipe, load

    device, models = gpus.find(gpu), []
    depth = SHORT + (OUTPUT + 1) // 2
    for name, recipe_name, batches in POINTS:
        of_model = shape.from_config(SHAPES[name], name)
        recipe = None if recipe_name is None else load(recipe_name)
        form = formats.of(recipe)
        config = dict(SHAPES[name])
        if isinstance(recipe, Recipe):
            plan = weights.plan(of_model, recipe)
            config["quantization_config"] = forms.config(plan.recipe, plan.ignored)
        case = speed.Case(of_model, work.of(of_model, form), form, device)
        ends = efficiency.of(form.engine, device.vendor)
        points = {}
        for users in batches:
            rates = [users / speed.step_seconds(case, users, depth, end) for end in ends]
            points[str(users)] = dict(zip(ENDS, rates, strict=True))
        models.append({"shape": name, "recipe": recipe_name, "config": config, "points": points})
    return {
        "what": "tokens a second in vLLM, predicted before they were measured",
        "gpu": device.name,
        "quantkit": quantkit.__version__,
        "prompt_tokens": SHORT,
        "output_tokens": OUTPUT + 1,
        "models": models,
    }


def measure(predicted: dict[str, Any], out: Path, timeout: float) -> None:
    """Time every model in an engine of its own; what there is, is written after each."""
    result: dict[str, Any] = {
        "what": "tokens a second in vLLM, at the points of speed_points-predicted.json",
        "machine": platform.machine(),
        "predicted": predicted.get("recorded"),
        "models": [],
    }
    models = predicted["models"]
    if out.is_file():  # a stopped run goes on with the rest, and keeps what was measured then
        before = json.loads(out.read_text())
        result["models"] = before["models"]
        result["before"] = [*before.get("before", []), before["recorded"]]
    for start in range(len(result["models"]), len(models), TOGETHER):
        with tempfile.TemporaryDirectory() as scratch, ExitStack() as beside:
            group = []
            for index, model in enumerate(models[start : start + TOGETHER]):
                folder = Path(scratch) / f"model-{index}"
                folder.mkdir()
                (folder / "config.json").write_text(json.dumps(model["config"]))
                args = argparse.Namespace(
                    shape=model["shape"], batches=[int(users) for users in model["points"]],
                    output=OUTPUT, prefill=2048, repeat=3, together=TOGETHER, gpu_utilization=0.9,
                    engine=json.dumps({"kv_cache_memory_bytes": KV_BYTES}), timeout=timeout,
                    load_format="dummy",
                )  # fmt: skip
                label = f"{model['shape']} {model['recipe'] or 'unquantised'}"
                group.append((model, Timed(label, folder, args, beside)))
            for _, timed in group:  # all, so that nobody loads while another is timed
                timed.wait_until_loaded()
            for model, timed in group:
                found = timed.measure()
                if "refused" not in found:
                    with_ratios({timed.name: found})
                print(timed.name, "refused" if "refused" in found else "done", flush=True)
                shape = {"shape": model["shape"], "recipe": model["recipe"]}
                result["models"].append({**shape, **found})
                write(out, result)


def compare(predicted: dict[str, Any], measured: dict[str, Any]) -> list[dict[str, Any]]:
    """Every point that was tried: the range, the speed, and how far the middle is off."""
    found = []
    for model, real in zip(predicted["models"], measured["models"], strict=False):
        for users, span in model["points"].items():
            rate = real.get(f"decode_{users}", {}).get("tokens_per_s")
            found.append(
                {
                    "model": f"{model['shape']} {model['recipe'] or 'unquantised'}",
                    "users": int(users),
                    **span,
                    "measured": rate,
                    "inside": rate is not None and span["low"] <= rate <= span["high"],
                    "error": None if rate is None else span["typical"] / rate - 1,
                }
            )
    return found


def show(points: list[dict[str, Any]]) -> None:
    for one in points:
        rate = "refused" if one["measured"] is None else f"{one['measured']:,.0f}"
        off = "" if one["error"] is None else f"{one['error']:+.0%}"
        mark = "" if one["inside"] else "  outside"
        span = f"{one['low']:,.0f} to {one['high']:,.0f}, {one['typical']:,.0f}"
        print(f"{one['model']:32}{one['users']:>5} users  {span:>28}  {rate:>8} {off:>6}{mark}")
    errors = [abs(one["error"]) for one in points if one["error"] is not None]
    inside = sum(one["inside"] for one in points)
    middle = f"{statistics.median(errors):.0%}" if errors else "unknown"
    print(f"{inside} of {len(points)} inside their range; median error {middle}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(dest="part", required=True)
    first = parts.add_parser("predict")
    first.add_argument("--gpu", default="H200")
    second = parts.add_parser("measure")
    second.add_argument("predicted", type=Path)
    second.add_argument("--timeout", type=float, default=300, help="seconds for one model")
    for part in (first, second):
        part.add_argument("--out", type=Path, required=True)
    third = parts.add_parser("compare")
    third.add_argument("predicted", type=Path)
    third.add_argument("measured", type=Path)
    args = parser.parse_args()
    if args.part == "predict":
        write(args.out, predict(args.gpu))
        return
    predicted = json.loads(args.predicted.read_text())
    if args.part == "measure":
        measure(predicted, args.out, args.timeout)
        show(compare(predicted, json.loads(args.out.read_text())))
    else:
        show(compare(predicted, json.loads(args.measured.read_text())))


if __name__ == "__main__":
    main()
