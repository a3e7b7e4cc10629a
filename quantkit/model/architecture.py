"""What a config says the model is made of, found by building it without weights."""

import fnmatch
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.errors import SourceError
from quantkit.model.headers import WEIGHT_TYPES, TensorSpec
from quantkit.model.source import ModelSource
from quantkit.quiet import hushed

if TYPE_CHECKING:
    import torch

# In the name of a layer that belongs to one expert.
EXPERT = re.compile(r"\.experts\.\d+\.")
KNOWN_EXPERTS = (
    "quantkit knows experts of gate_proj, up_proj and down_proj, as Qwen and GLM have them"
)
# Written by old checkpoints, computed by every present loader.
IGNORABLE = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


@dataclass(frozen=True)
class Architecture:
    """Parameters and linear layers of a model, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    """Every parameter and persistent buffer."""
    linears: Mapping[str, tuple[int, int]]
    """Modules of class Linear: rows and columns of their weight."""
    tied: Mapping[str, str]
    """Parameters that are another one by a second name."""
    attentions: Sequence[str] = ()
    """Modules that put keys and values into a cache."""
    routers: tuple[str, ...] = ()
    """Modules that choose experts. They are small, decide much, and are never quantised."""
    chosen_share: float = 1.0
    """Of a block's experts, those that a token goes to."""

    @classmethod
    def of(cls, folder: Path, trust_remote_code: bool = False) -> "Architecture":
        """Build the skeleton of the model in `folder` and look at it."""
        import torch

        model = skeleton(folder, trust_remote_code)
        state = model.state_dict()
        tied = {
            name: owner
            for name, owner in (getattr(model, "all_tied_weights_keys", None) or {}).items()
            if name in state
        }
        shapes = _separate_experts(folder, {n: tuple(t.shape) for n, t in state.items()})
        routers = find_routers(folder, shapes)
        found = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        linears = {
            module: (shape[0], shape[1])
            for module, shape in _weights(shapes)
            if module not in routers and (module in found or EXPERT.search(module))
        }
        if not linears:
            raise SourceError(
                f"{folder}: {type(model).__name__} has no Linear layers, "
                "so there is nothing that quantkit could quantise"
            )
        shares = [
            int(getattr(model.config, "num_experts_per_tok", 0) or shape[0]) / shape[0]
            for name, shape in ((n, tuple(t.shape)) for n, t in state.items())
            if routers and len(shape) == 3 and "expert" in name
        ]
        share = min(1.0, *shares) if shares else 1.0
        return cls(shapes, linears, tied, list(attentions(model)), routers, share)

    def matching(self, targets: list[str], ignore: list[str]) -> list[str]:
        """Linear layers that a recipe means, in the model's order."""
        return [n for n in self.linears if _matches(n, targets) and not _matches(n, ignore)]

    def check(self, source: ModelSource) -> list[str]:
        """Compare the config with the tensors; returns names that the config does not know."""
        problems, missing = [], []
        unknown = [
            name
            for name in source.tensors
            if name not in self.shapes and not matches_any(name, IGNORABLE)
        ]
        for name, shape in self.shapes.items():
            stored = source.tensors.get(name)
            if stored is None and EXPERT.search(name):
                raise SourceError(
                    f"{source.folder} stores its experts in another form ({name} is missing); "
                    f"{KNOWN_EXPERTS}"
                )
            if stored is None:
                if name not in self.tied or self.tied[name] not in source.tensors:
                    missing.append(name)
                    problems.append(f"{name} is missing")
            elif stored.shape != shape:
                problems.append(f"{name} is {list(stored.shape)} where config.json says {shape}")
            elif stored.dtype not in WEIGHT_TYPES:
                problems.append(f"{name} is {stored.dtype}, not one of {', '.join(WEIGHT_TYPES)}")
        for name, tensor in source.tensors.items():
            if tensor.dtype.startswith("F8") and name not in self.shapes:
                problems.append(f"{name} is {tensor.dtype}: part of a quantised model")
        if len(problems) == len(missing):
            self._refuse_renamed(source, missing, unknown)
        if problems:
            rest = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise SourceError(
                f"the weights in {source.folder} do not fit its config: "
                f"{'; '.join(problems[:3])}{rest}"
            )
        return unknown

    def _refuse_renamed(
        self, source: ModelSource, missing: Sequence[str], unknown: Sequence[str]
    ) -> None:
        """Stop where all that is missing seems to be there by other names, as in GPT-NeoX."""
        others = {name: source.tensors[name].shape for name in unknown}
        pairs = []
        for name in missing:
            own = next((n for n, shape in others.items() if shape == self.shapes[name]), None)
            if own is None:
                return
            del others[own]
            pairs.append((own, name))
        if pairs:
            own, name = pairs[0]
            raise SourceError(
                f"{source.folder} stores {own} where transformers has {name}: families whose "
                f"tensors get other names as they are loaded ({source.config.get('model_type')}) "
                "cannot be quantised here; choose a model of another family"
            )

    def stored(self, source: ModelSource) -> list[TensorSpec]:
        """Tensors that a checkpoint of this model carries: tied ones once, leftovers not at all."""
        return [
            TensorSpec(t.name, t.dtype, t.shape)
            for t in source.tensors.values()
            if not (t.name in self.tied and self.tied[t.name] in source.tensors)
            and not (t.name not in self.shapes and matches_any(t.name, IGNORABLE))
        ]


