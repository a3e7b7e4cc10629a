"""Predicts whether an engine will load a checkpoint and what it will run, without the engine."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.dispatch import gptoss, layers, llamacpp, rules, vllm
from quantkit.dispatch.choices import Choice, choices, expert_choices
from quantkit.dispatch.rules import Finding
from quantkit.dispatch.schemes import Judged, Unsupported
from quantkit.errors import CheckpointError, QuantkitError, ShardError, SourceError
from quantkit.hardware import support
from quantkit.hardware.gpus import GPU
from quantkit.model.headers import StoredTensor
from quantkit.model.source import read_config, read_tensors
from quantkit.parsing import parse_json
from quantkit.tensorspec import TensorSpec

BESIDE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Where quantisers write what config.json does not have."""


@dataclass
class Prediction:
    """What an engine will do with a checkpoint."""

    path: Path
    engine: str
    version: str
    gpu: str | None
    findings: list[Finding] = field(default_factory=list)
    kernels: list[Choice] = field(default_factory=list)
    schemes: dict[str, int] = field(default_factory=dict)
    """Number of layers by scheme."""
    left_out: list[str] = field(default_factory=list)

    @property
    def faults(self) -> list[Finding]:
        """Findings that keep it from loading, or from answering with its own weights."""
        return [one for one in self.findings if one.is_fault]

    @property
    def ok(self) -> bool:
        return not self.faults

    @property
    def verdict(self) -> str:
        """One word or two, for the last line."""
        if any(one.consequence == "refuses" for one in self.findings):
            return "will not load"
        if self.faults:
            return "loads, answers garbage"
        return "loads"

    def to_json(self) -> dict[str, Any]:
        return {
            "path": str(self.path),
            "engine": self.engine,
            "version": self.version,
            "gpu": self.gpu,
            "ok": self.ok,
            "verdict": self.verdict,
            "schemes": self.schemes,
            "kernels": [
                {
                    "layer": one.layer,
                    "scheme": one.scheme.tag,
                    "shape": [one.rows, one.columns],
                    "kernel": one.kernel,
                    "fallback": one.slow or None,
                }
                for one in self.kernels
            ],
            "findings": [one.to_json() for one in self.findings],
            "left_out": self.left_out,
        }


def predict(
    path: Path, engine: str = "vllm", version: str | None = None, gpu: GPU | None = None
) -> Prediction:
    """Judge a folder (or a GGUF file) by its config and headers; no weight is read."""
    if engine == "llama.cpp":
        result = Prediction(path, engine, version or "", gpu.name if gpu else None)
        if not path.exists():
            raise CheckpointError(f"{path} does not exist")
        result.findings = list(llamacpp.findings(path))
        if version:
            result.left_out.append(
                f"version {version}: the rules are those of {rules.READ_AT['llama.cpp']}"
            )
        return result
    number = rules.version_of(version) if version else rules.NEWEST
    result = Prediction(path, engine, _text(number), gpu.name if gpu else None)
    result.left_out += _doubts(number, gpu)
    if not path.is_dir() and path.suffix == ".gguf":
        raise CheckpointError(f"{path} is a GGUF file: use --for llama.cpp")
    config = read_config(path)
    try:
        tensors: Mapping[str, StoredTensor] = read_tensors(path)
    except (ShardError, SourceError) as error:
        result.findings.append(rules.finding("headers", path.name, str(error)))
        return result
    beside = next((held for name in BESIDE if (held := _held(path / name))), None)
    checkpoint = layers.of(config, tensors, str(path), beside)
    return _judged(result, checkpoint, number, gpu, _read)


def of_tensors(
    config: Mapping[str, Any],
    tensors: Iterable[TensorSpec],
    version: str | None = None,
    gpu: GPU | None = None,
) -> Prediction:
    """The same for a checkpoint that is not written yet."""
    number = rules.version_of(version) if version else rules.NEWEST
    result = Prediction(Path(), "vllm", _text(number), gpu.name if gpu else None)
    checkpoint = layers.of(config, {spec.name: spec for spec in tensors}, "the plan")
    return _judged(result, checkpoint, number, gpu, None)


