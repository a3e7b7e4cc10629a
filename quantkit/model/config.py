"""What a config says about how its weights were quantised; `dequantized` reads the numbers."""

from collections.abc import Mapping
from typing import Any


def method_of(config: Mapping[str, Any]) -> str | None:
    """The quantisation method that a config names."""
    for part in (config, *(v for v in config.values() if isinstance(v, dict))):
        found = part.get("quantization_config")
        if found:
            known = found if isinstance(found, dict) else {}
            return str(known.get("quant_method") or known.get("quant_algo") or "some method")
    return None


def plain_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the unquantised model."""
    return {
        key: plain_config(value) if isinstance(value, dict) and key.endswith("_config") else value
        for key, value in config.items()
        if key != "quantization_config"
    }
