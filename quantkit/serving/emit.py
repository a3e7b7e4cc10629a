"""Files of a deployment by kind: what `--emit` writes."""

import json
from collections.abc import Callable

from quantkit.errors import UnknownName
from quantkit.serving.compose import compose
from quantkit.serving.kubernetes import kubernetes
from quantkit.serving.monitoring import alerts, grafana
from quantkit.serving.plan import Plan

KINDS: dict[str, Callable[[Plan, float], dict[str, str]]] = {
    "compose": lambda plan, ttft: {"compose.yaml": compose(plan)},
    "k8s": lambda plan, ttft: {"kubernetes.yaml": kubernetes(plan)},
    "grafana": lambda plan, ttft: {
        "dashboard.json": json.dumps(grafana(plan, ttft), indent=2) + "\n",
        "alerts.yaml": alerts(plan, ttft),
    },
}


def files(plan: Plan, kind: str, ttft: float = 1.0) -> dict[str, str]:
    """Names and texts of the files of a kind; `ttft` is the target in seconds."""
    if kind not in KINDS:
        raise UnknownName("kind of files", kind, KINDS)
    return KINDS[kind](plan, ttft)
