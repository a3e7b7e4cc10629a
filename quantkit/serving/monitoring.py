"""A Grafana dashboard and Prometheus alerts, based on the engine's own metrics.

vLLM's names are those of 0.26 to 0.32 (vllm/v1/metrics/loggers.py, vllm/v1/spec_decode/metrics.py);
a counter gets the suffix `_total`, a histogram `_bucket`, `_sum` and `_count`. llama.cpp reports
slots and tokens, but neither its cache nor times to first token.
"""

from dataclasses import dataclass
from typing import Any

from quantkit import engine
from quantkit.serving.fleet import Targets
from quantkit.serving.kubernetes import label, waiting_threshold
from quantkit.serving.plan import Plan
from quantkit.serving.yamltext import dump

FULL_CACHE = 0.9
WINDOW = "5m"
PANEL_WIDTH, PANEL_HEIGHT = 12, 8
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
"""vLLM's histogram buckets: times within one cannot be distinguished."""
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
"""The same for times between tokens."""
SLOW_TPOT = 0.1
"""Default seconds between tokens that trigger an alert: ten tokens per second."""
FEW_HITS = 0.5
"""Share of the last day's hit rate below which an alert fires."""


@dataclass(frozen=True)
class Panel:
    """One panel: a title, its Grafana unit, and expressions by their legend."""

    title: str
    unit: str
    lines: dict[str, str]
    threshold: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Alert:
    """A condition that somebody should know about."""

    name: str
    condition: str
    lasting: str
    severity: str
    summary: str
    description: str


def grafana(plan: Plan, targets: Targets | None = None) -> dict[str, Any]:
    """A dashboard for Grafana's import, which asks for the Prometheus to use."""
    targets = targets or Targets()
    panels = _vllm_panels(plan, targets) if plan.engine == "vllm" else _llama_cpp_panels(plan)
    source = {"type": "prometheus", "uid": "${source}"}
    variable = {
        "name": "source",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
    }
    return {
        "uid": f"quantkit-{label(plan.target.name)}"[:40],
        "title": f"{plan.target.name} in {engine.label(plan.engine)}",
        "tags": ["quantkit", plan.engine],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "15s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [variable]},
        "panels": [_panel(panel, i, source) for i, panel in enumerate(panels)],
    }


def alerts(plan: Plan, targets: Targets | None = None) -> str:
    """Rules for Prometheus."""
    targets = targets or Targets()
    found = _vllm_alerts(plan, targets) if plan.engine == "vllm" else _llama_cpp_alerts(plan)
    rules = [
        {
            "alert": alert.name,
            "expr": alert.condition,
            "for": alert.lasting,
            "labels": {"severity": alert.severity},
            "annotations": {"summary": alert.summary, "description": alert.description},
        }
        for alert in found
    ]
    data = {"groups": [{"name": f"quantkit-{label(plan.target.name)}", "rules": rules}]}
    first = f"# Alerts of {plan.target.name} in {engine.label(plan.engine)}; written by quantkit.\n"
    return first + dump([data])