def _judged(
    result: Prediction,
    checkpoint: layers.Checkpoint,
    version: tuple[int, int],
    gpu: GPU | None,
    read: Callable[[TensorSpec], bytes] | None,
) -> Prediction:
    capability = None
    if gpu is not None and gpu.capability is not None:
        capability = round(gpu.capability * 10)
    judged = Judged(checkpoint, max(version, rules.OLDEST), capability, read)
    result.findings += vllm.findings(judged)
    chosen: set[str] = set()
    try:
        for scheme in judged.schemes.values():
            tag = scheme.tag if scheme else "16 bits"
            result.schemes[tag] = result.schemes.get(tag, 0) + 1
        result.kernels = list(choices(judged))
        for one in expert_choices(judged):
            if one.kernel is not None:
                result.kernels.append(one)
                chosen.add(one.layer)
    except Unsupported:
        pass  # reported as a finding
    if joint := gptoss.n_layers(judged):
        result.schemes["mxfp4 (fused experts)"] = joint
    if version >= (0, 26) and any(map(layers.TOGETHER.match, checkpoint.linears)):
        result.left_out.append(
            "experts in one tensor: vLLM 0.26 and later reads them in some families; "
            "`quantkit convert DIR --to FORMAT --repair` splits them"
        )
    if judged.method == "bitsandbytes" and not result.faults:
        result.left_out.append("bitsandbytes itself, which must be installed with vLLM")
    if gpu is not None and capability is None:
        result.findings += _by_table(judged, gpu)
    blocks = {*checkpoint.experts, *gptoss.blocks(judged)}
    if blocks - chosen and capability is not None:
        result.left_out.append("kernels of experts: depend on what is installed with vLLM")
    return result


def _by_table(judged: Judged, gpu: GPU) -> list[Finding]:
    """Devices other than NVIDIA's: by the table of formats, not layer by layer."""
    names = {"wna16": "w4a16", "fp8": "fp8-w8a8", "fp8-a16": "fp8-w8a8", "int8": "int8-w8a8"}
    found = []
    try:
        kinds = {s.kind: s for s in judged.schemes.values() if s is not None}
    except Unsupported:
        return []
    for kind, scheme in kinds.items():
        name = names.get(kind, kind)
        name = f"w{scheme.bits}a16" if kind == "wna16" else name
        how = support.runs(gpu, name)
        if how.how != "native":
            rule = "kernel" if how.how == "no" else "slow-kernel"
            found.append(rules.finding(rule, scheme.tag, how.reason))
    return found


def _doubts(version: tuple[int, int], gpu: GPU | None) -> list[str]:
    """What the table cannot know."""
    found = []
    if version > rules.NEWEST:
        found.append(
            f"vLLM {_text(version)}: its source was not read; these are the rules of "
            f"{_text(rules.NEWEST)}"
        )
    if version < rules.OLDEST:
        found.append(
            f"vLLM {_text(version)}: its source was not read; these are the rules of "
            f"{_text(rules.OLDEST)}"
        )
    if gpu is None:
        found.append("kernels: give the GPU with --gpu")
    elif gpu.capability is None:
        found.append(f"kernels layer by layer: {gpu.name} is judged by its table of formats")
    return found


def _text(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _held(path: Path) -> Mapping[str, Any] | None:
    if not path.is_file():
        return None
    try:
        found = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    return found if isinstance(found, dict) else None


def _read(spec: TensorSpec) -> bytes:
    assert isinstance(spec, StoredTensor)
    buffer = bytearray(spec.size_bytes)
    try:
        spec.read_into(memoryview(buffer))
    except QuantkitError as error:  # it was complete when its header was read
        raise CheckpointError(str(error)) from error
    return bytes(buffer)
