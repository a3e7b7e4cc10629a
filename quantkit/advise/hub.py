"""Config and tensor table of a model on the hub, without downloading its weights."""

from typing import Any

from quantkit.errors import SourceError
from quantkit.model.headers import TensorSpec
from quantkit.model.source import locate, read_config, read_tensors


def describe(name: str) -> tuple[dict[str, Any], list[TensorSpec] | None]:
    """The config, and the tensors if they are available without downloading the weights.

    A cached copy is used if there is one; otherwise only the headers of the files are requested.
    """
    folder = locate(name, weights=False)
    config = read_config(folder)
    try:
        return config, list(read_tensors(folder).values())
    except SourceError:
        return config, _headers(name)


def _headers(name: str) -> list[TensorSpec] | None:
    from huggingface_hub import get_safetensors_metadata

    try:
        files = get_safetensors_metadata(name).files_metadata.values()
    except Exception:  # whatever goes wrong, the config is still useful
        return None
    return [
        TensorSpec(key, str(info.dtype), tuple(info.shape))
        for file in files
        for key, info in file.tensors.items()
    ]
