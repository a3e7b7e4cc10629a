"""The engines by name: who does the arithmetic. Listing and checking them needs no torch."""

from quantkit.errors import UnknownName

NATIVE = "native"
ENGINES = (NATIVE, "llmcompressor")
"""Who does the arithmetic: quantkit itself, or the optional llm-compressor."""


def check_engine(name: str) -> None:
    """Refuse an engine that does not exist."""
    if name not in ENGINES:
        raise UnknownName("engine", name, ENGINES)
