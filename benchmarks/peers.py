"""One quantiser on one model, from files to files: the calls that `peers_speed.py` times.

    python benchmarks/peers.py RUN[@BATCH] ... --model DIR [DIR ...] --set DIR --group-size 128
        --out DIR --result FILE [--warm-samples 8]

RUN is one of KNOWN below. All runs read the same token ids, those of a set that `quantkit calibrate
build` wrote, load the model from its folder, and write a checkpoint in compressed-tensors form.
Several runs or models share the process; with --warm-samples each run first makes one untimed call
on the first model. `--result` is written after every call.

Nothing of quantkit is imported for the peers' runs: they pay for their own imports alone. Versions:
llm-compressor 0.14 and AutoRound 0.16, each in an environment of its own.
"""

import argparse
import gc
import json
import os
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

DEFAULT_BATCH = 8


@dataclass(frozen=True)
class Call:
    """What a quantiser is asked for."""

    model: Path
    set: Path
    n_samples: int | None
    """The first samples of the set; None takes all."""
    group_size: int
    batch: int
    out: Path

    def ids(self) -> torch.Tensor:
        """Token ids [samples, length]; sets with padding are refused."""
        from safetensors.torch import load_file

        stored = load_file(self.set / "tokens.safetensors")
        ids = stored["input_ids"].long()
        if not bool((stored["lengths"] == ids.shape[1]).all()):
            raise ValueError(f"{self.set} has padded samples; build it with --short pack")
        return ids[: self.n_samples]


def quantkit(*recipes: str, tuned: bool = False) -> Callable[[Call], None]:
    """Our own recipes, one or several from one pass; `tuned` as by `--tune`."""

    def run(call: Call) -> None:
        from quantkit.model.source import ModelSource
        from quantkit.onepass.prepare import CalibrationChoice
        from quantkit.onepass.run import quantize
        from quantkit.recipe import Recipe

        loaded = []
        for name in recipes:
            recipe = Recipe.load(name)
            weights = recipe.weights.model_dump() | {"group_size": call.group_size}
            if tuned:
                recipe = recipe.tuned()
            loaded.append(Recipe.model_validate(recipe.model_dump() | {"weights": weights}))
        source = ModelSource.open(str(call.model))
        choice = CalibrationChoice(str(call.set), call.n_samples)
        quantize(source, loaded, call.out, calibration=choice)

    return run


def llmcompressor(method: str, bits: int = 4) -> Callable[[Call], None]:
    """GPTQ as its W4A16, AWQ as its W4A16_ASYM, with the width and group size asked for."""

    def run(call: Call) -> None:
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
        from llmcompressor.modifiers.transform.awq import AWQModifier
        from torch.utils.data import DataLoader

        weights = {
            "num_bits": bits,
            "type": "int",
            "strategy": "group",
            "group_size": call.group_size,
            "symmetric": method == "gptq" or bits < 4,
        }
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        if method == "gptq":
            recipe = [GPTQModifier(config_groups=groups, ignore=["lm_head"])]
        else:
            rounding = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
            recipe = [AWQModifier(), rounding]
        ids = call.ids()
        rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
        oneshot(
            model=str(call.model),
            recipe=recipe,
            dataset=DataLoader(rows, batch_size=call.batch),
            num_calibration_samples=len(ids),
            max_seq_length=ids.shape[1],
            output_dir=str(call.out),
        )

    return run


def autoround(
    iterations: int, learning_rate: float | None, bits: int = 4, extension: bool = False
) -> Callable[[Call], None]:
    """Sign-gradient rounding; settings are those of its own presets.

    Below 4 bits it saves the rounded weights in 16 bits, which needs no kernel to read.
    """

    def run(call: Call) -> None:
        from auto_round import AutoRound
        from transformers import AutoTokenizer

        ids = call.ids()
        scheme = f"W{bits}A16"
        more = {"enable_alg_ext": True} if extension else {}
        AutoRound(
            str(call.model),
            tokenizer=AutoTokenizer.from_pretrained(call.model),
            scheme=scheme if call.group_size == 128 else f"{scheme}G{call.group_size}",
            dataset=list(ids.split(call.batch)),
            iters=iterations,
            lr=learning_rate,
            seqlen=ids.shape[1],
            nsamples=len(ids),
            batch_size=call.batch,
            **more,
        ).quantize_and_save(str(call.out), format="llm_compressor" if bits == 4 else "fake")

    return run


