"""A model's shape: config and tensors, without weights and without torch.

From a folder or the hub it is read from the files' headers; from a `config.json` alone, computed by
formulas; from a size such as 70B, assumed.
"""

import re
from collections.abc import (
    Collection,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, overload

from quantkit import resources
from quantkit.advise import families, sizes
from quantkit.errors import SourceError, near_matches
from quantkit.families import CACHED, MXFP4_EXPERTS, geometry, rows_by_head
from quantkit.home import expanded
from quantkit.model import fused
from quantkit.model.architecture import (
    BESIDE_UNUSED,
    EXPERT,
    IGNORABLE,
    OUTSIDE,
    TOWER,
    Architecture,
    find_routers,
    kept_reason,
    matches_any,
)
from quantkit.model.headers import ITEM_BYTES, StoredTensor, TensorSpec
from quantkit.model.source import INDEX, check_kind, read_config, read_tensors, text_config
from quantkit.parsing import parse_json

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
HEADS = re.compile(r"(.*\.)?(lm_head|embed_out)\.weight|(head|output)\.weight")
TABLES = re.compile(r"(.*\.)?(embed_tokens|embed_in|word_embeddings|wte)\.weight|embed\.weight")
NUMBERED = re.compile(r"\.\d+\.")
"""Marks the names of what belongs to a block."""
ATTENTION = re.compile(r"(?P<attention>.*\.layers\.(?P<layer>\d+)\.self_attn)\.[qkv]_proj")
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
EMBEDDINGS = ("embed", "wte", "wpe")
"""Found in the last part of the name of a module that looks up words or positions; not a Linear."""
NUMBER = re.compile(r"\.(\d+)\.")
Block = tuple[str, int]
"""The prefix before a block's number, and the number."""


@dataclass(frozen=True)
class Tensor(TensorSpec):
    """A tensor of the source, and whether it is the weight of a Linear."""

    is_linear: bool = False


@lru_cache(1 << 16)
def at_block(name: str) -> tuple[str, int | None, str]:
    """A name's prefix before its block number, the number, and the rest; without a block, the name
    is all prefix. Formats of a model have most names in common.
    """
    found = NUMBER.search(name)
    if found is None:
        return name, None, ""
    return name[: found.start()], int(found[1]), name[found.end() :]


class Repeated(Sequence[Tensor]):
    """Tensors with every expert of a block, from those with the first: tens of thousands, made
    only where somebody looks at them.
    """

    def __init__(self, first: Sequence[Tensor], n_experts: int) -> None:
        self._first = first
        self.n_experts = n_experts

    @cached_property
    def _all(self) -> tuple[Tensor, ...]:
        tensors: list[Tensor] = []
        for is_expert, run in groupby(self._first, lambda t: EXPERT.search(t.name) is not None):
            if not is_expert:
                tensors += run
                continue
            parts = [(t, t.name.partition(".experts.0.")) for t in run]
            for number in range(self.n_experts):
                tensors += [
                    Tensor(f"{before}.experts.{number}.{rest}", t.dtype, t.shape, t.is_linear)
                    for t, (before, _, rest) in parts
                ]
        return tuple(tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._all)


@dataclass(frozen=True)
class Sample:
    """A model without repetition: one expert per layer, one block of each kind.

    Plans for it name the same tensors as plans for the whole and take a fraction of the time.
    """

    shape: "ModelShape"
    n_experts: int = 1
    """Experts that each one stands for."""
    layers: Mapping[Block, tuple[int, ...]] = field(default_factory=dict)
    """Blocks that each one stands for, including itself; one not listed stands for itself."""

    def layers_of(self, name: str) -> tuple[int, ...]:
        """Numbers of the blocks that have a tensor like this one; none outside blocks."""
        before, number, _ = at_block(name)
        return () if number is None else self.layers.get((before, number), (number,))

    def has_block(self, name: str) -> bool:
        """Whether a tensor's block is in the sample, or the tensor is outside blocks."""
        before, number, _ = at_block(name)
        return number is None or (before, number) in self.layers

    def count(self, name: str) -> int:
        """Number of tensors that one stands for."""
        return self.experts(name) * max(1, len(self.layers_of(name)))

    def experts(self, name: str) -> int:
        """The same within one block."""
        return self.n_experts if self.n_experts > 1 and EXPERT.search(name) else 1


@dataclass(frozen=True)
class ModelShape:
    """What sizes are computed from."""

    label: str
    config: Mapping[str, Any]
    """With the defaults of its class, see `families.completed`."""
    tensors: Sequence[Tensor]
    """As quantkit stores them: a tied head is omitted."""
    assumed: bool = False
    """Only a size was given; `note` says which model stands in for it."""
    routers: tuple[str, ...] = ()
    note: str = ""
    stand_in: str = ""
    """The hub model with exactly this shape, if only a size was given."""
    folder: Path | None = None
    """Where its weights are; None if only its config or its headers are known."""
    _attentions: tuple[str, ...] = field(default=())

    @property
    def described(self) -> str:
        """Its name, plus the stand-in if only a size was given."""
        return f"{self.label} ({self.note})" if self.assumed else self.label

    @property
    def has_cache_scales(self) -> bool:
        """Whether any layer caches keys and values in a form that has scales."""
        return bool(self._attentions)

    @property
    def is_published_in_mxfp4(self) -> bool:
        """Whether its experts are in MXFP4 to begin with; a folder in 16 bits may hold others."""
        return self.assumed and self.config.get("model_type") in MXFP4_EXPERTS

    @cached_property
    def n_parameters(self) -> int:
        """Weights of the model, tied ones counted once."""
        return sum(n * tensor.n_elements for tensor, n in self._counted())

    @cached_property
    def size_bytes(self) -> int:
        """Bytes of the unquantised model."""
        return sum(n * tensor.size_bytes for tensor, n in self._counted())

    def _counted(self) -> Iterator[tuple[Tensor, int]]:
        """The first expert of each layer and all other tensors, with how many each stands for."""
        alike = Sample(*self.thin)
        return ((tensor, alike.experts(tensor.name)) for tensor in alike.shape.tensors)

    @cached_property
    def stored(self) -> list[TensorSpec]:
        """The tensors in the form that plans take."""
        return list(self.tensors)

    @cached_property
    def cache(self) -> dict[Hashable, Any]:
        """Cache of derived results, by what they depend on."""
        return {}

    @cached_property
    def thin(self) -> "tuple[ModelShape, int]":
        """The model with only the first expert of each layer, and how many that one stands for.

        MoE models have tens of thousands of tensors, and experts are alike; if they are not, this
        is the model itself.
        """
        kept, alike, n_first = [], True, 0
        kinds: dict[str, list[Any]] = {}
        for tensor in self.tensors:
            found = EXPERT.search(tensor.name)
            if found is None:
                kept.append(tensor)
                continue
            is_first = found[0].endswith("experts.0.")
            if is_first:
                n_first += 1
                kept.append(tensor)
            kind = f"{tensor.name[: found.start()]}.{tensor.name[found.end() :]}"
            seen = kinds.setdefault(kind, [tensor, 0])
            seen[1] += 1
            alike &= (tensor.dtype, tensor.shape) == (seen[0].dtype, seen[0].shape)
        numbers = {n for _, n in kinds.values()}
        if len(numbers) != 1 or n_first != len(kinds) or not alike:
            return self, 1
        return replace(self, tensors=tuple(kept)), numbers.pop()

    @cached_property
    def sample(self) -> Sample:
        """The same with the first of all blocks that are alike."""
        thin, n_experts = self.thin
        blocks: dict[Block, list[Hashable]] = {}
        for tensor in thin.tensors:
            before, number, rest = at_block(tensor.name)
            if number is not None:
                kind = rest, tensor.dtype, tensor.shape, tensor.is_linear
                blocks.setdefault((before, number), []).append(kind)
        alike: dict[Hashable, list[Block]] = {}
        for block, kinds in blocks.items():
            alike.setdefault((block[0], block[1] >= self.first_shared, *kinds), []).append(block)
        layers = {same[0]: tuple(number for _, number in same) for same in alike.values()}
        found = Sample(thin, n_experts, layers)
        first = replace(
            thin,
            tensors=tuple(tensor for tensor in thin.tensors if found.has_block(tensor.name)),
            routers=tuple(name for name in thin.routers if found.has_block(f"{name}.")),
            _attentions=tuple(n for n in thin._attentions if found.has_block(f"{n}.")),
        )
        return replace(found, shape=first)

    @property
    def first_shared(self) -> int:
        """The first block that reuses the keys and values of another."""
        n_shared: int = self.config.get("num_kv_shared_layers") or 0
        n_layers: int = self.config["num_hidden_layers"]
        return n_layers - n_shared

    @cached_property
    def head(self) -> str:
        """The output head's weight, whatever its prefix in the files."""
        return _ending(HEADS, (t.name for t in self.thin[0].tensors)) or HEAD

    @cached_property
    def embedding(self) -> str:
        """The embedding table."""
        return _ending(TABLES, (t.name for t in self.thin[0].tensors)) or EMBEDDING

    @cached_property
    def architecture(self) -> Architecture:
        """What a recipe's targets are matched against."""
        found = {t.name.removesuffix(".weight"): t.shape for t in self.tensors if t.is_linear}
        head = self.head.removesuffix(".weight")
        kept = {
            module: reason
            for module in found
            if module != head and (reason := _kept(module, found, self.first_shared))
        }
        return Architecture(
            shapes={t.name: t.shape for t in self.tensors},
            linears={m: (shape[0], shape[1]) for m, shape in found.items() if m not in kept},
            tied={},
            attentions=self._attentions,
            routers=self.routers,
            unquantised=kept,
            head=head,
            n_kv_heads=geometry.n_kv_heads(self.config),
            rows_by_head=rows_by_head(self.config),
        )

    @cached_property
    def gguf(self) -> tuple[list[tuple[str, tuple[int, ...]]], dict[str, Any]]:
        """Tensor names and shapes of a GGUF file of this model, and its metadata, whatever its
        types.
        """
        from quantkit.gguf.families import family_of, metadata_of
        from quantkit.gguf.tensors import BLOCK, tensors_of

        place = Path(self.label)
        family = family_of(self.config, place)
        metadata = metadata_of(family, self.config, place)
        found = []
        for one in tensors_of(self._blocks(), family, self.config, place):
            layers = self.sample.layers_of(one.parts[0]) if one.parts else ()
            names = [BLOCK.sub(f"blk.{layer}.", one.name, count=1) for layer in layers]
            found += [(name, one.shape) for name in names or [one.name]]
        return found, {"general.architecture": family.llamacpp, **metadata}

    def _blocks(self) -> dict[str, Tensor]:
        """Blocks of the sample with all their experts, and everything outside blocks."""
        sample = self.sample.shape.tensors
        if isinstance(self.tensors, Repeated):
            return {t.name: t for t in Repeated(sample, self.tensors.n_experts)}
        known = {t.name for t in sample}
        blocks = tuple(f"{before}.{number}." for before, number in self.sample.layers)
        return {t.name: t for t in self.tensors if t.name in known or t.name.startswith(blocks)}


def of(model: str) -> ModelShape:
    """The shape of a folder, a `config.json`, a hub id, `demo`, or a size such as 70B."""
    path = resources.DEMO_MODEL if model == "demo" else expanded(model)
    if path.is_dir():
        if not (path / INDEX).is_file() and not any(path.glob("*.safetensors")):
            return from_config(read_config(path), _label(model, path))
        found = from_tensors(read_config(path), read_tensors(path).values(), _label(model, path))
        return replace(found, folder=path)
    if path.is_file():
        return from_config(_read_json(path), _label(model, path.resolve().parent))
    if (moe := sizes.moe_of(model)) is not None:
        name, config = moe
        form = "" if config["model_type"] == "gpt_oss" else " in Qwen 3's form"
        note = f"taken to have the layers of {name}{form}"
        return from_config(config, model.strip(), assumed=True, note=note)
    if (n_weights := sizes.parse(model)) is not None:
        return _of_size(n_weights, model.strip())
    is_hub_id = model.count("/") == 1 and "," not in model
    if path.is_absolute() or model.startswith((".", "~")) or not is_hub_id:
        hint = ". Did you mean demo?" if near_matches(model, ["demo"]) else ""
        if "," in model:
            several = " ".join(part.strip() for part in model.split(",") if part.strip())
            hint = f". Separate several models by spaces: {several}"
        if model.strip().replace(".", "", 1).isdigit():
            hint = f". Did you mean {model.strip()}B?"
        raise SourceError(
            f"{model} was not found; give a folder, a config.json, a hub id such as "
            f"Qwen/Qwen3-8B, or a size such as 70B{hint}"
        )
    from quantkit.advise import hub

    config, stored = hub.describe(model)
    return from_config(config, model) if stored is None else from_tensors(config, stored, model)


@cache
def _of_size(n_weights: int, label: str) -> ModelShape:
    """The model assumed for a size."""
    name, config = sizes.config_of(n_weights)
    note = f"taken to be like {name} with {config['num_hidden_layers']} layers"
    found = from_config(config, label, assumed=True, note=note)
    return replace(found, stand_in=sizes.hub_id(name, config))


def from_config(
    config: Mapping[str, Any], label: str, assumed: bool = False, note: str = ""
) -> ModelShape:
    """The shape from formulas, in the config's dtype or else BF16."""
    check_kind(config, Path(label), trust_remote_code=True)  # its code is not run here
    named = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    dtype = DTYPES.get(named.removeprefix("torch."), "BF16")
    full = families.completed(config, label)
    found = families.shapes(full, label, only_first=True)
    stored = [TensorSpec(n, dtype, s) for n, s in found.items()]
    return _with_experts(_shape(full, stored, label, assumed, note), families.n_experts(full))


def _with_experts(thin: ModelShape, n_experts: int) -> ModelShape:
    """The model of all experts, from one that has only the first of each block."""
    if n_experts < 2 or not any(EXPERT.search(tensor.name) for tensor in thin.tensors):
        return thin
    full = replace(thin, tensors=Repeated(thin.tensors, n_experts))
    full.__dict__["thin"] = thin, n_experts  # presets the cached property
    return full


def from_tensors(config: Mapping[str, Any], stored: Iterable[TensorSpec], label: str) -> ModelShape:
    """The shape from a checkpoint's headers."""
    check_kind(config, Path(label), trust_remote_code=True)
    full = families.completed(_language(config), label)
    families.require(full, NEEDED, label)
    by_name = fused.separated({tensor.name: _placed(tensor) for tensor in stored}, config)
    tied = full["tie_word_embeddings"] and _ending(TABLES, by_name)
    head = _ending(HEADS, by_name)
    kept: list[TensorSpec] = [
        tensor
        for name, tensor in by_name.items()
        if not (tied and name == head) and not matches_any(name, IGNORABLE)
    ]
    if unknown := next((t for t in kept if t.dtype not in ITEM_BYTES), None):
        raise SourceError(f"{label}: {unknown.name} has the unknown type {unknown.dtype}")
    return _shape(full, kept, label)


def _ending(pattern: re.Pattern[str], names: Iterable[str]) -> str | None:
    """The first tensor of that kind in the language model."""
    return next((n for n in names if pattern.fullmatch(n) and not TOWER.search(n)), None)


def _placed(tensor: TensorSpec) -> StoredTensor:
    """A tensor that may be split; nobody reads the bytes of one on the hub."""
    if isinstance(tensor, StoredTensor):
        return tensor
    return StoredTensor(tensor.name, tensor.dtype, tensor.shape, Path(), 0)


def _shape(
    config: Mapping[str, Any],
    stored: list[TensorSpec],
    label: str,
    assumed: bool = False,
    note: str = "",
) -> ModelShape:
    routers = find_routers(Path(label), {tensor.name: tensor.shape for tensor in stored})
    among = frozenset(routers)
    tensors = tuple(Tensor(t.name, t.dtype, tuple(t.shape), _is_linear(t, among)) for t in stored)
    parents = (t.name.removesuffix(".weight").rpartition(".") for t in tensors if t.is_linear)
    cached = dict.fromkeys(parent for parent, _, last in parents if last in CACHED)
    # With an index of keys, the cache has a format of its own (`model/skeleton.py`).
    indexed = {t.name.partition(".indexer.")[0] for t in tensors if ".indexer." in t.name}
    attentions = tuple(name for name in cached if name not in indexed)
    return ModelShape(label, config, tensors, assumed, routers, note, _attentions=attentions)


def _kept(module: str, among: Collection[str], first_shared: int) -> str | None:
    """Why a layer other than the head stays in 16 bits; None if a recipe decides."""
    if TOWER.search(module) or not NUMBERED.search(module):
        return OUTSIDE
    found = ATTENTION.fullmatch(module)
    if found and int(found["layer"]) >= first_shared:
        return BESIDE_UNUSED if f"{found['attention']}.k_proj" in among else None
    return kept_reason(module, among)


def _language(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its language model's settings at the top level."""
    text = text_config(config)
    found = {**config, **text}
    if config.get("architectures"):
        found["architectures"] = config["architectures"]
    if config.get("tie_word_embeddings") is not None:  # of the model that the head belongs to
        found["tie_word_embeddings"] = config["tie_word_embeddings"]
    if isinstance(widths := found.get("intermediate_size"), list) and widths:
        found["intermediate_size"] = max(widths)  # each layer has its own
    if not found.get("num_hidden_layers") and isinstance(found.get("layers_block_type"), list):
        found["num_hidden_layers"] = len(found["layers_block_type"])
    return found


def _is_linear(tensor: TensorSpec, routers: Container[str]) -> bool:
    """Whether a tensor is the weight of a Linear, judged by name and shape."""
    module, _, last = tensor.name.rpartition(".")
    if last != "weight" or len(tensor.shape) != 2 or module in routers:
        return False
    own = module.rpartition(".")[2]
    looks_up = any(part in own for part in EMBEDDINGS)
    return not looks_up or EXPERT.search(module) is not None


def _label(model: str, folder: Path) -> str:
    return model if model == "demo" else folder.resolve().name


def _read_json(path: Path) -> dict[str, Any]:
    if path.name == "config.json":
        return read_config(path.parent)
    try:
        config = parse_json(path.read_bytes(), finite=False)
    except (OSError, ValueError, RecursionError) as error:
        raise SourceError(f"{path} is neither a model's folder nor its config: {error}") from error
    if not isinstance(config, dict):
        raise SourceError(f"{path} is not a config: it is not a JSON object")
    return config
