"""Imports transformers without the packages that quantising never uses: half of the cost.

transformers checks once whether a package is available and imports it if so: scikit-learn, with
scipy and pandas, for a threshold of assisted generation; scipy for losses of detectors; torch's
distributed tensors for models that are split over several processes. torch does so with dill, and
the hub's client with trio. A command works in one process and uses none of these. The check is
answered with no while the classes load, and only in processes of the command line: programs that
import quantkit keep their transformers unchanged.

transformers also imports torch's compiler (a third of what is left) for decorators that speak to
it, and one context manager; torchvision, where it is installed, for one question. Nothing is
compiled here, so while the classes load, a stand-in takes the compiler's place; whoever needs the
real one later imports it as usual. And transformers reads
the metadata of every installed package for a table of which package provides which module, of which
it needs a few rows.
"""

import gc
import importlib.metadata
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from quantkit import launch
from quantkit.model import class_table

LOADED = "transformers.generation.candidate_generator"
HIDDEN = ("sklearn", "scipy", "dill", "trio")
COMPILER = "torch._dynamo"
_is_lean = False
DECORATORS = ("allow_in_graph", "assume_constant_result", "disable")


def load() -> None:
    """Import transformers' classes, unless they are imported already."""
    global _is_lean
    if LOADED in sys.modules:
        return
    _is_lean = True
    was_on = gc.isenabled()
    gc.disable()  # imports are never freed
    try:
        with _hidden(), _few_packages(), class_table.kept():
            import torch

            try:
                with _stand_in(torch):
                    _load(torch)
            except (ImportError, AttributeError):  # it needs more of the compiler than is known
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
        answers = {
            "sklearn": import_utils.is_sklearn_available(),
            "scipy": import_utils.is_scipy_available(),
        }
    finally:
        torch.distributed.is_available = usual
    for name, is_there in answers.items():
        if is_there and sys.modules.get(name, answers) is None:
            del sys.modules[name]  # asked before it was hidden: what follows imports it
    import transformers.generation.candidate_generator
    import transformers.generation.utils
    import transformers.masking_utils
    import transformers.modeling_layers
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
            # One that was asked for before is imported after all, and stays: without it, its own
            # modules would be left alone.
            if sys.modules.get(name, absent) is None:
                del sys.modules[name]


@contextmanager
def without_compiler() -> Iterator[None]:
    """Build a model's modules, whose initialisation asks for torch's compiler, without it.

    Only after `load`: other programs keep their torch unchanged.
    """
    if not _is_lean or COMPILER in sys.modules:
        yield
        return
    import torch

    with _stand_in(torch):
        yield


@contextmanager
def _stand_in(torch: Any) -> Iterator[None]:
    """What decorates functions for torch's compiler, in place of all of it."""
    if COMPILER in sys.modules:
        yield
        return
    compiler = _module(COMPILER, dict.fromkeys(DECORATORS, _unchanged))
    compiler.__path__ = []
    inner = {f"{COMPILER}.{name}": names for name, names in INNER.items()}
    modules = {COMPILER: compiler} | {name: _module(name, inner[name]) for name in inner}
    sys.modules.update(modules)
    torch._dynamo = compiler
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]
        del torch._dynamo


def _module(name: str, functions: Mapping[str, Callable[..., Any]]) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(functions)
    return made


def _unchanged(function: Callable[..., Any] | None = None, *_: Any, **__: Any) -> Any:
    """A decorator, with or without options, that decorates nothing."""
    return _unchanged if function is None else function


def _real_transform() -> Any:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()


def _real_answer(device: str) -> Any:
    from torch._dynamo.utils import is_compile_supported

    return is_compile_supported(device)


INNER: dict[str, dict[str, Callable[..., Any]]] = {
    "_trace_wrapped_higher_order_op": {"TransformGetItemToIndex": _real_transform},
    "utils": {"is_compile_supported": _real_answer},
}
"""What is imported from inside the compiler while the classes load."""


class _Providers(dict[str, list[str]]):
    """Names of the packages that provide a module, sought when they are asked for."""

    def __init__(self, of_all: Callable[[], Any]) -> None:
        super().__init__()
        self._of_all: Callable[[], Any] | None = of_all

    def get(self, module: str, default: Any = None) -> Any:
        """The package of that name, or what a look at all packages finds."""
        try:
            importlib.metadata.distribution(module)
        except importlib.metadata.PackageNotFoundError:
            if self._of_all is not None:
                self.update(self._of_all())
                self._of_all = None
            return super().get(module, default)
        return [module]


@contextmanager
def _few_packages() -> Iterator[None]:
    """No look at all installed packages before a module's own name does not find its package."""
    usual = importlib.metadata.packages_distributions
    importlib.metadata.packages_distributions = lambda: _Providers(usual)
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = usual
