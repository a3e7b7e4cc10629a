"""Records of families with a mixture of experts."""

from dataclasses import replace

from quantkit.families.record import MULTIPLIERS, Family

SOFTMAX, SIGMOID = 1, 2
"""How llama.cpp makes scores of a router's outputs, by its numbers."""
SCORED = {
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
LATENT = {"attention_bias": False, "moe_layer_freq": 1, "rope_interleave": True}
GRANITE = Family(
    experts="block_sparse_moe",
    mlp_parts=("w1", "w3", "w2"),
    formulas=False,
    defaults={"hidden_act": "silu", **dict.fromkeys(MULTIPLIERS, 1.0)},
    llamacpp="granitemoe",
    architecture="GraniteMoeForCausalLM",
    permuted=True,
    multiplied=True,
    readable=False,
)
DEEPSEEK = Family(
    experts="mlp",
    formulas=False,
    llamacpp="deepseek2",
    architecture="DeepseekV3ForCausalLM",
    dense_first=True,
    latent=True,
    weights_sum_to_one=None,
    keys=SCORED | {"expert_gating_func": SIGMOID},
    fixed=LATENT | {"scoring_func": "sigmoid"},
    readable=False,
)

MOE = {
    "mixtral": Family(
        attention_bias=False,
        experts="block_sparse_moe",
        mlp_parts=("w1", "w3", "w2"),
        n_kv_heads=8,
        llamacpp="llama",
        architecture="MixtralForCausalLM",
        permuted=True,
    ),
    "olmoe": Family(
        head_norms="all",
        experts="mlp",
        llamacpp="olmoe",
        architecture="OlmoeForCausalLM",
        weights_sum_to_one=False,
    ),
    "qwen2_moe": Family(
        attention_bias=True,
        experts="mlp",
        n_kv_heads=16,
        llamacpp="qwen2moe",
        architecture="Qwen2MoeForCausalLM",
        weights_sum_to_one=False,
    ),
    "qwen3_moe": Family(
        head_norms="head",
        experts="mlp",
        n_kv_heads=4,
        llamacpp="qwen3moe",
        architecture="Qwen3MoeForCausalLM",
    ),
    "gpt_oss": Family(
        mlp_bias=True,
        experts="mlp",
        n_kv_heads=8,
        head_dim=64,
        windows="every",
        window_every=2,
        defaults={"hidden_act": "silu", "attention_bias": True, "mlp_bias": True},
        llamacpp="gpt-oss",
        architecture="GptOssForCausalLM",
        keys={"expert_feed_forward_length": "intermediate_size"},
        fixed={"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "attention_bias": True},
        readable=False,
    ),
    "granitemoe": GRANITE,
    "granitemoeshared": replace(
        GRANITE,
        architecture="GraniteMoeSharedForCausalLM",
        keys={"expert_shared_feed_forward_length": "shared_intermediate_size"},
    ),
    "ernie4_5_moe": Family(
        experts="mlp",
        tied=True,
        formulas=False,
        llamacpp="ernie4_5-moe",
        architecture="Ernie4_5_MoeForCausalLM",
        dense_first=True,
        keys={
            "expert_shared_count": "moe_num_shared_experts",
            "expert_shared_feed_forward_length": (
                "moe_num_shared_experts",
                "moe_intermediate_size",
            ),
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        fixed={"moe_layer_interval": 1, "use_bias": False},
        readable=False,
    ),
    "hunyuan_v1_moe": Family(
        head_norms="head",
        experts="mlp",
        formulas=False,
        llamacpp="hunyuan-moe",
        architecture="HunYuanMoEV1ForCausalLM",
        keys={
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_feed_forward_length": "intermediate_size",
        },
        fixed={"attention_bias": False},
        fixed_ntk=True,
        readable=False,
    ),
    "glm4_moe": Family(
        experts="mlp",
        formulas=False,
        llamacpp="glm4moe",
        architecture="Glm4MoeForCausalLM",
        dense_first=True,
        weights_sum_to_one=None,
        keys=SCORED | {"expert_gating_func": SIGMOID},
        readable=False,
    ),
    "minimax_m2": Family(
        experts="block_sparse_moe",
        mlp_parts=("w1", "w3", "w2"),
        formulas=False,
        llamacpp="minimax-m2",
        architecture="MiniMaxM2ForCausalLM",
        keys={
            "expert_feed_forward_length": "intermediate_size",
            "expert_gating_func": SIGMOID,
        },
        fixed={"scoring_func": "sigmoid"},
        readable=False,
    ),
    "qwen3_next": Family(
        head_norms="head",
        experts="mlp",
        formulas=False,
        llamacpp="qwen3next",
        architecture="Qwen3NextForCausalLM",
        shifted_norms=True,
        full_every=4,
        keys={
            "ssm.conv_kernel": "linear_conv_kernel_dim",
            "ssm.state_size": "linear_key_head_dim",
            "ssm.group_count": "linear_num_key_heads",
            "ssm.time_step_rank": "linear_num_value_heads",
            "ssm.inner_size": ("linear_num_value_heads", "linear_value_head_dim"),
            "full_attention_interval": 4,
        },
        fixed={"attention_bias": False},
        readable=False,
    ),
    "lfm2_moe": Family(
        head_norms="head",
        experts="feed_forward",
        mlp_parts=("w1", "w3", "w2"),
        tied=True,
        formulas=False,
        llamacpp="lfm2moe",
        architecture="Lfm2MoeForCausalLM",
        dense_first=True,
        convolutions=True,
        keys={"expert_gating_func": SIGMOID, "shortconv.l_cache": "conv_L_cache"},
        fixed={"conv_bias": False, "routed_scaling_factor": 1.0, "use_expert_bias": True},
        readable=False,
    ),
    "deepseek_v2": replace(
        DEEPSEEK,
        architecture="DeepseekV2ForCausalLM",
        keys={
            "expert_gating_func": SOFTMAX,
            "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor",
        },
        # The other method ranks groups of experts by the best of each.
        fixed=LATENT
        | {"norm_topk_prob": False, "scoring_func": "softmax", "topk_method": "greedy"},
    ),
    "deepseek_v3": DEEPSEEK,
    "glm4_moe_lite": replace(DEEPSEEK, architecture="Glm4MoeLiteForCausalLM"),
}
