"""How soon commands answer: help, `recommend`, `gate`, and whatever is wrong with a command line.

    python benchmarks/startup.py [--repeat 5] [--only WORDS] [--out FILE]
    python benchmarks/startup.py --questions [--repeat 1] [--out FILE]

Seconds are the processor's, the system's own counted, which others on the machine change less than
those of the clock: the least of several runs, after one that leaves bytecode as any first use does.
A refusal is what a user meets most: a name that is misspelt, a file that is not there, a
folder that is. Each must come before anything heavy is imported, so each is run here as it would
be typed, twice.
"""

import argparse
import json
import math
import os
import platform
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from recording import write

RECOMMEND = "recommend 8B --gpu L40S --count 2 --context 16384 --users 40"
NOTHING = "recommend 405B --gpu RTX4090 --users 10"
MIXTURE = "recommend Qwen3-235B-A22B --gpu H100 --count 8 --users 32"
ALL = "recommend 8B --gpu all"
HARD = {
    "an 8B with 128k of context and a first token in 1 s on an H200": (
        "recommend 8B --gpu H200 --context 128k --ttft 1s --tpot 50ms"
    ),
    "the same for 64 users and 5 ms a token": (
        "recommend 8B --gpu H200 --context 128k --users 64 --ttft 1s --tpot 5ms"
    ),
    "an 8B with 128k of context on an RTX 3070": "recommend 8B --gpu RTX3070 --context 128k",
    "a 235B on four RTX 4090": "recommend 235B --gpu RTX4090 --count 4",
    "Qwen3-235B-A22B on four RTX 4090": (
        "recommend models/Qwen3-235B-A22B --gpu RTX4090 --count 4"
    ),
    "a model of 10^12 weights on eight H200": "recommend 1T --gpu H200 --count 8",
    "a 32B for 200 users on two RTX 4070 Ti": (
        "recommend 32B --gpu 'RTX 4070 Ti' --count 2 --context 32k --users 200"
    ),
}
"""Questions of `recommend` that take longest: few fit, or there are many ways to share GPUs."""
GATE_SAID_NO = 1
THREE = "quantize demo -r fp8-dynamic -r rtn-w4a16 -r rtn-w8a16 --quiet --force -o three"

