"""Output of engines for docs/serving.md: recorded results, printed by the commands' own code."""

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from figures.regions import RESULTS, region, result
from quantkit.bench import record
from quantkit.bench.choice import choose
from quantkit.cli import bench_view, verify_view
from quantkit.export.verified import Verified

SHOWN = "w4afp8"
PYTHON = "--python vllm-env/bin/python"


def printed(show: Callable[..., None], *arguments: Any) -> list[str]:
    """The lines that a view prints."""
    with redirect_stdout(io.StringIO()) as text:
        show(*arguments)
    return [line.rstrip() for line in text.getvalue().rstrip().split("\n")]


@region
def serving_verify() -> str:
    """One checkpoint in vLLM; the checks of its files come first and are left out."""
    told = result("vllm-formats-h200")["models"][SHOWN]
    found = Verified(**{name: told[name] for name in Verified.model_fields if name in told})
    checks = SimpleNamespace(passed=["files"], left_out=[], faults=[], worst=[])
    proof = SimpleNamespace(folder=Path("out") / SHOWN, checks=checks, verified=found)
    first, *lines = printed(verify_view.View(False, False, False).show_proof, proof)
    command = f"$ quantkit verify out/{SHOWN} --backend vllm {PYTHON}"
    return "\n".join(["```", command, first, "…", *lines, "verdict: sound", "```"])


@region
def serving_sweep() -> str:
    """Two settings of vLLM on a CPU."""
    name = "bench-vllm-cpu"
    bench = record.read(RESULTS / f"{name}.json")
    row, target, options = bench.rows[0], bench.target, bench.options
    assert target is not None
    assert target.ttft_s is not None
    assert target.tpot_s is not None
    settings = ",".join(one.setting["max_num_seqs"] for one in bench.rows)
    work = row.workload
    arguments = options["engine_arguments"]
    assert isinstance(arguments, list)
    command = [
        f"$ quantkit bench {row.model} {PYTHON} --prompt {work.prompt_tokens} \\",
        f"    --output {work.output_tokens} --shared-prefix {work.shared_prefix} "
        f"--rate {row.load.rate:g} --requests {row.n_requests} --sweep max_num_seqs={settings} \\",
        f"    --ttft {target.ttft_s:g}s --tpot {1000 * target.tpot_s:g}ms "
        f"--attain {100 * target.share:g} \\",
        f'    --engine-args "{" ".join(map(str, arguments))}" -o sweep',
    ]
    # Today's words for the recorded choice; that the client was late is said in the text.
    shown = bench.model_copy(update={"choices": choose(bench.rows, target), "notes": []})
    return "\n".join(["```", *command, *printed(bench_view.show, shown, False), "```"])