def _vllm_panels(plan: Plan, targets: Targets) -> list[Panel]:
    own = _selector(plan)
    hits = f"{_rate('prefix_cache_hits', own)} / {_rate('prefix_cache_queries', own)}"
    panels = [
        Panel(
            "KV cache in use",
            "percentunit",
            {"used": f"max(vllm:kv_cache_usage_perc{own})"},
            FULL_CACHE,
            "When full, requests wait or are preempted and recomputed.",
        ),
        Panel(
            "Requests",
            "short",
            {
                "running": f"sum(vllm:num_requests_running{own})",
                "waiting": f"sum(vllm:num_requests_waiting{own})",
            },
            None,
            f"At most {plan.size.sequences} run at once.",
        ),
        Panel(
            "Time to first token",
            "s",
            _quantiles("time_to_first_token_seconds", own),
            targets.ttft,
        ),
        Panel(
            "Time between tokens",
            "s",
            _quantiles("inter_token_latency_seconds", own),
            targets.tpot,
        ),
        Panel(
            "Prefill: prompts from start to first token",
            "s",
            _quantiles("request_prefill_time_seconds", own),
            None,
            "Without the wait before it. Long prompts, or few hits in the prefix cache.",
        ),
        Panel(
            "Decode: from first to last token",
            "s",
            _quantiles("request_decode_time_seconds", own),
            None,
            "Long answers, or many requests at a time.",
        ),
        Panel("Whole request", "s", _quantiles("e2e_request_latency_seconds", own)),
        Panel("Wait before computing", "s", _quantiles("request_queue_time_seconds", own)),
        Panel(
            "Tokens per second",
            "short",
            {
                "read": _rate("prompt_tokens", own),
                "written": _rate("generation_tokens", own),
            },
        ),
        Panel(
            "Read from the prefix cache",
            "percentunit",
            {"hits": hits},
        ),
        Panel(
            "Requests finished and preempted",
            "reqps",
            {
                "{{finished_reason}}": (
                    f"sum by (finished_reason) (rate(vllm:request_success_total{own}[{WINDOW}]))"
                ),
                "thrown out": _rate("num_preemptions", own),
            },
        ),
    ]
    if plan.demand.draft is not None:
        accepted = _rate("spec_decode_num_accepted_tokens", own)
        drafts, tokens = (_rate(f"spec_decode_num_{n}", own) for n in ("drafts", "draft_tokens"))
        panels += [
            Panel("Accepted draft tokens", "percentunit", {"all": f"{accepted} / {tokens}"}),
            Panel("Tokens per step", "short", {"mean": f"1 + {accepted} / {drafts}"}),
        ]
    return panels


def _llama_cpp_panels(plan: Plan) -> list[Panel]:
    return [
        Panel(
            "Requests",
            "short",
            {
                "running": "sum(llamacpp:requests_processing)",
                "waiting": "sum(llamacpp:requests_deferred)",
            },
            None,
            f"There are {plan.size.sequences} slots.",
        ),
        Panel(
            "Tokens per second",
            "short",
            {
                "read": f"sum(rate(llamacpp:prompt_tokens_total[{WINDOW}]))",
                "written": f"sum(rate(llamacpp:tokens_predicted_total[{WINDOW}]))",
            },
        ),
        Panel(
            "Busy slots per step",
            "short",
            {"mean": "avg(llamacpp:n_busy_slots_per_decode)"},
        ),
    ]


def _bucket(wanted: float, buckets: tuple[float, ...]) -> tuple[float, str]:
    """The limit of an alert, and a note where it differs from the requested one.

    vLLM counts times in buckets: a limit inside one would be a guess, so the next boundary is used.
    """
    limit = next((bucket for bucket in buckets if bucket >= wanted), buckets[-1])
    if limit == wanted:
        return limit, ""
    return limit, f" (asked for {wanted:g} s; vLLM's next bucket is {limit:g} s)"


