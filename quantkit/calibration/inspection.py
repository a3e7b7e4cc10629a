"""Weaknesses of a calibration set, in sentences, before hours are spent on it."""

from quantkit.calibration.calibration_set import CalibrationSet, Manifest
from quantkit.calibration.choosing.figures import BETTER_HIGH, Figures
from quantkit.calibration.spec import USUAL_SAMPLES

DOMINANT = 0.8
REPEATED = 0.3
OFF_SHARE = 0.02


def warnings(found: CalibrationSet) -> list[str]:
    """Everything the user should consider first."""
    manifest = found.manifest
    said = [*_sizes(manifest, manifest.tokenizer.widest), *_sources(manifest), *_rows(manifest)]
    for name in worse_than_random(manifest):
        said.append(f"{NAMES[name]} is no better than in a random choice")
    return said


NAMES = {
    "token_distance": "distance of token frequencies",
    "vocabulary_coverage": "coverage of common tokens",
    "length_distance": "distance of lengths",
    "source_distance": "distance of sources' shares",
    "cluster_distance": "distance of topics' shares",
    "cluster_coverage": "coverage of topics",
}
"""Display names of figures."""


def worse_than_random(manifest: Manifest) -> list[str]:
    """Figures in which a selected set does not beat a random one."""
    if manifest.random is None or manifest.spec.select == "random":
        return []
    return [
        name
        for name in Figures.model_fields
        if _worse(getattr(manifest.figures, name), getattr(manifest.random, name), name)
    ]


def _worse(ours: float, theirs: float, name: str) -> bool:
    return ours < theirs if name in BETTER_HIGH else ours > theirs


def _sizes(manifest: Manifest, widest: int | None) -> list[str]:
    said = []
    few, many = USUAL_SAMPLES
    if manifest.n_samples < few:
        said.append(f"{manifest.n_samples} samples are few; {few} to {many} are usual")
    if widest is not None and manifest.n_tokens < 2 * widest:
        said.append(
            f"{manifest.n_tokens:,} tokens are too few for layers of {widest:,} inputs; "
            f"{2 * widest:,} or more would be better"
        )
    if manifest.n_tokens < 0.5 * manifest.n_samples * manifest.length:
        filled = manifest.n_tokens / (manifest.n_samples * manifest.length)
        said.append(f"only {filled:.0%} of the samples is text, the rest is padding: `short: pack`")
    return said


def _sources(manifest: Manifest) -> list[str]:
    said = []
    if len(manifest.sources) > 1:
        for source in manifest.sources:
            share = source.n_tokens / manifest.n_tokens
            if share > DOMINANT:
                said.append(f"{share:.0%} of the tokens come from {source.name}")
            if not source.n_tokens:
                said.append(f"{source.name} gives nothing: its share is less than a sample")
            elif abs(share - source.share) > OFF_SHARE:
                said.append(
                    f"{source.name} gives {share:.0%} of the tokens, {source.share:.0%} asked"
                )
    return said


def _rows(manifest: Manifest) -> list[str]:
    said = []
    for source in manifest.sources:
        read = max(1, source.rows.get("read", 0))
        for reason in ("near-duplicate", "contaminated", "unreadable", "unrecognised", "empty"):
            if (share := source.rows.get(reason, 0) / read) > REPEATED:
                said.append(f"{share:.0%} of the rows of {source.name} are {reason}")
        if n := source.remarks.get("without an answer", 0):
            said.append(f"{n:,} rows of {source.name} end before an answer")
    return said
