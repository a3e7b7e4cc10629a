"""Locates what ships with quantkit: recipes, calibration sets, the demo model.

A wheel carries them under `quantkit/_data/`; in a checkout, recipes and calibration sets are at the
top of the repository. No other code knows about the two places.
"""

import shlex
from contextlib import suppress
from pathlib import Path

from quantkit.errors import RecipeError, UnknownName, UsageError
from quantkit.nearby import similar

PACKAGE = Path(__file__).parent
DEMO_MODEL = PACKAGE / "_data" / "demo-model"


# Common requests that are declined, with the reason; the first entry contained in a name wins.
REFUSED = {
    "nf4": "NF4 is a run-time format of bitsandbytes, made while loading; use nvfp4-a16 or "
    "awq-gptq-w4a16",
    "bitsandbytes": "bitsandbytes quantises while loading and is slow to serve; use "
    "awq-gptq-w4a16 for 4 bits, fp8-dynamic for 8",
    "bnb": "bitsandbytes quantises while loading and is slow to serve; use awq-gptq-w4a16 for 4 "
    "bits, fp8-dynamic for 8",
    "exl3": "EXL3 is ExLlamaV3's own, which vLLM and llama.cpp do not load; use awq-gptq-w4a16, or "
    "gptq-w3a16 for 3 bits",
    "exl2": "EXL2 is ExLlamaV2's own, which vLLM and llama.cpp do not load; use awq-gptq-w4a16, or "
    "gptq-w3a16 for 3 bits",
    "hqq": "HQQ quantises while loading and loses more than calibrated methods; use awq-gptq-w4a16,"
    " or rtn-w4a16 without data",
    "int4": "4-bit integers are called by their method; use awq-gptq-w4a16, or rtn-w4a16 without "
    "data",
}


def install(extra: str) -> str:
    """The command that adds an extra. There is no release on the package index: it is built from a
    checkout, by its path where that is known.
    """
    checkout = PACKAGE.parent
    if (checkout / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(f'{checkout}[{extra}]')}"
    return f"pip install '.[{extra}]' in a checkout of quantkit"


def folder(kind: str) -> Path:
    """The folder of `recipes` or `calibration`."""
    shipped = PACKAGE / "_data" / kind
    return shipped if shipped.is_dir() else PACKAGE.parent / kind


def names(kind: str) -> list[str]:
    """Names of all files of a kind, sorted."""
    return sorted(path.stem for path in folder(kind).glob("*.yaml"))


def find(kind: str, name: str) -> Path:
    """The file a name stands for: one that ships with quantkit, or the user's own path."""
    own = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name) if own else folder(kind) / f"{name}.yaml"
    with suppress(OSError):  # not a valid file name
        if path.is_file():
            return path
    asked = name.lower()
    if kind == "recipes" and (reason := next((r for k, r in REFUSED.items() if k in asked), None)):
        raise RecipeError(f"there is no recipe '{name}': {reason}")
    if kind == "recipes" and "," in name:
        several = " ".join(f"-r {one.strip()}" for one in name.split(",") if one.strip())
        raise UsageError(f"'{name}' is not one recipe; give each its own -r: {several}")
    label = "calibration set" if kind == "calibration" else kind.rstrip("s")
    if own:
        hint = f"There is no file or folder of that name{similar(path, files=True) or '.'}"
        raise UnknownName(label, name, names(kind), hint)
    raise UnknownName(label, name, names(kind), "A path to a YAML file works too.")
