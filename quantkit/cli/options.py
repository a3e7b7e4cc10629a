"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

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
    str, typer.Option(metavar="NAME", help="native, or llmcompressor (an extra; for GPUs).")
]
Format = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Form of the files: compressed-tensors, gptq, awq or fp8; default: the recipe's.",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")]
Offload = Annotated[
    str,
    typer.Option(
        metavar="MODE", help="Hidden states in host memory: auto (as room allows), always or never."
    ),
]
Imatrix = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Importance matrix for GGUF, of llama.cpp's or ours, not a new one."
    ),
]
Requantize = Annotated[
    bool, typer.Option("--requantize", help="Take a GGUF file that is quantised already.")
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
    str,
    typer.Option(metavar="A,B", help="lm-eval tasks, or ours: python_docs and python_quiz."),
]
Limit = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Only the first N documents of each task.")
]
MaxLength = Annotated[
    int | None, typer.Option(min=2, metavar="N", help="Window; default: the model's context.")
]
Lora = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME=DIR", help="An adapter that is served too; repeat for more."),
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
TimeToFirst = Annotated[
    float,
    typer.Option(min=0.001, metavar="SECONDS", help="Of --emit: alert at slower first tokens."),
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
