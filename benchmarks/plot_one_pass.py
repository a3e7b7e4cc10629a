"""Time of the calibrated pass against its size, drawn from what `one_pass.py` wrote.

python benchmarks/plot_one_pass.py RESULT.json PICTURE.svg        # needs matplotlib
"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

COLOURS = {"gptq": "#0b6e99", "awq": "#c2571a", "together": "#4d4d4d"}


def main() -> None:
    result = json.loads(Path(sys.argv[1]).read_text())
    matplotlib.rcParams.update({"font.family": "sans-serif", "svg.hashsalt": "quantkit"})
    figure, (tokens, blocks) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, label in (("gptq", "GPTQ"), ("awq", "AWQ")):
        points = [(result["samples"], result[name]["seconds_a_block"])]
        points += [
            (point["samples"], point["seconds_a_block"])
            for point in result["sweep"]
            if point["recipes"] == result[name]["recipes"]
        ]
        points.sort()
        x = [samples * result["length"] / 1000 for samples, _ in points]
        y = [seconds for _, seconds in points]
        slope = (y[-1] - y[0]) / (x[-1] - x[0])
        tokens.plot([0, x[-1]], [y[0] - slope * x[0], y[-1]], color=COLOURS[name], lw=0.8, ls=":")
        tokens.plot(x, y, "o-", color=COLOURS[name], ms=5)
        tokens.annotate(label, (x[-1], y[-1]), (-6, 6), textcoords="offset points", ha="right")
    tokens.set(xlabel="thousand calibration tokens", ylabel="seconds a block")
    for name, label in (("gptq", "GPTQ"), ("awq", "AWQ"), ("together", "five recipes together")):
        seconds = result[name]["seconds_by_block"][1:]
        x = list(range(2, len(seconds) + 2))
        blocks.plot(x, seconds, "o-", color=COLOURS[name], ms=5)
        below = name == "awq"
        offset = (0, -15 if below else 7)
        blocks.annotate(label, (x[0], seconds[0]), offset, textcoords="offset points")
    blocks.set(xlabel="block (the first one also warms up)", xticks=x)
    for axis in (tokens, blocks):
        axis.set_ylim(bottom=0)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", lw=0.4, alpha=0.6)
    tokens.set_xlim(left=0)
    figure.suptitle(f"Blocks of an 8B Llama's shape on one {result['device']}", x=0.01, ha="left")
    figure.savefig(sys.argv[2], metadata={"Date": None})


if __name__ == "__main__":
    main()
