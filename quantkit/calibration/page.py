"""A calibration set as a page: its contents, how well they represent the pool, how it was made."""

from typing import Any

from markupsafe import Markup

from quantkit.calibration.calibration_set import CalibrationSet, Manifest
from quantkit.calibration.choosing.figures import BETTER_HIGH, Figures
from quantkit.calibration.inspection import NAMES, warnings, worse_than_random
from quantkit.calibration.redaction.redact import LABELS
from quantkit.page.bars import Bar, bars
from quantkit.page.document import Section, document
from quantkit.page.lines import Series, lines
from quantkit.page.parts import Fact, details, extract, facts, notices
from quantkit.page.scale import Axis
from quantkit.page.table import Cell, Column, table

N_SHOWN = 10
LONGEST = 20_000
"""Characters shown per sample; the rest is in its folder."""
TAKEN = ("whole", "in part")

MEANINGS = {
    "token_distance": "Jensen-Shannon distance of how often each token occurs",
    "vocabulary_coverage": "share of the tokens that make up 99% of the pool",
    "length_distance": "Kolmogorov-Smirnov distance of the pieces' lengths",
    "source_distance": "half the sum of the differences between requested and actual shares",
    "cluster_distance": "half the sum of the differences between topics' shares",
    "cluster_coverage": "share of the pool in topics that the set covers",
}


def render(found: CalibrationSet) -> str:
    """The whole page; the same set gives the same bytes."""
    manifest = found.manifest
    weaknesses = warnings(found)
    one = len(weaknesses) == 1
    return document(
        _title(manifest),
        [
            Section("Does it represent the pool?", _figures(manifest)),
            Section("Lengths", _lengths(manifest)),
            Section("Sources", _sources(manifest)),
            Section("What happened to every row", _rows(manifest)),
            Section("Replaced in the text", _redacted(manifest)),
            Section("Samples", _samples(found)),
            Section("How it was made", _making(manifest)),
        ],
        kind="Calibration set",
        lead=manifest.spec.summary,
        top=[
            notices(f"{len(weaknesses)} warning{'' if one else 's'}", weaknesses),
            facts(_facts(manifest)),
        ],
        footer=f"Written by quantkit {manifest.version}. Nothing on this page is loaded from "
        "elsewhere.",
    )


def _title(manifest: Manifest) -> str:
    """Its name; the sources' names where that lists whole paths."""
    if "/" not in manifest.name:
        return manifest.name
    return ", ".join(source.name for source in manifest.sources)


def _facts(manifest: Manifest) -> list[Fact]:
    return [
        Fact(f"{manifest.n_samples:,}", "samples"),
        Fact(f"{manifest.length:,}", "tokens each" if _is_full(manifest) else "tokens at most"),
        Fact(f"{manifest.n_tokens:,}", "tokens in all"),
        Fact(f"{len(manifest.sources):,}", "source" if len(manifest.sources) == 1 else "sources"),
        Fact(f"{manifest.pool.n_tokens:,}", "tokens in the pool"),
        Fact(manifest.tokenizer.model, "model it is for"),
    ]


def _is_full(manifest: Manifest) -> bool:
    return manifest.n_tokens == manifest.n_samples * manifest.length


def _figures(manifest: Manifest) -> list[str | Markup]:
    names = list(Figures.model_fields)
    parts: list[str | Markup] = [_comparison(manifest)]
    mark = f"mean of {manifest.n_random} random draws" if manifest.random is not None else ""
    for title, chosen, label in (
        (
            "Distances from the pool",
            [n for n in names if n not in BETTER_HIGH],
            "distance, lower is better",
        ),
        ("Coverage of the pool", [n for n in names if n in BETTER_HIGH], "share, higher is better"),
    ):
        items = [
            Bar(
                NAMES[name],
                getattr(manifest.figures, name),
                None if manifest.random is None else getattr(manifest.random, name),
            )
            for name in chosen
        ]
        axis = Axis(label, digits=4)
        parts.append(bars(title, items, axis, value="this set", mark=mark))
    parts.append(_figures_table(manifest))
    return parts


def _comparison(manifest: Manifest) -> str:
    n = len(Figures.model_fields)
    if manifest.random is None:
        return "This set was not compared with random draws."
    if manifest.spec.select == "random":
        return (
            f"This set was drawn at random; the mean of {manifest.n_random} such draws is what to "
            "expect of one."
        )
    better = n - len(worse_than_random(manifest))
    return (
        f"Samples were chosen to represent a pool of {manifest.pool.n_pieces:,} pieces of text. "
        f"In {better} of {n} figures this set is as close to the pool as the mean of "
        f"{manifest.n_random} random draws, or closer."
    )


