"""Loads transformers without what quantising never uses: a third of what its import costs.

transformers asks once whether a package is there and imports it if so: scikit-learn, with scipy
and pandas behind it, for a threshold of assisted generation; torch's distributed tensors for models
that are cut over several processes. A command works in one process and uses neither. The question
is answered with no while the classes load, and only in processes of the command line: programs that
import quantkit keep their transformers as it is.
"""

import sys
from typing import Any

from quantkit import launch

LOADED = "transformers.generation.candidate_generator"


def load() -> None:
    """Have transformers' classes loaded, unless they are."""
    if LOADED in sys.modules:
        return
    hidden: dict[str, Any] = {"sklearn": None}  # for importlib: it is not there
    had = {name for name in hidden if name in sys.modules}
    sys.modules.update({name: there for name, there in hidden.items() if name not in had})
    try:
        import torch
        from transformers.utils import import_utils

        usual = torch.distributed.is_available
        if launch.place() is None:
            torch.distributed.is_available = lambda: False
        try:
            import_utils.is_torch_distributed_available()  # which keeps the answer
            import_utils.is_sklearn_available()
        finally:
            torch.distributed.is_available = usual
        import transformers.generation.candidate_generator
        import transformers.modeling_utils  # noqa: F401
    finally:
        for name in hidden.keys() - had:
            sys.modules.pop(name, None)
