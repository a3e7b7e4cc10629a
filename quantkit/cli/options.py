"""Options that several commands share."""

import difflib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from quantkit.formats import FORMATS
from quantkit.registry import ENGINES


def one_of(*names: str) -> Callable[[str | None], str | None]:
    """Refuse invalid values of an option, before anything is read."""

    def check(value: str | None) -> str | None:
        if value is None or value in names:
            return value
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        choice = f"{', '.join(names[:-1])} or {names[-1]}"
        raise typer.BadParameter(f"'{value}' is not {choice}{hint}")

    return check


one_objective = one_of("latency", "throughput", "memory", "quality")


def tokens(text: str) -> int:
    """`8192`, `16k` (of 1,024 each) or `1M`."""
    match = re.fullmatch(r"(-?\d+(?:\.\d+)?)\s*([kKmM]?)", text.strip())
    number = float(match[1]) * {"": 1, "k": 1 << 10, "m": 1 << 20}[match[2].lower()] if match else 0
    if match is None or number != int(number):
        raise typer.BadParameter(f"'{text}' is not a number of tokens such as 8192 or 16k")
    if number < 1:
        raise typer.BadParameter(f"{text} is below 1")
    return int(number)


def _device(value: str) -> str:
    if re.fullmatch(r"auto|cpu(:0)?|cuda(:[0-9]+)?", value):
        return value
    raise typer.BadParameter(f"'{value}' is not auto, cpu, cuda or cuda:N.")


Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, a hub id, or `demo`.")]
_RECIPES = typer.Option(
    "-r",
    "--recipe",
    metavar="NAME",
    help="A recipe's name or file; append +kv-fp8 for an FP8 KV cache. Repeatable.",
)
Recipes = Annotated[list[str], _RECIPES]
MaybeRecipes = Annotated[list[str] | None, _RECIPES]
Fit = Annotated[
    str | None,
    typer.Option(metavar="GPU", help="Choose the recipe for a GPU; not with --recipe."),
]
FitCount = Annotated[
    int, typer.Option("--count", min=1, metavar="N", help="With --fit: number of GPUs.")
]
FitContext = Annotated[
    int | None,
    typer.Option("--context", min=1, metavar="N", help="With --fit: tokens per user."),
]
FitUsers = Annotated[
    int | None,
    typer.Option(
        "--users",
        min=1,
        metavar="N",
        help="With --fit: concurrent users; default: 1, or all that fit for throughput.",
    ),
]
FitObjective = Annotated[
    str | None,
    typer.Option(
        "--objective",
        metavar="WHAT",
        help="With --fit: latency (default), throughput, memory or quality.",
        callback=one_objective,
    ),
]
FitMinQuality = Annotated[
    float | None,
    typer.Option(
        "--min-quality",
        min=0.01,
        max=1,
        metavar="SHARE",
        help="With --fit: share of the source's accuracy to keep; default: 0.97.",
    ),
]
FitReport = Annotated[
    Path | None,
    typer.Option("--report", metavar="FILE", help="With --fit: a report.json of the model."),
]
Bits = Annotated[
    float | None,
    typer.Option(
        "--bits",
        metavar="N",
        help="Choose formats layer by layer for N stored bits per quantised weight.",
    ),
]
Size = Annotated[
    str | None,
    typer.Option(
        "--size",
        metavar="SIZE",
        help="Choose formats layer by layer for a total size such as 9GiB.",
    ),
]
Mixed = Annotated[bool, typer.Option("--mixed", help="With --fit: choose formats layer by layer.")]
For = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help="Engine that formats are chosen for, layer by layer: vllm or llama.cpp.",
        callback=one_of("vllm", "llama.cpp"),
    ),
]
Formats = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Formats to choose from: int, nvfp4, mxfp4, fp8, or names such as w4a16-g32.",
    ),
]
Sensitivity = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR", help="With --bits, --size or --mixed: the output of `quantkit sensitivity`."
    ),
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Output folder.")]
Calibration = Annotated[
    str | None,
    typer.Option(
        metavar="SET", help="A calibration set's name, folder or file, or a file of text or chats."
    ),
]
Samples = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Calibration samples; default: the set's.")
]
Length = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Tokens per sample; default: the set's.")
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="native, or llmcompressor (an extra; needs a GPU).",
        callback=one_of(*ENGINES),
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="File format: compressed-tensors, gptq, awq or fp8; default: the recipe's.",
        callback=one_of(*FORMATS),
    ),
]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.", callback=_device)
]
Offload = Annotated[
    str,
    typer.Option(
        metavar="MODE",
        help="Keep hidden states in host memory: auto (when they do not fit), always or never.",
        callback=one_of("auto", "always", "never"),
    ),
]
Tune = Annotated[
    bool,
    typer.Option(
        "--tune",
        help="Fine-tune the codes and scales of each block by gradient descent (GPTQ recipes).",
    ),
]
Imatrix = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Use an existing importance matrix for GGUF (llama.cpp's or ours)."
    ),
]
Requantize = Annotated[
    bool,
    typer.Option("--requantize", help="Accept a model or GGUF file that is already quantised."),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite existing results.")]
Revision = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a hub model.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modelling code that ships with the model.")
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="lm-eval tasks, folders with your own tasks, or a suite such as damage; default: "
        "wikitext,mmlu, and damage-quick for `demo`.",
    ),
]
Limit = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Score only the first N documents of each task."),
]
MaxLength = Annotated[
    int | None,
    typer.Option(min=2, metavar="N", help="Window in tokens; default: the model's context."),
]
Datasets = Annotated[
    Path | None,
    typer.Option(
        "--data",
        metavar="DIR",
        help="Read datasets from this folder instead of the hub (same layout).",
    ),
]
Source = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="The model that the checkpoints were made from."),
]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="Use a running server of the model, for example vLLM's."),
]
VllmPython = Annotated[
    Path | None, typer.Option(metavar="PATH", help="Python interpreter of vLLM's environment.")
]
EngineArgs = Annotated[
    str, typer.Option(metavar="TEXT", help="Extra engine flags, passed through unchanged.")
]
Checkpoints = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Checkpoint folders, GGUF files or hub ids.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
Lora = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="A LoRA adapter, or a folder of them. Repeatable."),
]
MaxLoras = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Adapters with a slot on the GPU; default: up to 8."),
]
MaxCpuLoras = Annotated[
    int | None,
    typer.Option(min=1, metavar="N", help="Adapters kept in host memory; default: all."),
]
DraftText = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="DRAFT",
        help="Speculative decoding: a model, ngram, suffix, mtp, eagle:DIR, eagle3:DIR or "
        "medusa:DIR.",
    ),
]
DraftTokens = Annotated[
    int | None, typer.Option(min=1, max=32, metavar="N", help="Tokens drafted per step.")
]
DraftSampling = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="How the draft samples: greedy (vLLM's default) or probabilistic.",
        callback=one_of("greedy", "probabilistic"),
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Host memory, such as 64GB; GGUF layers that do not fit the GPU go there.",
    ),
]
HostBandwidth = Annotated[
    str | None,
    typer.Option(
        metavar="RATE", help="Bandwidth of the host memory, such as 80GB/s; default: a typical one."
    ),
]
Replicas = Annotated[
    str | None,
    typer.Option(metavar="N-M", help="With --emit k8s: autoscale between N and M servers."),
]
EmitTo = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="DIR", help="Output folder of --emit.")
]
EmitImage = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="IMAGE",
        help="With --emit: the container image, or :TAG for another version of the default one.",
    ),
]
AlertFirst = Annotated[
    str | None,
    typer.Option(
        "--ttft",
        metavar="TIME",
        help="With --emit: alert when the first token is slower; default: 1s.",
    ),
]
AlertToken = Annotated[
    str | None,
    typer.Option(
        "--tpot",
        metavar="TIME",
        help="With --emit: alert when a later token is slower; default: 100ms.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="Print no progress and no notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Print more notes.")]


def words(engine_args: str) -> list[str]:
    """The flags of --engine-args, as a shell would split them."""
    import shlex

    try:
        return shlex.split(engine_args)
    except ValueError as error:
        raise typer.BadParameter(str(error).lower(), param_hint="--engine-args") from error


def split(names: str) -> list[str]:
    """The parts of a comma-separated option."""
    parts = [name.strip() for name in names.split(",") if name.strip()]
    if not parts:
        raise typer.BadParameter("name at least one, for example: wikitext,mmlu")
    return parts
