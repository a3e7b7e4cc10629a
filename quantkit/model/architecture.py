"""The layers and parameters of a model, found by building it from its config without weights."""

import fnmatch
import json
import re
from collections.abc import Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit import families
from quantkit.errors import SourceError
from quantkit.families import geometry
from quantkit.model.headers import WEIGHT_TYPES, StoredTensor, TensorSpec
from quantkit.model.skeleton import (
    attentions,
    find_blocks,
    skeleton,
    usual_names,
)
from quantkit.model.source import ModelSource, read_config, read_tensors

if TYPE_CHECKING:
    from quantkit.model.links import Links

HEAD = "lm_head"
# In the name of a layer that belongs to one expert.
EXPERT = re.compile(r"(?:^|\.)experts\.\d+\.")
ROUTERS = ("gate", "router", "wg")
"""Parts of the names of routers."""
SMALL = "a small projection, which serving engines keep in 16 bits"
BEFORE_0_28 = "it is next to a short convolution, and vLLM before 0.28 builds it in 16 bits only"
STREAMS = "it mixes the model's parallel streams (AltUp): a few columns"
UNQUANTISED = {
    "shared_expert_gate": "it weighs the shared expert, and serving engines keep it in 16 bits",
    "in_proj_ba": SMALL,
    "in_proj_a": SMALL,
    "in_proj_b": SMALL,
    "dt_proj": SMALL,
    "x_proj": SMALL,
    "weights_proj": "it weighs an indexer's heads, and serving engines keep it in 16 bits",
    "indexer.wk": "vLLM fuses it with weights_proj, which stays in 16 bits",
    **dict.fromkeys(
        (
            *("compressor.kv_proj", "compressor.gate_proj", "indexer.kv_proj", "indexer.gate_proj"),
            *("compressor.wkv", "compressor.wgate"),  # in files
        ),
        "vLLM computes DeepSeek V4's compressed entries from its 16-bit weight",
    ),
    "attn.wo_a": "vLLM computes it by groups, from FP8 blocks or its 16-bit weight",
    "g_proj": "it gates attention heads: a small projection",
    "f_a_proj": SMALL,
    "f_b_proj": SMALL,
    "g_a_proj": SMALL,
    "g_b_proj": SMALL,
    "b_proj": SMALL,
    "per_layer_input_gate": SMALL,
    "per_layer_projection": SMALL,
    "correction_coefs": STREAMS,
    "prediction_coefs": STREAMS,
    "modality_router": STREAMS,
    "laurel.linear_left": SMALL,
    "laurel.linear_right": SMALL,
    "conv.in_proj": BEFORE_0_28,
    "conv.out_proj": BEFORE_0_28,
}
"""Linear layers within blocks that recipes never mean, by the end of their names, and why."""
MIXER = "it belongs to a mixer of the first Mamba, which vLLM builds in 16 bits only"
OUTSIDE = "outside the decoder blocks"
NOT_BUILT = "not part of the model as transformers builds it, such as a head that predicts ahead"
BESIDE_UNUSED = (
    "vLLM loads it as one layer with others that the file has and the model does not use, such as "
    "keys and values of layers that share those of another"
)
SHARED = "shared between blocks"
INSIDE_VLLM = "what vLLM calls layers that stay in 16 bits"
OTHER_KIND = "not a plain linear layer"
TOWER = re.compile(r"(vision|visual|audio|video|image|multi_modal|mm_projector|patch_merge)\w*")
"""In the names of vision and audio towers, and of the projectors between them and the language
model.
"""
CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "moe_top_k",
)
"""Config keys for the number of experts per token."""
# Written by old checkpoints, computed by every current loader.
IGNORABLE = ("*.rotary_emb.inv_freq", "*.attn.bias", "*.attn.masked_bias")


MOST_KNOWN = 8


