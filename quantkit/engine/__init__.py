"""Serving engines as child processes: starting, supervising, diagnosing and stopping them."""

LABELS = {"vllm": "vLLM"}
"""Engines whose label differs from the name that options take."""


def label(engine: str) -> str:
    """An engine's label in messages, tables and pages."""
    return LABELS.get(engine, engine)
