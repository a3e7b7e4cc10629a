"""What ideas for few bits are worth (benchmarks/best_bits.py)."""

import json
from collections.abc import Callable
from typing import Any

from figures.regions import RESULTS, link, number, paragraph, region, result, table
from quantkit.hardware.gpus import label

HEAD = ["", "perplexity:", "KL:", "top-1 agreement:", "commit"]
THEN = "Recipes are those of the commit in the last column."
PLACES = ("best_bits-h200", "best_bits-cpu")


@region
def best_bits() -> str:
    """The record of the larger machine, where there are two."""
    name = next(n for n in PLACES if (RESULTS / f"{n}.json").is_file())
    run = result(name)
    # By width, most bits first; `drift` is a step that was deleted since.
    rows = [
        [
            f"{idea}, with a step deleted since" if one["options"].get("drift") else idea,
            f"{one['change_percent']:+.2f}%",
            number(one["kl_mean"]),
            f"{100 * one['top1_agreement']:.1f}%",
            _commit(run, one),
        ]
        for idea, one in sorted(
            run["rows"].items(), key=lambda row: row[0].split()[0], reverse=True
        )
    ]
    told = (
        f"{run['model']}, calibrated on {run['calibration']}, compared with the source on "
        f"{run['windows']} windows of {run['length']} tokens of held-out text "
        f"({link('recorded', name)}, {label(run['device'])}). {THEN}"
    )
    return f"{paragraph(told)}\n\n{table(HEAD, rows)}"


@region
def seeds() -> str:
    """How far results spread over sets that are as good as each other."""
    name = "seeds-cpu"
    run = result(name)
    rows = [
        [
            f"`{recipe}`",
            f"{one['change_percent']['mean']:+.2f}%",
            f"{one['change_percent']['deviation']:.2f} points",
            number(one["kl_mean"]["mean"]),
            number(one["kl_mean"]["deviation"]),
        ]
        for recipe, one in run["recipes"].items()
    ]
    n_sets = min(one["seeds"] for one in run["recipes"].values())
    told = (
        f"{run['model']}, calibrated on {n_sets} sets of {run['calibration']} that differ in their "
        f"seed alone, compared with the source on {run['windows']} windows of {run['length']} "
        f"tokens of held-out text ({link('recorded', name)}, {label(run['device'])})."
    )
    head = ["", "perplexity:", "standard deviation:", "KL:", "standard deviation:"]
    return f"{paragraph(told)}\n\n{table(head, rows)}"


MOVED = "moved off the grid of the 4-bit file that it comes from"
FOLDERS = {
    "qwenm": f"Qwen2.5-Coder-1.5B-Instruct, {MOVED}",
    "smolm": f"SmolLM2-135M-Instruct, {MOVED}",
}
NAMES = {folder: name.partition(",")[0] for folder, name in FOLDERS.items()}
"""Models that a record names by their folder."""


@region
def gguf_best() -> str:
    """The record of the larger machine, where there are two."""
    name = next(n for n in ("gguf_best-h200", "gguf_best-cpu") if (RESULTS / f"{n}.json").is_file())
    run = result(name)
    rows = [
        [
            f"`{recipe}-{kind}`",
            f"{one['tensor_bytes']:,}",
            f"{one['perplexity']:.2f}",
            number(one["kl_mean"]),
            f"{100 * one['top1_agreement']:.1f}%",
        ]
        for kind, pair in run["types"].items()
        for recipe, one in (("gguf", pair["llama.cpp"]), ("gguf-best", pair["quantkit"]))
    ]
    told = (
        f"{FOLDERS.get(run['model'], run['model'])} (perplexity "
        f"{run['source']['perplexity']:.2f}), calibrated on "
        f"{run['calibration']}, {run['windows']} windows of {run['length']:,} tokens of held-out "
        f"text ({link('recorded', name)}, {label(run['device'])}); both files "
        "of a type from one pass."
    )
    head = ["", "bytes of tensors:", "perplexity:", "KL:", "top-1 agreement:"]
    return f"{paragraph(told)}\n\n" + table(head, rows)


