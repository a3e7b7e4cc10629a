"""One pass on several GPUs of a machine: the command line under torchrun, as users run it."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quantkit.engine.process import Child
from quantkit.errors import MethodError
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.progress import Progress
from quantkit.recipe import AnyRecipe

SECONDS_BETWEEN_LOOKS = 0.2


def quantize(
    model: Mapping[str, Any],
    recipes: Sequence[AnyRecipe],
    out: Path,
    device: str,
    n_ranks: int,
    choice: CalibrationChoice | None,
    progress: Progress,
) -> None:
    """Write `out/<recipe>/` for every recipe, with one process per GPU."""
    words = command(model, recipes, out, device, n_ranks, choice)
    progress.note(f"{n_ranks} ranks: {' '.join(words)}")
    # As a child that ends with this process: left alone it would write into the next one's folder.
    with Child(words, name="torchrun") as child:
        while (code := child.code) is None:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        output = [line for line in child.output().splitlines() if line.strip()]
    for line in output:
        progress.detail(line)
    if code:
        # Find our message among the many lines of a launcher that ends.
        ours = [line for line in output if line.startswith("quantkit: ")] or output[-1:]
        why = ours[0].removeprefix("quantkit: ") if ours else f"exit code {code}"
        raise MethodError(f"the pass on {n_ranks} ranks failed: {why}")


def command(
    model: Mapping[str, Any],
    recipes: Sequence[AnyRecipe],
    out: Path,
    device: str,
    n_ranks: int,
    choice: CalibrationChoice | None,
) -> list[str]:
    """The command line; recipes become files, since a sweep's need not be files here."""
    folder = out / "recipes"
    folder.mkdir(exist_ok=True)
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={n_ranks}"]
    words = [sys.executable, "-m", *launcher, "-m", "quantkit", "quantize", str(model["place"])]
    for recipe in recipes:
        path = folder / f"{recipe.name}.yaml"
        path.write_text(json.dumps(recipe.public()), encoding="utf-8")  # JSON is YAML
        words += ["-r", str(path)]
    words += ["-o", str(out), "--device", device]
    if choice is not None:
        words += ["--calibration", choice.name]
        words += ["--samples", str(choice.n_samples)] if choice.n_samples else []
        words += ["--length", str(choice.length)] if choice.length else []
    if model["revision"]:
        words += ["--revision", str(model["revision"])]
    return [*words, "--trust-remote-code"] if model["trust_remote_code"] else words
