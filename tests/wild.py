"""A corpus of small checkpoints as they lie about in the wild: sound ones, and one per known fault.

Made on the demo model by compressed-tensors' own code and by writers of ours whose files carry no
trace of it (`foreign.py`), then damaged in one way each. `benchmarks/wild.py` puts the same corpus
before a real vLLM.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from foreign import by_library, changed, configured, disowned, in_mxfp4, save_gpt_oss

import quantkit
from quantkit import resources
from quantkit.formats import packing
from quantkit.model.source import read_tensors

LIBRARY = (
    "W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16",
    "MXFP4",
)  # fmt: skip
OURS = {
    "gptq": ("rtn-w4a16", "gptq"),
    "awq": ("rtn-w4a16", "awq"),
    "fp8-blocks": ("fp8-block", "fp8"),
}
Damage = Callable[[Path, Path, Path], Path]
"""Of a sound folder, the new one and the source model."""
DEMO = Path(resources.DEMO_MODEL)
DOWN = "model.layers.0.mlp.down_proj"
QUERY = "model.layers.1.self_attn.q_proj"
GATE = "model.layers.1.mlp.gate_proj"


@dataclass(frozen=True)
class Case:
    """A folder, and what must be said of it."""

    name: str
    folder: Path
    rule: str | None = None
    """The rule of `quantkit.dispatch.rules` that names its fault; None: none does."""
    consequence: str | None = None
    """What comes of it in vLLM."""
    verify: str | None = None
    """What `quantkit verify` says of it, where weights must be read to see it."""

    @property
    def is_sound(self) -> bool:
        return self.rule is None and self.verify is None


def make(
    out: Path,
    source: Path = DEMO,
    wanted: Callable[[str], bool] = lambda name: True,
) -> list[Case]:
    """Write the corpus, or those of it that are wanted by name; what is there is made again."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    bases: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in bases:
            bases[name] = _base(name, out / "sound" / name, source)
        return bases[name]

    cases = [Case(name, base(name)) for name in SOUND if wanted(name)]
    for name, (of, rule, consequence, found, damage) in BROKEN.items():
        if wanted(name):
            folder = out / "broken" / name
            folder.parent.mkdir(exist_ok=True)
            damage(base(of), folder, source)
            cases.append(Case(name, folder, rule, consequence, found))
    return cases


def _base(name: str, folder: Path, source: Path) -> Path:
    folder.parent.mkdir(exist_ok=True, parents=True)
    if name in LIBRARY:
        return by_library(source, folder, name)[0]
    if name in OURS:
        recipe, form = OURS[name]
        return _disowned(source, recipe, form, folder)
    return VARIANTS[name](folder, source)


def _disowned(source: Path, recipe: str, form: str, folder: Path) -> Path:
    scratch = folder.with_name(f"{folder.name}-ours")
    (made,) = quantkit.quantize(source, [recipe], out=scratch, format=form, device="cpu")
    disowned(made.folder, folder)
    shutil.rmtree(scratch)
    return folder


def _act_order(folder: Path, source: Path) -> Path:
    """GPTQ whose columns belong to groups in an order of their own, rounded to these groups."""
    made = _base("gptq", folder.with_name(f"{folder.name}-plain"), source)
    plain = {n: t.read() for n, t in read_tensors(source).items()}
    stored = read_tensors(made)
    replaced: dict[str, torch.Tensor] = {}
    for name in [n.removesuffix(".qweight") for n in stored if n.endswith(".qweight")]:
        weight = plain[f"{name}.weight"].float()
        order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
        groups = torch.empty_like(order)
        groups[order] = torch.arange(weight.shape[1]) // 128
        n_groups = int(groups.max()) + 1
        peaks = torch.stack([weight[:, groups == g].abs().amax(1) for g in range(n_groups)])
        scales = (peaks / 7.5).to(torch.bfloat16 if stored[f"{name}.scales"].dtype == "BF16"
                                  else torch.float16)  # fmt: skip
        values = (weight / scales.float()[groups].t()).round().clamp(-8, 7) + 8
        fields = values.t().reshape(-1, 8, weight.shape[0]).long()
        packed = sum(fields[:, place] << (4 * place) for place in range(8))
        assert isinstance(packed, torch.Tensor)
        packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
        replaced |= {
            f"{name}.qweight": packed.to(torch.int32),
            f"{name}.scales": scales,
            f"{name}.g_idx": groups.to(torch.int32),
        }
    changed(made, folder, **replaced)
    shutil.rmtree(made)
    return configured(folder, desc_act=True)


