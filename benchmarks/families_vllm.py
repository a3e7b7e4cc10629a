"""Small models of every family in real vLLM: what it loads, and whether it computes what is stored.

    python benchmarks/families.py --vllm PYTHON_OF_VLLM --work FOLDER [--jobs 8] [FAMILY ...]

Each family is built with sizes that vLLM's kernels take, quantised with one recipe (one family of
each kind with all of them), verified, loaded in a vLLM process of its own and compared by prompt
log-probabilities, as `quantkit verify --engine vllm` does. Several processes share one GPU. Where
vLLM refuses a checkpoint or disagrees, the 16-bit source is asked about as well, which shows
whether the family or the checkpoint is at fault. Vision towers are left out: prompts are text.

Every outcome is written as it comes, and a later call goes on with the rest (`--retry` tries again
what did not agree). `--python` may be a script that sets its own PYTHONPATH.
"""

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import families
import torch
from recording import without_folders, write
from safetensors.torch import load_file, save_file

from quantkit import device as devices
from quantkit.dispatch import prediction
from quantkit.engine.vllm_job import Answer, Job, Vllm
from quantkit.errors import QuantkitError
from quantkit.export.manifest import versions
from quantkit.export.verified import Verified
from quantkit.hardware import gpus
from quantkit.model.source import ModelSource
from quantkit.progress import Silent
from quantkit.proof.run import ProofOptions, ask, compare, prove

