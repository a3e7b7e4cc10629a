"""Every rule by which a checkpoint is judged before an engine sees it: one table, with sources.

A rule describes what the engine's own code does. `since` and `before` are engine versions; each
source is a file and a function in the engine's repository, read at the tag that `READ_AT` names.
"""

import re
from dataclasses import dataclass
from typing import Literal

from quantkit.errors import UsageError
from quantkit.hardware.kernels import NEWEST as NEWEST

Consequence = Literal["refuses", "garbage", "accuracy", "slow path"]
CONSEQUENCES: dict[str, str] = {
    "refuses": "the engine does not load it; exit code 1",
    "garbage": "it loads and answers from wrong numbers; exit code 1",
    "accuracy": "it loads and loses more than the format costs; exit code 0",
    "slow path": "it loads and runs without the speed that the format is for; exit code 0",
}
FAULTS = ("refuses", "garbage")
ENGINES = ("vllm", "llama.cpp")
READ_AT = {"vllm": "v0.26.0 (and, where versions differ, at tags from v0.18.0 to v0.27.0 and in "
                   "the published source packages 0.28.0 to 0.33.0)",
           "llama.cpp": "b21e4de of August 2026"}  # fmt: skip
CHANGED: dict[tuple[int, int], str] = {
    (0, 27): "ModelOpt's FP8 starts at compute capability 8.0",
    (0, 28): "bitsandbytes is gone",
    (0, 29): "FP8 blocks on compute capability 8.9 run with Marlin, no longer with Triton",
    (0, 30): "act-order by group is refused",
    (0, 31): "AllSpark is gone",
    (0, 32): "Hopper prefers Humming to Marlin",
}
"""What loaders and kernel lists do differently from the version before."""
OLDEST = (0, 18)
"""The first vLLM version that was read; NEWEST is the last."""
PINNED: dict[tuple[int, int], str] = {
    (0, 18): "0.13.0", (0, 19): "0.14.0.1", (0, 20): "0.15.0.1", (0, 23): "0.17.0",
}  # fmt: skip
"""compressed-tensors that vLLM pins from a version on (requirements/common.txt)."""
ARGUMENT_KEYS = frozenset(
    [
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
        "observer",
        "observer_kwargs",
    ]
)
"""Keys of `QuantizationArgs`, the same in compressed-tensors 0.13 to 0.19, which forbids others."""
ARGUMENT_VALUES: dict[str, tuple[object, ...]] = {
    "type": ("int", "float"),
    "strategy": (None, "tensor", "channel", "group", "block", "token", "tensor_group", "attn_head"),
    "dynamic": (None, True, False, "local"),
    "actorder": (None, True, False, "group", "weight", "dynamic", "static"),
}
METHODS: dict[str, tuple[tuple[int, int], tuple[int, int] | None]] = {
    **dict.fromkeys(
        ("compressed-tensors", "gptq", "awq", "fp8", "fbgemm_fp8", "modelopt", "mxfp4", "quark",
         "torchao", "fp_quant", "auto-round"),
        (OLDEST, None),
    ),
    "bitsandbytes": (OLDEST, (0, 28)),
}  # fmt: skip
"""vLLM's methods: the first version that has each, and the first that no longer has it."""


@dataclass(frozen=True)
class Rule:
    """One thing that an engine does with a checkpoint."""

    id: str
    consequences: tuple[Consequence, ...]
    """The first is the usual one."""
    what: str
    """What is wrong with the checkpoint, and what the engine then does."""
    remedy: str
    source: str
    since: tuple[int, int] | None = None
    before: tuple[int, int] | None = None
    engine: str = "vllm"

    def holds(self, version: tuple[int, int]) -> bool:
        """Whether a version of the engine has this rule."""
        late = self.since is None or version >= self.since
        return late and (self.before is None or version < self.before)


CT = "layers/quantization/compressed_tensors/compressed_tensors.py"
UTILS = "layers/quantization/compressed_tensors/utils.py"
WNA16 = "layers/quantization/compressed_tensors/schemes/compressed_tensors_wNa16.py"
MOE = "layers/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe.py"
NVFP4 = "layers/quantization/compressed_tensors/schemes/compressed_tensors_w4a4_nvfp4.py"
GPTQ = "layers/quantization/auto_gptq.py"
AWQ = "layers/quantization/auto_awq.py"
FP8 = "layers/quantization/fp8.py"
MODELOPT = "layers/quantization/modelopt.py"
LOADER = "model_loader/default_loader.py: load_weights"
UNNAMED = "models/utils.py: AutoWeightsLoader"
KERNELS = "kernels/linear/__init__.py"
SKIPPED = "layers/quantization/utils/quant_utils.py: is_layer_skipped"
QUANTIZE = "quantise the source model with a quantkit recipe"
REPAIR = "`quantkit convert DIR --to FORMAT --repair` rewrites the config"


