"""Libraries whose versions affect what a step writes.

A result that another version made is another result: the step is done again, and what depends on
it. Builds of one version for other hardware count as the same, since the device is recorded
separately.
"""

from collections.abc import Mapping
from importlib import metadata

from quantkit.errors import SweepError

DECISIVE = {
    "calibrate": ("transformers", "tokenizers"),
    "quantize": ("torch", "transformers"),
    "score": ("torch", "transformers", "lm_eval"),
}
"""By kind of step. The others only read what these made."""


def of(kind: str) -> dict[str, str]:
    """Installed versions of the libraries that affect a kind of step."""
    return {package: installed(package) for package in DECISIVE.get(kind, ())}


def installed(package: str) -> str:
    """A package's version, without its build tag."""
    return metadata.version(package).partition("+")[0]


def require(wanted: Mapping[str, str]) -> None:
    """Refuse to make here what would be recorded as another version's work."""
    for package, version in wanted.items():
        if (found := installed(package)) != version:
            raise SweepError(
                f"this machine has {package} {found}, where the sweep was started with {version}; "
                "install the same version on both"
            )
