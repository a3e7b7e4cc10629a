"""Repair mechanical faults in checkpoints from other tools; never change a number silently.

The result is a new folder in the same format. Its `repaired.json` lists every change: config keys,
tensors that were added, dropped or repacked, and scales, with the error of each layer whose numbers
were rounded again, which requires `allow_rounding`.
"""

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.dispatch import prediction
from quantkit.dispatch.layers import Checkpoint
from quantkit.dispatch.layers import of as checkpoint_of
from quantkit.dispatch.rules import ARGUMENT_KEYS, ARGUMENT_VALUES, NEWEST
from quantkit.dispatch.schemes import Judged, Unsupported
from quantkit.errors import CheckpointError
from quantkit.export import expert_layout
from quantkit.export import folder as folders
from quantkit.export.manifest import is_checkpoint, now, versions
from quantkit.formats import declared, packing
from quantkit.formats.declared import DIALECTS, Dialect
from quantkit.model.headers import StoredTensor, TensorSpec
from quantkit.model.source import INDEX, read_config, read_tensors
from quantkit.progress import Progress, Silent
from quantkit.storage import refuse_existing, require_space, scratch_folder, sha256_of, write_json

if TYPE_CHECKING:
    import torch

FILE = "repaired.json"
BESIDE = ("input_scale", "input_global_scale", "qzeros", "g_idx", "scales")


@dataclass(frozen=True)
class Change:
    """One repair."""

    where: str
    """A config key, or a tensor."""
    what: str
    error: float | None = None
    """Relative error of a layer whose numbers were rounded again; None: exact."""


@dataclass
class Repaired:
    """A repaired folder."""

    folder: Path
    source: Path
    changes: list[Change] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "source": str(self.source),
            "created": now(),
            "versions": versions(),
            "exact": all(one.error is None for one in self.changes),
            "changes": [
                {"where": one.where, "what": one.what, "error": one.error} for one in self.changes
            ],
        }


@dataclass
class _Work:
    """The output in the making: tensors copied, and tensors that replace others."""

    config: dict[str, Any]
    stored: dict[str, StoredTensor]
    replaced: dict[str, "torch.Tensor"] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)

    @property
    def section(self) -> dict[str, Any]:
        found = declared.section(self.config)
        assert isinstance(found, dict)
        return found

    def checkpoint(self) -> Checkpoint:
        return checkpoint_of(self.config, self.stored, "")

    @property
    def dialect(self) -> Dialect:
        return DIALECTS[self.checkpoint().method]


def repair(
    path: Path,
    to: str,
    out: Path | None = None,
    force: bool = False,
    allow_rounding: bool = False,
    progress: Progress | None = None,
) -> Repaired:
    """Write a repaired copy of a folder to `out`; by default a sibling of the input."""
    progress = progress or Silent()
    if is_checkpoint(path):
        raise CheckpointError(
            f"{path} is quantkit's own: quantise the source again instead; --repair is for "
            "checkpoints from other tools"
        )
    config = read_config(path)
    work = _Work(config, read_tensors(path))
    method = work.checkpoint().method
    if not method:
        raise CheckpointError(f"{path} is not quantised: there is nothing to repair")
    if to != method:
        raise CheckpointError(
            f"{path} is in {method or 'no quantised'} form, and --repair keeps the format: use "
            f"--to {method}"
        )
    out = out or path.resolve().with_name(f"{path.resolve().name}-repaired")
    if out.resolve() == path.resolve():
        raise CheckpointError(f"{out} is the checkpoint itself; name another folder with -o")
    refuse_existing(out, force)
    _experts(work)
    _keys(work)
    _packing(work)
    _shapes(work)
    _strays(work)
    _scales(work, allow_rounding)
    _ignore(work)
    if not work.changes:
        found = prediction.predict(path)
        more = f"; {found.faults[0]} is not mechanical" if found.faults else ""
        raise CheckpointError(f"{path} has nothing to repair{more}")
    result = Repaired(out, path, work.changes)
    _write(path, work, result, force, progress)
    return result


def _experts(work: _Work) -> None:
    """Split experts as engines read them; gpt-oss's stay together in MXFP4."""
    if work.dialect.joins_experts:
        work.stored, changes = expert_layout.fuse(work.stored)
    else:
        work.stored, changes = expert_layout.split(work.stored, work.config)
    work.changes += [Change(where, what) for where, what in changes]


