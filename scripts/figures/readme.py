"""The README's short table of measurements."""

from figures import best_bits, engines, estimates, one_pass, peers
from figures.regions import count, link, region, result, seconds, table, times


def source(name: str) -> str:
    return link(f"{name}.json", name, "")


@region
def measured_in_short() -> str:
    """The most telling row of each subject; where a peer was measured the same way, beside it."""
    search = result("gguf_blocks-h200")["speed"]
    mmlu = result("scoring-h200")["mmlu"]
    free = result("data_free-h200")
    proofs = result("vllm-proof-h200")
    n_made, told = engines.proof_summary()
    caches = estimates.caches()
    whole = one_pass.whole(["gguf-q4_k_m"])[0]
    rows = [
        [
            "`fp8-dynamic` of an 8B, the whole command",
            seconds(free["fp8_dynamic"]["command_seconds"]),
            f"a plain copy of its files {seconds(min(free['copy_seconds']))}",
            source("data_free-h200"),
        ],
        *peers.short_blocks(source("peers_speed-h200")),
        [
            "GPTQ, AWQ, AWQ-GPTQ, INT8 and FP8 from one pass, per block",
            one_pass.five_together(),
            "",
            source("one_pass-latest-h200"),
        ],
        *peers.short_rows(source("peers_speed-h200")),
        [
            "KL of Qwen2.5-Coder-1.5B in 4 bits, groups of 128; lower is better",
            *best_bits.short_frontier(peers.LARGER),
            source(best_bits.FRONTIER),
        ],
        [
            "KL of SmolLM2-135M in 4 bits, groups of 64; lower is better",
            *peers.short_quality(peers.SMALLER),
            source("quality-h200"),
        ],
        [
            "search for Q4_K_M, per block of an 8B, the same bytes",
            seconds(search["ours"]["seconds_a_block"]),
            f"ggml on {search['cores']} cores {seconds(search['ggml']['seconds_a_block'])}",
            source("gguf_blocks-h200"),
        ],
        [
            "GGUF Q4_K_M of an 8B with calibration, the whole command",
            seconds(whole["seconds"]),
            "",
            source("whole_model-h200"),
        ],
        [
            f"five-shot MMLU, {mmlu['same']['answers']:,} questions, the same answers",
            seconds(mmlu["our_seconds"]),
            f"lm-eval {seconds(mmlu['lm_eval_seconds'])} ({times(mmlu['times_faster'])} as long)",
            source("scoring-h200"),
        ],
        [
            f"{n_made} checkpoints in {engines.engine(proofs['models'])}",
            f"{told} with our reference",
            "",
            source("vllm-proof-h200"),
        ],
        [
            f"predicted KV cache capacity, {count(len(caches))} settings",
            f"{estimates.cache_gap(caches)} fewer tokens",
            "than vLLM reports",
            source("kv_capacity-h200"),
        ],
    ]
    return table(["", "quantkit:", "compared with", "results"], rows)
