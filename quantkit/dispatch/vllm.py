"""vLLM's dispatch applied to a config and headers: the scheme and kernel of each layer, and faults.

Each function follows one of vLLM's own; the rule that a finding names says which (`rules.py`).
"""

from collections.abc import Iterator

from quantkit.dispatch import fusion, gptoss, loaders, sizes, storage
from quantkit.dispatch.choices import choices, expert_choices
from quantkit.dispatch.rules import (
    ARGUMENT_KEYS,
    ARGUMENT_VALUES,
    METHODS,
    RULES,
    Finding,
    finding,
    pinned,
)
from quantkit.dispatch.schemes import (
    MODELOPT,
    Judged,
    Unsupported,
    compressed,
)
from quantkit.hardware import kernels

REQUIRED = {
    "gptq": (("bits",), ("group_size",), ("desc_act",), ("sym",)),
    "awq": (("w_bit", "bits"), ("q_group_size", "group_size"), ("zero_point",)),
    "fp8": (("activation_scheme",),),
}
"""Keys that vLLM reads without a default; one of each."""
DTYPES = {
    "gptq": ("float16", "bfloat16"), "awq": ("float16", "bfloat16"),
    "fp8": ("float16", "bfloat16"), "modelopt": ("float16", "bfloat16"), "mxfp4": ("bfloat16",),
}  # fmt: skip


def findings(judged: Judged) -> list[Finding]:
    """Everything that is wrong, most general first."""
    holds = {rule.id for rule in RULES if rule.engine == "vllm" and rule.holds(judged.version)}
    result: list[Finding] = []
    for check in (_method, _keys, _numbers):
        result += [one for one in check(judged) if one.rule.id in holds]
        if any(one.is_fault for one in result):
            return result
    for check in (
        _groups, sizes.model, fusion.fused, fusion.experts, gptoss.findings,
        loaders.findings, storage.storage, storage.tensors, storage.scalars, storage.order,
        sizes.cache, sizes.heads, _kernels,
    ):  # fmt: skip
        result += [one for one in check(judged) if one.rule.id in holds]
    return result


def _method(judged: Judged) -> Iterator[Finding]:
    method = judged.method
    if not method:
        return
    span = METHODS.get(method)
    if span is None or judged.version < span[0] or (span[1] and judged.version >= span[1]):
        words = f"{method} is not a method of vLLM {judged.version[0]}.{judged.version[1]}"
        yield finding("method", "quantization_config", words)
    model = str(judged.checkpoint.config.get("model_type"))
    if method == "mxfp4" and model != "gpt_oss":
        yield finding("mxfp4-family", "quantization_config", f"mxfp4 in a model of type {model}")
    minimum = kernels.METHOD_MINIMUM.get(method, 0)
    if method == "modelopt" and judged.algorithm.startswith("FP8"):
        known = kernels.MODELOPT_FP8_MINIMUM
        minimum = known[max(since for since in known if since <= judged.version)]
    elif method == "modelopt" and judged.algorithm == "MXFP8":
        minimum = kernels.MODELOPT_MXFP8_MINIMUM
    if judged.capability is not None and judged.capability < minimum:
        words = f"{method} needs {minimum / 10:.1f}, the GPU has {judged.capability / 10:.1f}"
        yield finding("capability", "quantization_config", words)
    dtype = judged.checkpoint.text.get("dtype") or judged.checkpoint.text.get("torch_dtype")
    dtype = dtype or judged.checkpoint.config.get("torch_dtype")
    if method in DTYPES and dtype is not None and str(dtype) not in DTYPES[method]:
        words = f"{method} computes in {' or '.join(DTYPES[method])}, config.json says {dtype}"
        # vLLM uses float16 for a float32 model unless told otherwise.
        if str(dtype) not in ("float32", "float16"):
            yield finding("dtype", "config.json", words)


def _keys(judged: Judged) -> Iterator[Finding]:
    section, library = judged.section, pinned(judged.version)
    for keys in REQUIRED.get(judged.method, ()):
        if not any(key in section for key in keys):
            yield finding("required-key", "quantization_config", f"{keys[-1]} is missing")
    if (section.get("sparsity_config") or {}).get("targets"):
        yield finding("sparsity", "sparsity_config", "it names targets")
    if judged.method != "compressed-tensors":
        return
    for name, group in (section.get("config_groups") or {}).items():
        if not isinstance(group, dict) or not isinstance(group.get("targets"), list):
            yield finding("required-key", f"config_groups.{name}", "targets is missing")
            continue
        for part in ("weights", "input_activations", "output_activations"):
            given = group.get(part)
            if not isinstance(given, dict):
                if part == "weights" and given is None:
                    yield finding("required-key", f"config_groups.{name}", "weights is missing")
                continue
            where = f"config_groups.{name}.{part}"
            for key in sorted(given.keys() - ARGUMENT_KEYS):
                yield finding(
                    "unknown-key", where, f"{key}, which compressed-tensors {library} forbids"
                )
            for key, values in ARGUMENT_VALUES.items():
                if key in given and given[key] not in values:
                    words = f"{key} is {given[key]!r}, which compressed-tensors {library} forbids"
                    yield finding("unknown-key", where, words)


