"""Write docs/models.md, the model families that quantkit takes, from the result of their runs."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "families.json"
PAGE = ROOT / "docs" / "models.md"
KINDS = {
    "dense": "Dense decoders",
    "mixture of experts": "Mixtures of experts",
    "hybrid": "Hybrids: linear attention and state-space blocks",
    "vision-language": "Vision-language models",
}
INTRODUCTION = """# Models

Made by `make docs` from `benchmarks/results/families.json`, which `benchmarks/families.py` writes.

Every family below was built small and with random weights by transformers' own class, and taken
through every recipe of its row: quantised, verified against its source, and loaded back. The logits
of quantkit's reader must be those of transformers, which is given the dequantised weights in the
source's own layout. That shows layers, names and arithmetic; it says nothing about the quality of a
recipe on a real model of the family, and nothing about a serving engine's kernels.

A family that is not listed is taken by looking at it: transformers builds the model from its config
(`--trust-remote-code` for code that a model brings), its decoder blocks are the one list of modules
with `num_hidden_layers` entries, what blocks are called with is recorded, and tensors are resolved
by transformers' own rules between checkpoints and modules.

## What stays in 16 bits

Embeddings and the output head, routers, vision and audio towers and their projectors, heads that
predict ahead (MTP), convolutions, and the small projections beside linear attention and state-space
layers. All of them are named in the checkpoint's `ignore`. Before a router, folded scales are
powers of two, so that norm, router and shared-expert gate keep every bit.

## Sources that are quantised already

With `--requantize`: FP8 with scales per tensor, row or block (DeepSeek), MXFP4 (gpt-oss), NVFP4,
int8, compressed-tensors, AutoGPTQ and AutoAWQ. They are read layer by layer as the 16-bit weights
that they stand for.
"""


def page() -> str:
    """The whole page."""
    result = json.loads(RESULT.read_text(encoding="utf-8"))
    families: dict[str, Any] = result["families"]
    used = ", ".join(
        f"{name} {result['versions'][name]}"
        for name in ("quantkit", "transformers", "torch")
        if name in result["versions"]
    )
    recorded = result["recorded"]
    parts = [
        INTRODUCTION,
        f"## Families\n\n{_count(families)} {used}; {result['machine']}, {recorded['date']}, "
        f"commit {recorded['commit']}.\n",
    ]
    for kind, title in KINDS.items():
        rows = {name: found for name, found in families.items() if found["kind"] == kind}
        if rows:
            parts.append(f"### {title}\n\n{_table(rows)}\n")
    return "\n".join(parts)


def _count(families: dict[str, Any]) -> str:
    built = [found for found in families.values() if found.get("built")]
    whole = [f for f in built if all(r["ok"] for r in f["recipes"].values())]
    return f"{len(whole)} of {len(built)} families that transformers builds pass every recipe."


def _table(rows: dict[str, Any]) -> str:
    recipes = list(dict.fromkeys(r for found in rows.values() for r in found.get("recipes", {})))
    lines = [
        f"| model_type | {' | '.join(recipes)} | note |",
        f"|---|{'---|' * len(recipes)}---|",
    ]
    for name, found in rows.items():
        tried = found.get("recipes", {})
        cells = [("yes" if tried[r]["ok"] else "no") if r in tried else "" for r in recipes]
        lines.append(f"| {name} | {' | '.join(cells)} | {_note(found)} |")
    return "\n".join(lines)


def _note(found: dict[str, Any]) -> str:
    if not found.get("built"):
        return "not in this transformers"
    reasons = dict.fromkeys(r["reason"] for r in found["recipes"].values() if not r["ok"])
    return "; ".join(reason.replace("|", "/") for reason in reasons)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