REFUSED: dict[str, dict[str, str]] = {
    "demo": {
        "an output that cannot be": "-o plain/x",
        "a device": "--device cudo",
    },
    "run": {
        "a model": "nowhere/model -r fp8-dynamic",
        "a recipe": "demo -r fp8-dynamix",
        "a recipe's file": "demo -r ./none.yaml",
        "a task": "demo -r fp8-dynamic --tasks wikitexd",
        "a folder of tasks": "demo -r fp8-dynamic --tasks ./none",
        "a calibration set": "demo -r gptq-w4a16 --calibration genral",
        "a calibration file": "demo -r gptq-w4a16 --calibration ./none.txt",
        "no calibration": "demo -r gptq-w4a16",
        "a recipe twice": "demo -r fp8-dynamic -r fp8-dynamic",
        "an engine": "demo -r fp8-dynamic --engine nativ",
        "a device": "demo -r fp8-dynamic --device cudo",
        "an output that cannot be": "demo -r fp8-dynamic -o plain/x",
        "an output of somebody else": "demo -r fp8-dynamic -o others",
    },
    "quantize": {
        "a model": "nowhere/model -r fp8-dynamic",
        "a GGUF file": "./none.gguf -r gguf-q8_0",
        "a recipe": "demo -r fp8-dynamix",
        "a recipe's file": "demo -r ./none.yaml",
        "an addition to a recipe": "demo -r fp8-dynamic+kv-fp9",
        "a format": "demo -r gptq-w4a16 --format gptk",
        "a format that does not fit": "demo -r fp8-dynamic --format awq",
        "a GPU": "demo --fit H2000",
        "a GPU and a recipe": "demo --fit H200 -r fp8-dynamic",
        "a calibration set": "demo -r gptq-w4a16 --calibration genral",
        "a calibration file": "demo -r gptq-w4a16 --calibration ./none.txt",
        "no calibration": "demo -r gptq-w4a16",
        "an importance matrix": "demo -r gguf-q4_k_m --imatrix none.gguf",
        "an importance matrix for nothing": "demo -r fp8-dynamic --imatrix some.gguf",
        "a recipe twice": "demo -r fp8-dynamic -r fp8-dynamic",
        "a device": "demo -r fp8-dynamic --device cudo",
        "an output that exists": "demo -r fp8-dynamic -o made",
        "an output that cannot be": "demo -r fp8-dynamic -o plain/x",
        "an output of somebody else": "demo -r fp8-dynamic -o others --force",
        "a full disk": "huge -r fp8-dynamic -o out",
        "a shard that is missing": "broken -r fp8-dynamic",
    },
    "sensitivity": {
        "a model": "nowhere/model -o out",
        "a calibration set": "demo --calibration genral -o out",
        "an output that cannot be": "demo --calibration python-docs -o plain/x",
    },
    "convert": {
        "a folder": "nowhere/x --to gptq",
        "a folder that is not a checkpoint": "others --to gptq",
        "a format": "made/fp8-dynamic --to fpp8",
        "an output that exists": "made/fp8-dynamic --to fp8 -o others",
        "an output that cannot be": "made/fp8-dynamic --to fp8 -o plain/x",
    },
    "verify": {
        "a folder": "nowhere/x",
        "a source": "made/fp8-dynamic --source nowhere/x",
        "a backend": "made/fp8-dynamic --backend vlm",
        "a Python": "made/fp8-dynamic --backend vllm --python none/python",
        "options that do not go together": "made/fp8-dynamic --model x",
    },
    "score": {
        "a model": "nowhere/x",
        "one of two models": "demo nowhere/x",
        "a task": "demo --tasks wikitexd",
        "a folder of tasks": "demo --tasks ./none",
        "prompts": "demo --prompts none.jsonl",
        "a baseline": "demo --baseline none.json",
        "a folder of data": "demo --tasks wikitext --data none",
        "a width": "demo --until wide",
        "a device": "demo --device cudo",
        "a backend": "demo --backend llama",
        "an output that cannot be": "demo -o plain/x",
    },
    "report": {"a file": "none.json", "an output that cannot be": "scores -o plain/x"},
    "compare": {
        "a model": "demo nowhere/x -o out",
        "a source": "made/fp8-dynamic --source nowhere/x -o out",
        "a task": "demo made/fp8-dynamic --tasks wikitexd -o out",
        "an output that cannot be": "demo made/fp8-dynamic -o plain/x",
        "no source": "made/fp8-dynamic -o out",
    },
    "gate": {
        "a report": "none.json",
        "a policy": "report.json --policy none.yaml",
        "a report to compare with": "report.json --against none.json",
        "a checkpoint": "report.json --checkpoint nowhere/x",
    },
    "bench": {
        "a folder": "nowhere/x",
        "a backend": "made/fp8-dynamic --backend vlm",
        "a trace": "made/fp8-dynamic --trace none.jsonl",
        "a calibration set": "made/fp8-dynamic --calibration genral",
        "a flag to sweep": "made/fp8-dynamic --sweep max_num_sekks=1,2",
        "a Python": "made/fp8-dynamic --python none/python",
        "an output that exists": "made/fp8-dynamic -o others",
    },
    "card": {
        "a folder": "nowhere/x",
        "scores": "made/fp8-dynamic --scores none.json",
        "a report": "made/fp8-dynamic --report none.json",
    },
    "serve": {
        "a folder": "nowhere/x",
        "a GPU": "made/fp8-dynamic --gpu H2000 --dry-run",
        "a profile": "made/fp8-dynamic --profile chad",
        "an adapter": "made/fp8-dynamic --lora a=none",
        "a draft": "made/fp8-dynamic --draft none/x --gpu H200 --dry-run",
        "a kind of files": "made/fp8-dynamic --emit k9s",
        "an output that exists": "made/fp8-dynamic --gpu H200 --emit compose -o others",
    },
    "draft": {
        "a target": "nowhere/x demo --calibration python-docs",
        "a draft": "demo nowhere/x --calibration python-docs",
        "a calibration set": "demo made/fp8-dynamic --calibration genral",
        "a GPU": "demo made/fp8-dynamic --calibration python-docs --gpu H2000",
        "options that do not go together": "demo demo --calibration python-docs --users 2",
    },
    "recommend": {
        "a model": "nowhere/x --gpu H200",
        "a GPU": "8B --gpu H2000",
        "an objective": "8B --gpu H200 --objective speeed",
        "a report": "8B --gpu H200 --report none.json",
        "a context": "8B --gpu H200 --context much",
        "options that do not go together": "8B --gpu H200 --memory 24GB",
    },
    "gpus": {"a GPU": "H2000"},
    "sweep run": {
        "a file": "none.yaml",
        "a model in it": "model.yaml",
        "a recipe in it": "recipe.yaml",
        "a task in it": "task.yaml",
        "an output that cannot be": "sweep.yaml -o plain/x",
    },
    "sweep status": {"a folder": "nowhere"},
    "sweep report": {"a folder": "nowhere"},
    "calibrate build": {
        "a set": "genral --model demo -o out",
        "a model": "python-docs --model nowhere/x -o out",
        "data": "--from none.jsonl --model demo -o out",
        "a task to avoid": "python-docs --model demo --avoid wikitexd -o out",
        "an output that exists": "python-docs --model demo -o others",
        "an output that cannot be": "python-docs --model demo -o plain/x",
    },
    "calibrate inspect": {"a folder": "nowhere"},
    "recipes show": {"a recipe": "fp8-dynamix"},
    "recipes validate": {"a file": "none.yaml"},
}
"""What is wrong, by command, and how it is typed; `prepare` makes what these name."""


