"""Maps the parameters of a model to stored tensors, by transformers' own rules.

A checkpoint may have other names than the modules that transformers builds (`embed_out` is
`lm_head`), a different split (an expert's gate and up are one tensor of all experts), or both.
transformers has rules for loading and saving them; the same rules are applied here tensor by
tensor, so that a block can be loaded alone and what is written keeps the names that were read.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from quantkit.errors import SourceError
from quantkit.model import fused
from quantkit.model.dequantized import BESIDE
from quantkit.model.derived import DerivedTensor
from quantkit.model.headers import StoredTensor

PACKED = {"weight_packed": "weight", "qweight": "weight"}
"""Names of quantised weights in the existing formats."""
OF_CACHE = ("k_scale", "v_scale", "q_scale")
"""Scales of keys and values, which belong to no weight."""


@dataclass(frozen=True)
class Conversion:
    """A parameter that transformers computes from stored tensors."""

    converter: Any
    sources: tuple[tuple[str, str], ...]
    """Pattern and name of each stored tensor."""
    first: str
    """The parameter under which transformers knows the conversion; it may produce several."""
    target: str
    config: Any

    def names(self) -> list[str]:
        return [name for _, name in self.sources]


def _convert(made: Conversion, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return _converted(made, tensors)[made.target]


def _converted(made: Conversion, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    converter = deepcopy(made.converter)
    for (pattern, name), tensor in zip(made.sources, tensors, strict=True):
        converter.add_tensor(made.first, name, pattern, tensor)
    found = converter.convert(made.first, config=made.config)
    return {name: t[0] if isinstance(t, list) else t for name, t in found.items()}


@dataclass(frozen=True)
class Links:
    """The stored tensors of the parameters of a model with separate experts."""

    stored: Mapping[str, str]
    """Parameters that are one stored tensor, and its name."""
    conversions: Mapping[str, Conversion]
    """Parameters that transformers computes."""
    stacked: Mapping[str, tuple[str, ...]]
    """Linear layers whose rows come from several stored ones: the names of these within it."""
    unknown: tuple[str, ...]
    """Stored tensors that are not part of the model."""

    @classmethod
    def of(cls, model: Any, names: Mapping[str, tuple[int, ...]]) -> "Links":
        """Links between a skeleton as transformers builds it and stored tensors with their
        shapes.
        """
        return _Resolver(model, names).links()

    def tensors(
        self, source: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> dict[str, StoredTensor]:
        """Every parameter of the source, by its name in the model."""
        found: dict[str, StoredTensor] = {
            parameter: source[name] for parameter, name in self.stored.items() if name in source
        }
        for parameter, made in self.conversions.items():
            parents = [source[name] for name in made.names() if name in source]
            if len(parents) == len(made.sources):
                compute = partial(_convert, made)
                found[parameter] = DerivedTensor.of(
                    parameter, parents[0].dtype, shapes[parameter], parents, compute
                )
        return found

    def state(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Parameters by their names in the model, from tensors by their names in files."""
        found = {p: stored[name] for p, name in self.stored.items() if name in stored}
        for parameter, made in self.conversions.items():
            if all(name in stored for name in made.names()):
                found[parameter] = _convert(made, [stored[name] for name in made.names()])
        return found

    def module(self, name: str) -> str:
        """The stored name of a module with a weight, or of one that contains such modules."""
        if (weight := self.stored.get(f"{name}.weight")) is not None:
            return weight.removesuffix(".weight")
        start = f"{name}."
        for parameter, stored in self.stored.items():
            inside = parameter.removeprefix(start)
            if parameter.startswith(start) and stored.endswith(f".{inside}"):
                return stored.removesuffix(f".{inside}")
        return name


@dataclass
class _Entry:
    converter: Any
    by_pattern: dict[str, list[str]] = field(default_factory=dict)