RULES = (
    Rule("headers", ("refuses",), "A shard is truncated, missing or corrupt",
          "download the file again", "safetensors: deserialize"),
    Rule("method", ("refuses",), "This version does not have that `quant_method`",
          "use a version that has it, or quantise the source model",
          "layers/quantization/__init__.py: get_quantization_config"),
    Rule("unknown-key", ("refuses",),
          "The config has a key or value that the pinned compressed-tensors forbids",
          REPAIR, "compressed-tensors: quantization/quant_args.py: QuantizationArgs"),
    Rule("sparsity", ("refuses",), "`sparsity_config` names targets; 2:4 kernels are gone",
          "serve the unsparsified checkpoint", f"{CT}: _parse_sparsity_config", (0, 22)),
    Rule("no-scheme", ("refuses",), "No scheme of vLLM has these numbers in this `format`",
          QUANTIZE, f"{CT}: _get_scheme_from_parts"),
    Rule("width", ("refuses",), "Integer weights of a width that this version does not read",
          "serve with vLLM 0.25 or later, or quantise in 4 or 8 bits",
          f"{WNA16}: WNA16_SUPPORTED_TYPES_MAP"),
    Rule("expert-width", ("refuses",),
          "Integer experts of a width other than 4 and 8 bits, whose shapes it gets wrong",
          "serve with vLLM 0.29 or later, or quantise experts in 4 or 8 bits",
          "compressed_tensors_moe_wna16.py: create_weights", None, (0, 29)),
    Rule("packing", ("refuses", "garbage"),
          "Integers of 3, 5, 6 or 7 bits padded to 32-bit words, as compressed-tensors before 0.18 "
          "packs them; vLLM reads them dense",
          "`quantkit convert DIR --to compressed-tensors --repair` packs them densely",
          f"{WNA16}: create_weights", (0, 25)),
    Rule("fused-ignore", ("refuses",),
          "`ignore` leaves some layers out that vLLM fuses (q/k/v, gate/up), but not all",
          "quantise all of them or none", f"{UTILS}: should_ignore_layer; {SKIPPED}"),
    Rule("fused-scheme", ("refuses", "garbage"),
          "Layers that vLLM fuses have different schemes; it takes one for all, and a group that "
          "targets Linear wins over one that names the shards",
          "give all of them the same scheme", f"{UTILS}: find_matched_target"),
    Rule("experts-scheme", ("refuses", "garbage"),
          "Experts have different schemes; vLLM reads expert 0 and builds all the same way",
          "give all experts of a layer the same scheme", f"{MOE}: get_moe_method"),
    Rule("experts-together", ("refuses",),
          "Quantised experts of a block are stored in one tensor; these versions read them one by "
          "one",
          "`quantkit convert DIR --to FORMAT --repair` splits them",
          "models/qwen3_moe.py (v0.24.0): load_weights", None, (0, 26)),
    Rule("stored-plain", ("refuses", "garbage"),
          "A layer is stored in 16 bits and built quantised: packed formats stop at the unknown "
          "tensor, FP8 and INT8 cast the weights without a scale",
          f"add the layer to `ignore`; {REPAIR}", f"{UNNAMED}; {LOADER}"),
    Rule("stored-quantized", ("refuses",),
          "A layer is stored quantised and built in 16 bits, since `ignore` names it or no group "
          "covers it",
          f"take it out of `ignore` or add a target; {REPAIR}", UNNAMED),
    Rule("ignore-name", ("refuses", "garbage"),
          "An entry of `ignore` misses vLLM's module names: names must be whole, patterns (re:) "
          "must fit the names inside vLLM",
          REPAIR, f"{UTILS}: check_equal_or_regex_match; {SKIPPED}; {CT}: apply_vllm_mapper"),
    Rule("missing-tensor", ("garbage",),
          "A scale, zero point or group index is missing; vLLM checks completeness of unquantised "
          "models only and computes with uninitialised memory",
          "download again, or quantise again", f"{LOADER} (enable_weights_track)"),
    Rule("missing-layer", ("garbage",),
          "A block of the model has no tensors in the files", "download again",
          f"{LOADER} (enable_weights_track)"),
    Rule("shape", ("refuses",), "A tensor's shape differs from vLLM's parameter",
          "check that config.json belongs to these files",
          "parameter.py: load_column_parallel_weight, load_row_parallel_weight"),
    Rule("config-shape", ("refuses",),
          "config.json does not describe the model in the files",
          "restore the config.json that belongs to these weights",
          "layers/vocab_parallel_embedding.py: weight_loader; parameter.py"),
    Rule("global-scales", ("garbage",),
          "NVFP4 shards of a fused layer have different global scales; vLLM takes the largest for "
          "all",
          "`quantkit convert DIR --to compressed-tensors --repair` makes them equal",
          f"{NVFP4}: process_weights_after_loading; {MODELOPT}: ModelOptNvFp4LinearMethod"),
    Rule("fp8-merge", ("accuracy",),
          "FP8 scales per tensor differ within a fused layer; vLLM rounds the shards again to the "
          "largest", "quantise with scales per channel (fp8-dynamic)",
          "layers/quantization/utils/w8a8_utils.py: requantize_with_max_scale"),
    Rule("input-scales", ("accuracy",),
          "Input scales differ within a fused layer; vLLM takes the largest for all",
          "calibrate the fused layers together",
          f"{NVFP4}: process_weights_after_loading; {FP8}: process_weights_after_loading"),
    Rule("capability", ("refuses",), "The GPU's compute capability is below the method's or "
          "scheme's minimum", "use another GPU or recipe (`quantkit recommend`)",
          f"{CT}: _check_scheme_supported; config/vllm.py: _get_quantization_config"),
    Rule("kernel", ("refuses",), "No kernel of this version runs the layer on this GPU",
          "use another GPU or recipe (`quantkit recommend`)",
          f"{KERNELS}: choose_mp_linear_kernel, choose_scaled_mm_linear_kernel"),
    Rule("slow-kernel", ("slow path",), "The layer runs with a fallback kernel on this GPU",
          "use a recipe that the GPU runs natively (`quantkit recommend`)", KERNELS),
    Rule("fp8-blocks", ("refuses",),
          "Blocks do not divide the rows of a fused layer's shards",
          "use fp8-dynamic for this model",
          "layers/quantization/utils/fp8_utils.py: validate_fp8_block_shape"),
    Rule("gptq-numbers", ("refuses",), "GPTQ other than symmetric 4 and 8 bits",
          "serve with vLLM 0.21 or earlier in float16, or quantise again",
          f"{GPTQ}: AutoGPTQConfig.TYPE_MAP", (0, 22)),
    Rule("gptq-numbers-old", ("refuses",), "GPTQ other than 2, 3, 4 and 8 bits", QUANTIZE,
          "layers/quantization/gptq.py (v0.20.0): GPTQConfig", None, (0, 22)),
    Rule("gptq-group", ("refuses",), "GPTQ with a group size other than -1, 32, 64 or 128",
          QUANTIZE, f"{GPTQ}: verify_marlin_supported", (0, 22)),
    Rule("act-order-gone", ("refuses",),
          "Act-order by group is declared (`desc_act`, `actorder: group`), which these versions no "
          "longer read",
          "serve with vLLM 0.29 or earlier, or quantise again: quantkit's recipes keep the order",
          "layers/quantization/utils/gptq_utils.py (0.30.0): normalize_and_validate_gptq_desc_act; "
          f"{CT} (0.30.0): _quantization_scheme_map_from_config", (0, 30)),
    Rule("act-order", ("garbage", "refuses"),
          "The order of columns (`g_idx`) is not what the config declares: without `desc_act` or "
          "`actorder` vLLM ignores it",
          "set `desc_act` as the files need it",
          f"{GPTQ}: create_weights; {WNA16}: create_weights"),
    Rule("act-order-experts", ("refuses",),
          "Act-order in experts whose sizes Marlin does not take", "quantise without act-order",
          f"{MOE}: get_moe_method", None, (0, 30)),
    Rule("required-key", ("refuses",), "A key that vLLM reads is missing from the config",
          REPAIR, "layers/quantization/base_config.py: get_from_keys"),
    Rule("awq-numbers", ("refuses",), "AWQ other than 4 bits", QUANTIZE,
          f"{AWQ}: AutoAWQConfig.TYPE_MAP"),
    Rule("fp8-scheme", ("refuses",),
          "`activation_scheme` is neither static nor dynamic, or is static with blocks",
          QUANTIZE, f"{FP8}: Fp8Config"),
    Rule("modelopt-algo", ("refuses",), "vLLM does not have that `quant_algo`", QUANTIZE,
          f"{MODELOPT}: QUANT_ALGOS"),
    Rule("family-gone", ("refuses", "garbage"),
          "The model's class was taken out of vLLM, and its path through transformers refuses it "
          "or runs it without the state that it needs",
          "serve with vLLM 0.23, or with transformers",
          "models/registry.py: _PREVIOUSLY_SUPPORTED_MODELS", (0, 24)),
    Rule("family-new", ("garbage",),
          "vLLM has no class for the model yet and runs it through transformers, where it computes "
          "something else, also for the 16-bit model",
          "serve with vLLM 0.28 or later", "models/registry.py", None, (0, 28)),
    Rule("laguna-rope", ("refuses",),
          "vLLM's own config of Laguna reads one set of rotary parameters, config.json has one for "
          "each kind of layer, as transformers writes it",
          "serve with vLLM 0.32, which takes transformers' config",
          "transformers_utils/configs/laguna.py: LagunaConfig", None, (0, 32)),
    Rule("plain-mixer", ("refuses",),
          "Projections of a mixer that vLLM builds in 16 bits only (the first Mamba's, and before "
          "0.28 those next to a short convolution) are stored quantised",
          "quantise the model again with quantkit, which leaves them in 16 bits",
          "layers/mamba/mamba_mixer.py, layers/mamba/short_conv.py: __init__"),
    Rule("neox-rows", ("refuses",),
          "GPT-NeoX's query_key_value has tensors without a row for each of the weight's, and the "
          "loader sorts the rows of all of them by head",
          "quantise it with fp8-dynamic or int8-w8a8, or leave query_key_value in 16 bits",
          "models/gpt_neox.py: _repack_qkv", None, (0, 32)),
    Rule("granite-experts", ("refuses",),
          "Quantised experts of a Granite with state-space blocks, which vLLM reads by their own "
          "names (gate_proj, up_proj, down_proj) and from 0.29 on",
          "serve with vLLM 0.29 or later; quantise older files again",
          "models/granitemoehybrid.py: load_weights"),
    Rule("gpt-oss-experts", ("refuses", "garbage"),
          "Experts of gpt-oss stored one by one: vLLM finds no parameter for their biases, or "
          "(from 0.31) silently leaves their weights out",
          "serve the published model, whose experts are MXFP4",
          "models/gpt_oss.py: _load_weights_other"),
    Rule("deepseek-v4", ("refuses",),
          "DeepSeek V4 as vLLM does not read it: config.json lists its layers as transformers "
          "writes them, or (before 0.30) attention's wo_a is not in the published FP8 blocks",
          "keep the published config.json; serve with vLLM 0.30 or later",
          "transformers_utils/configs/deepseek_v4.py; "
          "vllm/models/deepseek_v4/nvidia/ops/o_proj.py: deep_gemm_fp8_o_proj"),
    Rule("mxfp4-family", ("refuses",), "`mxfp4` outside gpt-oss: linear layers have no method",
          "store it as compressed-tensors", "layers/quantization/mxfp4.py: GptOssMxfp4Config"),
    Rule("mxfp4-experts", ("garbage", "refuses"),
          "gpt-oss's blocks, scales or biases of experts are missing or too small, and vLLM leaves "
          "zeros in their place; too large ones it refuses",
          "download again", "models/gpt_oss.py: _load_weights_mxfp4; "
          "layers/fused_moe/routed_experts.py: weight_loader"),
    Rule("bnb-state", ("refuses",),
          "bitsandbytes weights without their state (`absmax`, `quant_map`, `quant_state`), or in "
          "another storage type than uint8",
          "download again, or quantise with a quantkit recipe",
          "model_loader/bitsandbytes_loader.py (v0.26.0): _quantized_4bit_generator; "
          "layers/quantization/bitsandbytes.py (v0.26.0): BitsAndBytesConfig", None, (0, 28)),
    Rule("dtype", ("refuses",), "The method does not compute in the model's type",
          "serve with --dtype bfloat16", "config/vllm.py: _get_quantization_config"),
    Rule("kv-scheme", ("refuses",), "A KV cache other than symmetric FP8 per tensor or head",
          "quantise with +kv-fp8", f"{CT}: validate_kv_cache_scheme"),
    Rule("kv-scales", ("accuracy",), "An FP8 KV cache is declared and has no scales; vLLM takes 1",
          "quantise with +kv-fp8, which calibrates them",
          "layers/quantization/kv_cache.py: process_weights_after_loading"),
    Rule("mtp", ("slow path",), "The config declares heads for multi-token prediction and the "
          "files have none: it serves, and speculative decoding with them stops at loading",
          "take a checkpoint that keeps them, or another draft",
          "models/deepseek_mtp.py: load_weights"),
    Rule("not-gguf", ("refuses",), "The folder has no GGUF file",
          "quantise the source model with a GGUF recipe, such as gguf-q4_k_m",
          "src/llama-model-loader.cpp", engine="llama.cpp"),
    Rule("nan-group-scale", ("garbage", "accuracy"),
          "A group's scale in E4M3 is NaN, which `quantkit verify` finds and headers do not show: "
          "kernels that multiply in FP4 answer NaN; Marlin in BF16 takes it for a number from 512 "
          "to 960, so that 16 weights are wrong", "download again, or quantise the source model",
          "layers/quantization/utils/marlin_utils_fp4.py: nvfp4_marlin_process_scales; "
          "csrc/quantization/marlin/dequant.h: dequant_fp8_scales"),
    Rule("gguf-header", ("refuses",), "The file's header or length is damaged",
          "download the file again", "ggml/src/gguf.cpp: gguf_init_from_file", engine="llama.cpp"),
    Rule("gguf-architecture", ("refuses",), "llama.cpp does not have that `general.architecture`",
          "use a newer llama.cpp", "src/llama-arch.cpp: LLM_ARCH_NAMES", engine="llama.cpp"),
    Rule("gguf-type", ("refuses",), "A tensor's type was removed from ggml (4, 5, 31 to 33, 36 to "
          "38)", "take the file in another type; ggml repacks Q4_0 itself",
          "ggml/include/ggml.h: ggml_type", engine="llama.cpp"),
    Rule("gguf-tokenizer", ("refuses",), "The file has no tokenizer",
          "convert the model again with its tokenizer", "src/llama-vocab.cpp: load",
          engine="llama.cpp"),
    Rule("gguf-pre-tokenizer", ("garbage",),
          "A BPE tokenizer without `tokenizer.ggml.pre` is read by the default "
          "pattern, which splits text differently from the model's training",
          "convert the model again", "src/llama-vocab.cpp: load", engine="llama.cpp"),
    Rule("gguf-tensors", ("refuses",), "A tensor that the architecture needs is missing",
          "download again, with all parts of a split file",
          "src/llama-model-loader.cpp: create_tensor", engine="llama.cpp"),
)  # fmt: skip
BY_ID = {rule.id: rule for rule in RULES}


