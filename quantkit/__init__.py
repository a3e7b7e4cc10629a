"""quantkit: quantise language models, and know what it cost."""

__version__ = "0.1.0.dev0"