RESULT = Path(__file__).parent / "results" / "families-vllm-h200.json"
RECIPE = "gptq-w4a16"
ALL_RECIPES = ("qwen3", "qwen3_moe", "lfm2", "qwen3_next", "qwen3_vl")
"""One family of each kind, and the hybrid that most people serve."""
SIZES: dict[str, Any] = families.SMALL | {
    "hidden_size": 256,
    "n_embd": 256,
    "intermediate_size": 512,
    "intermediate_size_mlp": 512,
    "ffn_hidden_size": 512,
    "moe_intermediate_size": 256,
    "shared_intermediate_size": 256,
    "shared_expert_intermediate_size": 256,
    "moe_shared_expert_intermediate_size": 256,
    "dense_intermediate_size": 512,
    "expert_ffn_hidden_size": 256,
    "head_dim": 64,
    "global_head_dim": 64,
    "swa_head_dim": 64,
    "swa_v_head_dim": 64,
    "v_head_dim": 128,
    "qk_head_dim": 192,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "o_lora_rank": 128,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "max_position_embeddings": 1024,
    "n_positions": 1024,
    "index_head_dim": 128,
    "index_n_heads": 64,
    "index_topk": 2048,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "mamba_d_ssm": 512,
    "mamba_chunk_size": 64,
    "chunk_size": 64,
    "ssm_state_size": 128,
    "hidden_size_per_layer_input": 128,
}
"""What kernels for Hopper accept: heads of 64 or 128, MLA and linear attention as published."""
DEEPSEEK = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
TEXT: dict[str, dict[str, Any]] = {
    "glm4_moe": {"head_dim": 64},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "glm4v_moe": {
        "head_dim": 64,
        "use_qk_norm": False,
        "rope_parameters": families.DEFAULT_ROPE
        | {"partial_rotary_factor": 0.5, "mrope_section": [4, 6, 6]},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "deepseek_v3": DEEPSEEK,
    "deepseek_v32": DEEPSEEK,
    "glm_moe_dsa": DEEPSEEK,
    "gemma4": {"global_head_dim": 64},
    "gemma4_text": {"global_head_dim": 64},
    "hunyuan_v1_moe": {
        "head_dim": 64,
        "moe_intermediate_size": 512,
        "num_shared_expert": 1,
        "use_mixed_mlp_moe": 1,
        "use_qk_norm": True,
    },
    "hy_v3": {
        "expert_hidden_dim": 256,
        "first_k_dense_replace": 1,
        "qk_norm": True,
        "route_norm": True,
    },
    "kimi_k25": DEEPSEEK,
    "kimi_linear": {
        "linear_head_dim": 128,
        "mla_use_nope": True,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "use_grouped_topk": True,
        "linear_attn_config": {
            "kda_layers": [1],
            "full_attn_layers": [2],
            "num_heads": 4,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
    "lfm2": {"conv_dim": 256, "block_dim": 256},
    "llama4": {"num_experts_per_tok": 1},
    "minimax_m2": {"rotary_dim": 64, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen3_vl_moe": {"norm_topk_prob": True},
    "minimax_m3_vl": {
        "head_dim": 128,
        "index_n_heads": 2,
        "index_head_dim": 128,
        "shared_intermediate_size": 512,
        "rope_parameters": families.DEFAULT_ROPE | {"partial_rotary_factor": 0.5},
    },
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
    "qwen2_5_vl": {"rope_parameters": families.DEFAULT_ROPE | {"mrope_section": [8, 12, 12]}},
    "zamba2": {"attention_hidden_size": 512, "attention_head_dim": 128, "mamba_headdim": 64},
}
"""What families set themselves, in these sizes; and what published configs have, vLLM asks for and
transformers' own do not keep."""
NAMES = {
    "kimi_k25": (
        (r"^language_model\.model\.blocks\.", "language_model.model.layers."),
        (r"^model\.mm_projector\.", "mm_projector."),
    ),
    "kimi_linear": ((r"\.block_sparse_moe\.(gate|up|down)_proj\.", r".mlp.\1_proj."),),
}
"""Names that transformers saves otherwise than published checkpoints have them."""
CONFIGS: dict[str, dict[str, Any]] = {
    # Heads are alike here, and vLLM asks for the size of all.
    "gemma4": {"text_config": {"allow_global_per_layer_attribute_access": True}},
    "gemma4_text": {"allow_global_per_layer_attribute_access": True},
    "kimi_k25": {"architectures": ["KimiK25ForConditionalGeneration"]},
    "minimax_m3_vl": {
        "text_config": {
            "hidden_act": "swigluoai",
            "moe_layer_freq": [1, 1],
            "n_shared_experts": 1,
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_index_dim": 128,
                "sparse_num_index_heads": 2,
                "sparse_topk_blocks": 16,
                "sparse_block_size": 128,
                "sparse_disable_index_value": [0, 1],
                "sparse_score_type": "max",
                "sparse_init_block": 0,
                "sparse_local_block": 1,
                "sparse_attention_freq": [0, 1],
            },
        },
        "vision_config": {"img_token_compression_config": {"spatial_merge_size": 2}},
    },
    "phimoe": {"architectures": ["PhiMoEForCausalLM"]},
    "qwen3_5": {"text_config": {"mamba_ssm_dtype": "float32"}},
    "qwen3_5_moe": {"text_config": {"mamba_ssm_dtype": "float32"}},
}
"""What published configs say, transformers reads and does not write again."""
VISION = {"out_hidden_size": 256, "text_hidden_size": 256}
TOP = {"out_hidden_size": 256, "projector_hidden_size": 256}
TOWERS_LEFT_OUT = {"language_model_only": True}
LINEAR_ATTENTION = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
TRITON = {"gdn_prefill_backend": "triton", "mamba_ssm_cache_dtype": "float32"}
"""For those: the default on Hopper needs FlashInfer and compiles for minutes, and keeps the state
of models whose config does not say otherwise in 16 bits, which drifts."""
N_PROMPTS = 24
VERSION = "0.26"
"""Of vLLM, where none has answered yet."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    python: Path
    work: Path
    out: Path
    jobs: int = 8
    timeout: float = 120.0
    recipes: Sequence[str] = families.RECIPES
    retry: bool = False


class Small(Vllm):
    """vLLM beside others on one GPU, with further settings."""

    def __init__(self, options: Options, settings: Mapping[str, Any]) -> None:
        super().__init__(options.python, options.timeout, settings)

    def ask(self, job: Job) -> Answer:
        return super().ask(replace(job, shared=True))


def wanted(name: str, recipes: Sequence[str]) -> list[str]:
    """Recipes that a family is tried with."""
    return list(recipes) if name in ALL_RECIPES else [r for r in (RECIPE,) if r in recipes]


def sizes_of(name: str) -> families.Family:
    """A family's own settings in these sizes."""
    own = families.FAMILIES.get(name, families.Family())
    vision = {key: value for key, value in VISION.items() if key in families.SMALL_VISION}
    top = {key: value for key, value in TOP.items() if key in own.top}
    return replace(
        own, text=own.text | TEXT.get(name, {}), vision=own.vision | vision, top=own.top | top
    )


def prepare(name: str, recipes: list[str], work: Path) -> dict[str, Any]:
    """Build a family and quantise it, in a process of its own; says what could not be made."""
    torch.set_num_threads(2)
    families.warnings.simplefilter("ignore")
    source = work / name / "source"
    found: dict[str, Any] = {"built": True, "recipes": {}}
    if not (source / "config.json").is_file():
        shutil.rmtree(work / name, ignore_errors=True)
        try:
            model = families.build(name, source, SIZES, sizes_of(name))
        except Exception as error:  # transformers does not have it, or not with these numbers
            return {"built": False, "reason": " ".join(str(error).split())[:160]}
        del model
        _publish(name, source)
    for recipe in recipes:
        folder = work / name / recipe
        if (folder / "quantkit.json").is_file() or any(folder.glob("*.safetensors")):
            continue
        try:
            families.make(source, [recipe], work / name)
        except Exception as error:
            found["recipes"][recipe] = {"made": False, "reason": families.words(error, source)}
    return found


def _publish(name: str, source: Path) -> None:
    """Give a saved model the names and the config that its published ones have."""
    path = source / "model.safetensors"
    for pattern, instead in NAMES.get(name, ()):
        tensors = {re.sub(pattern, instead, key): t for key, t in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    config = json.loads((source / "config.json").read_bytes())
    for key, value in CONFIGS.get(name, {}).items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (source / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


@dataclass
class Record:
    """What is known so far, written after every change."""

    path: Path
    families: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, path: Path, again: bool) -> "Record":
        if not path.is_file() or again:
            return cls(path)
        stored = json.loads(path.read_text(encoding="utf-8"))
        return cls(path, stored["families"], {"vllm": stored["vllm"], "device": stored["device"]})

    def missing(self, name: str, recipes: list[str], retry: bool) -> list[str]:
        tried = self.families.get(name, {}).get("recipes", {})
        return [r for r in recipes if r not in tried or (retry and not tried[r].get("agrees"))]

    def add(self, name: str, kind: str, found: Mapping[str, Any], **facts: str) -> None:
        with self._lock:
            known = self.families.setdefault(name, {"kind": kind, "recipes": {}})
            known.pop("reason", None)  # it was not built, then
            known |= {key: value for key, value in found.items() if key != "recipes"}
            known["recipes"] |= found.get("recipes", {})
            self.facts |= facts
            order = {n: self.families[n] for n in families.kinds() if n in self.families}
            write(
                self.path,
                {
                    "what": "small random models in vLLM against our reference, nats per token",
                    "vllm": self.facts.get("vllm"),
                    "device": self.facts.get("device"),
                    "machine": devices.describe(devices.choose()),
                    "versions": versions(),
                    "families": order,
                },
            )


def run(names: Sequence[str], options: Options, again: bool = False) -> None:
    """Try what is not known yet; several engines and several builds at a time."""
    os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
    record = Record.open(options.out, again)
    kinds = families.kinds()
    left = {
        name: missing
        for name in names
        if (missing := record.missing(name, wanted(name, options.recipes), options.retry))
    }
    options.work.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    asked: list[Future[None]] = []
    makers = ProcessPoolExecutor(max(1, min(6, options.jobs)), mp_context=get_context("spawn"))
    with makers, ThreadPoolExecutor(options.jobs) as engines:
        building = {
            makers.submit(prepare, name, recipes, options.work): name
            for name, recipes in left.items()
        }
        for done in as_completed(building):
            name = building[done]
            found = done.result()
            record.add(name, kinds[name], found)
            if not found["built"]:
                print(f"{name}: not built: {found['reason']}", flush=True)
                continue
            for recipe in left[name]:
                if recipe in found["recipes"]:
                    print(f"{name} {recipe}: {found['recipes'][recipe]['reason']}", flush=True)
                    continue
                task = (name, kinds[name], recipe, options, record, started)
                asked.append(engines.submit(_try, *task))
        for one in asked:
            one.result()
    agree, of = counts(record.families)
    print(f"{agree} of {of} checkpoints agree; {time.monotonic() - started:.0f} s", flush=True)


def counts(found: Mapping[str, Any]) -> tuple[int, int]:
    """Checkpoints that agree, and all that were tried."""
    tried = [one for family in found.values() for one in family["recipes"].values()]
    return sum(bool(one.get("agrees")) for one in tried), len(tried)


def _try(
    name: str, kind: str, recipe: str, options: Options, record: Record, started: float
) -> None:
    folder, source = options.work / name / recipe, options.work / name / "source"
    settings: dict[str, Any] = dict(TOWERS_LEFT_OUT if kind == "vision-language" else {})
    settings |= TRITON if name in LINEAR_ATTENTION else {}
    found, facts = in_vllm(folder, source, Small(options, settings))
    if not found.get("agrees"):
        found["source"] = source_in_vllm(source, Small(options, settings))
        version = record.facts.get("vllm") or VERSION
        told = prediction.predict(folder, version=version, gpu=gpus.find("H200"))
        found["foretold"] = [f"{one.rule.id}: {one.words}" for one in told.faults][:3]
    record.add(name, kind, {"recipes": {recipe: found}}, **facts)
    said = found.get("reason") or f"off by {found['mean']:.4f}, noise {found['noise']:.4f}"
    if "source" in found:
        said += f"; source: {found['source'].get('reason', 'agrees')}"
    word = "agrees" if found.get("agrees") else "loads" if found.get("loads") else "REFUSED"
    print(f"{time.monotonic() - started:5.0f} s  {name} {recipe}: {word} {said}", flush=True)


def in_vllm(folder: Path, source: Path, engine: Small) -> tuple[dict[str, Any], dict[str, str]]:
    """A checkpoint in vLLM: loads, agrees, or why not; and what the engine says of itself."""
    try:
        (proof,) = prove(
            [folder], engine, ProofOptions(n_prompts=N_PROMPTS), ModelSource.open(str(source))
        )
    except Exception as error:
        return {"loads": False, "agrees": False, "reason": families.words(error)}, {}
    if proof.verified is None:
        reason = proof.problem or f"verify: {proof.checks.faults[0]}"
        return {"loads": False, "agrees": False, "reason": short(reason)}, {}
    told = proof.verified
    found: dict[str, Any] = {"loads": True, "agrees": told.ok, "quantization": told.quantization}
    if told.read is not None:
        found |= {"mean": round(told.read.mean, 5), "noise": round(told.read.noise_mean, 5)}
    found |= _generated(told)
    if not told.ok:
        found["reason"] = told.faults[0]
    return found, {"vllm": told.version, "device": told.device}


def source_in_vllm(source: Path, engine: Small) -> dict[str, Any]:
    """The 16-bit model in vLLM, which tells a family that it cannot run from a bad checkpoint."""
    asked = ProofOptions(n_prompts=N_PROMPTS)
    try:
        told = compare(ask(ModelSource.open(str(source)), engine, asked), asked, Silent())
    except QuantkitError as error:
        return {"loads": False, "agrees": False, "reason": short(str(error))}
    except Exception as error:
        return {"loads": False, "agrees": False, "reason": families.words(error)}
    found: dict[str, Any] = {"loads": True, "agrees": told.ok} | _generated(told)
    return found if told.ok else found | {"reason": told.faults[0]}


def _generated(told: Verified) -> dict[str, Any]:
    """How far off generated tokens are; where that is too far, in which texts and from where on."""
    if told.written is None:
        return {}
    made = told.written
    found: dict[str, Any] = {"mean": round(made.mean, 5), "noise": round(made.noise_mean, 5)}
    if not told.ok:
        found |= {"by_text": made.by_text, "by_place": made.by_place}
    return {"generated": found}


def short(words: str) -> str:
    """One line of an engine's last words, without this machine's folders."""
    line = without_folders(" ".join(words.split()))
    return line if len(line) <= 400 else f"{line[:200]} ... {line[-200:]}"
