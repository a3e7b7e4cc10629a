"""Runs steps as tasks of a Ray cluster, an existing one by its address or a local one.

Each job is one task with its GPUs, cores and memory. Ray does not retry failures: the driver does,
since it knows what a failure means. On an existing cluster, our code is shipped in Ray's runtime
environment, so that only the libraries must be installed.
"""

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit import resources
from quantkit.errors import HardwareError, MissingDependency, StorageError, SweepError
from quantkit.progress import Progress
from quantkit.quiet import only_errors
from quantkit.storage import gib
from quantkit.sweep.expand import Devices
from quantkit.sweep.graph import Step
from quantkit.sweep.place import Place
from quantkit.sweep.spec import COMPUTING, KINDS, Resources, SweepSpec
from quantkit.sweep.worker import Functions, Job, Outcome, execute

SECONDS_TO_ANSWER = 10.0
SECONDS_TO_START = 300.0
"""For the first node to run anything: it unpacks our code, and may create an environment."""
SECONDS_MORE = 20.0
"""For all others."""
SECONDS_OF_A_WAIT = 1.0
MOST_TASKS = 5000
TRAVELLING = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
"""Environment variables that workers have to share; no secrets: Ray shows these to everybody."""


class Cluster:
    """A connection to Ray."""

    def __init__(
        self,
        address: str | None = None,
        environment: Mapping[str, Any] | None = None,
        n_cpus: int | None = None,
    ) -> None:
        self._ray = _library()
        more: dict[str, Any] = {}
        if address is None:
            more = {"include_dashboard": False, "num_cpus": n_cpus}
        else:
            _require_answer(address)
        if address is not None or environment:  # a local cluster has our code already
            more["runtime_env"] = _environment(environment or {})
        try:
            with only_errors("ray"):
                self._ray.init(
                    address=address or "local",
                    log_to_driver=False,
                    logging_level="ERROR",
                    configure_logging=False,
                    **more,
                )
        except Exception as error:  # Ray raises all kinds of errors
            where = f"no Ray cluster answers at {address}" if address else "Ray cannot start here"
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise SweepError(f"{where}: {first}") from error

    def close(self) -> None:
        """Disconnect; our tasks end with it, and so does a local cluster."""
        self._ray.shutdown()

    def devices(self, spec: SweepSpec) -> Devices:
        """The devices: GPUs where any node has them, unless specified."""
        has = any(node.get("GPU", 0) >= 1 for node in self._nodes().values())

        def chosen(kind: str) -> str:
            gpus = self._gpus(spec, kind, has)
            if spec.device == "cuda" and not gpus:
                raise HardwareError("device: cuda, but no node of the cluster has a GPU")
            return "cuda" if gpus else "cpu"

        return Devices(chosen("quantize"), chosen("score"), spec.of("quantize").gpus or 1)

    def check(self, spec: SweepSpec, place: Place) -> None:
        """Refuse before the start what no node can do, and storage that some do not see."""
        nodes = self._nodes()
        for kind in KINDS:
            _require_node(kind, spec.of(kind), list(nodes.values()))
        if place.protocol == "memory":
            raise StorageError(f"{place.address} is visible to this process alone; give a folder")
        if place.local is not None:
            self._require_shared(place)

    def executor(
        self, spec: SweepSpec, progress: Progress, functions: Functions | None = None
    ) -> "RayExecutor":
        """The executor that runs jobs there."""
        has = any(node.get("GPU", 0) >= 1 for node in self._nodes().values())
        options = {kind: _options(spec.of(kind), self._gpus(spec, kind, has)) for kind in KINDS}
        return RayExecutor(self._ray, options, progress, functions)

    def _nodes(self) -> dict[str, dict[str, float]]:
        """Resources of every node that is up, by its id."""
        return {n["NodeID"]: n["Resources"] for n in self._ray.nodes() if n["Alive"]}

    def _gpus(self, spec: SweepSpec, kind: str, has: bool) -> int:
        asked = spec.of(kind).gpus
        if asked is not None:
            return asked
        return int(has and kind in COMPUTING and spec.device != "cpu")

    def _require_shared(self, place: Place) -> None:
        """A folder that is not shared by all nodes would lose results."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        assert place.local is not None
        mark = f".seen-{uuid.uuid4().hex[:8]}"
        place.write(mark, b"quantkit")
        try:
            asked = {
                self._ray.remote(_sees)
                .options(
                    num_cpus=0,
                    max_retries=1,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                )
                .remote(str(place.local / mark)): node
                for node in self._nodes()
            }
            # One answer shows that the cluster works; the slowest nodes are not waited for.
            self._ray.wait(list(asked), num_returns=1, timeout=SECONDS_TO_START)
            ready, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=SECONDS_MORE)
            answers = [answer for task in ready if (answer := self._got(task)) is not None]
            for host, seen in answers:
                if not seen:
                    raise StorageError(
                        f"node {host} does not see {place.local}: give a folder that all nodes "
                        "share, or a bucket such as s3://"
                    )
            if not answers:
                raise SweepError("no node of the cluster answers; see `ray status`")
        finally:
            place.remove(mark)

    def _got(self, task: Any) -> tuple[str, bool] | None:
        """A node's answer; None if the node went away."""
        errors = self._ray.exceptions
        try:
            host, seen = self._ray.get(task)
        except (errors.RuntimeEnvSetupError, errors.RayTaskError) as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise SweepError(f"a node of the cluster cannot run quantkit: {first}") from error
        except errors.RayError:
            return None
        return str(host), bool(seen)


