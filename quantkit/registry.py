"""Names of the quantisation engines. Listing and checking them does not load torch."""

from quantkit.errors import UnknownName

NATIVE = "native"
ENGINES = (NATIVE, "llmcompressor")
"""Quantisation engines: quantkit itself, or the optional llm-compressor."""


def check_engine(name: str) -> None:
    """Refuse an unknown engine."""
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
