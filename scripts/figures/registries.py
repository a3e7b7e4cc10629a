"""Tables of what quantkit knows by name, written from the code itself."""

from figures.regions import region, table
from quantkit.dispatch.rules import CHANGED, CONSEQUENCES, PINNED, READ_AT, RULES
from quantkit.metrics import METRICS

PAIRED = {"answers": "answer by answer", "losses": "document by document", "": ""}
UNITS = {"share": "percent", "": ""}


@region
def metrics() -> str:
    """Every metric, as `quantkit/metrics.py` has it."""
    return table(
        ["metric", "shown as", "in", "better", "compared with the source"],
        [
            [
                f"`{metric.name}`",
                metric.label,
                UNITS.get(metric.unit, metric.unit),
                "higher" if metric.more_is_better else "lower",
                "is a distance from it" if metric.against_source else PAIRED[metric.paired],
            ]
            for metric in METRICS.values()
        ],
    )


@region
def dispatch_rules() -> str:
    """Every rule of `quantkit/dispatch/rules.py`, by engine."""
    rows = []
    for rule in RULES:
        versions = ""
        if rule.since:
            versions = f"from {rule.since[0]}.{rule.since[1]}"
        if rule.before:
            versions = f"{versions} before {rule.before[0]}.{rule.before[1]}".strip()
        engine = "vLLM" if rule.engine == "vllm" else rule.engine
        rows.append(
            [
                f"`{rule.id}`",
                f"{engine} {versions}".strip(),
                rule.what,
                ", ".join(rule.consequences),
                rule.remedy,
                rule.source,
            ]
        )
    head = ["rule", "engine", "what is wrong", "consequence", "remedy", "read in"]
    return table(head, rows)


@region
def dispatch_consequences() -> str:
    """What a finding can lead to."""
    return table(["consequence", "meaning"], [[name, what] for name, what in CONSEQUENCES.items()])


@region
def dispatch_sources() -> str:
    """Which sources the rules were read in."""
    changed = "; ".join(f"{words} ({major}.{minor})" for (major, minor), words in CHANGED.items())
    pins = ", ".join(f"{major}.{minor}: {pin}" for (major, minor), pin in PINNED.items())
    return (
        f"vLLM was read at {READ_AT['vllm']}; paths are below `vllm/model_executor` unless they "
        f"begin otherwise. llama.cpp was read at {READ_AT['llama.cpp']}. vLLM pins "
        f"compressed-tensors (from version: pin) {pins}.\n\n"
        "For versions after 0.26, the config classes, the choice of schemes of compressed-tensors, "
        "GPTQ, AWQ, FP8, ModelOpt and MXFP4, and the lists of kernels (`kernels/linear`) were "
        "compared version by version. The kernels of experts (`fused_moe/oracle`) were read at "
        "0.26, 0.32 and 0.33, except those of MXFP4 with FP8 activations. Of the model loaders, "
        f"only gpt-oss's was compared. What changed: {changed}."
    )
