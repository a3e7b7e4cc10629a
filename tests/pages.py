"""Pages for tests: every kind of part, under names that look like markup."""

from quantkit.page.bars import Bar, bars
from quantkit.page.document import Section, document
from quantkit.page.heatmap import heatmap
from quantkit.page.lines import Series, lines
from quantkit.page.parts import Fact, details, extract, facts, notices
from quantkit.page.scale import UNKNOWN, Axis
from quantkit.page.scatter import Point, scatter
from quantkit.page.table import Cell, Column, table

SCRIPT = "<script>document.title = 'taken'</script>"
IMAGE = "\"'><img src=x onerror=\"document.title = 'taken'\">"
SVG = "</title></text></svg><svg onload=\"document.title = 'taken'\">"
STYLE = "</style></script><style>*{display:none}</style>{{ 7 * 7 }}"
HOSTILE = (SCRIPT, IMAGE, SVG, STYLE)


def gallery() -> str:
    """All parts with hostile names everywhere."""
    size, quality = Axis(f"size {SCRIPT}", log=True), Axis(f"quality {IMAGE}", percent=True)
    points = [
        Point(name, 2.0 + n, 0.5 + n / 20, (0.45 + n / 20, 0.55 + n / 20), name, n % 2 == 0)
        for n, name in enumerate(HOSTILE)
    ]
    curves = [Series(name, [(1, n), (10, n + 1), (100, 5)]) for n, name in enumerate(HOSTILE)]
    grid = [[n * m if n + m else None for m in range(4)] for n in range(4)]
    columns = [Column("Name", note=SVG), Column("Value", numeric=True, note=IMAGE), Column(STYLE)]
    columns += [Column(f"task {k}", numeric=True) for k in range(12)]
    rows = [
        [Cell(name), Cell(f"{value:,}", value) if value else Cell(UNKNOWN, None), STYLE]
        + [Cell("0.123", 0.123, shade=0.9)] * 12
        for name, value in zip(
            [*HOSTILE, "alpha", "beta"], [9, 1000, 30, None, 200, -4.5], strict=True
        )
    ]
    return document(
        IMAGE,
        [
            Section(SCRIPT, [SVG, table(IMAGE, columns, rows, searchable=True, wide=True)]),
            Section(IMAGE, [scatter(SVG, points, size, quality, front=IMAGE, note=STYLE)]),
            Section(SVG, [heatmap(SCRIPT, HOSTILE, HOSTILE, grid, Axis(SVG))]),
            Section(STYLE, [lines(STYLE, curves, Axis(SVG, log=True), Axis(SCRIPT))]),
            Section("Bars", [bars(SVG, [Bar(n, -1.5, 2) for n in HOSTILE], quality, mark=SCRIPT)]),
            Section(
                "Parts", [details(dict.fromkeys(HOSTILE, SVG)), *(_extract(n) for n in HOSTILE)]
            ),
        ],
        kind=STYLE,
        lead=SCRIPT,
        top=[notices(SVG, HOSTILE), facts([Fact(IMAGE, SCRIPT)]), IMAGE],
        footer=SVG,
    )


def ordinary() -> str:
    """Pictures as a report has them."""
    size, quality = Axis("size in GiB", log=True), Axis("accuracy", percent=True, digits=1)
    names = ("bf16", "fp8-dynamic", "int8-w8a8", "gptq-w4a16", "awq-w4a16", "gguf-q4-k-m")
    sizes = (16.1, 8.6, 8.7, 5.1, 5.2, 4.9)
    points = [
        Point(name, gib, 0.7 - 0.25 / gib, (0.69 - 0.25 / gib, 0.71 - 0.25 / gib), front=gib > 8)
        for name, gib in zip(names, sizes, strict=True)
    ]
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    grid = [[10.0 ** -(1 + (n + m) % 4) for m in range(32)] for n in range(7)]
    curves = [Series(n, [(10.0**k, 3.0**k) for k in range(6)]) for n in ("set", "pool")]
    changes = [Bar(name, 0.01 * n - 0.02, 0.01) for n, name in enumerate(names)]
    return document(
        "Pictures",
        [
            Section("Quality", [scatter("Quality", points, size, quality, front="the best")]),
            Section("Layers", [heatmap("Error", kinds, [*map(str, range(32))], grid, size)]),
            Section("Curves", [lines("Curves", curves, Axis("n", log=True), Axis("time"))]),
            Section("Change", [bars("Change", changes, quality, mark="allowed")]),
        ],
    )


def _extract(name: str):
    return extract(name, HOSTILE, name, f"{name}\n" * 60)


def calibration_set(**changes):
    """A small set whose sources, texts and model have hostile names."""
    import torch

    from quantkit.calibration.calibration_set import (
        CalibrationSet,
        Manifest,
        Pool,
        SourceRecord,
        Tokenizer,
    )
    from quantkit.calibration.choosing.figures import Figures
    from quantkit.calibration.spec import SetSpec
    from quantkit.calibration.tokens import CalibrationTokens

    counts = {"read": 10, "whole": 3, "in part": 1, "not chosen": 4, "near-duplicate": 2}
    sources = [
        SourceRecord(
            name=name,
            share=0.25,
            n_tokens=64,
            licence=name,
            digest="d" * 64,
            files={f"{name}.jsonl": "f" * 64},
            rows=counts,
            remarks={"without an answer": 1},
            examples={"near-duplicate": f"{name}:2 repeats an earlier row"},
        )
        for name in HOSTILE
    ]
    spec = SetSpec(
        summary=SCRIPT,
        sources=[{"kind": "files", "path": f"{n}.jsonl", "name": n} for n in HOSTILE],
        redact=True,
    )
    known = {
        "name": IMAGE,
        "spec": spec,
        "n_samples": 8,
        "length": 32,
        "n_tokens": 256,
        "tokenizer": Tokenizer(model=SVG, digest="a" * 64, vocabulary=300),
        "sources": sources,
        "pool": Pool(
            n_pieces=40,
            n_tokens=4000,
            n_clusters=4,
            lengths=list(range(1, 43, 2)),
            set_lengths=list(range(2, 44, 2)),
        ),
        "figures": Figures(**dict.fromkeys(Figures.model_fields, 0.25)),
        "random": Figures(**dict.fromkeys(Figures.model_fields, 0.5)),
        "n_random": 20,
        "redacted": {"email": 3, "phone": 0},
        "avoided": {STYLE: "e" * 64},
        "digest": "b" * 64,
        "files": {"tokens.safetensors": "c" * 64},
        "version": "1.2.3",
    }
    pieces = [
        {
            "sample": number,
            "source": HOSTILE[number % 4],
            "place": f"{HOSTILE[number % 4]}:{number}",
            "kind": "text",
            "n_tokens": 32,
            "cut": number % 2 == 0,
            "cluster": number % 3,
            "why": f"represents {STYLE}",
            "text": f"piece {number} {SCRIPT} {SVG}",
        }
        for number in range(24)
    ]
    tokens = CalibrationTokens(IMAGE, torch.zeros(8, 32, dtype=torch.long))
    return CalibrationSet(tokens, pieces, Manifest(**(known | changes)))