def cpu_seconds(command: list[str], folder: Path) -> tuple[float, int, str]:
    """Of the processor; the exit code; the last line on stderr."""
    # A hub's answer is not what is timed, and bytecode belongs to no folder of ours.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    env |= {"HF_HUB_OFFLINE": "1", "PYTHONPYCACHEPREFIX": str(folder / "bytecode")}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    said = [line for line in done.stderr.splitlines() if line.startswith("quantkit: ")]
    return used, done.returncode, said[-1] if said else ""


def least(command: list[str], repeat: int, folder: Path) -> float:
    """Seconds of the quickest run, after one to warm up; "no" is an answer, too."""
    runs = [cpu_seconds(command, folder) for _ in range(repeat + 1)]
    if any(code not in (0, GATE_SAID_NO) for _, code, _ in runs):
        raise SystemExit(f"{' '.join(command)} failed: {runs[0][2]}")
    found = min(used for used, _, _ in runs[1:])
    print(f"{found:6.2f}  {' '.join(command[1:])}", flush=True)
    return found


def prepare(folder: Path, run: list[str]) -> None:
    """Everything that wrong command lines name: a checkpoint, files, folders, a model too large."""
    from quantkit import resources

    made = [*run, "quantize", "demo", "-r", "fp8-dynamic", "-o", "made", "--quiet"]
    subprocess.run(made, cwd=folder, check=True, capture_output=True)
    (folder / "plain").write_text("a file where a folder would have to be\n")
    for name in ("others", "others/fp8-dynamic"):
        (folder / name).mkdir()
        (folder / name / "somebody's.txt").write_text("not ours\n")
    (folder / "some.gguf").write_bytes(b"GGUF")
    (folder / "others" / "compose.yaml").write_text("not ours\n")
    published = sorted((Path(__file__).parent.parent / "reports").rglob("report.json"))
    shutil.copyfile(published[0], folder / "report.json")
    spec = "models: [{model}]\nrecipes: [{recipe}]\ntasks: [{task}]\n"
    for name, changed in {
        "sweep": {},
        "model": {"model": "nowhere/x"},
        "recipe": {"recipe": "fp8-dynamix"},
        "task": {"task": "wikitexd"},
    }.items():
        words = {"model": "demo", "recipe": "fp8-dynamic", "task": "python_docs"} | changed
        (folder / f"{name}.yaml").write_text(spec.format(**words))
    copied = shutil.ignore_patterns("*.safetensors")
    shutil.copytree(resources.DEMO_MODEL, folder / "broken", ignore=copied)
    weights = {"weight_map": {"model.embed_tokens.weight": "model-00001-of-00002.safetensors"}}
    (folder / "broken" / "model.safetensors.index.json").write_text(json.dumps(weights))
    enlarge(shutil.copytree(resources.DEMO_MODEL, folder / "huge", ignore=copied), resources)