def _keys(work: _Work) -> None:
    """Drop keys that the readers' library forbids, and add those that readers need."""
    section = work.section
    for name, group in (section.get("config_groups") or {}).items():
        for part in ("weights", "input_activations", "output_activations"):
            given = group.get(part)
            if not isinstance(given, dict):
                continue
            for key in sorted(given.keys() - ARGUMENT_KEYS):
                value = given.pop(key)
                where = f"config_groups.{name}.{part}.{key}"
                work.changes.append(Change(where, f"dropped {value!r}, an unknown key"))
            for key, values in ARGUMENT_VALUES.items():
                if key in given and given[key] not in values and key == "actorder":
                    value = given.pop(key)
                    where = f"config_groups.{name}.{part}.{key}"
                    work.changes.append(Change(where, f"dropped {value!r}, an unknown value"))
    if (section.get("sparsity_config") or {}).get("targets") and not any(
        "bitmask" in name or name.endswith(".compressed") for name in work.stored
    ):
        section.pop("sparsity_config")
        work.changes.append(Change("sparsity_config", "dropped: the weights are stored whole"))
    for key, value in work.dialect.defaults.items():
        if key not in section:
            if key == "desc_act":
                value = _is_ordered(work)
            section[key] = value
            work.changes.append(Change(key, f"added {value}"))
    if section.get("desc_act") is False and _is_ordered(work):
        section["desc_act"] = True
        work.changes.append(Change("desc_act", "set to true: g_idx has an order of its own"))


def _is_ordered(work: _Work) -> bool:
    size = work.section.get("group_size") or -1
    for name, tensor in work.stored.items():
        if name.endswith(".g_idx") and size > 0:
            index = tensor.read()
            return bool((index != _plain_index(len(index), size)).any())
    return False