def _figures_table(manifest: Manifest) -> Markup:
    worse = worse_than_random(manifest)
    compared = manifest.random is not None
    columns = [Column("Figure"), Column("This set", numeric=True)]
    if compared:
        columns.append(Column("Random", numeric=True, note=f"mean of {manifest.n_random}"))
    columns += [Column("Better"), Column("What it is")]
    rows = []
    for name in Figures.model_fields:
        ours = getattr(manifest.figures, name)
        row = [Cell(NAMES[name]), Cell(f"{ours:.4f}", ours, "bad" if name in worse else "")]
        if compared:
            theirs = getattr(manifest.random, name)
            row.append(Cell(f"{theirs:.4f}", theirs))
        row.append(Cell("higher" if name in BETTER_HIGH else "lower"))
        row.append(Cell(MEANINGS[name], tone="quiet"))
        rows.append(row)
    return table("Figures of the set, and of random draws from the same pool", columns, rows)


def _lengths(manifest: Manifest) -> list[str | Markup]:
    pool, ours = manifest.pool.lengths, manifest.pool.set_lengths
    half = len(pool) // 2

    def quantiles(values: list[int]) -> list[tuple[float, float]]:
        return [(n, place / (len(values) - 1)) for place, n in enumerate(values)]

    return [
        f"Half of the pieces in the set have {ours[half]:,} tokens or fewer; in the pool, half "
        f"have {pool[half]:,} or fewer.",
        lines(
            "How long pieces are",
            [Series("this set", quantiles(ours)), Series("pool", quantiles(pool))],
            Axis("tokens of a piece"),
            Axis("share of pieces up to this length", percent=True),
            note="Every 5% of the pieces is marked. The closer the lines, the better the choice.",
        ),
    ]


def _sources(manifest: Manifest) -> list[str | Markup]:
    total = max(1, manifest.n_tokens)
    axis = Axis("share of the set's tokens", percent=True, digits=1)
    items = [Bar(s.name, s.n_tokens / total, s.share) for s in manifest.sources]
    columns = [
        Column("Source"),
        Column("Tokens", numeric=True),
        Column("Share", numeric=True),
        Column("Requested", numeric=True),
        Column("Rows read", numeric=True),
        Column("Rows used", numeric=True),
        Column("Licence"),
    ]
    rows = []
    for source in manifest.sources:
        used = sum(source.rows.get(reason, 0) for reason in TAKEN)
        share = source.n_tokens / total
        rows.append(
            [
                Cell(source.name),
                Cell(f"{source.n_tokens:,}", source.n_tokens),
                Cell(f"{share:.1%}", share),
                Cell(f"{source.share:.1%}", source.share),
                _count(source.rows.get("read", 0)),
                _count(used),
                Cell(source.licence or "not given", tone="" if source.licence else "quiet"),
            ]
        )
    return [
        bars("Where the tokens come from", items, axis, value="in the set", mark="requested"),
        table("Sources", columns, rows, searchable=len(rows) > 8),
    ]


def _rows(manifest: Manifest) -> list[str | Markup]:
    seen = dict.fromkeys(reason for source in manifest.sources for reason in source.rows)
    reasons = [*TAKEN, "not chosen"]
    reasons += [reason for reason in seen if reason not in ("read", *reasons)]
    columns = [Column("Source"), *(Column(r, numeric=True) for r in ("read", *reasons))]
    rows = []
    for source in manifest.sources:
        read = source.rows.get("read", 0)
        cells = [_count(source.rows.get(reason, 0), read) for reason in reasons]
        rows.append([Cell(source.name), _count(read), *cells])
    parts: list[str | Markup] = [
        "Each row is used whole, used in part, or left out for one reason. Darker cells hold a "
        "larger share of the source's rows.",
        table("Rows of every source", columns, rows, wide=len(columns) > 7),
    ]
    examples = [
        [source.name, reason, example]
        for source in manifest.sources
        for reason, example in source.examples.items()
    ]
    if examples:
        headings = [Column("Source"), Column("What happened"), Column("The first such row")]
        parts.append(table("One row of each", headings, examples, searchable=len(examples) > 8))
    parts += [
        f"{source.name}: {n:,} rows {remark}."
        for source in manifest.sources
        for remark, n in source.remarks.items()
        if n
    ]
    return parts