def _numbers(judged: Judged) -> Iterator[Finding]:
    section, method = judged.section, judged.method
    if method == "gptq" and not section.get("dynamic"):
        bits, symmetric = section.get("bits"), section.get("sym", True)
        if (bits, symmetric) not in ((4, True), (8, True)):
            words = f"{bits} bits, {'symmetric' if symmetric else 'with zero points'}"
            yield finding("gptq-numbers", "quantization_config", words)
        if bits not in (2, 3, 4, 8):
            yield finding("gptq-numbers-old", "quantization_config", f"{bits} bits")
        if section.get("group_size") not in kernels.MARLIN_GROUPS:
            words = f"group_size is {section.get('group_size')}"
            yield finding("gptq-group", "quantization_config", words)
    yield from _act_order(judged)
    if method == "awq" and section.get("w_bit", section.get("bits")) != 4:
        words = f"{section.get('w_bit', section.get('bits'))} bits"
        yield finding("awq-numbers", "quantization_config", words)
    if method == "fp8":
        scheme, blocks = section.get("activation_scheme"), section.get("weight_block_size")
        if scheme not in ("static", "dynamic"):
            yield finding("fp8-scheme", "quantization_config", f"activation_scheme is {scheme!r}")
        elif blocks and scheme == "static":
            yield finding("fp8-scheme", "quantization_config", "static inputs with blocks")
    if method == "bitsandbytes" and section.get("bnb_4bit_quant_storage", "uint8") != "uint8":
        words = f"bnb_4bit_quant_storage is {section['bnb_4bit_quant_storage']}, vLLM reads uint8"
        yield finding("bnb-state", "quantization_config", words)
    if method == "modelopt" and judged.algorithm not in MODELOPT:
        words = f"quant_algo is {judged.algorithm or 'missing'}"
        yield finding("modelopt-algo", "quantization_config", words)


def _act_order(judged: Judged) -> Iterator[Finding]:
    """A column order by group, which later versions refuse if it is declared."""
    section = judged.section
    if judged.method == "gptq":
        parts = {"quantization_config": section}
        for pattern, change in (section.get("dynamic") or {}).items():
            if not pattern.startswith("-:") and isinstance(change, dict):
                parts[f"dynamic: {pattern}"] = {**section, **change}
        for where, part in parts.items():
            if part.get("desc_act") and part.get("group_size") != -1:
                yield finding("act-order-gone", where, "desc_act is true")
    for name, group in (section.get("config_groups") or {}).items():
        order = (group.get("weights") or {}).get("actorder") if isinstance(group, dict) else None
        if order in ("group", "dynamic", True):
            yield finding("act-order-gone", f"config_groups.{name}", f"actorder is {order!r}")


def _groups(judged: Judged) -> Iterator[Finding]:
    """Groups that vLLM has no scheme for."""
    if judged.method != "compressed-tensors":
        return
    form = str(judged.section.get("format"))
    for name, group in (judged.section.get("config_groups") or {}).items():
        try:
            compressed(group, form, judged.version, judged.capability)
        except Unsupported as error:
            yield finding(error.args[0], f"config_groups.{name}", error.args[1])


def _kernels(judged: Judged) -> Iterator[Finding]:
    if judged.capability is None:
        return
    alike: dict[tuple[str, str], list[str]] = {}
    known = (one for one in expert_choices(judged) if one.kernel is not None)
    for choice in (*choices(judged), *known):
        minimum = kernels.MINIMUM.get(choice.scheme.kind, 0)
        if choice.kernel is None and judged.capability < minimum:
            key = ("capability", f"{choice.scheme.tag} needs {minimum / 10:.1f}")
        elif choice.kernel is None:
            key = ("kernel", choice.scheme.tag)
        elif choice.slow:
            key = ("slow-kernel", f"{choice.kernel}: {choice.slow}")
        else:
            continue
        alike.setdefault(key, []).append(choice.layer)
    for (rule, words), names in alike.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        yield finding(rule, f"{names[0]}{more}", words)