def _plain_index(n: int, size: int) -> "torch.Tensor":
    import torch

    return (torch.arange(n) // size).to(torch.int32)


def _groups(work: _Work) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Quantised layers, and the quantisation arguments of their weights."""
    checkpoint = work.checkpoint()
    if not work.dialect.spells_out:
        return
    declares = declared.of(work.config, "the checkpoint")
    for name, layer in checkpoint.linears.items():
        part = declares.part(name) if layer.is_quantized else None
        if part is not None:
            yield name, {"bits": part.weights.num_bits, "size": part.weights.group_size,
                         "type": part.weights.type}  # fmt: skip


def _packing(work: _Work) -> None:
    """Repack integers densely that compressed-tensors before 0.18 padded to words."""
    for name, args in _groups(work):
        bits, packed = int(args["bits"]), work.stored.get(f"{name}.weight_packed")
        scale = work.stored.get(f"{name}.weight_scale")
        if packed is None or packed.dtype != "I32" or 32 % bits == 0 or scale is None:
            continue
        columns = _columns(work, name, scale, args)
        per = 32 // bits
        if columns is None or packed.shape[1] == packing.n_words(columns, bits):
            continue
        if packed.shape[1] != -(-columns // per):
            continue  # neither layout: verify reports it
        fields = _unpadded(packed.read(), bits, per, columns)
        work.replaced[packed.name] = packing.pack(fields, bits)
        work.changes.append(Change(packed.name, f"{bits}-bit integers packed densely"))


def _unpadded(packed: "torch.Tensor", bits: int, per: int, columns: int) -> "torch.Tensor":
    import torch

    shifts = torch.arange(per, dtype=torch.int64) * bits
    fields = (packed.to(torch.int64)[..., None] >> shifts) & ((1 << bits) - 1)
    return (fields.flatten(1)[:, :columns] - (1 << (bits - 1))).to(torch.int8)


def _columns(work: _Work, name: str, scale: StoredTensor, args: Mapping[str, Any]) -> int | None:
    shape = work.stored.get(f"{name}.weight_shape")
    if shape is not None:
        return int(shape.read().tolist()[1])
    size = args["size"]
    return scale.shape[1] * int(size) if size and len(scale.shape) == 2 else None


def _shapes(work: _Work) -> None:
    """Add `weight_shape`, which decompressors need beside packed integers."""
    import torch

    for name, args in _groups(work):
        packed = work.stored.get(f"{name}.weight_packed")
        scale = work.stored.get(f"{name}.weight_scale")
        if packed is None or packed.dtype != "I32" or f"{name}.weight_shape" in work.stored:
            continue
        columns = None if scale is None else _columns(work, name, scale, args)
        if columns is None:
            if 32 % int(args["bits"]):
                continue
            columns = packed.shape[1] * 32 // int(args["bits"])
        shape = [packed.shape[0], columns]
        work.replaced[f"{name}.weight_shape"] = torch.tensor(shape, dtype=torch.int64)
        work.changes.append(Change(f"{name}.weight_shape", f"added {shape}"))


def _strays(work: _Work) -> None:
    """Drop tensors that belong to no layer, on which engines stop."""
    checkpoint = work.checkpoint()
    modules = {name for name, layer in checkpoint.layers.items() if layer.is_quantized}
    for name in list(work.stored):
        module, _, last = name.rpartition(".")
        beside = last.startswith(("weight_scale", "weight_zero", "weight_shape", "weight_global"))
        beside = beside or last in (
            "input_scale",
            "input_global_scale",
            "qzeros",
            "g_idx",
            "scales",
        )
        if beside and module not in modules:
            del work.stored[name]
            work.changes.append(Change(name, "left out: its layer is stored in 16 bits"))


def _scales(work: _Work, allow_rounding: bool) -> None:
    """Give NVFP4 layers that engines fuse one global scale.

    Exact if the ratio is a power of two and no group scale leaves E4M3's range.
    """
    checkpoint = work.checkpoint()
    for kind in ("weight_global_scale", "weight_scale_2"):
        for whole, shards in checkpoint.fused:
            names = [f"{shard}.{kind}" for shard in shards]
            if any(name not in work.stored for name in names):
                continue
            values = [work.stored[name].read().float().reshape(-1)[0].item() for name in names]
            if len(set(values)) == 1 or min(values) <= 0 or not all(map(math.isfinite, values)):
                continue
            # Divisors: the smallest leaves room for all. Multipliers: the largest does.
            shared = min(values) if kind == "weight_global_scale" else max(values)
            for shard, value in zip(shards, values, strict=True):
                if value == shared:
                    continue
                ratio = value / shared if kind == "weight_global_scale" else shared / value
                _rescale(work, shard, kind, shared, ratio, whole, allow_rounding)


def _rescale(
    work: _Work, shard: str, kind: str, shared: float, ratio: float, whole: str, rounding: bool
) -> None:
    """Divide a shard's group scales by the ratio of its global scale to the shared one."""
    import torch

    name = f"{shard}.weight_scale"
    before = work.stored[name].read()
    wide = before.float()
    # The effective scale is the group scale over the divisor, so both change by the same factor.
    after = (wide / ratio).to(before.dtype)
    exact = bool((after.float() * ratio == wide).all())
    if not exact and not rounding:
        raise CheckpointError(
            f"{shard}: its global scale is {ratio:.6g} times off that of {whole}, and its group "
            "scales do not take that up exactly; --allow-rounding rounds them and lists the error"
        )
    error = None
    if not exact:
        error = float(((after.float() * ratio - wide).norm() / wide.norm()).item())
    stored = work.stored[f"{shard}.{kind}"].read()
    work.replaced[f"{shard}.{kind}"] = torch.full_like(stored, shared)
    work.replaced[name] = after
    change = f"made that of {whole}, its group scales over {ratio:.6g}"
    work.changes.append(Change(f"{shard}.{kind}", change, error))


def _ignore(work: _Work) -> None:
    """Rewrite entries to vLLM's names, and add every layer that is stored in 16 bits."""
    checkpoint, section = work.checkpoint(), work.section
    if not (keys := work.dialect.ignore_keys):
        return
    key = next((key for key in keys if section.get(key)), keys[0])
    judged = Judged(checkpoint, NEWEST)
    names = list(section.get(key) or [])
    entries = {mapped: entry for entry, mapped in judged.ignore}
    inside = {checkpoint.inside(name) for name in checkpoint.layers}
    for mapped, entry in entries.items():
        if any(judged.ignores(mapped, name) for name in inside):
            continue
        names.remove(entry)
        work.changes.append(Change(f"{key}: {entry}", "dropped: it names no module"))
    added = []
    try:
        schemes = judged.schemes
    except Unsupported:
        return
    tied = bool(work.config.get("tie_word_embeddings"))
    for name, layer in checkpoint.linears.items():
        is_head = name.rpartition(".")[2] == "lm_head"
        if layer.is_quantized or schemes[name] is None or (tied and is_head):
            continue
        added.append(name)
    for name in added:
        work.changes.append(Change(f"{key}: {name}", "added: it is stored in 16 bits"))
    if added or len(names) != len(section.get(key) or []):
        section[key] = [*names, *added]


def _write(path: Path, work: _Work, result: Repaired, force: bool, progress: Progress) -> None:
    """Write the folder: tensors in their old order, other files copied, the record last."""
    specs: list[TensorSpec] = []
    for name, tensor in work.stored.items():
        specs.append(_spec(name, work.replaced[name]) if name in work.replaced else tensor)
    specs += [_spec(n, t) for n, t in work.replaced.items() if n not in work.stored]
    require_space(result.folder, sum(spec.size_bytes for spec in specs))
    progress.start(f"repair {path.name}", sum(spec.size_bytes for spec in specs))
    with scratch_folder(result.folder, force) as scratch:
        plain = [TensorSpec(spec.name, spec.dtype, spec.shape) for spec in specs]
        with folders.open_folder(scratch, plain) as writer:
            for spec in plain:
                held = work.replaced.get(spec.name)
                writer.write(spec.name, work.stored[spec.name].read() if held is None else held)
                progress.advance(spec.size_bytes)
        for file in sorted(path.iterdir()):
            own = file.name in ("config.json", INDEX, FILE)
            if file.is_file() and not own and file.suffix != ".safetensors":
                shutil.copyfile(file, scratch / file.name)
        write_json(scratch / "config.json", work.config, allow_nan=True)
        manifest = result.to_json()
        manifest["files"] = {
            file.name: sha256_of(file) for file in sorted(scratch.iterdir()) if file.is_file()
        }
        (scratch / FILE).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    progress.finish()


def _spec(name: str, tensor: "torch.Tensor") -> TensorSpec:
    from quantkit.model.dtypes import CODES

    return TensorSpec(name, CODES[tensor.dtype], tuple(tensor.shape))