def enlarge(folder: Path, resources: Any) -> None:
    """The demo with layers so wide that no disk holds the result, in a file without contents."""
    from quantkit.model.source import read_tensors

    config = json.loads((folder / "config.json").read_text())
    usual, wide = config["intermediate_size"], 1 << 30
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": wide}))
    header, offset = {}, 0
    for name, tensor in read_tensors(resources.DEMO_MODEL).items():
        shape = [wide if ".mlp." in name and n == usual else n for n in tensor.shape]
        end = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + offset)


def questions(run: list[str], folder: Path, repeat: int) -> dict[str, float]:
    """Seconds for each of the thirty questions of docs/choosing.md, and for the hard ones."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
    import questions as thirty

    models = folder / "models"
    models.mkdir()
    thirty.prepare(models)
    typed = {text: thirty.arguments(asked, "models") for text, asked in thirty.QUESTIONS}
    typed |= {text: shlex.split(command) for text, command in HARD.items()}
    return {text: least([*run, *words], repeat, folder) for text, words in typed.items()}


def refusals(run: list[str], folder: Path, only: str) -> dict[str, dict[str, Any]]:
    """The table: seconds of the processor and the exit code, for what is wrong in every command."""
    found: dict[str, dict[str, Any]] = {}
    for command, wrong in REFUSED.items():
        for what, arguments in wrong.items():
            if only not in f"{command} {what}":
                continue
            typed = [*run, *command.split(), *arguments.split()]
            runs = [cpu_seconds(typed, folder) for _ in range(2)]
            seconds = min(used for used, _, _ in runs)
            _, code, said = runs[0]
            found.setdefault(command, {})[what] = {"cpu_seconds": seconds, "exit_code": code}
            print(f"{seconds:6.2f}  {code}  {command}: {what}: {said[:110]}", flush=True)
    return found


def machine() -> dict[str, Any]:
    """What was measured, and where."""
    return {
        "what": "seconds of the processor until a command has answered, the least of several",
        "machine": platform.machine(),
        "n_cores": os.cpu_count(),
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--questions", action="store_true", help="questions of recommend alone")
    parser.add_argument("--only", help="refusals alone, of which the name has these words")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    python, run = [sys.executable], [sys.executable, "-m", "quantkit"]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if args.questions:
            told = {"questions": questions(run, folder, args.repeat)}
            if args.out:
                write(args.out, machine() | told)
            return
        prepare(folder, run)
        if args.only is not None:
            refusals(run, folder, args.only)
            return
        commands = {
            "python_alone": [*python, "-c", "pass"],
            "import_typer": [*python, "-c", "import typer"],
            "quantkit_help": [*run, "--help"],
            "quantkit_quantize_help": [*run, "quantize", "--help"],
            "quantkit_gpus": [*run, "gpus"],
            "quantkit_recommend": [*run, *RECOMMEND.split()],
            "quantkit_recommend_nothing": [*run, *NOTHING.split()],
            "quantkit_recommend_mixture": [*run, *MIXTURE.split()],
            "quantkit_recommend_all": [*run, *ALL.split()],
            "quantkit_gate": [*run, "gate", "report.json"],
            "import_torch": [*python, "-c", "import torch"],
            "quantkit_quantize_three": [*run, *THREE.split()],
        }
        result: dict[str, Any] = machine()
        for name, command in commands.items():
            result[name] = least(command, args.repeat, folder)
        result["refusals"] = refusals(run, folder, "")
    if args.out:
        write(args.out, result)


if __name__ == "__main__":
    main()