def _second_version(folder: Path, source: Path) -> Path:
    """GPTQModel's second version of the format: zero points stored as they are."""
    made = _base("gptq", folder.with_name(f"{folder.name}-plain"), source)
    raised = {
        n: t.read() + 0x11111111 for n, t in read_tensors(made).items() if n.endswith(".qzeros")
    }
    changed(made, folder, **raised)
    shutil.rmtree(made)
    return configured(folder, checkpoint_format="gptq_v2")


def _three_bits(folder: Path, source: Path) -> Path:
    """Integers of 3 bits by plain rounding, which no recipe of ours has."""
    text = resources.find("recipes", "rtn-w5a16").read_text()
    recipe = folder.with_name("rtn-w3a16.yaml")
    recipe.write_text(text.replace("num_bits: 5", "num_bits: 3").replace("rtn-w5a16", "rtn-w3a16"))
    return _disowned(source, str(recipe), "compressed-tensors", folder)


def _experts(folder: Path, _: Path) -> Path:
    """A small MoE model with eight experts."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    source = folder.with_name(f"{folder.name}-source")
    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, vocab_size=4096, max_position_embeddings=512, decoder_sparse_step=1,
        norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.to(torch.bfloat16).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, source / name)
    made = _disowned(source, "rtn-w4a16", "compressed-tensors", folder)
    shutil.rmtree(source)
    return made


def _gpt_oss(folder: Path, _: Path) -> Path:
    """gpt-oss's own format: MXFP4 experts, all of a block in one tensor."""
    source = save_gpt_oss(folder.with_name(f"{folder.name}-source"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, source / name)
    in_mxfp4(source, folder)
    shutil.rmtree(source)
    return folder


VARIANTS: Mapping[str, Callable[[Path, Path], Path]] = {
    "w3a16": _three_bits,
    "gptq-act-order": _act_order,
    "gptq-v2": _second_version,
    "experts": _experts,
    "gpt-oss": _gpt_oss,
}
SOUND = (*LIBRARY, *OURS, *VARIANTS)


def _stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor.read() for name, tensor in read_tensors(folder).items()}


def _section(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_bytes())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))
    return folder


def _copied(made: Path, folder: Path) -> Path:
    shutil.copytree(made, folder)
    return folder


def _plain(made: Path, folder: Path, source: Path, module: str) -> Path:
    """One layer in 16 bits, as the source has it."""
    parts = [name for name in read_tensors(made) if name.startswith(f"{module}.")]
    weight = read_tensors(source)[f"{module}.weight"].read()
    return changed(made, folder, **{**dict.fromkeys(parts), f"{module}.weight": weight})


def _unlike_ignored(made: Path, folder: Path, source: Path) -> Path:
    _plain(made, folder, source, QUERY)
    return _section(folder, lambda s: s.update(ignore=[*s["ignore"], QUERY]))


def _unlike_scheme(made: Path, folder: Path, source: Path) -> Path:
    """q_proj in 8 bits beside k_proj and v_proj in 4."""
    weight = read_tensors(source)[f"{QUERY}.weight"].read().float()
    groups = weight.reshape(weight.shape[0], -1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-8) / 127.5
    values = (groups / scale[..., None]).round().clamp(-128, 127).reshape(weight.shape)
    changed(
        made,
        folder,
        **{
            f"{QUERY}.weight_packed": packing.pack(values.to(torch.int8), 8),
            f"{QUERY}.weight_scale": scale.to(torch.bfloat16),
        },
    )

    def declare(section: dict[str, Any]) -> None:
        first = section["config_groups"]["group_0"]
        own = {**first, "targets": [QUERY], "weights": {**first["weights"], "num_bits": 8}}
        section["config_groups"] = {"group_1": own, "group_0": first}

    return _section(folder, declare)


def _missing_scale(made: Path, folder: Path, source: Path) -> Path:
    return changed(made, folder, **{f"{DOWN}.weight_scale": None})


def _wrong_prefix(made: Path, folder: Path, source: Path) -> Path:
    _plain(made, folder, source, DOWN)
    entry = f"language_model.{DOWN}"
    return _section(folder, lambda s: s.update(ignore=[*s["ignore"], entry]))