@region
def drift() -> str:
    """What the correction for drifted inputs did on a real model, before it was deleted."""
    name = "drift-h200"
    run = result(name)
    source = run["source"]["perplexity"]
    rows = [
        [recipe, f"{100 * (one['perplexity'] / source - 1):+.1f}%", number(one["kl_mean"])]
        for recipe, one in run["rows"].items()
    ]
    told = (
        f"{run['model']} ({run['origin']}), {run['windows']} windows of {run['length']} tokens of "
        f"WikiText-2 ({link('recorded', name)}, {label(run['device'])}). `floor` is the "
        "source's own weights with rounded inputs: the loss from inputs alone. gptq-w3 ran "
        "without the correction, the others with it."
    )
    return f"{paragraph(told)}\n\n" + table(["", "perplexity:", "KL:"], rows)


PLAIN = "as they are"


@region
def tried() -> str:
    """What ideas around the product do to KL (benchmarks/tried.py)."""
    return "\n\n".join(_tried(name) for name in ("tried-cpu", "tried-smollm2-cpu"))


def _tried(name: str) -> str:
    run = result(name)
    found = {(one["idea"], one["recipe"]): one["kl_mean"] for one in run["rows"]}
    recipes = list(dict.fromkeys(one["recipe"] for one in run["rows"]))
    ideas = [PLAIN, *dict.fromkeys(idea for idea, _ in found if idea != PLAIN)]

    def cell(idea: str, recipe: str) -> str:
        kl = found[idea, recipe]
        change = "" if idea == PLAIN else f" ({kl / found[PLAIN, recipe] - 1:+.1%})"
        return f"{number(kl)}{change}"

    rows = [[idea, *(cell(idea, recipe) for recipe in recipes)] for idea in ideas]
    told = (
        f"KL of {FOLDERS.get(run['model'], run['model'])}; {run['samples']} samples of "
        f"{run['calibration']}, {run['windows']} windows of {run['length']} tokens of held-out "
        f"text ({link('recorded', name)}, {label(run['device'])}); in parentheses, against the "
        "recipe as it is."
    )
    return f"{paragraph(told)}\n\n" + table(["", *(f"`{recipe}`:" for recipe in recipes)], rows)


RUNS = {
    "quantkit-gptq": "`gptq-w4a16`",
    "quantkit-awq-gptq": "`awq-gptq-w4a16`",
    "quantkit-tune": "`awq-gptq-w4a16` with `--tune`",
    "quantkit-best": "`best-w4a16`",
    "autoround-200": "AutoRound, 200 iterations",
}

SHARE = "share_of_seconds"
FRONTIER = "frontier-h200"


@region
def frontier() -> str:
    """KL against seconds beside AutoRound, on sources that are not on a 4-bit grid."""
    run = result(FRONTIER)
    return "\n\n".join(_frontier(run, FRONTIER, model) for model in run["models"])


def short_frontier(model: str) -> list[str]:
    """KL and seconds at 4 bits for the README: ours as they are today, and AutoRound's."""
    rows = {one["run"]: one for one in result(FRONTIER)["models"][model]["rows"]}

    def of(run: str, name: str) -> str:
        return f"{name} {number(rows[run]['kl_mean'])} in {rows[run]['seconds']:.0f} s"

    ours = of("quantkit-awq-gptq", "AWQ-GPTQ"), of("quantkit-tune", "with `--tune`")
    return [", ".join(ours), of("autoround-200", RUNS["autoround-200"])]


