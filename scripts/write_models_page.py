"""Write docs/models.md, the model families that quantkit takes, from the result of their runs."""

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.families import FAMILIES
from quantkit.hardware.gpus import label

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "families.json"
LACKING = re.compile(r"No module named|requires DeepGEMM support")
NO_PROCESSOR = " (the image processor, which published folders bring as code)"
IN_VLLM = ROOT / "benchmarks" / "results" / "families-vllm-h200.json"
"""What real vLLM made of them, once that was measured."""
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
recipe on a real model of the family. Where there is a column for vLLM, models of the same families
with sizes that its kernels take were loaded in it: it *agrees* when its prompt log-probabilities
are those of quantkit's reference up to the rounding of its type.

A family that is not listed is taken by looking at it: transformers builds the model from its config
(`--trust-remote-code` for code that a model brings), its decoder blocks are the one list of modules
with `num_hidden_layers` entries, what blocks are called with is recorded, and tensors are resolved
by transformers' own rules between checkpoints and modules.

## What stays in 16 bits

Embeddings and the output head, routers, vision and audio towers and their projectors, heads that
predict ahead (MTP), convolutions, and the small projections beside linear attention and state-space
layers. All of them are named in the checkpoint's `ignore`. Before a router, folded scales are
powers of two, so that norm, router and shared-expert gate keep every bit.

## Chats with images

Vision-language models are calibrated by text, or by chats with images where the model has a
processor and pillow is installed: `quantkit calibrate build chats.jsonl --model MODEL -o SET`, then
`quantize --calibration SET`. Rotation by rows and columns (Qwen), attention both ways within an
image (Gemma 3) and features that are added between blocks (Qwen 3-VL) reach the blocks as in the
model itself (`tests/integration/test_pictures.py`).

## GGUF

{gguf}. llama.cpp computes what transformers does for each of them
(`tests/integration/test_gguf_convert.py`); of mixtures the experts of a block are one tensor, each
rounded by what its own inputs weigh. A config that llama.cpp's graph would compute otherwise is
refused with the reason.

## Sources that are quantised already

With `--requantize`: FP8 with scales per tensor, row or block (DeepSeek), MXFP4 (gpt-oss), NVFP4,
int8, compressed-tensors, AutoGPTQ and AutoAWQ. They are read layer by layer as the 16-bit weights
that they stand for.

GGUF files of the families above, too, whoever quantised them: `quantkit quantize FILE.gguf -r
gptq-w4a16 --calibration general --requantize`. Config and tokenizer are made from the file's keys,
and the keys from that config again: a file that says something else than any config can is refused
with what it is. Tensors are dequantised one at a time, an expert without the others of its block.
The manifest's notes say what the source was. A file in a hub is `org/repo:Q4_K_M`.
`quantkit convert FILE.gguf --to bf16` writes a plain folder, of any quantised folder as well;
`dequantized.json` in it says what it was made from.
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
        INTRODUCTION.replace("{gguf}", _gguf()),
        f"## Families\n\n{_count(families)} {used}; {result['machine']}, {recorded['date']}, "
        f"commit {recorded['commit']}.\n",
    ]
    engine = Engine.read()
    if engine is not None:
        parts.append(f"{engine.summary()}\n")
    for kind, title in KINDS.items():
        rows = {name: found for name, found in families.items() if found["kind"] == kind}
        if rows:
            parts.append(f"### {title}\n\n{_table(rows, engine)}\n")
    if engine is not None and (misses := engine.misses()):
        lines = "\n".join(f"- {line}" for line in misses)
        parts.append(f"### What vLLM does not run\n\n{lines}\n")
    return "\n".join(parts)


