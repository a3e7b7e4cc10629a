"""A Kubernetes manifest: a Deployment with probes and GPUs, and a Service for it.

With a number of replicas also what a fleet needs: a KEDA ScaledObject that adds servers while
requests wait, a budget that keeps the warm ones, updates that remove no server before another is
ready, and a route of the Gateway API.
"""

import re
from typing import Any

from quantkit.errors import EngineError
from quantkit.serving.compose import start_seconds
from quantkit.serving.fleet import Fleet
from quantkit.serving.images import PORT, RESOURCES, Container, container
from quantkit.serving.plan import Plan
from quantkit.serving.yamltext import dump, head

GIB = 1 << 30
CLAIM = "models"
PROBE_SECONDS = 10
WAITING_SHARE = 4
"""A server is added when this share of its sequences is waiting: a quarter."""
SLOW_ANSWER_SECONDS = 600
"""Answers may take this long before the gateway gives up, and pods terminate afterwards."""
COOLING_SECONDS = 300
"""A server that is not needed stays this long, since a start takes minutes."""


def kubernetes(plan: Plan, fleet: Fleet | None = None) -> str:
    """The manifest's text: two documents for one server, more for a fleet."""
    fleet = fleet or Fleet()
    box = container(plan, fleet.image)
    _refuse_same_names(box)
    name = label(plan.target.name)
    own = {"app.kubernetes.io/name": name, "app.kubernetes.io/component": "engine"}
    documents = [_deployment(plan, box, name, own, fleet), _service(name, own)]
    folders = ", ".join(_inside_claim(here) for here, _ in box.mounts)
    lines = [
        "kubectl apply -f FILE",
        f"The model is in a volume: a PersistentVolumeClaim `{CLAIM}` with {folders}.",
    ]
    if fleet.is_scaled:
        documents += [_budget(name, own, fleet), _route(name, own, fleet)]
        lines.append(f"The route needs a Gateway `{fleet.gateway}` (Gateway API).")
        if fleet.most > 1:
            lines.append("The volume must be readable by several nodes (ReadOnlyMany).")
        if fleet.most > fleet.least:
            documents.append(_scaling(plan, name, own, fleet))
            lines.append(f"Scaling needs KEDA, and Prometheus at {fleet.prometheus}.")
    return head(plan, *lines) + dump(documents)


def waiting_threshold(plan: Plan) -> int:
    """Requests that may wait per server before another one is started."""
    return max(1, plan.size.sequences // WAITING_SHARE)


def _scaling(plan: Plan, name: str, own: dict[str, str], fleet: Fleet) -> dict[str, Any]:
    """Servers follow the number of waiting requests; below the threshold none is added."""
    if plan.engine == "vllm":
        query = f'sum(vllm:num_requests_waiting{{model_name="{plan.served_name}"}})'
    else:
        query = "sum(llamacpp:requests_deferred)"
    start = start_seconds(plan)
    trigger = {
        "type": "prometheus",
        "metadata": {
            "serverAddress": fleet.prometheus,
            "query": query,
            "threshold": str(waiting_threshold(plan)),
        },
    }
    # One at a time: otherwise a second would be requested while the first still loads.
    up = {"type": "Pods", "value": 1, "periodSeconds": min(start, 1800)}
    down = {"type": "Pods", "value": 1, "periodSeconds": 60}
    return {
        "apiVersion": "keda.sh/v1alpha1",
        "kind": "ScaledObject",
        "metadata": {"name": name, "labels": own},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": name},
            "minReplicaCount": fleet.least,
            "maxReplicaCount": fleet.most,
            "pollingInterval": 15,
            "cooldownPeriod": COOLING_SECONDS,
            "advanced": {
                "horizontalPodAutoscalerConfig": {
                    "behavior": {
                        "scaleUp": {"stabilizationWindowSeconds": 30, "policies": [up]},
                        "scaleDown": {
                            "stabilizationWindowSeconds": COOLING_SECONDS,
                            "policies": [down],
                        },
                    }
                }
            },
            "triggers": [trigger],
        },
    }


def _budget(name: str, own: dict[str, str], fleet: Fleet) -> dict[str, Any]:
    """Draining nodes removes one server at a time."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": name, "labels": own},
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": own}},
    }


def _route(name: str, own: dict[str, str], fleet: Fleet) -> dict[str, Any]:
    """From the gateway to the service; answers that stream may take long."""
    return {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": name, "labels": own},
        "spec": {
            "parentRefs": [{"name": fleet.gateway}],
            "rules": [
                {
                    "matches": [{"path": {"type": "PathPrefix", "value": "/v1"}}],
                    "backendRefs": [{"name": name, "port": 80}],
                    "timeouts": {"request": f"{SLOW_ANSWER_SECONDS}s"},
                }
            ],
        },
    }


def label(name: str) -> str:
    """A valid Kubernetes name: lower case, digits and dashes, at most 63."""
    safe = re.sub(r"[^a-z0-9]+", "-", name.lower())[:55].strip("-")
    return safe if safe and safe[0].isalpha() else f"model-{safe}".rstrip("-")


def _deployment(
    plan: Plan, box: Container, name: str, own: dict[str, str], fleet: Fleet
) -> dict[str, Any]:
    volumes: list[dict[str, Any]] = [
        {"name": "models", "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}},
        # GPUs that share a model communicate through shared memory; a pod's default 64 MB is too
        # little.
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
        # Answers in progress are finished; the gateway gives up on longer ones.
        "terminationGracePeriodSeconds": SLOW_ANSWER_SECONDS if fleet.is_scaled else 60,
        "containers": [engine],
        "volumes": volumes,
    }
    # Alone on its GPUs, a second pod would wait for those that the first one holds.
    strategy: dict[str, Any] = {"type": "Recreate"}
    if fleet.is_scaled:
        rolling = {"maxSurge": 1, "maxUnavailable": 0}
        strategy = {"type": "RollingUpdate", "rollingUpdate": rolling}
    spec: dict[str, Any] = {
        "replicas": fleet.least,
        "selector": {"matchLabels": own},
        "strategy": strategy,
        "progressDeadlineSeconds": 2 * start_seconds(plan),
        "template": {"metadata": {"labels": own, "annotations": annotations}, "spec": pod},
    }
    if fleet.most > fleet.least:
        del spec["replicas"]  # which would undo KEDA's scaling whenever the file is applied
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "labels": own},
        "spec": spec,
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
    """In a volume folders are identified by name alone, so one would be mistaken for another."""
    found: dict[str, str] = {}
    for here, _ in box.mounts:
        if found.setdefault(_inside_claim(here), here) != here:
            raise EngineError(
                f"{found[_inside_claim(here)]} and {here} would be one folder in the volume "
                f"`{CLAIM}`; give one of them another name"
            )


def _inside_claim(folder: str) -> str:
    return folder.rstrip("/").rpartition("/")[2]