def _frontier(run: dict[str, Any], name: str, model: str) -> str:
    entry = run["models"][model]
    timed = [one for one in entry["rows"] if one["bits"] == 4 and not one.get("shared")]
    rows = [
        [
            RUNS[one["run"]],
            f"{one['seconds']:.0f} s",
            number(one["kl_mean"]),
            *(f"{one[key]:.0%}" if key in one else "" for key in ("share_of_kl", SHARE)),
            f"`{one['recorded']['commit']}`",
        ]
        for one in sorted(timed, key=lambda one: one["seconds"])
    ]
    moved = entry["off_grid"]
    text = (
        f"{model} ({entry['origin']}: weights on a 4-bit grid would be easy to round, and in this "
        f"order rounding groups of 32 to 16 levels costs {moved['after']['share']:.1%} of what it "
        f"costs shuffled weights, {moved['before']['share']:.1%} before). "
        f"Groups of {entry['group_size']}, the same "
        f"{entry['tokens']['samples']} x {entry['tokens']['length']:,} tokens of calibration, "
        f"{entry['windows']} windows of {entry['length']:,} tokens of WikiText-2; whole commands, "
        f"alone on the machine ({link('recorded', name)}, {label(run['device'])})."
    )
    head = ["", "seconds:", "KL:", "of AutoRound's KL:", "of its seconds:", "commit"]
    if not any("share_of_kl" in one for one in timed):
        text += _on_other_samples(model)
        head, rows = [*head[:3], head[-1]], [[*row[:3], row[-1]] for row in rows]
    return f"{paragraph(text)}\n\n{table(head, rows)}"


def _on_other_samples(model: str) -> str:
    """AutoRound's row of an earlier record."""
    name = "frontier-smollm2-h200"
    entry = result(name)["models"][model]
    (peer,) = (one for one in entry["rows"] if one["run"] == "autoround-200")
    return (
        " AutoRound has not run on these samples yet; calibrated on others of the same files, "
        f"it took {peer['seconds']:.0f} s for a KL of {number(peer['kl_mean'])} "
        f"({link('recorded', name)})."
    )


@region
def first_tokens() -> str:
    """KL by what a first token counts (benchmarks/best_bits.py)."""
    return _by_constant(
        "best_bits-first-cpu",
        "by the weight of the first token",
        lambda share: f"1/{1 / share:g} of its sample" if share else "like any other token",
    )


@region
def momentum() -> str:
    """KL by the momentum of gradient steps (benchmarks/best_bits.py)."""
    name = "best_bits-momentum-cpu"
    (steps,) = {row["options"]["tune"] for row in result(name)["rows"].values()}
    return _by_constant(
        name,
        f"by the momentum of {steps} gradient steps per block",
        lambda share: f"{share:g}" if share else "none",
    )


def _by_constant(name: str, words: str, show: Callable[[float], str]) -> str:
    """KL by the values of one constant, against the first of them."""
    run = result(name)
    found: dict[str, dict[float, float]] = {}
    for row in run["rows"].values():
        (value,) = row["set"].values()
        found.setdefault(row["recipe"], {})[value] = row["kl_mean"]
    first, *others = next(iter(found.values()))
    rows = [[show(first), *(number(by[first]) for by in found.values())]]
    rows += [
        [
            show(value),
            *(f"{number(by[value])} ({by[value] / by[first] - 1:+.1%})" for by in found.values()),
        ]
        for value in others
    ]
    samples = f"{run['samples']} samples of " if run["samples"] else ""  # else as many as it has
    text = paragraph(
        f"KL of {run['model']}, {words}; calibrated on {samples}{run['calibration']}, "
        f"{run['windows']} windows of {run['length']} tokens of held-out text "
        f"({link('recorded', name)}, {label(run['device'])}); in parentheses, against the first "
        "row."
    )
    return f"{text}\n\n" + table(["", *(f"`{recipe}`:" for recipe in found)], rows)


WORDS = {
    "distil": "{} passes of distillation",
    "SOFT": "in proportion",
    "STEP": "codes moved by {} per step",
    "tune": "{} gradient steps",
    "signed": "signed scales",
    "sweeps": "{} sweeps",
    "DAMPING": "GPTQ's matrix damped by {}",
    "REACH": "positions moved by {}",
    "SCALE_REACH": "scales moved by {}",
    "TOKENS_PER_BATCH": "{} tokens per step",
}


