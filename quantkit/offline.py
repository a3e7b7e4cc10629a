"""Keeps libraries from waiting minutes for a hub that a run does not need."""

import os


def without_hub() -> None:
    """Tell Hugging Face libraries to stay offline; must run before they are imported."""
    for variable in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(variable, "1")
