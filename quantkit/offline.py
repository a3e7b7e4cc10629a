"""Keeps libraries from waiting minutes for a hub that the run does not need."""

import os


def without_hub() -> None:
    """Put Hugging Face libraries into offline mode; must run before they are imported."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(variable, "1")