def _container(made: Path, folder: Path, source: Path) -> Path:
    """The MLP of a block in 16 bits, named by the block's part and not layer by layer."""
    stored = read_tensors(made)
    original = read_tensors(source)
    part = "model.layers.0.mlp"
    gone = [name for name in stored if name.startswith(f"{part}.")]
    weights = {n: t.read() for n, t in original.items() if n.startswith(f"{part}.")}
    changed(made, folder, **{**dict.fromkeys(gone), **weights})
    return _section(folder, lambda s: s.update(ignore=[*s["ignore"], part]))


def _nan(made: Path, folder: Path, source: Path) -> Path:
    name = f"{DOWN}.weight_scale"
    scale = read_tensors(made)[name].read().clone()
    raw = scale.view(torch.uint8) if scale.element_size() == 1 else scale
    raw.view(-1)[3] = 0x7F if scale.element_size() == 1 else float("nan")
    return changed(made, folder, **{name: scale})


def _global_scales(made: Path, folder: Path, source: Path) -> Path:
    """The global scale of k_proj eight times as large, and its group scales to fit."""
    key = QUERY.replace("q_proj", "k_proj")
    stored = _stored(made)
    whole, scale = stored[f"{key}.weight_global_scale"], stored[f"{key}.weight_scale"]
    finer = (scale.float() / 8).to(torch.float8_e4m3fn)
    return changed(
        made,
        folder,
        **{f"{key}.weight_global_scale": whole / 8, f"{key}.weight_scale": finer},
    )


def _padded(made: Path, folder: Path, source: Path) -> Path:
    """3-bit integers, ten to a word, as compressed-tensors before 0.18 packs them."""
    stored = _stored(made)
    replaced = {}
    for name, packed in stored.items():
        if name.endswith(".weight_packed"):
            columns = int(stored[name.replace("packed", "shape")][1])
            fields = packing.unpack(packed, 3, columns).to(torch.int64) + 4
            fields = torch.nn.functional.pad(fields, (0, -columns % 10))
            fields = fields.reshape(len(fields), -1, 10)
            replaced[name] = sum(fields[..., i] << (3 * i) for i in range(10)).to(torch.int32)
    return changed(made, folder, **replaced)


EXPERTS = "model.layers.0.mlp.experts"


def _no_block_scales(made: Path, folder: Path, source: Path) -> Path:
    return changed(made, folder, **{f"{EXPERTS}.down_proj_scales": None})