@dataclass(frozen=True)
class Architecture:
    """Parameters and linear layers of a model, by name."""

    shapes: Mapping[str, tuple[int, ...]]
    """Every parameter and persistent buffer."""
    linears: Mapping[str, tuple[int, int]]
    """Modules of class Linear: rows and columns of their weight."""
    tied: Mapping[str, str]
    """Parameters that are another one under a second name."""
    attentions: Sequence[str] = ()
    """Modules that write keys and values to a cache."""
    routers: tuple[str, ...] = ()
    """Routers. They are small, decide a lot, and are never quantised."""
    chosen_share: float = 1.0
    """Share of a block's experts that a token is routed to."""
    unquantised: Mapping[str, str] = field(default_factory=dict)
    """Other layers that are never quantised, with the reason."""
    n_vocabulary: int = 0
    """Rows of the embedding."""
    head: str = HEAD
    """The output head's name in files, which recipes know as lm_head."""
    n_kv_heads: int = 0
    """Key-value heads; 0 where the config does not say."""
    renamed: str = ""
    """A tensor whose name in files differs from its module's; empty where there is none."""
    experts_note: str | None = None
    """A warning about serving quantised experts; None: nothing to warn about."""
    note: str | None = None
    """The same about serving the model at all."""
    module_names: Mapping[str, str] = field(default_factory=dict)
    """transformers' names of linear layers that files name differently, by the names in files."""
    rows_by_head: str | None = None
    """The last part of the names of layers whose rows engines reorder; None: there are none."""

    @classmethod
    def of(
        cls,
        folder: Path,
        trust_remote_code: bool = False,
        tensors: Mapping[str, StoredTensor] | None = None,
    ) -> "Architecture":
        """Build the skeleton of the model in `folder` and inspect it.

        Names are those of its files; those of `tensors`, if given.
        """
        from quantkit.model import links

        config = read_config(folder)
        if tensors is None:
            tensors = stored_tensors(folder, config)
        names = links.parameter_names(tensors, "quantization_config" in config)
        if trust_remote_code:  # its code may be another one the next time
            return _inspected(folder, config, names, trust_remote_code)
        # A command asks often, of a source and of its checkpoints, whose weights may be packed.
        described = {key: value for key, value in config.items() if key != "quantization_config"}
        key = json.dumps(described, sort_keys=True), tuple(names.items())
        if key not in _KNOWN:
            found = _inspected(folder, config, names, trust_remote_code)
            if len(_KNOWN) == MOST_KNOWN:
                del _KNOWN[next(iter(_KNOWN))]
            _KNOWN[key] = found
        return _KNOWN[key]

    @property
    def never(self) -> list[str]:
        """Modules that serving engines must be told to leave in 16 bits."""
        return [*self.routers, *self.unquantised]

    def matching(self, targets: list[str], ignore: list[str]) -> list[str]:
        """Linear layers that a recipe targets, in the model's order."""
        usual = {name: HEAD if name == self.head else name for name in self.linears}
        return [n for n, u in usual.items() if _matches(u, targets) and not _matches(u, ignore)]

    def check(self, source: ModelSource) -> list[str]:
        """Compare the config with the tensors; returns names that the config does not know."""
        problems = []
        unknown = [
            name
            for name in source.tensors
            if name not in self.shapes and not matches_any(name, IGNORABLE)
        ]
        for name, shape in self.shapes.items():
            stored = source.tensors.get(name)
            if stored is None:
                if name not in self.tied or self.tied[name] not in source.tensors:
                    problems.append(f"{name} is missing")
            elif stored.shape != shape:
                problems.append(f"{name} is {list(stored.shape)} where config.json says {shape}")
            elif name.endswith(".weight") and stored.dtype not in WEIGHT_TYPES:
                problems.append(f"{name} is {stored.dtype}, not one of {', '.join(WEIGHT_TYPES)}")
        for name, tensor in source.tensors.items():
            if tensor.dtype.startswith("F8") and name not in self.shapes:
                problems.append(f"{name} is {tensor.dtype}: part of a quantised model")
        if problems:
            rest = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
            raise SourceError(
                f"the weights in {source.folder} do not fit its config: "
                f"{'; '.join(problems[:3])}{rest}"
            )
        return unknown

    def stored(self, source: ModelSource) -> list[TensorSpec]:
        """Tensors that a checkpoint of this model stores: tied ones once, leftovers not at all."""
        return [
            TensorSpec(t.name, t.dtype, t.shape)
            for t in source.tensors.values()
            if not (t.name in self.tied and self.tied[t.name] in source.tensors)
            and not (t.name not in self.shapes and matches_any(t.name, IGNORABLE))
        ]


_KNOWN: dict[tuple[str, tuple[tuple[str, tuple[int, ...]], ...]], Architecture] = {}
"""The last ones, by config and stored parameters."""


def stored_tensors(folder: Path, config: Mapping[str, Any]) -> dict[str, StoredTensor]:
    """The tensors of a folder with separate experts; empty where it has no weights."""
    from quantkit.model import fused

    try:
        found = read_tensors(folder)
    except SourceError:
        return {}
    return fused.separated(found, config)