def _count(n: int, of: int = 0) -> Cell:
    return Cell(f"{n:,}", n, "" if n else "quiet", n / of if of else None)


def _redacted(manifest: Manifest) -> list[str | Markup]:
    counts = sorted(manifest.redacted.items())
    if not counts:
        return ["Not searched: the set was built without --redact."]
    total = sum(n for _, n in counts)
    named = [LABELS.get(kind, kind) for kind, _ in counts]
    if not total:
        return [f"Looked for {', '.join(named)}: none were found."]
    columns = [Column("Kind"), Column("Replaced", numeric=True)]
    rows = [[Cell(name), _count(n)] for name, (_, n) in zip(named, counts, strict=True)]
    return [
        f"{total:,} private strings were replaced by placeholders. "
        "Look through the samples below anyway: no rule finds everything.",
        table("Replacements by kind", columns, rows),
    ]


def _samples(found: CalibrationSet) -> list[str | Markup]:
    chosen = spread(found.samples, [source.name for source in found.manifest.sources], N_SHOWN)
    parts: list[str | Markup] = [
        f"{len(chosen)} of {len(found.samples):,} pieces, from all over the sources, as the model "
        "sees them."
    ]
    for piece in chosen:
        marks = [
            piece["kind"],
            f"{piece['n_tokens']:,} tokens{', cut' if piece['cut'] else ''}",
            f"topic {piece['cluster']}",
            f"sample {piece['sample']}",
        ]
        source, place = piece["source"], piece["place"]
        title = place if place.startswith(source) else f"{source}, {place}"
        parts.append(extract(title, marks, f"Why: {piece['why']}", _cut(piece["text"])))
    return parts


def spread(pieces: list[dict[str, Any]], sources: list[str], n: int) -> list[dict[str, Any]]:
    """A few pieces, spread evenly over the sources, and from start to end of each."""
    by_source = [[p for p in pieces if p["source"] == name] for name in sources]
    quotas = [0] * len(by_source)
    while sum(quotas) < min(n, sum(map(len, by_source))):
        for place, mine in enumerate(by_source):
            if quotas[place] < len(mine) and sum(quotas) < n:
                quotas[place] += 1
    return [
        mine[(2 * k + 1) * len(mine) // (2 * quota)]
        for mine, quota in zip(by_source, quotas, strict=True)
        for k in range(quota)
    ]


def _cut(text: str) -> str:
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}\n… and {len(text) - LONGEST:,} more characters"


def _making(manifest: Manifest) -> list[str | Markup]:
    spec, tokenizer = manifest.spec, manifest.tokenizer
    alike = spec.near_duplicates
    settings = {
        "Choice": "samples that represent the pool" if spec.select == "cover" else "at random",
        "Seed": str(spec.seed),
        "Short rows": "packed, several in a sample" if spec.short == "pack" else "padded",
        "Chats": "through the chat template" if spec.chat == "template" else "as plain text",
        "Near-duplicates": "kept"
        if alike is None
        else f"counted once if {alike:.0%} of their word triples are the same",
        "Kept apart from": ", ".join(manifest.avoided) or "no evaluation text",
        "Topics": f"{manifest.pool.n_clusters:,}",
        "Tokenizer": f"{tokenizer.model}, {tokenizer.vocabulary:,} tokens",
        "quantkit": manifest.version,
    }
    hashes = {"the tokens": manifest.digest, "the tokenizer": tokenizer.digest}
    if tokenizer.template_digest:
        hashes["the chat template"] = tokenizer.template_digest
    hashes |= {f"evaluation text of {name}": digest for name, digest in manifest.avoided.items()}
    hashes |= manifest.files
    read: list[list[str | Markup]] = []
    for source, asked in zip(manifest.sources, spec.sources, strict=True):
        read.append([source.name, f"all its rows ({asked.kind})", _hash(source.digest)])
        read += [[source.name, name, _hash(digest)] for name, digest in source.files.items()]
    return [
        details(settings),
        details({f"sha256 of {name}": _hash(digest) for name, digest in hashes.items()}),
        table(
            "What was read",
            [Column("Source"), Column("File"), Column("sha256")],
            read,
            searchable=len(read) > 12,
            wide=True,
        ),
    ]


def _hash(digest: str) -> Markup:
    return Markup("<code>{}</code>").format(digest)
