"""quantkit: quantise language models, and measure what it costs.

The names below are the public API (`quantkit.api` documents each). They are loaded on first use:
importing quantkit loads neither torch nor any other slow module.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from quantkit import errors as errors
    from quantkit.api import calibrate as calibrate
    from quantkit.api import compare as compare
    from quantkit.api import convert as convert
    from quantkit.api import gate as gate
    from quantkit.api import predict as predict
    from quantkit.api import quantize as quantize
    from quantkit.api import recommend as recommend
    from quantkit.api import score as score
    from quantkit.api import verify as verify
    from quantkit.calibration.calibration_set import CalibrationSet as CalibrationSet
    from quantkit.recipe import Recipe as Recipe
    from quantkit.report.comparison import Report as Report

_HOMES = {
    "CalibrationSet": "quantkit.calibration.calibration_set",
    "Recipe": "quantkit.recipe",
    "Report": "quantkit.report.comparison",
    "calibrate": "quantkit.api",
    "compare": "quantkit.api",
    "convert": "quantkit.api",
    "errors": "quantkit",
    "gate": "quantkit.api",
    "predict": "quantkit.api",
    "quantize": "quantkit.api",
    "recommend": "quantkit.api",
    "score": "quantkit.api",
    "verify": "quantkit.api",
}

__all__ = [
    "CalibrationSet",
    "Recipe",
    "Report",
    "calibrate",
    "compare",
    "convert",
    "errors",
    "gate",
    "predict",
    "quantize",
    "recommend",
    "score",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'quantkit' has no attribute {name!r}")
    from importlib import import_module

    if name == "errors":
        return import_module("quantkit.errors")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
