"""What a record of a family holds."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

PRE_NORMS = ("input_layernorm", "post_attention_layernorm")
FEEDFORWARD_NORMS = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
SILU = ("silu", "swish")
GELU = ("gelu_pytorch_tanh",)
MULTIPLIERS = (
    "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """What a model type has beyond the standard architecture, and what its config may omit."""

    norms: tuple[str, ...] = PRE_NORMS
    head_norms: str = ""
    """Norms of queries and keys: per `head`, over `all` heads together, or none."""
    attention_bias: bool | None = None
    """Whether q/k/v have biases while o has none; None: the config decides for all four."""
    mlp_bias: bool = False
    """The MLP has biases where the config's `mlp_bias` says so."""
    packed: bool = False
    """q/k/v are one layer, and so are gate and up."""
    experts: str = ""
    """Path of the experts of an MoE block and their router."""
    mlp_parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names in an MLP or expert: gate, up and down."""
    tied: bool = False
    n_kv_heads: int | None = None
    """If the config does not say; None: as many as attention heads."""
    head_dim: int | None = None
    """If the config does not say; None: the hidden size over the heads."""
    windows: Literal["all", "every", "last", "unrotated"] = "all"
    """Layers that use the sliding window, if there is one and the config does not list them: all,
    all but every `window_every`-th, those after `max_window_layers`, or those without rotary
    embedding.
    """
    window_every: int = 0
    """Every n-th block uses full attention, the others a window."""
    formulas: bool = True
    """Shapes follow from the config by the formulas of `advise/families.py`."""
    defaults: Mapping[str, Any] = field(default_factory=lambda: {"hidden_act": "silu"})
    """Other settings that a GGUF file needs."""

    # For llama.cpp. Facts are from its own converter and model sources.
    llamacpp: str = ""
    """Value of `general.architecture`; empty if quantkit does not write GGUF for it."""
    named_as: str = ""
    """Another architecture with the same tensors, if the gguf package does not know its own."""
    architecture: str = ""
    """The transformers class that is written under this name."""
    permuted: bool = False
    """Rotary pairs are adjacent in llama.cpp, halves of a head in transformers."""
    shifted_norms: bool = False
    """Norms multiply by one plus their weight in transformers."""
    activations: tuple[str, ...] = SILU
    wide_blocks: int = 0
    """Block count of the one size whose attention scale comes from hidden size over heads."""
    capped: bool = False
    """Attention and output are soft-capped."""
    multiplied: bool = False
    """The config has multipliers of attention, embeddings, residuals and logits."""
    windowless: bool = False
    """The file must say that there is no window; otherwise it is taken for an older model."""
    long_rope: bool = False
    """Rotary embedding may be scaled by `longrope`."""
    unrotated_every: int = 0
    """Every n-th block has no rotary embedding; 0: all have."""
    weights_sum_to_one: bool | None = True
    """Whether the router weights of a token's experts are normalised to sum to one; None: a key
    says so.
    """
    unnormed_experts: int = 0
    """Number of experts of the one size whose queries and keys are not normalised."""
    dense_first: bool = False
    """The first blocks may have no experts."""
    listed_windows: bool = False
    """The file lists which blocks have a window; those have twice the key heads."""
    some_attention: bool = False
    """Some blocks have a short convolution or a state-space layer instead of attention."""
    state_space: bool = False
    """Such layers are those of Mamba 2."""
    embedding: str = "model.embed_tokens.weight"
    fixed_ntk: bool = False
    """`alpha` of `dynamic` rotary scaling changes the base, whatever the length."""
    full_every: int = 0
    """Every n-th block has attention, the others linear attention."""
    latent: bool = False
    """Keys and values come from a latent vector (MLA)."""
    keys: Mapping[str, Any] = field(default_factory=dict)
    """Further keys that llama.cpp reads: each has the name of a setting, several to multiply, or a
    number.
    """
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings that llama.cpp does not read, and what it takes them to be."""
    readable: bool = True
    """A GGUF file of it can be read as a model folder."""