def _vllm_alerts(plan: Plan, targets: Targets) -> list[Alert]:
    own, name = _selector(plan), plan.served_name
    queue = waiting_threshold(plan)
    limit, rounded = _bucket(targets.ttft, TTFT_BUCKETS)
    slow, about = _bucket(targets.tpot or SLOW_TPOT, ITL_BUCKETS)
    p90 = _quantiles("time_to_first_token_seconds", own)["p90"]
    between = _quantiles("inter_token_latency_seconds", own)["p90"]
    now, before = (
        f"sum(rate(vllm:prefix_cache_hits_total{own}[{span}])) / "
        f"sum(rate(vllm:prefix_cache_queries_total{own}[{span}]))"
        for span in ("30m", "1d")
    )
    return [
        Alert(
            "KVCacheNearlyFull",
            f"max(vllm:kv_cache_usage_perc{own}) > {FULL_CACHE}",
            WINDOW,
            "warning",
            f"The KV cache of {name} has been more than {FULL_CACHE:.0%} full for 5 minutes",
            "Requests wait or are preempted: use more GPUs, an FP8 cache, or a shorter "
            "--max-model-len.",
        ),
        Alert(
            "RequestsWait",
            f"sum(vllm:num_requests_waiting{own}) > {queue}",
            WINDOW,
            "warning",
            f"More than {queue} requests to {name} have been waiting for 5 minutes",
            f"It runs {plan.size.sequences} at a time: raise --max-num-seqs while the KV cache has "
            "room, or add a server.",
        ),
        Alert(
            "FirstTokenIsSlow",
            f"{p90} > {limit:g}",
            WINDOW,
            "warning",
            f"One in ten first tokens of {name} takes longer than {limit:g} s{rounded}",
            "See whether requests wait before they are computed, or prompts have become longer.",
        ),
        Alert(
            "TokensAreSlow",
            f"{between} > {slow:g}",
            WINDOW,
            "warning",
            f"One in ten tokens of {name} takes longer than {slow:g} s{about}",
            "Too many requests run at a time, or prompts in between are long: lower "
            "--max-num-seqs or --max-num-batched-tokens, or add a server.",
        ),
        Alert(
            "PrefixCacheHitsFell",
            f"{now} < {FEW_HITS} * ({before}) and {before} > 0.1",
            "30m",
            "info",
            f"{name} hits its prefix cache less than half as often as before",
            "Prompts no longer share a prefix, or the cache is too full to keep prefixes.",
        ),
        Alert(
            "RequestsThrownOut",
            f"{_rate('num_preemptions', own)} > 0.1",
            "10m",
            "info",
            f"{name} preempts requests and recomputes them",
            "Lower --max-num-seqs, or give the cache more room.",
        ),
        _down(plan, f"vllm:num_requests_running{own}"),
    ]


def _llama_cpp_alerts(plan: Plan) -> list[Alert]:
    queue = waiting_threshold(plan)
    return [
        Alert(
            "RequestsWait",
            f"sum(llamacpp:requests_deferred) > {queue}",
            WINDOW,
            "warning",
            f"More than {queue} requests to {plan.target.name} have been waiting for 5 minutes",
            f"It has {plan.size.sequences} slots: raise --parallel with --ctx-size, or add a "
            "server.",
        ),
        _down(plan, "llamacpp:requests_processing"),
    ]


def _down(plan: Plan, metric: str) -> Alert:
    return Alert(
        "EngineIsDown",
        f"absent({metric})",  # whatever the scraping job is called
        "2m",
        "critical",
        f"{plan.target.name} sends no metrics",
        "The engine has died or still loads; its last lines say which.",
    )


def _selector(plan: Plan) -> str:
    return f'{{model_name="{plan.served_name}"}}'


def _rate(counter: str, own: str) -> str:
    return f"sum(rate(vllm:{counter}_total{own}[{WINDOW}]))"


def _quantiles(histogram: str, own: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate(vllm:{histogram}_bucket{own}[{WINDOW}]))"
    return {f"p{q:.0%}"[:-1]: f"histogram_quantile({q}, {buckets})" for q in (0.5, 0.9, 0.99)}


def _panel(panel: Panel, index: int, source: dict[str, str]) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.threshold is not None:
        steps.append({"color": "red", "value": panel.threshold})
    custom = {"thresholdsStyle": {"mode": "line" if panel.threshold is not None else "off"}}
    defaults = {
        "unit": panel.unit,
        "min": 0,
        "thresholds": {"mode": "absolute", "steps": steps},
        "custom": custom,
    }
    return {
        "id": index + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {
            "h": PANEL_HEIGHT,
            "w": PANEL_WIDTH,
            "x": PANEL_WIDTH * (index % 2),
            "y": PANEL_HEIGHT * (index // 2),
        },
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "expr": expression, "legendFormat": legend}
            for i, (legend, expression) in enumerate(panel.lines.items())
        ],
    }
