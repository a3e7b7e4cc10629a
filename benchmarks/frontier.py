"""KL divergence against seconds at 4, 3 and 2 bits: quantkit, llm-compressor and AutoRound.

    python benchmarks/frontier.py --model DIR --name NAME --origin TEXT --group-size 128
        --calibration FILE [FILE ...] --text FILE --work DIR --out FILE [--widths 4 3 2]
        [--runs NAME ...] [--max-windows N] [--path PACKAGE=DIRS ...] [--draw SVG] [--shared]

One call per model; all write to the same FILE, after every checkpoint. Runs that --work has a
result of are not made again, rows that FILE holds are not scored again: a stopped call resumes.
Every run gets the same token ids and is a process of its own, from its start to files on disk
(`peers_speed.py`); every checkpoint is scored as `quality.py` does it. At 2 bits groups are 64
wide. Sources that come from a 4-bit file are moved off its grid first (`off_grid.py`), and what
that found is copied. Every row has the commit and the date of its run.

Each row beside AutoRound's of that width says what share of its KL and of its seconds it has. With
--shared other work is on the machine: rows say so, and no seconds are compared.
"""

import json
from pathlib import Path
from typing import Any

import off_grid
import peers
import torch
from peers_speed import whole
from quality import begin, compare, load, parser_of, scored_before, scored_text, windows_of

from quantkit.model.tokenizer import load as load_tokenizer

MARK = {4: "autoround-200", 3: "autoround-200-w3", 2: "autoround-200-w2"}
"""What each width is compared with."""
GROUPS_OF_TWO_BITS = 64
OF_ONE_CALL = ("seconds", "device", "recorded")
"""What a moved source's record has of the call that moved it."""
NAMES = {"quantkit": "quantkit", "llmcompressor": "llm-compressor", "autoround": "AutoRound"}
COLOURS = {"quantkit": "tab:green", "llmcompressor": "tab:orange", "autoround": "tab:blue"}
LABELS = {
    "quantkit-awq-gptq": "quantkit, awq-gptq-w4a16",
    "quantkit-tune": "quantkit, awq-gptq-w4a16 --tune",
    "quantkit-best": "quantkit, best-w4a16",
    "autoround-200": "AutoRound, 200 iterations",
}
TICKS = (10, 20, 50, 100, 200, 500, 1000)


def score(row: dict[str, Any], folder: Path, source: Any, model: Path, windows: Any) -> None:
    """Add to a row what its checkpoint loses; one that cannot be read keeps its error."""
    try:
        loaded = load(model, folder, windows.device)
        row["weight_bytes"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
        row |= compare(source, loaded, windows)
    except Exception as error:  # a checkpoint that cannot be read is a result too
        row["error"] = f"{type(error).__name__}: {error}"


def relate(rows: list[dict[str, Any]], bits: int) -> None:
    """Shares of AutoRound's KL and seconds, for rows of one width."""
    mark = next((r for r in rows if r["run"] == MARK[bits] and "kl_mean" in r), None)
    for row in rows:
        if mark is not None and row["bits"] == bits and "kl_mean" in row:
            row["share_of_kl"] = row["kl_mean"] / mark["kl_mean"]
            if not (row.get("shared") or mark.get("shared")):
                row["share_of_seconds"] = row["seconds"] / mark["seconds"]


def draw(models: dict[str, Any], target: Path) -> None:
    """KL against seconds: a panel for each model and width that another tool was timed on."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "quantkit"})
    panels: dict[str, list[dict[str, Any]]] = {}
    for name, entry in models.items():
        for row in entry["rows"]:
            if "kl_mean" in row and not row.get("shared"):
                panels.setdefault(f"{name}, {row['bits']} bits", []).append(row)
    panels = {
        title: rows
        for title, rows in panels.items()
        if any(not row["run"].startswith("quantkit") for row in rows)
    }
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.4 * len(panels), 3.6), squeeze=False, layout="constrained"
    )
    for axis, (title, rows) in zip(axes[0], panels.items(), strict=True):
        for place, row in enumerate(sorted(rows, key=lambda row: row["seconds"])):
            tool, _, what = row["run"].partition("-")
            at = row["seconds"], row["kl_mean"]
            axis.plot(*at, "o", color=COLOURS[tool])
            label = LABELS.get(row["run"], f"{NAMES[tool]} {what}")
            # Ours below and above in turn, so that neighbours do not collide.
            beside = (6, -13 if tool == "quantkit" and place % 2 else 5)
            axis.annotate(label, at, beside, textcoords="offset points", fontsize=9)
        axis.set_xscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds, the whole command")
        axis.set_ylabel("KL from the source")
        axis.set_ylim(0, 1.25 * max(row["kl_mean"] for row in rows))
        fastest, slowest = (f(row["seconds"] for row in rows) for f in (min, max))
        axis.set_xlim(0.7 * fastest, 3 * slowest)
        ticks = [each for each in TICKS if 0.7 * fastest <= each <= 3 * slowest]
        axis.set_xticks(ticks, [str(each) for each in ticks])
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = parser_of(__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[4, 3, 2])
    parser.add_argument("--runs", nargs="+", help="only these; by default all of every width")
    parser.add_argument("--shared", action="store_true", help="other work is on the machine")
    parser.add_argument("--draw", type=Path, help="also draw what FILE holds")
    args = parser.parse_args()
    result, tokens = begin(args, "KL divergence against seconds of 4-, 3- and 2-bit checkpoints")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    windows = windows_of(load_tokenizer(args.model), args.text, args.length)[: args.max_windows]
    windows = windows.to(device)
    about = scored_text(args, tokens, windows) | {"group_size": args.group_size}
    if (args.model / off_grid.RECORD).is_file():
        record = json.loads((args.model / off_grid.RECORD).read_text())
        # What is the same whenever a source is moved; rows of earlier calls then still count.
        about["off_grid"] = {key: record[key] for key in record if key not in OF_ONE_CALL}
    before = scored_before(result, args.name, about)
    source = load(args.model, args.model, device)
    entry = result["models"][args.name] = {
        **about,
        "source": before.get("source") or compare(source, source, windows),
        "rows": before.get("rows", []),
    }
    scored = {row["run"] for row in entry["rows"] if "kl_mean" in row}
    for bits in args.widths:
        size = min(args.group_size, GROUPS_OF_TWO_BITS) if bits == 2 else args.group_size
        for name in peers.RUNS_BY_WIDTH[bits]:
            if name in scored or (args.runs and name not in args.runs):
                continue
            row = whole(name, args.model, tokens, size, args.work, args.path, args.limit)
            result["versions"] |= row.pop("versions", {})
            row.pop("stage_seconds", None)
            row |= {"bits": bits, "group_size": size} | ({"shared": True} if args.shared else {})
            if row["error"] is None:
                (folder,) = peers.checkpoints(name, args.work / name / "out").values()
                score(row, folder, source, args.model, windows)
            row["recorded"] = result["recorded"]
            entry["rows"] = [r for r in entry["rows"] if r["run"] != name] + [row]
            relate(entry["rows"], bits)
            args.out.write_text(json.dumps(result, indent=2) + "\n")
            print(json.dumps(row), flush=True)
    if args.draw:
        draw(result["models"], args.draw)


if __name__ == "__main__":
    main()
