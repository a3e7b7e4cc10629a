"""How much of a model's quality a format keeps: from a report of that model, or published figures.

Quality is recovery: the share of the source's accuracy that is left. It comes from a report's
accuracies or, if there are none or too few questions to decide, from perplexities, source over
candidate, which is harsher.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import metrics
from quantkit.advise.formats import MXFP4_FILE, Format
from quantkit.advise.shape import ModelShape
from quantkit.errors import AdviceError
from quantkit.model.source import ModelSource

if TYPE_CHECKING:
    from quantkit.report.document import Document, Entry

DATA = Path(__file__).with_name("quality.yaml")
FAR = 2.0
"""Size ratio beyond which the difference is mentioned."""
CACHE = "kv-fp8"
REFERENCE = "w4a16"
"""The format with figures of small, medium and large models: what it loses at two sizes converts
other formats' figures from one to the other.
"""

MORE_BITS = (
    ("w2a16", "w3a16", "w4a16", "w5a16", "w6a16", "w8a16"),
    ("mxfp4", "mxfp8"),
    ("gguf-q2_k", "gguf-q3_k_m", "gguf-q4_k_m", "gguf-q5_k_m", "gguf-q6_k", "gguf-q8_0"),
)
"""Formats of one kind, by bits."""
EIGHT_BITS = ("fp8-w8a8", "fp8-block", "int8-w8a8", "w8a16", "mxfp8", "gguf-q8_0")
FOUR_BITS = (
    REFERENCE, "nvfp4", "nvfp4-a16", "mxfp4", "mxfp4-a16", "gguf-q4_k_m", "gguf-iq4_xs",
)  # fmt: skip
VAGUE = 0.03
"""95% half-width beyond which accuracies do not distinguish formats."""


@dataclass(frozen=True)
class Quality:
    """A recovery, and where it comes from."""

    recovery: float
    """At most 1: anything above the source is chance."""
    is_prior: bool
    """From other models; a report of this one would replace it."""
    basis: str
    """What was measured, in a few words."""
    source: str = ""
    """The page or file it comes from."""
    cache: "Quality | None" = None
    """What an FP8 cache alone keeps, if it is included."""
    other_size: bool = False
    """Its prior, of the weights if a cache is included, is of a model more than twice or less than
    half as large.
    """


@dataclass(frozen=True)
class Share:
    """Correct answers in percent, of this many questions."""

    task: str
    questions: int
    """Including repetitions."""
    before: float
    after: float


@dataclass(frozen=True)
class Prior:
    """One published figure."""

    formats: tuple[str, ...]
    billions: float | None
    """Size of the measured model; None: many sizes."""
    recovery: float
    measured: str
    source: str = ""
    unverified: bool = False
    shares: tuple[Share, ...] = ()
    """What it was computed from, if known per task."""


SAME = Quality(1.0, False, "the weights are unchanged")


@cache
def priors() -> tuple[Prior, ...]:
    """All published figures in the file."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with DATA.open(encoding="utf-8") as stream:
        entries: list[dict[str, Any]] = yaml.load(stream, loader)
    return tuple(_read(entry) for entry in entries)


def _read(entry: dict[str, Any]) -> Prior:
    shares = tuple(Share(**share) for share in entry.get("shares", ()))
    return Prior(**entry | {"formats": tuple(entry["formats"]), "shares": shares})


def of(format: Format, shape: ModelShape, measured: Mapping[str, Quality]) -> Quality | None:
    """The quality of a format: measured, else from published figures; None if there is neither."""
    if format.is_whole:
        return SAME
    if found := measured.get(format.name):
        return found
    if format.name == MXFP4_FILE and shape.is_published_in_mxfp4:
        return _of_the_rest("gguf-q8_0", shape.n_parameters)
    weights = measured.get(format.base) or _prior(format.quality_class, shape.n_parameters)
    if weights is None or not format.has_fp8_cache:
        return weights
    cache_only = _prior(CACHE, shape.n_parameters)
    if cache_only is None:
        return None
    return Quality(
        weights.recovery * cache_only.recovery,
        True,
        f"{weights.basis}; the cache: {cache_only.basis}",
        weights.source,
        cache_only,
        weights.other_size,
    )


def _of_the_rest(name: str, n_parameters: int) -> Quality | None:
    """Of a file that keeps experts as they were published, and has the rest in a format."""
    rest = _prior(name, n_parameters)
    if rest is None:
        return None
    return replace(rest, basis=f"experts as published, the rest as {name}, of which {rest.basis}")


@cache
def _prior(name: str, n_parameters: int) -> Quality | None:
    """The published figure for the nearest size, or a better one for fewer bits: of the same kind,
    and 4 bits of any kind for 8.

    Figures come from different models, methods and tasks, so 8 bits may have the lower one.
    """
    found = _nearest(name, n_parameters)
    fewer = [other for chain in MORE_BITS if name in chain for other in chain[: chain.index(name)]]
    for other in (*fewer, *(FOUR_BITS if name in EIGHT_BITS else ())):
        known = _nearest(other, n_parameters)
        if known is not None and (found is None or known.recovery > found.recovery):
            found = replace(known, basis=f"no worse than {other}, of which {known.basis}")
    return found


