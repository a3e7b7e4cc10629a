"""Deployment files by kind: what `--emit` writes."""

import json
from collections.abc import Callable
from pathlib import Path

from quantkit.errors import EngineError, StorageError, UnknownName
from quantkit.serving import images
from quantkit.serving.compose import ALERTS, DASHBOARD, compose
from quantkit.serving.fleet import Fleet
from quantkit.serving.kubernetes import kubernetes
from quantkit.serving.monitoring import alerts, grafana
from quantkit.serving.plan import Plan
from quantkit.storage import guarded, write_text

Maker = Callable[[Plan, Fleet], str]


def _dashboard(plan: Plan, fleet: Fleet) -> str:
    return json.dumps(grafana(plan, fleet.targets), indent=2) + "\n"


def _alerts(plan: Plan, fleet: Fleet) -> str:
    return alerts(plan, fleet.targets)


KINDS: dict[str, dict[str, Maker]] = {
    "compose": {"compose.yaml": compose, ALERTS: _alerts, DASHBOARD: _dashboard},
    "k8s": {"kubernetes.yaml": kubernetes},
    "grafana": {DASHBOARD: _dashboard, ALERTS: _alerts},
}
"""File names and the functions that make them."""
SHARED = (ALERTS, DASHBOARD)
"""Files of more than one kind, which may be written to the same folder."""


def check(kind: str, folder: Path, fleet: Fleet, force: bool = False) -> None:
    """Refuse an impossible kind, path or image before there is a plan."""
    if kind not in KINDS:
        raise UnknownName("kind of files", kind, KINDS)
    images.check(fleet.image)
    if fleet.image is not None and kind == "grafana":
        raise EngineError("--image needs --emit compose or k8s; a dashboard has no image")
    if fleet.is_scaled and kind != "k8s":
        raise EngineError(f"--replicas goes with --emit k8s; {kind} has no replicas")
    if folder.exists() and not folder.is_dir():
        raise StorageError(f"{folder} is a file; --out names a folder")
    for name in KINDS[kind]:
        if name not in SHARED and (folder / name).exists() and not force:
            raise StorageError(f"{folder / name} exists already; use --force to replace it")


def files(plan: Plan, kind: str, fleet: Fleet | None = None) -> dict[str, str]:
    """Names and texts of the files of a kind."""
    if kind not in KINDS:
        raise UnknownName("kind of files", kind, KINDS)
    return {name: make(plan, fleet or Fleet()) for name, make in KINDS[kind].items()}


def placed(
    plan: Plan, kind: str, folder: Path, fleet: Fleet, force: bool = False
) -> dict[Path, str]:
    """The same by path, for a folder where nothing conflicts with them."""
    made = {folder / name: text for name, text in files(plan, kind, fleet).items()}
    for path, text in made.items():
        if not force and path.exists() and path.read_bytes() != text.encode():
            raise StorageError(
                f"{path} exists already with other content; use --force to replace it"
            )
    return made


def write(made: dict[Path, str]) -> None:
    """Write files to their paths."""
    for path, text in made.items():
        with guarded(path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
