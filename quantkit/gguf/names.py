"""Names and numbers of the GGUF format from gguf-py, without importing the rest of it.

The package imports numpy and its readers and writers, which takes longer than the rest of `quantkit
recommend`. Its names need none of that. So only the modules that hold names are executed at first;
the package itself runs when anything else is requested from it.
"""

import sys
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any


class _Later(ModuleType):
    """A package that is executed on the first access to an attribute that it does not have yet."""

    def __getattr__(self, name: str) -> Any:
        object.__setattr__(self, "__class__", ModuleType)
        if self.__spec__ is not None and self.__spec__.loader is not None:
            self.__spec__.loader.exec_module(self)
        return getattr(self, name)


if "gguf" not in sys.modules and (_spec := find_spec("gguf")) is not None:
    _package = module_from_spec(_spec)
    _package.__class__ = _Later
    sys.modules["gguf"] = _package

from gguf.constants import (  # noqa: E402
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    MODEL_TENSOR,
    TENSOR_NAMES,
    GGMLQuantizationType,
    Keys,
    LlamaFileType,
    RopeScalingType,
)
from gguf.tensor_mapping import get_tensor_name_map  # noqa: E402

__all__ = (
    "GGML_QUANT_SIZES",
    "MODEL_ARCH",
    "MODEL_ARCH_NAMES",
    "MODEL_TENSOR",
    "TENSOR_NAMES",
    "GGMLQuantizationType",
    "Keys",
    "LlamaFileType",
    "RopeScalingType",
    "get_tensor_name_map",
)
