"""Files of a deployment by kind: what `--emit` writes."""

import json
from collections.abc import Callable
from pathlib import Path

from quantkit.errors import EngineError, StorageError, UnknownName
from quantkit.serving import images
from quantkit.serving.compose import ALERTS, compose
from quantkit.serving.kubernetes import kubernetes
from quantkit.serving.monitoring import alerts, grafana
from quantkit.serving.plan import Plan

Maker = Callable[[Plan, float, str | None], str]


def _compose(plan: Plan, ttft: float, image: str | None) -> str:
    return compose(plan, image)


def _kubernetes(plan: Plan, ttft: float, image: str | None) -> str:
    return kubernetes(plan, image)


def _dashboard(plan: Plan, ttft: float, image: str | None) -> str:
    return json.dumps(grafana(plan, ttft), indent=2) + "\n"


def _alerts(plan: Plan, ttft: float, image: str | None) -> str:
    return alerts(plan, ttft)


KINDS: dict[str, dict[str, Maker]] = {
    "compose": {"compose.yaml": _compose, ALERTS: _alerts},
    "k8s": {"kubernetes.yaml": _kubernetes},
    "grafana": {"dashboard.json": _dashboard, ALERTS: _alerts},
}
"""Names of files and what makes them."""


def check(kind: str, folder: Path, force: bool = False, image: str | None = None) -> None:
    """Refuse a kind, a place or an image that cannot be, before there is a plan."""
    if kind not in KINDS:
        raise UnknownName("kind of files", kind, KINDS)
    images.check(image)
    if image is not None and kind == "grafana":
        raise EngineError("--image goes with --emit compose or k8s; a dashboard has none")
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; --out names a folder")
    # Alerts are of two kinds, which may be written side by side: they are looked at when made.
    first = next(iter(KINDS[kind]))
    if (folder / first).exists() and not force:
        raise StorageError(f"{folder / first} exists already; use --force to replace it")


def files(plan: Plan, kind: str, ttft: float = 1.0, image: str | None = None) -> dict[str, str]:
    """Names and texts of the files of a kind; `ttft` is the target in seconds."""
    if kind not in KINDS:
        raise UnknownName("kind of files", kind, KINDS)
    return {name: make(plan, ttft, image) for name, make in KINDS[kind].items()}


def refuse_changed(made: dict[Path, str], force: bool = False) -> None:
    """Stop where a file is there already and says something else."""
    for path, text in made.items():
        if not force and path.exists() and path.read_bytes() != text.encode():
            raise StorageError(
                f"{path} exists already and says something else; use --force to replace it"
            )
