"""Imports transformers without the packages that quantising never uses: a third of the cost.

transformers checks once whether a package is available and imports it if so: scikit-learn, with
scipy and pandas, for a threshold of assisted generation; scipy for losses of detectors; torch's
distributed tensors for models that are split over several processes. A command works in one process
and uses none of these. The check is answered with no while the classes load, and only in processes
of the command line: programs that import quantkit keep their transformers unchanged.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quantkit import launch

LOADED = "transformers.generation.candidate_generator"
HIDDEN = ("sklearn", "scipy")


def load() -> None:
    """Import transformers' classes, unless they are imported already."""
    if LOADED in sys.modules:
        return
    was_on = gc.isenabled()
    gc.disable()  # imports are never freed
    try:
        import torch

        with _hidden():
            _load(torch)
    finally:
        gc.freeze()
        if was_on:
            gc.enable()


def _load(torch: Any) -> None:
    from transformers.utils import import_utils

    usual = torch.distributed.is_available
    if launch.place() is None:
        torch.distributed.is_available = lambda: False
    try:
        import_utils.is_torch_distributed_available()  # which caches the answer
        import_utils.is_sklearn_available()
        import_utils.is_scipy_available()
    finally:
        torch.distributed.is_available = usual
    import transformers.generation.candidate_generator
    import transformers.modeling_utils  # noqa: F401


@contextmanager
def _hidden() -> Iterator[None]:
    """Packages hidden from importlib, unless they are imported already."""
    absent = [name for name in HIDDEN if name not in sys.modules]
    modules: dict[str, Any] = sys.modules
    modules.update(dict.fromkeys(absent))
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)
