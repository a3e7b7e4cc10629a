"""Runs inside vLLM's own environment: reads a job and writes the engine's answer, both as JSON.

    PYTHON_OF_VLLM vllm_worker.py JOB.json ANSWER.json

It imports nothing from quantkit, which is not installed there, and works with vLLM 0.20 and later.
The answer is written last and atomically, so its presence means that the job is complete.
"""

import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any


def main(job_file: str, answer_file: str) -> None:
    """Run a job: check the config and, on request, load, generate and report log-probabilities."""
    job = json.loads(Path(job_file).read_text())
    seconds: dict[str, float] = {}
    answer: dict[str, Any] = {"seconds": seconds}
    started = time.monotonic()
    import vllm  # type: ignore[import-not-found]

    answer["version"] = vllm.__version__
    settings = {"model": job["model"], **_room(job), **job["settings"]}
    seconds["import"] = time.monotonic() - started
    if job["level"] == "config":
        _timed(seconds, "config", lambda: _check_config(settings, answer))
    else:
        model = _timed(seconds, "load", lambda: vllm.LLM(**settings))
        _describe(model.llm_engine.vllm_config, answer)
        _timed(seconds, "generate", lambda: _generate(model, job, answer))
        if job["level"] == "logprobs":
            _timed(seconds, "logprobs", lambda: _score(model, job, answer))
    whole = Path(f"{answer_file}.whole")
    whole.write_text(json.dumps(answer))
    whole.replace(answer_file)


def _room(job: dict[str, Any]) -> dict[str, Any]:
    """Settings for a shared GPU: a small cache of fixed size, and no memory profiling.

    A CPU has no such setting; its cache is set by the environment.
    """
    if not job["shared"] or _platform().is_cpu():
        return {}
    return {"kv_cache_memory_bytes": 1 << 28, "gpu_memory_utilization": 0.05}


def _platform() -> Any:
    from vllm.platforms import current_platform  # type: ignore[import-not-found]

    return current_platform


def _check_config(settings: dict[str, Any], answer: dict[str, Any]) -> None:
    """Everything vLLM can say about a model without its weights."""
    from vllm import EngineArgs

    _describe(EngineArgs(**settings).create_engine_config(), answer)


def _describe(config: Any, answer: dict[str, Any]) -> None:
    known = _platform()
    name = f"cpu ({platform.machine()})" if known.is_cpu() else known.get_device_name()
    answer["device"] = str(name)
    answer["dtype"] = str(config.model_config.dtype).removeprefix("torch.")
    answer["quantization"] = config.model_config.quantization


def _generate(model: Any, job: dict[str, Any], answer: dict[str, Any]) -> None:
    from vllm import SamplingParams

    # End-of-text does not stop generation: every prompt gets the same number of tokens.
    wanted = SamplingParams(
        temperature=0, max_tokens=job["max_tokens"], logprobs=1, ignore_eos=True
    )
    found = [one.outputs[0] for one in model.generate(_prompts(job["generate"]), wanted)]
    answer["texts"] = [one.text for one in found]
    answer["tokens"] = [[int(token) for token in one.token_ids] for one in found]
    answer["token_logprobs"] = [
        [float(known[token].logprob) for token, known in zip(one.token_ids, one.logprobs)]  # noqa: B905
        for one in found
    ]


def _score(model: Any, job: dict[str, Any], answer: dict[str, Any]) -> None:
    from vllm import SamplingParams

    wanted = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    prompts = job["score"]
    logprobs = []
    for prompt, one in zip(prompts, model.generate(_prompts(prompts), wanted)):  # noqa: B905
        # The first token has no context, so it has no log-probability.
        known = list(one.prompt_logprobs)[1:]
        logprobs.append([float(known[i][token].logprob) for i, token in enumerate(prompt[1:])])
    answer["prompt_logprobs"] = logprobs


def _prompts(tokens: list[list[int]]) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": ids} for ids in tokens]


def _timed(seconds: dict[str, float], name: str, work: Any) -> Any:
    started = time.monotonic()
    result = work()
    seconds[name] = time.monotonic() - started
    return result


if __name__ == "__main__":
    # Python puts this file's folder first on the path, where our modules would shadow the engine's.
    here = Path(__file__).resolve().parent
    sys.path[:] = [part for part in sys.path if Path(part or os.curdir).resolve() != here]
    main(sys.argv[1], sys.argv[2])
