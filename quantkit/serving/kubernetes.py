"""A Kubernetes manifest: a Deployment with probes and GPUs, and a Service before it."""

import re
from typing import Any

from quantkit.errors import EngineError
from quantkit.serving.compose import start_seconds
from quantkit.serving.images import PORT, RESOURCES, Container, container
from quantkit.serving.plan import Plan
from quantkit.serving.yamltext import dump, head

GIB = 1 << 30
CLAIM = "models"
PROBE_SECONDS = 10


def kubernetes(plan: Plan, image: str | None = None) -> str:
    """The manifest's text, two documents."""
    box = container(plan, image)
    _refuse_same_names(box)
    name = label(plan.target.name)
    own = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "engine"}
    documents = [_deployment(plan, box, name, own), _service(name, own)]
    folders = ", ".join(_inside_claim(here) for here, _ in box.mounts)
    claim = f"The model lies in a volume: a PersistentVolumeClaim `{CLAIM}` with {folders}."
    return head(plan, "kubectl apply -f FILE", claim) + dump(documents)


def label(name: str) -> str:
    """A name as Kubernetes takes it: lower case, digits and dashes, at most 63."""
    safe = re.sub(r"[^a-z0-9]+", "-", name.lower())[:55].strip("-")
    return safe if safe and safe[0].isalpha() else f"model-{safe}".rstrip("-")


def _deployment(plan: Plan, box: Container, name: str, own: dict[str, str]) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}},
        # GPUs that share a model talk through shared memory; a pod's own 64 MB are too few.
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": _shm(plan)}},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "models", "mountPath": there, "subPath": _inside_claim(here), "readOnly": True}
        for here, there in box.mounts
    ]
    engine = {
        "name": "engine",
        "image": box.image,
        "command": list(box.entrypoint),
        "args": list(box.arguments),
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "ports": [{"name": "http", "containerPort": PORT}],
        "resources": _resources(plan),
        "startupProbe": _probe(-(-start_seconds(plan) // PROBE_SECONDS)),
        "readinessProbe": _probe(3),
        "livenessProbe": _probe(6),
        "volumeMounts": [*mounts, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    annotations = {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(PORT),
        "prometheus.io/path": "/metrics",
    }
    pod = {
        # A Service called `vllm` would have Kubernetes set VLLM_PORT, which vLLM reads.
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": 60,
        "containers": [engine],
        "volumes": volumes,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": own},
        "spec": {
            "replicas": 1,
            "selector": {"matchLabels": own},
            # A second pod would wait for GPUs that the first one holds.
            "strategy": {"type": "Recreate"},
            "template": {"metadata": {"labels": own, "annotations": annotations}, "spec": pod},
        },
    }


def _service(name: str, own: dict[str, str]) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": own},
        "spec": {
            "selector": own,
            "ports": [{"name": "http", "port": 80, "targetPort": "http"}],
        },
    }


def _probe(failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": "http"},
        "periodSeconds": PROBE_SECONDS,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }


def _resources(plan: Plan) -> dict[str, Any]:
    """GPUs, and main memory to load through: the weights of one GPU, and room for Python."""
    fit = plan.size.fit
    weights = fit.weight_bytes if fit else 0
    if plan.demand.gpu.vendor == "cpu" and fit is not None:
        weights += plan.size.sequences * fit.user_bytes
    memory = f"{8 + -(-weights // GIB)}Gi"
    requests = {"cpu": str(2 + 2 * plan.size.split.n_gpus), "memory": memory}
    if plan.demand.gpu.vendor not in RESOURCES:
        return {"requests": requests}
    gpus = {RESOURCES[plan.demand.gpu.vendor]: str(plan.size.split.n_gpus)}
    return {"requests": {**requests, **gpus}, "limits": gpus}


def _shm(plan: Plan) -> str:
    return "16Gi" if plan.size.split.n_gpus > 1 else "2Gi"


def _refuse_same_names(box: Container) -> None:
    """In a volume folders are known by their names alone, so one would be taken for another."""
    found: dict[str, str] = {}
    for here, _ in box.mounts:
        if found.setdefault(_inside_claim(here), here) != here:
            raise EngineError(
                f"{found[_inside_claim(here)]} and {here} would be one folder in the volume "
                f"`{CLAIM}`; give one of them another name"
            )


def _inside_claim(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]