def _short_block_scales(made: Path, folder: Path, source: Path) -> Path:
    """Scales of half the rows: vLLM fills the first rows and leaves zeros in the others."""
    name = f"{EXPERTS}.down_proj_scales"
    scales = read_tensors(made)[name].read()
    return changed(made, folder, **{name: scales[:, : scales.shape[1] // 2].contiguous()})


def _nan_exponent(made: Path, folder: Path, source: Path) -> Path:
    name = f"{EXPERTS}.gate_up_proj_scales"
    scales = read_tensors(made)[name].read().clone()
    scales.view(-1)[3] = 0xFF
    return changed(made, folder, **{name: scales})


def _undeclared_order(made: Path, folder: Path, source: Path) -> Path:
    return configured(_copied(made, folder), desc_act=False)


def _odd_expert(made: Path, folder: Path, source: Path) -> Path:
    module = "model.layers.0.mlp.experts.7.down_proj"
    parts = [name for name in read_tensors(made) if name.startswith(f"{module}.")]
    weight = torch.randn(256, 128, dtype=torch.bfloat16) * 0.02
    return changed(made, folder, **{**dict.fromkeys(parts), f"{module}.weight": weight})


def _truncated(made: Path, folder: Path, source: Path) -> Path:
    path = _copied(made, folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4096])
    return folder


def _other_config(made: Path, folder: Path, source: Path) -> Path:
    path = _copied(made, folder) / "config.json"
    config = json.loads(path.read_bytes())
    config |= {"hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
    path.write_text(json.dumps(config))
    return folder


def _missing_block(made: Path, folder: Path, source: Path) -> Path:
    gone = [name for name in read_tensors(made) if name.startswith("model.layers.1.")]
    return changed(made, folder, **dict.fromkeys(gone))


def _unknown_key(made: Path, folder: Path, source: Path) -> Path:
    def add(section: dict[str, Any]) -> None:
        section["config_groups"]["group_0"]["weights"]["rounding"] = "stochastic"

    return _section(_copied(made, folder), add)


def _wrong_format(made: Path, folder: Path, source: Path) -> Path:
    def change(section: dict[str, Any]) -> None:
        section["format"] = "int-quantized"
        section["config_groups"]["group_0"].pop("format", None)

    return _section(_copied(made, folder), change)


def _with(**changes: Any) -> Damage:
    return lambda made, folder, source: configured(_copied(made, folder), **changes)


def _without(key: str) -> Damage:
    def damage(made: Path, folder: Path, source: Path) -> Path:
        return _section(_copied(made, folder), lambda section: section.pop(key))

    return damage


def _ignored(made: Path, folder: Path, source: Path) -> Path:
    shards = [QUERY.replace("q_proj", name) for name in ("q_proj", "k_proj", "v_proj")]
    return _section(
        _copied(made, folder), lambda section: section.update(ignore=[*section["ignore"], *shards])
    )


def _plain_fp8(made: Path, folder: Path, source: Path) -> Path:
    return _plain(made, folder, source, DOWN)


BROKEN: Mapping[str, tuple[str, str | None, str, str | None, Damage]] = {
    "unlike-ignored": ("W4A16", "fused-ignore", "refuses", None, _unlike_ignored),
    "unlike-scheme": ("W4A16", "fused-scheme", "refuses", None, _unlike_scheme),
    "missing-scale": ("W4A16", "missing-tensor", "garbage", None, _missing_scale),
    "wrong-prefix": ("W4A16", "ignore-name", "refuses", None, _wrong_prefix),
    "ignored-container": ("W4A16", "ignore-name", "refuses", None, _container),
    "nan-scale": ("W4A16", None, "garbage", "scales are NaN|scales is NaN", _nan),
    "nan-e4m3-scale": ("NVFP4", None, "accuracy", "scales are NaN|scales is NaN", _nan),
    "global-scales": ("NVFP4", "global-scales", "garbage", None, _global_scales),
    "padded-3-bit": ("w3a16", "packing", "refuses", None, _padded),
    "undeclared-act-order": ("gptq-act-order", "act-order", "garbage", None, _undeclared_order),
    "odd-expert": ("experts", "experts-scheme", "refuses", None, _odd_expert),
    "no-block-scales": ("gpt-oss", "mxfp4-experts", "garbage", None, _no_block_scales),
    "short-block-scales": ("gpt-oss", "mxfp4-experts", "garbage", None, _short_block_scales),
    "nan-exponent": ("gpt-oss", None, "garbage", r"scales is NaN \(E8M0\)", _nan_exponent),
    "truncated": ("FP8_DYNAMIC", "headers", "refuses", None, _truncated),
    "other-config": ("FP8_DYNAMIC", "config-shape", "refuses", None, _other_config),
    "missing-block": ("FP8_DYNAMIC", "missing-layer", "garbage", None, _missing_block),
    "plain-in-fp8": ("FP8_DYNAMIC", "stored-plain", "garbage", None, _plain_fp8),
    "ignored-quantized": ("FP8_DYNAMIC", "stored-quantized", "refuses", None, _ignored),
    "unknown-key": ("W4A16", "unknown-key", "refuses", None, _unknown_key),
    "unknown-method": ("W4A16", "method", "refuses", None, _with(quant_method="squeeze")),
    "wrong-format": ("W4A16", "no-scheme", "refuses", None, _wrong_format),
    "integer-cache": ("W4A16", "kv-scheme", "refuses", None, _with(
        kv_cache_scheme={"num_bits": 8, "type": "int", "strategy": "tensor", "symmetric": True})),
    "sparsity": ("W8A8", "sparsity", "refuses", None, _with(
        sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"],
                         "sparsity_structure": "2:4"})),
    "gptq-asymmetric": ("gptq", "gptq-numbers", "refuses", None, _with(sym=False)),
    "gptq-group-16": ("gptq", "gptq-group", "refuses", None, _with(group_size=16)),
    "gptq-without-desc-act": ("gptq", "required-key", "refuses", None, _without("desc_act")),
    "awq-8-bit": ("awq", "awq-numbers", "refuses", None, _with(bits=8)),
    "fp8-static-blocks": ("fp8-blocks", "fp8-scheme", "refuses", None, _with(
        activation_scheme="static")),
}  # fmt: skip
"""Name: the sound checkpoint it is made from, rule, consequence, verify's words, and how."""
