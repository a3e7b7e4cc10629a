"""GGUF: the search, the writing, perplexity, and files in llama.cpp."""

from figures.regions import (
    gb,
    items,
    number,
    paragraph,
    percent,
    region,
    result,
    seconds,
    span,
    table,
    times,
)


@region
def gguf_search() -> str:
    run = result("gguf_blocks-h200")["speed"]
    rows = []
    for what, end in (("without importance", ""), ("with importance", "_with_importance")):
        ours, ggml = (run[side][f"seconds_a_block{end}"] for side in ("ours", "ggml"))
        rows.append([what, seconds(ours), seconds(ggml), times(ggml / ours), "20 times"])
    head = ["", "H200:", f"ggml, {run['cores']} cores:", "faster by:", "aim:"]
    return table(head, rows)


@region
def gguf_identity() -> str:
    h200, cpu = result("gguf_blocks-h200")["identity"], result("gguf_blocks-cpu")["identity"]
    types = len({one["type"] for one in h200})
    same = {min(one["identical"] for one in found) for found in (h200, cpu)}
    told = "all blocks are" if same == {1.0} else f"at least {percent(min(same), 3)} of blocks are"
    return paragraph(
        f"For {types} types, with normal, heavy-tailed and real weights, with and without "
        f"importance, {told} byte for byte what ggml writes, on the H200 and on a CPU. Aim 99.9%."
    )


@region
def gguf_writing() -> str:
    run = result("gguf_writing-h200")
    before = run["before_flushing_had_a_thread_of_its_own"]
    parts = run["parts_one_after_another"]
    total = sum(parts.values())
    shares = "; ".join(f"{name} {percent(part / total, 0)}" for name, part in parts.items())
    plain = sum(run["plain"].values())
    return items(
        f"Writing Q4_K_M of {number(run['weights'] / 1e9)} billion weights, from the model on disk "
        f"to the file on disk, takes {seconds(run['seconds']['again'])}: it reads "
        f"{gb(run['read_bytes'])} and writes {gb(run['written_bytes'])}. Plain reading and "
        f"writing of as many bytes takes {seconds(plain)}, so it is bound by the files "
        f"({times(run['times_the_plain_bytes'])} that time).",
        f"Shares of its parts when they run one after another: {shares}.",
        f"Before flushing had a thread of its own it took {seconds(before['seconds']['again'])}, "
        f"{times(before['times_the_plain_bytes'])} the plain bytes of that run.",
    )


@region
def gguf_quality() -> str:
    run = result("gguf_quality-h200")
    rows = [
        [
            one["type"].upper(),
            f"{one['with importance']['ours']:.2f}",
            f"{one['without']['ours']:.2f}",
            percent(largest_gap(one), 2),
        ]
        for one in run["types"]
    ]
    rows.append(["source", f"{run['source']:.2f}", "", ""])
    return table(
        ["", "with importance:", "without:", "off from files with ggml's own blocks:"], rows
    )


def largest_gap(one: dict[str, dict[str, float]]) -> float:
    return max(abs(one[way]["gap_percent"]) for way in ("with importance", "without")) / 100


@region
def gguf_llamacpp() -> str:
    run = result("gguf_llamacpp-cpu")
    logits = dict(run["logits"])
    plain = logits.pop("gguf-f16")
    rounded = list(logits.values())
    here = span((one["llama_cpp_to_ours"]["mean"] for one in rounded), lambda x: f"{x:.2f}")
    moved = span(
        (one["ours_with_rounded_inputs_to_ours"]["mean"] for one in rounded), lambda x: f"{x:.2f}"
    )
    away = span(
        (one["llama_cpp_to_ours_with_rounded_inputs"]["mean"] for one in rounded),
        lambda x: f"{x:.2f}",
    )
    largest = max(one["llama_cpp_to_ours"]["largest"] for one in rounded)
    first = sum(one["same_first_choice"] for one in rounded)
    asked = sum(one["prompts"] for one in rounded)
    names = ", ".join(name.removeprefix("gguf-").upper() for name in logits)
    return items(
        f"{run['tokens']['same_ids']} of {run['tokens']['texts']} texts are tokenised as by "
        "transformers.",
        f"Log-probabilities of the next token after {plain['prompts']} prompts differ from ours by "
        f"{plain['llama_cpp_to_ours']['mean']:.4f} nats on average for F16 "
        f"({plain['llama_cpp_to_ours']['largest']:.4f} at most), and by {here} for {names} "
        f"({largest:.2f} at most), with the same first choice for {first} of {asked} prompts.",
        "llama.cpp rounds the inputs of layers to 8 bits. The same rounding moves our own "
        f"log-probabilities as far, by {moved}, but not to the same values, since an early "
        f"difference in rounding changes later ones: llama.cpp differs from those by {away}.",
    )