@dataclass(frozen=True)
class Engine:
    """What real vLLM said of small models of the families."""

    result: dict[str, Any]

    @classmethod
    def read(cls) -> "Engine | None":
        if not IN_VLLM.is_file():
            return None
        return cls(json.loads(IN_VLLM.read_text(encoding="utf-8")))

    @property
    def families(self) -> dict[str, Any]:
        return dict(self.result["families"])

    @property
    def title(self) -> str:
        return f"vLLM {self.result['vllm']}"

    def summary(self) -> str:
        tried = [one for found in self.families.values() for one in found["recipes"].values()]
        agree = sum(bool(one.get("agrees")) for one in tried)
        own = [found for found in self.families.values() if _agrees(found)]
        n_tried = sum(bool(found["recipes"]) for found in self.families.values())
        recorded = self.result["recorded"]
        return (
            f"In {self.title} on {label(self.result['device'])}, {agree} of {len(tried)} "
            f"checkpoints of {n_tried} families agree; every checkpoint of {len(own)} families "
            f"does. {recorded['date']}, commit {recorded['commit']}."
        )

    def cell(self, name: str) -> str:
        """Of one family: how many of its checkpoints agree, or why none was tried."""
        tried = self.families.get(name, {}).get("recipes", {})
        if not tried:
            return ""
        agree = [recipe for recipe, one in tried.items() if one.get("agrees")]
        if len(agree) == len(tried):
            return "agrees" if len(tried) == 1 else f"agrees ({len(tried)} recipes)"
        if agree:
            return f"agrees in {len(agree)} of {len(tried)} recipes"
        if any(one.get("loads") for one in tried.values()):
            return "loads, differs"
        return "refuses"

    def misses(self) -> list[str]:
        """Each checkpoint that does not agree, with the engine's words."""
        found = []
        for name, family in self.families.items():
            for recipe, one in family["recipes"].items():
                if one.get("agrees"):
                    continue
                source = one.get("source", {})
                also = "" if not source or source.get("agrees") else "; so does the 16-bit source"
                reason = _said(str(one.get("reason", ""))).replace("|", "/")
                rules = [str(told).split(":")[0] for told in one.get("foretold", ())]
                known = f" (`verify --for vllm` foretells it: {rules[0]})" if rules else ""
                known += " (not installed on that host)" if LACKING.search(reason) else ""
                known += NO_PROCESSOR if "preprocessor_config.json" in one["reason"] else ""
                found.append(f"{name}, {recipe}: {reason}{also}{known}")
        return found


def _said(reason: str) -> str:
    """The error itself, without an engine's last lines around it and without folders."""
    reason = re.sub(r"(/[\w.+-]+){2,}(/|: )", "", reason)
    _, found, after = reason.partition("Its last lines: ")
    if not found:
        return reason
    errors = re.findall(r"(\w*(?:Error|Exception): .*?)(?= \.\.\. | File | Loading |  |$)", after)
    words = errors[-1] if errors else re.sub(r"\^+|Loading safetensors.*", "", after)
    return f"`{' '.join(words.split())[:160]}`"


def _agrees(found: dict[str, Any]) -> bool:
    tried = found["recipes"].values()
    return bool(tried) and all(one.get("agrees") for one in tried)


def _gguf() -> str:
    """The families that become GGUF files, a sentence over several lines."""
    names = sorted(name for name, family in FAMILIES.items() if family.llamacpp)
    return textwrap.fill(f"GGUF files are written of {', '.join(names)}", 100)


def _count(families: dict[str, Any]) -> str:
    built = [found for found in families.values() if found.get("built")]
    whole = [f for f in built if all(r["ok"] for r in f["recipes"].values())]
    return f"{len(whole)} of {len(built)} families that transformers builds pass every recipe."


def _table(rows: dict[str, Any], engine: Engine | None) -> str:
    recipes = list(dict.fromkeys(r for found in rows.values() for r in found.get("recipes", {})))
    columns = [*recipes, *([engine.title] if engine else []), "note"]
    lines = [f"| model_type | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, found in rows.items():
        tried = found.get("recipes", {})
        cells = [("yes" if tried[r]["ok"] else "no") if r in tried else "" for r in recipes]
        cells += [engine.cell(name)] if engine else []
        lines.append(f"| {name} | {' | '.join([*cells, _note(found)])} |")
    return "\n".join(lines)


def _note(found: dict[str, Any]) -> str:
    if not found.get("built"):
        package = re.search(r"requires the (\w+) library", found.get("reason", ""))
        return f"needs {package[1]} to be built" if package else "not in this transformers"
    reasons = list(dict.fromkeys(r["reason"] for r in found["recipes"].values() if not r["ok"]))
    if newer := found.get("versions", {}).get("transformers"):
        reasons.append(f"{found['class']}, with transformers {newer}")
    return "; ".join(reason.replace("|", "/") for reason in reasons)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