class _Resolver:
    """Follows transformers' loader, without loading."""

    def __init__(self, model: Any, names: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming

        from quantkit.model import experts

        self.model, self.names = model, names
        self.state = model.state_dict()
        mapping = get_model_conversion_mapping(model)
        self.renamings = [t for t in mapping if isinstance(t, WeightRenaming)]
        self.converters = [t for t in mapping if isinstance(t, WeightConverter)]
        self.by_pattern = {p: c for c in self.converters for p in c.source_patterns}
        self.experts = experts.fused(model)
        self.stored: dict[str, str] = {}
        self.conversions: dict[str, Conversion] = {}
        self.stacked: dict[str, tuple[str, ...]] = {}
        self.unknown: list[str] = []

    def links(self) -> Links:
        from transformers.core_model_loading import dot_natural_key

        entries: dict[str, _Entry] = {}
        for name in sorted(self.names, key=dot_natural_key):
            target, pattern = self._renamed(name)
            if target in self.state:
                entry = entries.setdefault(target, _Entry(self.by_pattern.get(pattern or "")))
                entry.by_pattern.setdefault(pattern or "", []).append(name)
            elif not self._expert(name):
                self.unknown.append(name)
        for target, entry in entries.items():
            self._take(target, entry)
        return Links(self.stored, self.conversions, self.stacked, tuple(self.unknown))

    def _renamed(self, name: str) -> tuple[str, str | None]:
        from transformers.core_model_loading import rename_source_key

        prefix = self.model.base_model_prefix
        found: tuple[str, str | None] = rename_source_key(
            name, self.renamings, self.converters, prefix, self.state
        )
        if found[0] not in self.state and name in self.state:
            found = rename_source_key(name, [], [], prefix, self.state)
        return found

    def _expert(self, name: str) -> bool:
        """Link a separate expert's tensor where transformers only knows a fused one."""
        for whole, index, layer, kind in fused.fused_names(name):
            target, _ = self._renamed(whole)
            module = target.rpartition(".")[0]
            if target in self.state and module in self.experts:
                self.stored[f"{module}.{index}.{layer}.{kind}"] = name
                return True
        return False

    def _take(self, target: str, entry: _Entry) -> None:
        names = [name for part in entry.by_pattern.values() for name in part]
        module, _, last = target.rpartition(".")
        if module in self.experts and last in fused.PARTS:
            self._take_experts(module, last, entry)
        elif entry.converter is None:
            if len(names) > 1:
                raise SourceError(
                    f"{names[0]} and {names[1]} are both {target} to transformers; the checkpoint "
                    "holds a part of the model twice: remove one"
                )
            self.stored[target] = names[0]
        elif not self._take_stacked(module, last, entry):
            self._take_made(target, entry)

    def _take_experts(self, module: str, last: str, entry: _Entry) -> None:
        layers = fused.PARTS[last]
        patterns = [] if entry.converter is None else entry.converter.source_patterns
        found = [entry.by_pattern.get(pattern, []) for pattern in patterns]
        n_experts = self.experts[module].n_experts
        if len(found) != len(layers) or any(len(names) != n_experts for names in found):
            example = next(iter(entry.by_pattern.values()))[0]
            shape = list(self.names[example])
            raise SourceError(
                f"{module} stores its experts in an unknown layout ({example} {shape}); "
                "quantkit reads experts stored one by one, or fused with gate and up stacked or "
                "side by side: save the model again with save_pretrained"
            )
        for layer, names in zip(layers, found, strict=True):
            for index, name in enumerate(names):
                self.stored[f"{module}.{index}.{layer}.weight"] = name

    def _take_stacked(self, module: str, last: str, entry: _Entry) -> bool:
        """Stacked linear layers, which can be separate layers as well."""
        from transformers.core_model_loading import Concatenate

        operations = entry.converter.operations
        linear = dict(self.model.named_modules()).get(module)
        found = [entry.by_pattern.get(p, []) for p in entry.converter.source_patterns]
        if not (
            last == "weight"
            and type(linear) is torch.nn.Linear
            and linear.bias is None
            and len(operations) == 1
            and isinstance(operations[0], Concatenate)
            and operations[0].dim == 0
            and all(len(names) == 1 for names in found)
        ):
            return False
        parts = tuple(names[0].split(".")[-2] for names in found)
        self.stacked[module] = parts
        for part, (name,) in zip(parts, found, strict=True):
            self.stored[f"{module}.{part}.weight"] = name
        return True

    def _take_made(self, target: str, entry: _Entry) -> None:
        sources = tuple((p, n) for p, names in entry.by_pattern.items() for n in names)
        made = Conversion(entry.converter, sources, target, target, self.model.config)
        empty = [torch.empty(self.names[name], device="meta") for _, name in sources]
        try:
            targets = _converted(made, empty)
        except Exception as error:  # transformers' own rules on untrusted tensors
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise SourceError(
                f"{sources[0][1]} does not become {target} by transformers' rules: {reason}"
            ) from error
        for name in targets:
            self.conversions[name] = Conversion(
                entry.converter, sources, target, name, self.model.config
            )


def parameter_names(
    tensors: Mapping[str, StoredTensor], is_quantized: bool
) -> dict[str, tuple[int, ...]]:
    """Stored parameters and their shapes; quantised ones under their original names."""
    if not is_quantized:
        return {name: tensor.shape for name, tensor in tensors.items()}
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        weights = (f"{module}.{part}" for part in ("weight", *PACKED))
        if last in OF_CACHE or (last in BESIDE and any(w in tensors for w in weights)):
            continue
        found[f"{module}.{PACKED[last]}" if last in PACKED else name] = tensor.shape
    return found
