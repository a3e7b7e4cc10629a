"""Runs batches through vLLM's own `LLM.generate`, with exact token counts and no server.

    PYTHON_OF_VLLM vllm_worker.py SPEC.json

Runs in vLLM's environment and imports nothing from quantkit. The file names a model, engine
arguments and cases; the last line printed is `RESULT` and JSON. With `turn`, a folder, it creates a
file `ready` there once the model is loaded, and waits for one called `go`. Each case is run with
its full output and with one token, on prompts of their own: the second is the prefill, and the
difference over the other tokens is the time of a decoding step.
"""

import json
import os
import random
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

MARK = "RESULT "
LOWEST, HIGHEST = 256, 2000
SETTINGS = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Load the model once and run every case."""
    vllm = import_module("vllm")  # types are checked without vLLM installed
    begun = time.perf_counter()
    model = vllm.LLM(
        spec["model"],
        skip_tokenizer_init=True,
        # Prompts never repeat, and a prefill benchmark must not hit the prefix cache.
        **{"enable_prefix_caching": False, "disable_log_stats": True, **spec.get("engine", {})},
    )
    loaded_s = time.perf_counter() - begun
    if "turn" in spec:
        _wait_for_turn(Path(spec["turn"]))
    draw = random.Random(spec.get("seed", 0))
    cases = [_case(model, case, draw) for case in spec["cases"]]
    return {
        "vllm": _version(),
        "device": _device(),
        "cold_start_s": loaded_s,
        "gpu_used_bytes": _gpu_used(),
        "cases": cases,
    }


def _wait_for_turn(folder: Path) -> None:
    """Several engines may load in parallel; they are timed one after the other."""
    (folder / "ready").touch()
    while not (folder / "go").exists():
        time.sleep(0.05)


def _case(model: Any, case: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    n_prompt, n_output = int(case["prompt_tokens"]), int(case["output_tokens"])
    n_requests, repeat = int(case["batch"]), int(case.get("repeat", 1))
    for _ in range(int(case.get("warmup", 1))):
        _generate(model, n_requests, n_prompt, min(n_output, 16), draw)
    whole = [_generate(model, n_requests, n_prompt, n_output, draw) for _ in range(repeat)]
    first = whole
    if n_output > 1:
        first = [_generate(model, n_requests, n_prompt, 1, draw) for _ in range(repeat)]
    return {**case, "seconds": whole, "prefill_seconds": first}


def _generate(
    model: Any, n_requests: int, n_prompt: int, n_output: int, draw: random.Random
) -> float:
    """Seconds of one batch; any other number of tokens than requested is an error."""
    prompts = [
        {"prompt_token_ids": [draw.randrange(LOWEST, HIGHEST) for _ in range(n_prompt)]}
        for _ in range(n_requests)
    ]
    sampling = import_module("vllm").SamplingParams(
        temperature=0, max_tokens=n_output, ignore_eos=True, detokenize=False
    )
    begun = time.perf_counter()
    answers = model.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    lengths = {len(answer.outputs[0].token_ids) for answer in answers}
    if lengths != {n_output}:
        raise SystemExit(f"asked for {n_output} tokens per request, got {sorted(lengths)}")
    return seconds


def _version() -> str:
    return str(import_module("vllm").__version__)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def _gpu_used() -> int | None:
    """Memory in use on the GPU by all processes."""
    import torch

    if not torch.cuda.is_available():
        return None
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def main() -> None:
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    result = run(json.loads(Path(sys.argv[1]).read_text()))
    sys.stdout.write(f"\n{MARK}{json.dumps(result)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