@dataclass
class RayExecutor:
    """Runs jobs as tasks."""

    ray: Any
    options: Mapping[str, Mapping[str, Any]]
    progress: Progress
    functions: Functions | None = None

    def __post_init__(self) -> None:
        self._running: dict[Any, Job] = {}
        self._shared = None if self.functions is None else self.ray.put(self.functions)
        self._task = self.ray.remote(_execute)

    def bundle(self, step: Step) -> str:
        """Recipes share a pass; tasks are scored in parallel."""
        return step.together

    def room(self) -> int:
        """Ray queues what has no machine yet; some thousands at a time."""
        return MOST_TASKS - len(self._running)

    def start(self, job: Job) -> None:
        """Submit a job to the cluster."""
        task = self._task.options(
            **self.options.get(job.kind, {"num_cpus": 1}),
            name=job.title,
            max_retries=0,
        )
        self._running[task.remote(job, self._shared)] = job

    def wait(self) -> list[tuple[Job, Outcome]]:
        """Jobs that have ended."""
        if not self._running:
            return []
        every = list(self._running)
        ready, _ = self.ray.wait(every, num_returns=1, timeout=SECONDS_OF_A_WAIT)
        if ready and len(every) > 1:  # all others that happen to be ready as well
            ready, _ = self.ray.wait(every, num_returns=len(every), timeout=0)
        return [(self._running.pop(task), self._outcome(task)) for task in ready]

    def _outcome(self, task: Any) -> Outcome:
        errors = self.ray.exceptions
        try:
            found = self.ray.get(task)
            assert isinstance(found, Outcome)
            return found
        except errors.RuntimeEnvSetupError as error:
            raise SweepError(
                f"the cluster cannot make the environment that the sweep asks for: {error}"
            ) from error
        except errors.OutOfMemoryError:
            return Outcome(error="its machine ran out of memory; give `resources` more memory")
        except errors.RayTaskError as error:  # our own code outside a step
            return Outcome(error=next(iter(str(error.cause or error).splitlines()), "it failed"))
        except errors.WorkerCrashedError:  # which may well be the step's own fault
            return Outcome(error="its process was killed, or crashed")
        except (errors.NodeDiedError, errors.LocalRayletDiedError, errors.ObjectLostError):
            return Outcome(error="its machine went away", died=True)
        except errors.RayError as error:
            first = next(iter(str(error).splitlines()), type(error).__name__)
            raise SweepError(
                f"the cluster went away: {first}; run the same command again to resume"
            ) from error


def _execute(job: Job, functions: Functions | None) -> Outcome:
    return execute(job, None, functions)


def _sees(path: str) -> tuple[str, bool]:
    return socket.gethostname(), Path(path).is_file()


def _options(wanted: Resources, gpus: int) -> dict[str, Any]:
    options: dict[str, Any] = {"num_cpus": wanted.cpus, "num_gpus": gpus}
    return options | ({"memory": wanted.memory} if wanted.memory is not None else {})


def _environment(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Our code, the variables that decide whether a hub is used, and the sweep's additions."""
    import quantkit

    switches = {name: os.environ[name] for name in TRAVELLING if name in os.environ}
    asked = dict(wanted)
    variables = switches | dict(asked.pop("env_vars", {}))
    modules = [str(Path(quantkit.__file__).parent), *asked.pop("py_modules", [])]
    return {"py_modules": modules, "env_vars": variables, **asked}


def _require_node(kind: str, wanted: Resources, nodes: Sequence[Mapping[str, float]]) -> None:
    """At least one node must have everything that a step needs."""
    asked = {"GPU": wanted.gpus or 0, "CPU": wanted.cpus, "memory": wanted.memory or 0}
    if any(all(node.get(key, 0) >= much for key, much in asked.items()) for node in nodes):
        return
    for key, much in asked.items():
        most = max((node.get(key, 0) for node in nodes), default=0)
        if much > most:
            words = {
                "GPU": (f"{much:g} GPUs", f"{most:g}"),
                "CPU": (f"{much:g} cores", f"{most:g}"),
                "memory": (f"{gib(much)} of memory", gib(most)),
            }[key]
            raise HardwareError(
                f"resources.{kind} asks for {words[0]}, and no node of the cluster has more than "
                f"{words[1]}; ask for less"
            )
    raise HardwareError(
        f"resources.{kind}: no node of the cluster has all of it at once; ask for less"
    )


def _require_answer(address: str) -> None:
    """Fail at once if nobody answers: Ray itself would retry for minutes."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise SweepError(f"--address {address}: give HOST:PORT of a Ray cluster, or auto")
    try:
        socket.create_connection((host, int(port)), SECONDS_TO_ANSWER).close()
    except OSError as error:
        raise SweepError(
            f"no Ray cluster answers at {address}: {error.strerror or error}; start one with `ray "
            "start --head`, or check the address"
        ) from error


def _library() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ModuleNotFoundError as error:
        raise MissingDependency(
            f"--on ray needs the package ray; install it: {resources.install('ray')}"
        ) from error
    return ray
