"""What a config says of how its weights were quantised; the numbers are for `dequantized`."""

from collections.abc import Mapping
from typing import Any


def method_of(config: Mapping[str, Any]) -> str | None:
    """The name of the method that a config says its weights were quantised with."""
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        found = part.get("quantization_config")
        if found:
            known = found if isinstance(found, dict) else {}
            return str(known.get("quant_method") or known.get("quant_algo") or "some method")
    return None


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the model that the numbers stand for."""
    return {
        key: plain_config(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in config.items()
        if key != "quantization_config"
    }
