"""The facts of a model card, before they are put into words: names, tags, metadata, scores."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from quantkit import metrics, numbers
from quantkit.export.manifest import Described, Manifest
from quantkit.gguf.plan import NAME as GGUF
from quantkit.model.description import HUB_ID
from quantkit.recipe import GGUFRecipe
from quantkit.storage import IMATRIX

HUB = "https://huggingface.co"


@dataclass(frozen=True)
class Figure:
    """One score of the checkpoint, beside its source's if known."""

    task: str
    metric: str
    value: float
    stderr: float | None
    n: int
    higher_is_better: bool
    source: float | None = None
    source_stderr: float | None = None
    verdict: str | None = None
    """Result of the comparison answer by answer."""
    source_at_chance: bool = False


@dataclass(frozen=True)
class Scored:
    """Scores measured with the same settings."""

    figures: tuple[Figure, ...]
    limit: int | None
    """Only this many documents per task."""
    num_fewshot: int | None
    max_length: int
    computed_in: str
    """A dtype, `llama.cpp`, or `served`."""
    created: str
    lm_eval: str | None = None

    @property
    def tasks(self) -> list[str]:
        """Tasks in the order of their figures."""
        return list(dict.fromkeys(figure.task for figure in self.figures))


def last_part(name: str) -> str:
    """The public part of a name that may be a local path."""
    return PurePath(name.replace("\\", "/")).name or "model"


def source_name(manifest: Manifest) -> str:
    """Display name of the source: its hub id, or the last part of its path."""
    known = base_model(manifest)
    name = known or last_part(manifest.source.name)
    return name.removesuffix(".gguf")


def slug(manifest: Manifest) -> str:
    """A name that needs no quoting: the model and how it was quantised."""
    short = last_part(source_name(manifest))
    safe = re.sub(r"[^A-Za-z0-9._-]+", "-", short).strip("-.") or "model"
    return f"{safe}-{re.sub(r'[^A-Za-z0-9._-]+', '-', manifest.name)}"


def base_model(manifest: Manifest) -> str | None:
    """The source's hub id, if it came from there or its own card names it."""
    source = manifest.source
    if source.revision is not None and HUB_ID.fullmatch(source.name):
        return source.name
    return described(manifest).hub_id


def described(manifest: Manifest) -> Described:
    """What the source says about itself."""
    return manifest.source.described or Described()


def license_link(manifest: Manifest) -> str | None:
    """The licence's URL; one inside the source's folder is used only if it is still valid."""
    link = described(manifest).license_link
    if link is None or re.match(r"https?://", link):
        return link
    name = link.removeprefix("./")
    if name in manifest.files:
        return name
    hub = base_model(manifest)
    plain = re.fullmatch(r"[\w.-]+", name) is not None
    return f"{HUB}/{hub}/blob/main/{name}" if hub and plain else None


def is_gguf(manifest: Manifest) -> bool:
    """Whether llama.cpp serves it."""
    return manifest.format == GGUF


def gguf_file(manifest: Manifest) -> str:
    """The file that llama.cpp loads."""
    names = (n for n in manifest.files if n.endswith(".gguf") and n != IMATRIX)
    return next(names, f"{slug(manifest)}.gguf")


def tags(manifest: Manifest) -> list[str]:
    """Search tags."""
    recipe = manifest.recipe
    if isinstance(recipe, GGUFRecipe):
        found = ["quantized", "gguf", recipe.gguf.lower()]
        found += [recipe.method] if recipe.method is not None else []
        return [*found, *(["imatrix"] if IMATRIX in manifest.files else []), "llama.cpp"]
    weights, inputs = recipe.weights, recipe.input_activations
    scheme = f"w{weights.num_bits}a{inputs.num_bits if inputs else 16}"
    kind = numbers.of(weights).tag
    cache = ["fp8-kv-cache"] if recipe.kv_cache else []
    methods = recipe.method.split("-")
    words = ["quantized", manifest.format, scheme, kind, *methods, *cache, "vllm"]
    return list(dict.fromkeys(words))  # a format may have a method's name


def metadata(manifest: Manifest, scored: Sequence[Scored] = ()) -> dict[str, Any]:
    """The card's keys, as in the hub's specification of model cards."""
    description = described(manifest)
    base = base_model(manifest)
    keys: dict[str, Any] = {
        "base_model": base,
        "base_model_relation": "quantized" if base else None,
        "license": description.license,
        "license_name": description.license_name,
        "license_link": license_link(manifest),
        "language": description.languages or None,
        # By default the hub assumes transformers for any folder with a config.json.
        "library_name": "gguf" if is_gguf(manifest) else "transformers",
        "pipeline_tag": "text-generation",
        "tags": tags(manifest),
        "model-index": index(slug(manifest), scored) if scored else None,
    }
    return {key: value for key, value in keys.items() if value is not None}


def index(name: str, scored: Sequence[Scored]) -> list[dict[str, Any]]:
    """Scores as in the hub's specification."""
    results = []
    for run in scored:
        part = f" (first {run.limit} documents)" if run.limit else ""
        for task in run.tasks:
            values = [
                {
                    "type": metrics.of(figure.metric).hub or figure.metric,
                    "name": figure.metric,
                    "value": figure.value,
                }
                for figure in run.figures
                if figure.task == task
            ]
            results.append(
                {
                    "task": {"type": "text-generation"},
                    "dataset": {"type": task, "name": f"{task}{part}"},
                    "metrics": values,
                }
            )
    return [{"name": name, "results": results}]
