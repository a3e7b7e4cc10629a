"""Sweeps as commands start them: read the file, choose the executor, stay offline if possible."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import UnknownName, UsageError
from quantkit.home import expanded
from quantkit.offline import without_hub
from quantkit.progress import Progress
from quantkit.scoring import task_names
from quantkit.storage import require_writable
from quantkit.sweep import spec as sweep_spec
from quantkit.sweep.place import Place

EXECUTORS = ("here", "ray")


@dataclass(frozen=True)
class Ready:
    """A sweep whose every name and requirement was checked."""

    run: Callable[[], Any]
    estimate: Callable[[], Any]


def ready(
    file: Path, out: str, on: str, address: str | None, progress: Progress, dry: bool = False
) -> Ready:
    """Check everything that can be checked before the work."""
    if on not in EXECUTORS:
        raise UnknownName("executor", on, EXECUTORS)
    if address is not None and on != "ray":
        raise UsageError("--address is that of a Ray cluster; add --on ray")
    spec = sweep_spec.read(file)
    place = Place(out)  # before anything slower
    if "://" not in out:
        require_writable(expanded(out))
    task_names.check(spec.tasks)
    base = file.absolute().parent
    from quantkit.sweep import resolve

    if not resolve.needs_hub(spec, base):
        without_hub()
    if on == "ray":
        from quantkit.sweep import ray_cluster

        return _on_ray(ray_cluster, spec, base, place, address, progress, dry)
    from quantkit.sweep import driver, local

    prepared = driver.prepare(spec, base, place, lambda: local.devices(spec))
    if not dry:
        from quantkit.sweep import data

        data.require(prepared)
    return Ready(
        lambda: driver.run(prepared, local.LocalExecutor(progress), progress),
        lambda: driver.estimated(prepared),
    )


def _on_ray(
    ray_cluster: Any,
    spec: sweep_spec.SweepSpec,
    base: Path,
    place: Place,
    address: str | None,
    progress: Progress,
    dry: bool,
) -> Ready:
    from quantkit.sweep import driver

    cluster = ray_cluster.Cluster(address, spec.environment)
    try:
        prepared = driver.prepare(spec, base, place, lambda: cluster.devices(spec))
        if not dry:
            cluster.check(spec, place)
    except BaseException:
        cluster.close()
        raise

    def run() -> Any:
        try:
            return driver.run(prepared, cluster.executor(spec, progress), progress)
        finally:
            cluster.close()

    def estimate() -> Any:
        cluster.close()
        return driver.estimated(prepared)

    return Ready(run, estimate)


def report(out: str) -> Any:
    """The report on everything that is done in a folder."""
    from quantkit.sweep import driver

    return driver.report(Place(out))