RECIPES = ("gptq-w4a16", "awq-w4a16", "awq-gptq-w4a16")
RUNS: dict[str, Callable[[Call], None]] = {
    **{f"quantkit-{name.removesuffix('-w4a16')}": quantkit(name) for name in RECIPES},
    "quantkit-one-pass": quantkit(*RECIPES),
    "llmcompressor-gptq": llmcompressor("gptq"),
    "llmcompressor-awq": llmcompressor("awq"),
    # The presets `default` and `light` of auto_round/cli/main.py, RECIPES.
    "autoround-200": autoround(200, None),
    "autoround-light": autoround(50, 5e-3),
}
OWN = {
    "quantkit-best": "best-w4a16",
    "quantkit-tune": "awq-gptq-w4a16",
    "quantkit-gptq-w3": "gptq-w3a16",
    "quantkit-best-w3": "best-w3a16",
    "quantkit-gptq-w2": "gptq-w2a16",
    "quantkit-best-w2": "best-w2a16",
}
"""Our recipes of the frontier."""
RUNS_BY_WIDTH: dict[int, dict[str, Callable[[Call], None]]] = {
    4: {
        "quantkit-gptq": RUNS["quantkit-gptq"],
        "quantkit-awq-gptq": RUNS["quantkit-awq-gptq"],
        "quantkit-best": quantkit("best-w4a16"),
        # What gradients are worth where there is a quarter of AutoRound's time: `--tune`.
        "quantkit-tune": quantkit("awq-gptq-w4a16", tuned=True),
        "llmcompressor-gptq": RUNS["llmcompressor-gptq"],
        "llmcompressor-awq": RUNS["llmcompressor-awq"],
        "autoround-200": RUNS["autoround-200"],
    },
    3: {
        "quantkit-gptq-w3": quantkit("gptq-w3a16"),
        "quantkit-best-w3": quantkit("best-w3a16"),
        "llmcompressor-gptq-w3": llmcompressor("gptq", 3),
        "autoround-0-w3": autoround(0, None, 3),
        "autoround-200-w3": autoround(200, None, 3),
    },
    2: {
        "quantkit-gptq-w2": quantkit("gptq-w2a16"),
        "quantkit-best-w2": quantkit("best-w2a16"),
        "llmcompressor-gptq-w2": llmcompressor("gptq", 2),
        "autoround-0-w2": autoround(0, None, 2),
        "autoround-200-w2": autoround(200, None, 2, extension=True),
    },
}
"""What `frontier.py` compares, by bits."""
KNOWN = RUNS | {name: run for runs in RUNS_BY_WIDTH.values() for name, run in runs.items()}
PACKAGES = {
    "quantkit": ("torch", "transformers", "compressed-tensors"),
    "llmcompressor": ("llmcompressor", "torch", "transformers", "compressed-tensors"),
    "autoround": ("auto-round", "torch", "transformers", "compressed-tensors"),
}


def split(name: str) -> tuple[str, int]:
    """A run and its batch size."""
    run, _, batch = name.partition("@")
    if run not in KNOWN:
        raise SystemExit(f"unknown run {run}: choose from {', '.join(KNOWN)}")
    return run, int(batch or DEFAULT_BATCH)


def package_of(run: str) -> str:
    return run.partition("-")[0]


def checkpoints(run: str, out: Path) -> dict[str, Path]:
    """Where a run leaves its checkpoints, by what they are called."""
    if run == "quantkit-one-pass":
        return {f"quantkit-{name.removesuffix('-w4a16')}": out / name for name in RECIPES}
    if package_of(run) == "quantkit":
        return {run: out / OWN.get(run, f"{run.removeprefix('quantkit-')}-w4a16")}
    # AutoRound makes a folder of its own within the one that it is given.
    return {run: next((path.parent for path in out.glob("**/config.json")), out)}


def timed(run: str, call: Call) -> dict[str, Any]:
    """Seconds and peak memory of one call; an error is part of the result."""
    cuda = torch.cuda.is_available()
    gc.collect()
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    error = None
    started = time.monotonic()
    try:
        KNOWN[run](call)
    except Exception:  # whatever goes wrong in a peer is recorded, never dropped
        error = traceback.format_exc()[-3000:]
    if cuda:
        torch.cuda.synchronize()
    return {
        "seconds": time.monotonic() - started,
        "peak_device_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "error": error,
    }


def line(call: dict[str, Any]) -> str:
    """A call in one line, of an error its last."""
    ended = call["error"].splitlines()[-1] if call["error"] else f"{call['seconds']:.2f} s"
    memory = f", {call['peak_device_bytes'] / 2**30:.1f} GiB" if call["peak_device_bytes"] else ""
    warm = ", warm-up" if call["warm_up"] else ""
    return f"{call['run']}@{call['batch']} {call['model']}{warm}: {ended}{memory}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--model", type=Path, nargs="+", required=True)
    parser.add_argument("--set", type=Path, required=True)
    parser.add_argument("--group-size", type=int, default=128)
    parser.add_argument("--warm-samples", type=int)
    parser.add_argument("--keep", action="store_true", help="leave the checkpoints in --out")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--result", type=Path, required=True)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    names = [split(name) for name in args.runs]
    calls: list[dict[str, Any]] = []
    packages = dict.fromkeys(p for run, _ in names for p in PACKAGES[package_of(run)])
    result = {"versions": {p: metadata.version(p) for p in packages}, "calls": calls}
    for run, batch in names:
        todo = [
            Call(model, args.set, None, args.group_size, batch, args.out) for model in args.model
        ]
        if args.warm_samples:
            todo.insert(0, replace(todo[0], n_samples=args.warm_samples))
        for call in todo:
            calls.append(
                {
                    "run": run,
                    "batch": batch,
                    "model": call.model.name,
                    "warm_up": call.n_samples is not None,
                    **timed(run, call),
                }
            )
            args.result.write_text(json.dumps(result, indent=2))
            print(line(calls[-1]), flush=True)
            if not args.keep:
                shutil.rmtree(call.out, ignore_errors=True)


if __name__ == "__main__":
    main()
