"""`quantkit gpus`."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantkit.cli.options import AsJson

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quantkit.hardware.gpus import GPU, Source

FIGURES = {
    "year": "year",
    "memory_gb": "memory, GB",
    "memory_bytes": "memory, bytes",
    "bandwidth_gb_s": "bandwidth, GB/s",
    "fp16_tflops": "16-bit, TFLOPS",
    "fp8_tflops": "FP8, TFLOPS",
    "int8_tops": "INT8, TOPS",
    "fp4_tflops": "FP4, TFLOPS",
    "link_gb_s": "link, GB/s",
    "link_gpus": "GPUs on one link",
    "pcie": "PCIe",
    "tdp_watts": "power, W",
    "compute_capability": "compute",
}
"""Labels of a GPU's figures."""
UNITS = "Peak rates are dense, accumulated in 32 bits, in TFLOPS (INT8: TOPS)."
HEADINGS = ("GPU", "GB", "GB/s", "16-bit", "FP8", "INT8", "FP4", "compute")


def command(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="A GPU's name, or `auto` for this machine's."),
    ] = None,
    json: AsJson = False,
) -> None:
    """List GPUs, or show one: its figures and the formats it runs."""
    from quantkit.cli import console
    from quantkit.hardware.gpus import find, load

    gpus = load() if name is None else (find(name),)
    if json:
        public = [_public(gpu) for gpu in gpus]
        console.print_json(public if name is None else public[0])
    elif name is None:
        console.print_table(HEADINGS, [_row(gpu) for gpu in gpus], words=(0, 7))
        console.say(UNITS)
    else:
        _show(gpus[0])


def _row(gpu: "GPU") -> list[str]:
    rates = (gpu.fp16_tflops, gpu.fp8_tflops, gpu.int8_tops, gpu.fp4_tflops)
    amounts = [_number(value) for value in (gpu.memory_gb, gpu.bandwidth_gb_s, *rates)]
    return [gpu.name, *amounts, gpu.compute_capability or ""]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _public(gpu: "GPU") -> dict[str, Any]:
    from dataclasses import asdict

    from quantkit.hardware.gpus import FIGURES
    from quantkit.hardware.support import ENGINES, FORMATS, runs

    support = {e: {f: runs(gpu, f, e)._asdict() for f in FORMATS} for e in ENGINES}
    known = [figure for figure in FIGURES if getattr(gpu, figure) is not None]
    return {
        **asdict(gpu),
        "rests_on": {figure: gpu.rests_on(figure) for figure in known},
        "usable_bytes": gpu.usable_bytes,
        "runs": support,
    }


def _show(gpu: "GPU") -> None:
    from quantkit.cli import console
    from quantkit.engine import label
    from quantkit.hardware.support import ENGINES
    from quantkit.storage import gib

    typer.echo(f"{gpu.name} ({gpu.maker}, {gpu.generation})")
    if gpu.note:
        console.say(gpu.note)
    known = [f for f in FIGURES if getattr(gpu, f) is not None]
    kept = f"; the driver keeps {gib(gpu.driver_bytes)}" if gpu.driver_bytes else ""
    rows = [(FIGURES[f], _shown(f, getattr(gpu, f)), gpu.rests_on(f)) for f in known]
    rows.append(("usable memory", gib(gpu.usable_bytes), f"visible to programs{kept}"))
    console.print_table(("figure", "value", "source"), rows, words=(0, 2))
    console.say(UNITS)
    writers = _writers()
    for engine in ENGINES:
        console.print_lines(f"In {label(engine)}", _formats(gpu, engine, writers))
    console.say(
        "\nEmulated formats save memory; arithmetic takes as long as in 16 bits. 8.0 and the like: "
        "compute capability."
    )
    named = [
        (name, ", ".join(found)) for name, found in writers.items() if found not in ([], [name])
    ]
    console.print_lines("Recipes of these formats", named)
    console.print_lines("Sources", [("-", _source(source)) for source in gpu.sources])


def _shown(figure: str, value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) and figure != "year" else str(value)


def _writers() -> dict[str, list[str]]:
    """The recipes of each format; a format that only recipes of one's own have is left out."""
    from quantkit import resources
    from quantkit.hardware.support import FORMATS, format_of
    from quantkit.recipe import load

    found: dict[str, list[str]] = {"bf16": [], "kv-fp8": [], "gguf": []}
    for name in resources.names("recipes"):
        if not name.startswith("gguf-"):
            found.setdefault(format_of(load(name)), []).append(name)
    return {format: found[format] for format in FORMATS if format in found}


def _formats(gpu: "GPU", engine: str, formats: "Iterable[str]") -> list[tuple[str, str]]:
    """Each format that runs, then those that do not, by their reason."""
    from quantkit.hardware.support import runs

    lines: list[tuple[str, str]] = []
    refused: dict[str, list[str]] = {}
    for format in formats:
        how, reason = runs(gpu, format, engine)
        if how == "no":
            refused.setdefault(reason, []).append(format)
        else:
            lines.append((format, f"{how}: {reason}"))
    return lines + [
        ("unsupported", f"{', '.join(names)}: {reason}") for reason, names in refused.items()
    ]


def _source(source: "Source") -> str:
    kind = f"{source.kind} (archived copy)" if source.copied else source.kind
    note = f" ({source.note})" if source.note else ""
    labels = (FIGURES.get(figure, figure).partition(",")[0] for figure in source.gives)
    given = ", ".join(dict.fromkeys(labels))
    return f"{kind}: {given}{note} {source.url}"
