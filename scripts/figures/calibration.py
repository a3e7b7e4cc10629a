"""Calibration data: what it is made of, what is taken out of it, how large it may be."""

from figures.regions import (
    count,
    gb,
    items,
    link,
    paragraph,
    percent,
    region,
    result,
    seconds,
    table,
)

RECIPES = {"gptq-w4a16": "GPTQ", "awq-w4a16": "AWQ", "awq-gptq-w4a16": "AWQ-GPTQ"}
SETS = {"matching": "the same", "mixed": "a mix", "wrong": "the wrong ones"}
KINDS = {
    "email": "e-mail addresses",
    "phone": "phone numbers",
    "card": "card numbers (Luhn, known issuers)",
    "key": "keys, tokens and passwords",
    "ip": "IP addresses",
}


def growth(recipe: str, domain: str, data: str) -> float:
    return result("calibration_domains-h200")["growth_percent"][recipe][domain][data] / 100


@region
def domains() -> str:
    rows = [
        [
            domain if data == "matching" else "",
            what,
            *(percent(growth(recipe, domain, data)) for recipe in RECIPES),
        ]
        for domain in result("calibration_domains-h200")["heldout_tokens"]
        for data, what in SETS.items()
    ]
    return table(["measured on", "calibrated on", *(f"{r}:" for r in RECIPES.values())], rows)


@region
def domains_summed_up() -> str:
    recipe = "awq-gptq-w4a16"
    shares = {
        domain: growth(recipe, domain, "matching") / growth(recipe, domain, "wrong")
        for domain in result("calibration_domains-h200")["heldout_tokens"]
    }
    told = ", ".join(f"{percent(share, 0)} ({domain})" for domain, share in shares.items())
    return paragraph(
        f"With a matching set, AWQ-GPTQ, the recommended recipe, loses only part of what it loses "
        f"with sets of other domains: {told}. A mix is in between here; in an earlier run with "
        "different encyclopaedia text a mix did better on chat than a matching set."
    )


@region
def redaction() -> str:
    rows = [
        [what, percent(found["recall"], 2), percent(found["precision"], 2)]
        for kind, what in KINDS.items()
        for found in [result("redaction")["corpus"][kind]]
    ]
    return table(["", "recall:", "precision:"], rows)


@region
def million_rows() -> str:
    run = result("million_rows")
    return paragraph(
        f"{run['n_rows']:,} chats ({gb(run['size_bytes'])}) take {seconds(run['seconds'])} and "
        f"{gb(run['peak_bytes'])} of memory on {count(run['cores'])} cores, near-duplicates, "
        f"redaction and contamination included ({link('measured', 'million_rows')})."
    )


# How far a set is from its pool: title, places or percent, which way is good.
FIGURES = {
    "token_distance": ("Jensen-Shannon distance of token frequencies", False, "lower"),
    "vocabulary_coverage": (
        "share of the pool's common tokens (99% of its text) that occur", True, "higher"),
    "length_distance": ("Kolmogorov-Smirnov distance of lengths", False, "lower"),
    "source_distance": ("total variation of the sources' shares", False, "lower"),
    "cluster_distance": ("total variation of the topics' shares", False, "lower"),
    "cluster_coverage": ("share of the pool whose topics occur", True, "higher"),
}  # fmt: skip


@region
def chosen() -> str:
    run = result("calibration_choice")
    first = next(iter(run["sets"].values()))
    read = {name: rows["read"] for name, rows in first["rows"].items()}
    alike = sum(rows.get("near-duplicate", 0) for rows in first["rows"].values())
    told = ", ".join(f"{n:,} of {name}" for name, n in read.items())
    text = paragraph(
        f"A pool of {sum(read.values()):,} rows ({told}; OASST1, Dolly, C4, Wikipedia and the "
        f"training questions of GSM8K), rendered for SmolLM2-135M; {alike} near-duplicates were "
        f"left out. {first['n_samples']} samples of {first['length']:,} tokens, compared with the "
        f"mean of 20 random draws from the same pool ({link('results', 'calibration_choice')}):"
    )
    rows = []
    for name, (what, share, good) in FIGURES.items():
        found = [first[way][name] for way in ("figures", "random")]
        shown = [percent(x) if share else f"{x:.3f}" for x in found]
        rows.append([what, *shown, good])
    return f"{text}\n\n{table(['', 'chosen:', 'random:', 'better'], rows)}"


@region
def chosen_shorter() -> str:
    sets = result("calibration_choice")["sets"]
    texts = []
    for name in list(sets)[1:]:
        found = sets[name]
        better = [key for key in FIGURES if is_better(key, found)]
        lengths = [f"{found[way]['length_distance']:.3f}" for way in ("figures", "random")]
        texts.append(
            f"Samples of {name}: closer than random draws in {count(len(better))} of "
            f"{count(len(FIGURES))} figures; lengths {lengths[0]} against {lengths[1]}."
        )
    return items(*texts)


def is_better(name: str, found: dict[str, dict[str, float]]) -> bool:
    ours, random = found["figures"][name], found["random"][name]
    return ours > random if FIGURES[name][2] == "higher" else ours < random