@region
def best_bits_real() -> str:
    """The same ideas on a real model, which today's defaults follow from."""
    return _of_a_real_model(
        "best_bits-smollm2-h200",
        " Unlike today's, `gptq-w4a16` and `awq-gptq-w4a16` had no signed scales, GPTQ's matrix "
        "was damped by 0.01, and `best-w4a16` had six sweeps and no gradient steps.",
    )


@region
def best_bits_distilled() -> str:
    """What distilled scales add to the presets as they are since."""
    return _of_a_real_model(
        "best_bits-distil-h200", " `best-w4a16` here is without distilled scales unless it says so."
    )


@region
def gradients() -> str:
    """What steps per block and passes over all blocks are worth today."""
    return _of_a_real_model(
        "best_bits-gradients-h200",
        " What a row does not name is as in its recipe. In proportion: codes move by their "
        "gradients relative to those of their group, not by signs.",
    )


@region
def norms() -> str:
    """Trained norms, and steps in proportion to gradients, before they were deleted."""
    name = "best_bits-norms-cpu"
    run = result(name)
    rows = []
    for row in run["rows"].values():
        asked = {key.rpartition(".")[2]: value for key, value in row["set"].items()}
        kind = f"in proportion, up to {asked['SOFT']} times" if asked["SOFT"] else "by signs"
        far = asked.get("REACH", [0.1])[0]
        norm = f"{asked['NORMS']:.0%}" if asked["NORMS"] else "no"
        rows.append([kind, f"{far:g}", norm, number(row["kl_mean"])])
    told = (
        f"{run['model']}, 4 bits, no steps per block; calibrated on {run['samples']} samples of "
        f"{run['calibration']}, {run['windows']} windows of {run['length']} tokens of held-out "
        f"text ({link('recorded', name)}, {label(run['device'])})."
    )
    head = ["codes move", "cells:", "norms move by:", "KL:"]
    return f"{paragraph(told)}\n\n{table(head, sorted(rows, key=lambda row: row[-1]))}"


def _of_a_real_model(name: str, more: str) -> str:
    run = result(name)
    rows = sorted(run["rows"].items(), key=lambda item: (item[1]["recipe"], -item[1]["kl_mean"]))
    told = [
        [
            f"`{row['recipe']}`{_changes(json.loads(asked))}",
            f"{row['perplexity']:.2f}",
            number(row["kl_mean"]),
            f"{row['top1_agreement']:.1%}",
            _commit(run, row),
        ]
        for asked, row in rows
    ]
    text = paragraph(
        f"{NAMES.get(run['model'], run['model'])} ({run['origin']}), groups of "
        f"{run['group_size']}, calibrated on "
        f"{run['samples']} x {run['calibration_length']:,} tokens, {run['windows']} windows of "
        f"{run['length']:,} tokens of WikiText-2 ({link('recorded', name)}, "
        f"{label(run['device'])}). {THEN}{more}"
    )
    return f"{text}\n\n{table(HEAD, told)}"


def _commit(run: dict[str, Any], row: dict[str, Any]) -> str:
    return f"`{row.get('commit', run['recorded']['commit'])}`"


def _changes(asked: dict[str, Any]) -> str:
    said = []
    constants = {key.rpartition(".")[2]: value for key, value in asked.get("set", {}).items()}
    if any("refine" in key for key in asked.get("set", {})):
        constants = {"sweeps damped by {}": constants["DAMPING"]}
    for key, value in {**asked.get("options", {}), **constants}.items():
        words = WORDS.get(key, key)
        shown = value[0] if isinstance(value, list) else value
        shown = f"{shown['cuda']:,}" if isinstance(shown, dict) else shown
        if (key, value) != ("sweeps", 2):
            said.append(words.format(shown if shown else "no"))
    return "".join(f", {one}" for one in said)