def _inspected(
    folder: Path,
    config: Mapping[str, Any],
    names: Mapping[str, tuple[int, ...]],
    trust_remote_code: bool,
) -> Architecture:
    """The architecture of a config, with stored parameters under these names."""
    from quantkit.model import links

    model = skeleton(folder, trust_remote_code)
    found = links.Links.of(model, names or usual_names(model))
    looked = _look(model, found, names, folder)
    others = dict.fromkeys(families.other_names(config), INSIDE_VLLM)
    return replace(
        looked,
        unquantised={**looked.unquantised, **others},
        experts_note=families.experts_note(config),
        note=families.serving_note(config),
        rows_by_head=families.rows_by_head(config),
    )


def _look(
    model: Any, links: "Links", names: Mapping[str, tuple[int, ...]], folder: Path
) -> Architecture:
    """Read the architecture from a skeleton and its links to stored tensors."""
    import torch

    from quantkit.model import experts

    fused_experts = experts.fused(model)
    n_vocabulary = int(model.get_input_embeddings().weight.shape[0])
    caches = list(attentions(model))
    experts.separate(model, folder)
    experts.stack(model, dict(links.stacked))
    blocks, _ = find_blocks(model)
    state = model.state_dict()
    tied = {
        links.stored.get(name, name): links.stored.get(owner, owner)
        for name, owner in (getattr(model, "all_tied_weights_keys", None) or {}).items()
        if name in state
    }
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        if name in links.conversions:
            shapes |= {n: names[n] for n in links.conversions[name].names() if n in names}
        else:
            shapes[links.stored.get(name, name)] = tuple(tensor.shape)
    modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    inside = {n: links.module(n) for n in modules if n.startswith(f"{blocks}.")}
    routers = find_routers(folder, {n: s for n, s in shapes.items() if not n.endswith(".bias")})
    unquantised: dict[str, str] = {}
    linears: dict[str, tuple[int, int]] = {}
    head = model.get_output_embeddings()
    for name, module in modules.items():
        own = links.module(name)
        if own in routers:
            continue
        if module is not head and name not in inside:
            unquantised[own] = OUTSIDE
        elif (
            f"{name}.weight" in links.conversions
            or type(module).forward is not torch.nn.Linear.forward
        ):
            unquantised[own] = OTHER_KIND
        elif name in inside and f"{own}.weight" in tied:
            unquantised[own] = SHARED
        elif name in inside and (reason := kept_reason(name, modules)):
            unquantised[own] = reason
        else:
            linears[own] = (module.weight.shape[0], module.weight.shape[1])
    owners = {owner.removesuffix(".weight") for owner in tied.values()}
    shared = [own for own in dict.fromkeys(inside.values()) if own in owners]  # in one order always
    unquantised |= dict.fromkeys(shared, SHARED)
    linears = {name: shape for name, shape in linears.items() if name not in shared}
    if not any(own in linears for own in inside.values()):
        raise SourceError(f"{folder}: {_without_linears(model, unquantised)}")
    unused = [
        name.removesuffix(".weight")
        for name in links.unknown
        if name.endswith(".weight") and len(names.get(name, ())) == 2
    ]
    unquantised |= dict.fromkeys(unused, NOT_BUILT)
    unquantised |= dict.fromkeys(_beside(linears, set(unused)), BESIDE_UNUSED)
    linears = {name: shape for name, shape in linears.items() if name not in unquantised}
    unquantised |= _towers(unquantised)
    share = 1.0
    if fused_experts:
        most = max(found.n_experts for found in fused_experts.values())
        text = model.config.get_text_config()
        chosen = next((int(n) for key in CHOSEN if (n := getattr(text, key, None))), most)
        share = min(1.0, chosen / most)
    heads = geometry.n_kv_heads(geometry.of_object(model.config.get_text_config()))
    caches = [links.module(name) for name in caches if name.startswith(f"{blocks}.")]
    own_head = next((links.module(name) for name, m in modules.items() if m is head), HEAD)
    renamed = next((n for p, n in links.stored.items() if p != n), "")
    # Experts have no modules of their own in transformers.
    own_names = {links.module(name): name for name in modules if not EXPERT.search(name)}
    return Architecture(
        shapes,
        linears,
        tied,
        caches,
        routers,
        chosen_share=share,
        unquantised=unquantised,
        n_vocabulary=n_vocabulary,
        head=own_head,
        n_kv_heads=heads,
        renamed=renamed,
        module_names={own: name for own, name in own_names.items() if own != name},
    )


