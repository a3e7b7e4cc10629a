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
    """Refuses what is none of an option's values, before anything is read."""

    def check(value: str | None) -> str | None:
        if value is None or value in names:
            return value
        near = difflib.get_close_matches(value, names, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "."
        choice = f"{', '.join(names[:-1])} or {names[-1]}"
        raise typer.BadParameter(f"'{value}' is not {choice}{hint}")

    return check


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
    help="A recipe or its file, +kv-fp8 behind it for an FP8 KV cache; repeat for more.",
)
Recipes = Annotated[list[str], _RECIPES]
MaybeRecipes = Annotated[list[str] | None, _RECIPES]
Fit = Annotated[
    str | None,
    typer.Option(metavar="GPU", help="Choose the recipe for a GPU; not with --recipe."),
]
FitCount = Annotated[int, typer.Option("--count", min=1, metavar="N", help="With --fit: GPUs.")]
FitContext = Annotated[
    int | None,
    typer.Option("--context", min=1, metavar="N", help="With --fit: tokens a user needs."),
]
FitUsers = Annotated[
    int, typer.Option("--users", min=1, metavar="N", help="With --fit: users at a time.")
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
        "--size", metavar="SIZE", help="Choose formats layer by layer for files such as 9GiB."
    ),
]
Mixed = Annotated[bool, typer.Option("--mixed", help="With --fit: choose formats layer by layer.")]
For = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="ENGINE",
        help="With --bits, --size or --mixed: vllm or llama.cpp.",
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
        metavar="DIR", help="With --bits, --size or --mixed: a table of `quantkit sensitivity`."
    ),
]
Out = Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Where results go.")]
Calibration = Annotated[
    str | None,
    typer.Option(metavar="SET", help="A calibration set, its file, or a text file."),
]
Samples = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Calibration samples; default: the set's.")
]
Length = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Tokens of a sample; default: the set's.")
]
Engine = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="native, or llmcompressor (an extra; for GPUs).",
        callback=one_of(*ENGINES),
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Form of the files: compressed-tensors, gptq, awq or fp8; default: the recipe's.",
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
        help="Hidden states in host memory: auto (as room allows), always or never.",
        callback=one_of("auto", "always", "never"),
    ),
]
Tune = Annotated[
    bool,
    typer.Option("--tune", help="Tune codes and scales of each block by gradients (GPTQ recipes)."),
]
Imatrix = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Importance matrix for GGUF, of llama.cpp's or ours, not a new one."
    ),
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Take a model or GGUF file that is quantised already.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.")]
Force = Annotated[bool, typer.Option("--force", help="Replace results that exist.")]
Revision = Annotated[
    str | None, typer.Option(metavar="REV", help="Branch, tag or commit of a hub model.")
]
TrustRemoteCode = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run modelling code that the model brings.")
]
Tasks = Annotated[
    str | None,
    typer.Option(
        metavar="A,B",
        help="Tasks of lm-eval, folders of your own, or damage; default: wikitext,mmlu.",
    ),
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Only the first N documents of each task.")
]
MaxLength = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Window; default: the model's context.")
]
Datasets = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="DIR", help="Datasets without a hub: a folder tree like a hub's."
    ),
]
Source = Annotated[
    str | None,
    typer.Option(metavar="MODEL", help="The model that checkpoints were made from."),
]
Server = Annotated[
    str | None,
    typer.Option(metavar="URL", help="A running server of the model, such as vLLM's."),
]
Checkpoints = Annotated[
    list[Path], typer.Argument(metavar="DIR...", help="Checkpoint folders or GGUF files.")
]
Seed = Annotated[int, typer.Option(metavar="N", help="Random seed.")]
Lora = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="A LoRA adapter, or a folder of them; repeat for more."),
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
    int | None, typer.Option(min=1, max=32, metavar="N", help="Tokens drafted for each step.")
]
DraftSampling = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="How the draft proposes: greedy (vLLM's default) or probabilistic.",
        callback=one_of("greedy", "probabilistic"),
    ),
]
HostMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE", help="Host memory, such as 64GB: GGUF layers may lie there partly."
    ),
]
HostBandwidth = Annotated[
    str | None,
    typer.Option(metavar="RATE", help="Of that memory, such as 80GB/s; default: as usual."),
]
Replicas = Annotated[
    str | None,
    typer.Option(metavar="N-M", help="Of --emit k8s: a fleet of N to M servers with autoscaling."),
]
EmitTo = Annotated[
    Path | None, typer.Option("-o", "--out", metavar="DIR", help="Where --emit writes.")
]
EmitImage = Annotated[
    str | None,
    typer.Option(
        "--image",
        metavar="IMAGE",
        help="Of --emit: a container image, or :TAG for another version of the usual one.",
    ),
]
AlertFirst = Annotated[
    str | None,
    typer.Option(
        "--ttft", metavar="TIME", help="Of --emit: alert at slower first tokens; default: 1s."
    ),
]
AlertToken = Annotated[
    str | None,
    typer.Option(
        "--tpot", metavar="TIME", help="Of --emit: alert at slower tokens; default: 100ms."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="No progress and no notes.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More notes on what happens.")]


def split(names: str) -> list[str]:
    """The parts of a comma-separated option."""
    parts = [name.strip() for name in names.split(",") if name.strip()]
    if not parts:
        raise typer.BadParameter("name at least one, for example: wikitext,mmlu")
    return parts