@dataclass(frozen=True)
class Finding:
    """A rule that a checkpoint breaks."""

    rule: Rule
    layer: str
    """A layer, a file or a config key."""
    words: str
    consequence: Consequence

    @property
    def is_fault(self) -> bool:
        return self.consequence in FAULTS

    def __str__(self) -> str:
        return f"{self.layer}: {self.words} [{self.rule.id}: {self.consequence}]"

    def to_json(self) -> dict[str, str]:
        return {
            "layer": self.layer,
            "rule": self.rule.id,
            "what": self.words,
            "consequence": self.consequence,
            "remedy": self.rule.remedy,
            "source": self.rule.source,
        }


def finding(id: str, layer: str, words: str, consequence: Consequence | None = None) -> Finding:
    """A finding by rule id, with the rule's usual consequence unless another is given."""
    rule = BY_ID[id]
    assert consequence is None or consequence in rule.consequences
    return Finding(rule, layer, words, consequence or rule.consequences[0])


def version_of(text: str) -> tuple[int, int]:
    """`0.26` or `0.26.1` as numbers."""
    match = re.fullmatch(r"v?(\d+)\.(\d+)(\.\w+)*", text.strip())
    if match is None:
        raise UsageError(f"'{text}' is not a version such as 0.26")
    return int(match[1]), int(match[2])


def pinned(version: tuple[int, int]) -> str:
    """The compressed-tensors that a version of vLLM installs."""
    return PINNED[max(since for since in PINNED if since <= max(version, OLDEST))]
