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
    weaknesses = [
        *_sizes(manifest, manifest.tokenizer.widest),
        *_sources(manifest),
        *_rows(manifest),
    ]
    for name in worse_than_random(manifest):
        chosen, drawn = (getattr(one, name) for one in (manifest.figures, manifest.random))
        weaknesses.append(
            f"{NAMES[name]} is not better than in random draws ({chosen:.4f} against {drawn:.4f})"
        )
    return weaknesses


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


def unusual_size(n_samples: int) -> str | None:
    """What is wrong with a number of samples, if anything."""
    few, many = USUAL_SAMPLES
    usual = f"{few} to {many} are usual"
    if n_samples < few:
        return f"{n_samples} samples are few: results depend on which ones were chosen; {usual}"
    if n_samples > many:
        return f"{n_samples:,} samples are many: they take longer and gain little; {usual}"
    return None


def _sizes(manifest: Manifest, widest: int | None) -> list[str]:
    found = [unusual] if (unusual := unusual_size(manifest.n_samples)) else []
    if widest is not None and manifest.n_tokens < 2 * widest:
        found.append(
            f"{manifest.n_tokens:,} tokens are too few for layers of {widest:,} inputs; "
            f"{2 * widest:,} or more would be better"
        )
    if manifest.n_tokens < 0.5 * manifest.n_samples * manifest.length:
        filled = manifest.n_tokens / (manifest.n_samples * manifest.length)
        found.append(
            f"only {filled:.0%} of the samples is text, the rest is padding: `short: pack`"
        )
    return found


def _sources(manifest: Manifest) -> list[str]:
    found = []
    if len(manifest.sources) > 1:
        for source in manifest.sources:
            share = source.n_tokens / manifest.n_tokens
            if share > DOMINANT:
                found.append(f"{share:.0%} of the tokens come from {source.name}")
            if not source.n_tokens:
                found.append(f"{source.name} gives nothing: its share is less than a sample")
            elif abs(share - source.share) > OFF_SHARE:
                found.append(
                    f"{source.name} gives {share:.0%} of the tokens instead of {source.share:.0%}"
                )
    return found


def _rows(manifest: Manifest) -> list[str]:
    found = []
    for source in manifest.sources:
        read = max(1, source.rows.get("read", 0))
        for reason in ("near-duplicate", "contaminated", "unreadable", "unrecognised", "empty"):
            if (share := source.rows.get(reason, 0) / read) > REPEATED:
                are = "are near-duplicates" if reason == "near-duplicate" else f"are {reason}"
                found.append(f"{share:.0%} of the rows of {source.name} {are}")
        if n := source.remarks.get("without an answer", 0):
            found.append(f"{n:,} rows of {source.name} end before an answer")
    return found
