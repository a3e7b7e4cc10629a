"""Small random models of every supported family."""

import torch
import transformers
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from quantkit import resources
from quantkit.model.source import ModelSource

SMALL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=16),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL),
    "gemma2": transformers.Gemma2Config(**SMALL, sliding_window=16, attn_logit_softcapping=2.0),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, sliding_window=16),
    "phi3": transformers.Phi3Config(**{k: v for k, v in SMALL.items() if k != "head_dim"}),
    "smollm3": transformers.SmolLM3Config(**SMALL),
    "granite": transformers.GraniteConfig(**SMALL, residual_multiplier=0.5),
    "olmo2": transformers.Olmo2Config(**SMALL),
}


def make_source(name, folder, config=None):
    """A small random model of the family, with norms that are not all one, and its folder."""
    torch.manual_seed(0)
    implementation = "eager" if name in ("gemma2", "gpt_oss", "mimo_v2_flash") else "sdpa"
    model = AutoModelForCausalLM.from_config(
        config or FAMILIES[name], attn_implementation=implementation, dtype=torch.float32
    )
    routing = [(n, buffer) for n, buffer in model.named_buffers() if n.endswith("bias")]
    for parameter_name, parameter in [*model.named_parameters(), *routing]:
        if parameter.dim() == 1 or "correction_bias" in parameter_name:
            mean = 0.0 if "bias" in parameter_name else 1.0
            torch.nn.init.normal_(parameter, mean=mean, std=0.2)
    model.to(torch.bfloat16).save_pretrained(folder)
    # Read again, since the detour through bf16 also rounded the rotary frequencies.
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=implementation
    ).eval()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((resources.DEMO_MODEL / file).read_bytes())
    return model, ModelSource.open(str(folder))


def loaded_by_transformers(folder, dtype=torch.float32):
    """The model as transformers loads a checkpoint, and the relative error that its way may cost.

    transformers 5.23.0 expects zero points unpacked, which neither compressed-tensors nor vLLM
    writes or reads, and refuses every asymmetric checkpoint; it reads them where it is asked to
    dequantise, which it does in the 16 bits of the scales.
    """
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), 0.0
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
    dense = CompressedTensorsConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=dense)
    return model, 2**-7  # one step of a zero point would change logits ten times as much
