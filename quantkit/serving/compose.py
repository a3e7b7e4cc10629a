"""A compose file: the engine with its GPUs and a health check, plus Prometheus and Grafana.

Prometheus reads its rules, and Grafana its dashboard, from files next to the compose file.
"""

from typing import Any

from quantkit.serving.fleet import Fleet
from quantkit.serving.images import PORT, container
from quantkit.serving.plan import Plan
from quantkit.serving.yamltext import dump, head

PROMETHEUS = "prom/prometheus:v3.5.0"
GRAFANA = "grafana/grafana:12.2.0"
SCRAPE_SECONDS = 15
ALERTS = "alerts.yaml"
DASHBOARD = "dashboard.json"
BOARDS = "/var/lib/grafana/dashboards"
PROVISIONING = "/etc/grafana/provisioning"
RULES = f"/etc/prometheus/{ALERTS}"
"""Their path inside the Prometheus container."""


def compose(plan: Plan, fleet: Fleet | None = None) -> str:
    """The file's text."""
    box = container(plan, (fleet or Fleet()).image)
    host, port = plan.address
    gpu = plan.demand.gpu.vendor
    service: dict[str, Any] = {
        "image": box.image,
        "entrypoint": list(box.entrypoint),
        "command": [word.replace("$", "$$") for word in box.arguments],
        "ports": [f"{_ip(host)}:{port}:{PORT}"],
        "volumes": [_mount(here, there) for here, there in box.mounts],
        "environment": {"HF_HUB_OFFLINE": "1"},
        # GPUs that share a model communicate through shared memory; Docker's default 64 MB is too
        # little.
        "shm_size": "16gb" if plan.size.split.n_gpus > 1 else "2gb",
        "restart": "unless-stopped",
        "stop_grace_period": "30s",
        "healthcheck": {
            "test": ["CMD", *box.health],
            "interval": "10s",
            "timeout": "10s",
            "retries": 6,
            "start_period": f"{start_seconds(plan)}s",
        },
    }
    if gpu == "nvidia":
        device = {"driver": "nvidia", "count": plan.size.split.n_gpus, "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    elif gpu in ("amd", "intel"):
        service["devices"] = ["/dev/kfd", "/dev/dri"] if gpu == "amd" else ["/dev/dri"]
        service["group_add"] = ["video"]
    data = {
        "services": {
            "engine": service,
            "prometheus": {
                "image": PROMETHEUS,
                "ports": ["127.0.0.1:9090:9090"],
                "configs": [
                    {"source": "prometheus", "target": "/etc/prometheus/prometheus.yml"},
                    {"source": "alerts", "target": RULES},
                ],
                "depends_on": ["engine"],
            },
            "grafana": {
                "image": GRAFANA,
                # Anybody who reaches this machine may view; the admin's password is Grafana's own.
                "environment": {
                    "GF_AUTH_ANONYMOUS_ENABLED": "true",
                    "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
                    "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": f"{BOARDS}/{DASHBOARD}",
                },
                "ports": ["127.0.0.1:3000:3000"],
                "configs": [
                    {
                        "source": "grafana-sources",
                        "target": f"{PROVISIONING}/datasources/prometheus.yaml",
                    },
                    {
                        "source": "grafana-boards",
                        "target": f"{PROVISIONING}/dashboards/quantkit.yaml",
                    },
                    {"source": "dashboard", "target": f"{BOARDS}/{DASHBOARD}"},
                ],
                "depends_on": ["prometheus"],
            },
        },
        "configs": {
            "prometheus": {"content": _scraping(plan)},
            "alerts": {"file": f"./{ALERTS}"},
            "grafana-sources": {"content": dump([_sources()])},
            "grafana-boards": {"content": dump([_boards()])},
            "dashboard": {"file": f"./{DASHBOARD}"},
        },
    }
    return head(plan, "docker compose up -d --wait   (Compose 2.23.1 or newer)") + dump([data])


def _sources() -> dict[str, Any]:
    """Grafana's data sources."""
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "access": "proxy",
        "url": "http://prometheus:9090",
        "isDefault": True,
    }
    return {"apiVersion": 1, "datasources": [source]}


def _boards() -> dict[str, Any]:
    """Grafana's dashboard provider."""
    provider = {"name": "quantkit", "type": "file", "options": {"path": BOARDS}}
    return {"apiVersion": 1, "providers": [provider]}


def start_seconds(plan: Plan) -> int:
    """How long a start may take before it has failed: reading at 200 MB/s, then warming up."""
    size = plan.size.fit.weight_bytes * plan.size.split.n_gpus if plan.size.fit else 0
    return int(180 + size / 200e6)


def _ip(host: str) -> str:
    """An address as Docker accepts it, which does not resolve names here."""
    if host == "localhost":
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def _mount(here: str, there: str) -> dict[str, Any]:
    source = here if here.startswith("/") else f"./{here.removeprefix('./')}"
    return {"type": "bind", "source": source, "target": there, "read_only": True}


def _scraping(plan: Plan) -> str:
    job = {
        "job_name": plan.target.name,
        "metrics_path": "/metrics",
        "static_configs": [{"targets": [f"engine:{PORT}"]}],
    }
    data = {
        "global": {"scrape_interval": f"{SCRAPE_SECONDS}s"},
        "rule_files": [RULES],
        "scrape_configs": [job],
    }
    # Compose would treat a dollar as the start of a variable.
    return dump([data]).replace("$", "$$")