def _nearest(name: str, n_parameters: int) -> Quality | None:
    billions = n_parameters / 1e9
    near = _nearest_prior(name, billions)
    if near is None:
        return None
    recovery, basis, size = min(1.0, near.recovery), near.measured, near.billions or billions
    other_size = not 1 / FAR <= size / billions <= FAR
    if size > FAR * billions and name != CACHE:
        here, there = (_nearest_prior(REFERENCE, one) for one in (billions, size))
        if here is not there and here and there and here.billions:
            recovery **= math.log(here.recovery) / math.log(there.recovery)
            size = here.billions
            basis += f"; scaled to {size:g}B by what {REFERENCE} loses at both sizes"
    if size > FAR * billions:
        basis += "; smaller models tend to lose more"
    elif size < billions / FAR:
        basis += "; larger models tend to lose less"
    if near.unverified:
        basis += " (unverified)"
    return Quality(recovery, True, basis, near.source, other_size=other_size)


def _nearest_prior(name: str, billions: float) -> Prior | None:
    return min(
        (prior for prior in priors() if name in prior.formats),
        key=lambda prior: abs(math.log((prior.billions or billions) / billions)),
        default=None,
    )


def from_report(path: Path, shape: ModelShape) -> dict[str, Quality]:
    """Qualities of this model from a report file, by recipe."""
    from quantkit.report.document import read  # slow to import, and most questions have no report

    path = path / "report.json" if path.is_dir() else path
    return from_document(read(path), shape, str(path))


def from_document(document: "Document", shape: ModelShape, path: str) -> dict[str, Quality]:
    """The same from a parsed report; messages call it `path`."""
    if shape.assumed:
        raise AdviceError(
            f"{path} is a report of {document.baseline.name}, and MODEL is only a size; name the "
            "model that was scored"
        )
    _refuse_another(document.baseline, shape, path)
    found = {}
    for entry in document.candidates:
        if entry.recipe is not None and (quality := measured(document, entry, path)):
            found[entry.recipe] = quality
    return found


def _refuse_another(baseline: "Entry", shape: ModelShape, path: str) -> None:
    """A report applies to the model that was scored: the same weights or, if they are not
    available, the same size and name.
    """
    if baseline.size_bytes != shape.size_bytes:
        raise AdviceError(
            f"{path} is a report of another model: its source {baseline.name} has "
            f"{baseline.size_bytes:,} bytes of weights, {shape.label} has {shape.size_bytes:,}"
        )
    if shape.folder is not None:
        digest = ModelSource.open(str(shape.folder), trust_remote_code=True).digest
        if digest != baseline.digest:
            raise AdviceError(
                f"{path} is a report of another model: it is of {baseline.name} with digest "
                f"{baseline.digest[:12]}, and config, tokenizer and weights in {shape.folder} have "
                f"{digest[:12]}"
            )
    elif shape.label.rpartition("/")[2].lower() != baseline.name.lower():
        raise AdviceError(
            f"{path} is a report of {baseline.name}, and {shape.label} has no weights here to "
            f"compare with; give the folder that was scored, or one called {baseline.name}"
        )


def measured(document: "Document", entry: "Entry", path: str) -> Quality | None:
    """A report's result for one candidate; None if it has no such scores."""
    shares, widest = {}, 0.0
    for task in document.baseline.settings.tasks:
        key = f"{task}/{metrics.ACCURACY}"
        before, after = document.baseline.scores.get(key), entry.scores.get(key)
        compared = entry.comparison(key)
        # If the source only guesses, so does every candidate.
        if before and after and before.value > 0 and not (compared and compared.source_at_chance):
            shares[task] = after.value / before.value
            if compared and compared.low is not None and compared.high is not None:
                widest = max(widest, (compared.high - compared.low) / 2)
    mean = sum(shares.values()) / len(shares) if shares else 0.0
    by_accuracy = Quality(min(1.0, mean), False, f"accuracy on {', '.join(shares)}", path)
    if shares and widest <= VAGUE:
        return by_accuracy
    vague = f"{by_accuracy.basis} has too few questions, +-{100 * widest:.0f} points"
    if found := _by_perplexity(document, entry, path):
        return replace(found, basis=f"{found.basis}; {vague}") if shares else found
    return replace(by_accuracy, basis=vague) if shares else None


def _by_perplexity(document: "Document", entry: "Entry", path: str) -> Quality | None:
    keys = [document.headline or "", *document.baseline.scores]
    for key in keys:
        before, after = document.baseline.scores.get(key), entry.scores.get(key)
        if (
            before is None
            or after is None
            or not key.endswith(metrics.PERPLEXITY)
            or after.value <= 0
        ):
            continue
        share = before.value / after.value
        return Quality(min(1.0, share), False, f"{key}, source over candidate", path)
    return None
