"""Batches without a server: runs a worker in the engine's environment and turns its output into
rows.
"""

import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quantkit.bench import figures, vllm_worker
from quantkit.bench.engines import Program, kv_tokens_in, weight_bytes_in
from quantkit.bench.measure import Plan
from quantkit.bench.memory import Peak
from quantkit.bench.model import Model
from quantkit.bench.record import Distribution, Press, Repetition, Row, Target
from quantkit.bench.settings import is_on, speculative_config
from quantkit.bench.workloads import Fixed
from quantkit.engine import label
from quantkit.engine.process import Child
from quantkit.errors import EngineError

TIMEOUT_S = 3600.0


def measure(
    program: Program,
    plan: Plan,
    model: Model,
    setting: Mapping[str, str],
    versions: set[str],
    log: Path | None = None,
) -> Iterator[Row]:
    """Rows of one model with one setting; adds the engine's version to `versions`."""
    cases = [
        {
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "batch": press.concurrency,
            "repeat": plan.repetitions,
            "warmup": 1 if plan.n_warmup is None else plan.n_warmup,
        }
        for workload in plan.workloads
        if isinstance(workload, Fixed)
        for press in plan.loads
    ]
    spec = {
        "model": str(model.path),
        "engine": {**engine_arguments(program.arguments), **keywords(setting)},
        "seed": plan.seed,
        "cases": cases,
    }
    with tempfile.TemporaryDirectory(prefix="quantkit-bench-") as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec))
        line = [program.python, vllm_worker.__file__, str(path)]
        with (
            Peak() as peak,
            Child(
                line, environment=program.environment, log=log, name=label(program.engine)
            ) as child,
        ):
            words = finished(child, TIMEOUT_S)
            peak_bytes = peak.bytes()
    result = read(words)
    versions.add(result["vllm"])
    for case in result["cases"]:
        yield _row(case, plan, model.name).model_copy(
            update={
                "digest": model.digest,
                "setting": dict(setting),
                "cold_start_s": result["cold_start_s"],
                "gpu_peak_bytes": peak_bytes or result["gpu_used_bytes"],
                "kv_tokens": kv_tokens_in(words),
                "weight_bytes": weight_bytes_in(words, plan.n_gpus),
            }
        )


def finished(child: Child, timeout_s: float) -> str:
    """A worker's output; an engine that crashes on shutdown has still measured."""
    try:
        return child.wait(timeout_s)
    except EngineError:
        words = child.output()
        if f"\n{vllm_worker.MARK}" not in words:
            raise
        return words


def read(words: str) -> dict[str, Any]:
    """The result that a worker printed last."""
    lines = [line for line in words.splitlines() if line.startswith(vllm_worker.MARK)]
    if not lines:
        raise EngineError("the engine ended without a result; see its output")
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(vllm_worker.MARK))
    return found


def _row(case: Mapping[str, Any], plan: Plan, label: str) -> Row:
    n, prompt, output = case["batch"], case["prompt_tokens"], case["output_tokens"]
    passes = [
        Repetition(
            seconds=seconds,
            n_ok=n,
            n_failed=0,
            prompt_tokens=n * prompt,
            output_tokens=n * output,
        )
        for seconds in case["seconds"]
    ]
    first = case["prefill_seconds"]
    steps = (
        [(whole - one) / (output - 1) for whole, one in zip(case["seconds"], first, strict=True)]
        if output > 1
        else []
    )
    rate = figures.rate([one.output_tokens_per_s for one in passes])
    total = figures.rate([one.total_tokens_per_s for one in passes])
    price, gpus = plan.gpu_hour, plan.n_gpus
    ttft, tpot = figures.distribution(first), figures.distribution(steps)
    met = _met(ttft, tpot, plan.target)
    return Row(
        model=label,
        workload=Fixed(prompt, output).about,
        load=Press(kind="batch", concurrency=n),
        load_name=f"batch of {n}",
        n_requests=n * len(passes),
        n_ok=n * len(passes),
        requests_per_s=figures.rate([one.requests_per_s for one in passes]),
        output_tokens_per_s=rate,
        total_tokens_per_s=total,
        ttft_s=ttft,
        tpot_s=tpot,
        e2e_s=figures.distribution(case["seconds"]),
        attained=None if met is None else float(met),
        meets=met,
        cost_per_million_output=figures.cost_per_million(rate.mean, price, gpus) if price else None,
        cost_per_million_total=figures.cost_per_million(total.mean, price, gpus) if price else None,
        repetitions=passes,
    )


def _met(
    ttft: Distribution | None, tpot: Distribution | None, target: Target | None
) -> bool | None:
    """A batch counts as one: its slowest pass meets the target, or it does not."""
    if target is None:
        return None
    pairs = ((ttft, target.ttft_s), (tpot, target.tpot_s))
    return all(found.max <= most for found, most in pairs if found and most is not None)


def keywords(setting: Mapping[str, str]) -> dict[str, Any]:
    """A setting as arguments of vLLM's `LLM`."""
    found: dict[str, Any] = {}
    for name, value in setting.items():
        if name in ("max_num_seqs", "max_num_batched_tokens"):
            found[name] = int(value)
        elif name == "tensor_parallel":
            found["tensor_parallel_size"] = int(value)
        elif name == "gpu_memory_utilization":
            found[name] = float(value)
        elif name in ("prefix_caching", "chunked_prefill"):
            found[f"enable_{name}"] = is_on(value)
        elif name == "speculative":
            if (config := speculative_config(value)) is not None:
                found["speculative_config"] = config
        else:
            found[name] = value
    return found


def engine_arguments(arguments: tuple[str, ...]) -> dict[str, Any]:
    """Command-line flags as keywords: `--max-model-len 4096` is `max_model_len=4096`."""
    found: dict[str, Any] = {}
    waiting = list(arguments)
    while waiting:
        flag, _, value = waiting.pop(0).partition("=")
        if not flag.startswith("--"):
            raise EngineError(f"'{flag}' is not a flag of vLLM; write it as --name value")
        name = flag[2:].replace("-", "_")
        if not value and waiting and not waiting[0].startswith("--"):
            value = waiting.pop(0)
        if value:
            found[name] = _value(value)
        else:
            found[name.removeprefix("no_")] = not name.startswith("no_")
    return found


def _value(text: str) -> Any:
    """Parsed JSON, or the text itself."""
    if re.fullmatch(r"-?\d+(\.\d+)?|\{.*\}|\[.*\]", text):
        try:
            return json.loads(text)
        except ValueError as error:
            raise EngineError(f"--engine-args has '{text}', which is not JSON: {error}") from error
    return text
