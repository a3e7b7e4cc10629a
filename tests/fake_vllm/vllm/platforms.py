"""The platform of the stand-in: a GPU by name."""

from types import SimpleNamespace

current_platform = SimpleNamespace(is_cpu=lambda: False, get_device_name=lambda: "Fake GPU")