def skeleton(
    folder: Path, trust_remote_code: bool = False, dtype: "torch.dtype | None" = None
) -> Any:
    """The model in `folder` with parameters on the meta device and real buffers.

    Some families compute constants in the type they are built in (Gemma's embedding scale), so a
    skeleton that will be run is built in the type it will run in.
    """
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with hushed("transformers"), init_empty_weights(include_buffers=False):
            config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            if hasattr(config, "quantization_config"):
                del config.quantization_config  # else transformers builds quantised layers
            # The fused attention drops soft-capping (Gemma 2) without a word.
            capped = getattr(config, "attn_logit_softcapping", None)
            model = AutoModelForCausalLM.from_config(
                config,
                trust_remote_code=trust_remote_code,
                attn_implementation="eager" if capped else "sdpa",
                **({} if dtype is None else {"dtype": dtype}),
            )
    except Exception as error:  # a config is somebody else's input; anything may be wrong with it
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SourceError(
            f"transformers cannot build the model that {folder / 'config.json'} describes: {reason}"
        ) from error
    model.tie_weights()
    return model.eval()


def attentions(module: "torch.nn.Module") -> "dict[str, torch.nn.Module]":
    """The modules within that put keys and values into a cache: the innermost that take one."""
    takers = {
        name: part
        for name, part in module.named_modules()
        if "past_key_values" in inspect.signature(part.forward).parameters
    }
    return {
        name: part
        for name, part in takers.items()
        if name and not any(other.startswith(f"{name}.") for other in takers)
    }


def _separate_experts(
    folder: Path, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Parameters as checkpoints store them: every expert has linear layers of its own.

    transformers holds all experts of a block in two tensors, [experts, rows, columns], and takes
    them apart when it saves.
    """
    result: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        if len(shape) < 3 or "expert" not in name:
            result[name] = shape
            continue
        experts, _, last = name.rpartition(".")
        both, down = (shapes.get(f"{experts}.{part}", ()) for part in ("gate_up_proj", "down_proj"))
        known = last in ("gate_up_proj", "down_proj") and len(both) == len(down) == 3
        # Some families store the transpose; their checkpoints have other names too.
        if not known or both != (down[0], 2 * down[2], down[1]):
            raise SourceError(
                f"{folder} is a mixture of experts of an unknown layout ({name} {list(shape)}); "
                f"{KNOWN_EXPERTS}"
            )
        if last == "gate_up_proj":
            n_experts, rows, columns = down
            for index in range(n_experts):
                result[f"{experts}.{index}.gate_proj.weight"] = (columns, rows)
                result[f"{experts}.{index}.up_proj.weight"] = (columns, rows)
                result[f"{experts}.{index}.down_proj.weight"] = (rows, columns)
    return result


def find_routers(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """What stands beside a block's experts and is called gate or router."""
    weights = [module for module, _ in _weights(shapes)]
    blocks = dict.fromkeys(EXPERT.split(module)[0] for module in weights if EXPERT.search(module))
    routers = []
    for block in blocks:
        beside = [m for m in weights if m.startswith(f"{block}.") and not EXPERT.search(m)]
        found = [m for m in beside if m.endswith(("gate", "router"))]
        if not found:
            raise SourceError(f"{folder}: {block} has experts but no router that quantkit knows")
        routers += found
    return tuple(routers)


def _weights(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Modules with a matrix called weight."""
    return [(n[:-7], s) for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2]


def _matches(name: str, patterns: list[str]) -> bool:
    """The rule of compressed-tensors: a class name, a module's name, or `re:` and a pattern."""
    return any(
        re.match(pattern[3:], name) if pattern.startswith("re:") else pattern in ("Linear", name)
        for pattern in patterns
    )


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