def _beside(linears: Collection[str], unused: Set[str]) -> list[str]:
    """Layers that engines fuse with any unused one."""
    fused = families.fused()
    found = []
    for name in linears if unused else ():
        parent, _, last = name.rpartition(".")
        others = {f"{parent}.{part}" for parts in fused if last in parts for part in parts}
        if not others.isdisjoint(unused):
            found.append(name)
    return found


def _towers(unquantised: Mapping[str, str]) -> dict[str, str]:
    """Patterns for whole parts of the model, whose inner names engines may change."""
    parts: dict[str, str] = {}
    for name, reason in unquantised.items():
        found = TOWER.search(name)
        if reason == OUTSIDE and found is not None:
            parts[f"re:.*{found[0]}.*"] = OUTSIDE
    return parts


def find_routers(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Modules next to a block's experts that choose among them, by name or by shape."""
    weights = _weights(shapes)
    numbers: dict[str, int] = {}
    others = []
    for module, shape in weights:
        if found := EXPERT.search(module):
            block = module[: found.start()]
            numbers[block] = max(numbers.get(block, 0), int(found[0].strip(".").split(".")[1]) + 1)
        else:
            others.append((module, shape))
    routers = []
    for block, n_experts in numbers.items():
        beside = [(module, shape) for module, shape in others if module.startswith(f"{block}.")]
        named = [m for m, _ in beside if set(ROUTERS) & set(m.removeprefix(block).split("."))]
        found_routers = named or [m for m, shape in beside if shape[0] == n_experts]
        # Whatever else lies directly beside experts may be the router under another name.
        found_routers = found_routers or [
            m for m, _ in beside if "." not in m.removeprefix(f"{block}.")
        ]
        if not found_routers:
            raise SourceError(
                f"{folder}: {block} has {n_experts} experts and no layer directly beside them that "
                f"could be their router (called {' or '.join(ROUTERS)}, or with {n_experts} rows), "
                "so nothing says what must stay exact; serve it unquantised"
            )
        routers += found_routers
    return tuple(routers)


def _without_linears(model: Any, unquantised: Mapping[str, str]) -> str:
    """Why nothing in a model can be quantised: what its blocks hold instead, and where."""
    named = type(model).__name__
    prefix, blocks = find_blocks(model)
    if left := next((name for name in unquantised if unquantised[name] != OUTSIDE), None):
        return (
            f"every linear layer in the blocks of {named} stays in 16 bits ({left}: "
            f"{unquantised[left]}); serve it unquantised, or take another model"
        )
    for name, module in blocks.named_modules():
        if getattr(getattr(module, "weight", None), "ndim", 0) == 2:
            return (
                f"the blocks of {named} have {type(module).__name__} instead of Linear layers "
                f"({prefix}.{name}), whose weights are transposed, and vLLM loads those in 16 bits "
                "only; serve it unquantised, or take a model of Linear layers"
            )
    return (
        f"the blocks of {named} have no Linear layers, so there is nothing to quantise; serve it "
        "unquantised, or take another model"
    )


def kept_reason(name: str, among: Container[str] = ()) -> str | None:
    """Why a layer within a block stays in 16 bits, judging by its name and by those of others; None
    where it does not.
    """
    parts = name.split(".")
    beside = ".".join((*parts[:-1], "x_proj"))
    if parts[-1] in ("in_proj", "out_proj") and beside in among:
        return MIXER
    return UNQUANTISED.get(parts[-1]) or UNQUANTISED.get(".".join(parts[-2:]))


def is_kept(name: str, among: Container[str] = ()) -> bool:
    """Whether a layer within a block is never quantised, judging by its name and by others'."""
    return kept_reason(name, among) is not None or bool(set(ROUTERS) & set(name.split(".")))


def _weights(shapes: Mapping[str, tuple[int, ...]]) -> list[tuple[str, tuple[int, ...]]]:
    """Modules with a matrix called weight."""
    return [(n[:-7], s) for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2]


def _matches(name: str, patterns: list[str]) -> bool:
    """The rule of compressed-tensors: a class name, a module's name, or `re:` and a pattern."""
    if "Linear" in patterns or name in patterns:
        return True
    return any(re.match(p[3:], name) for p in patterns if p.startswith("re:"))


def matches_any(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
