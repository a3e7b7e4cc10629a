"""Checkpoints of other tools: how fast their headers are judged."""

from figures.regions import FigureError, link, paragraph, region, result, table


@region
def wild_headers() -> str:
    """Large models before `verify --for vllm`."""
    found = result("wild_headers")
    rows = [
        [
            name,
            f"{told['files']}",
            f"{told['tensors']:,}",
            f"{told['bytes'] / (1 << 30):.0f} GiB",
            f"{told['seconds']:.1f} s",
            f"{told['peak_mb']:.0f} MB",
        ]
        for name, told in found["models"].items()
    ]
    head = ["model", "shards:", "tensors:", "size:", "judged in:", "peak memory:"]
    return f"{table(head, rows)}\n\nOn {found['machine']}, with the start of Python."


@region
def wild_in_vllm() -> str:
    """What was foretold of a corpus of checkpoints, beside what vLLM did with them."""
    found = result("wild-h200")
    tried = found["checkpoints"].items()
    kinds = {"loads": "loads and agrees", "refuses": "refuses", "garbage": "serves garbage"}
    rows = []
    for verdict, words in kinds.items():
        these = [one for _, one in tried if one["foretold"]["verdict"] == verdict]
        rows.append([words, f"{len(these)}", f"{sum(one['agrees'] for one in these)}"])
    told = (
        f"Predicted by quantkit, then loaded by vLLM {found['version']} on an {found['gpu']}: "
        f"{found['agree']} of {found['of']} as predicted ({link('recorded', 'wild-h200')})."
    )
    for name, one in tried:
        if not one["agrees"]:
            told += f" The exception is `{name}`: predicted {one['foretold']['verdict']}, found "
            told += one["found"]["outcome"]
            if (apart := one["found"].get("nats_apart")) is not None:
                told += f", {apart} nats per token from the sound one"
            told += "."
    again = result("wild-h200-judged")
    if again["outcomes"]["commit"] != found["recorded"]["commit"]:
        raise FigureError("wild-h200-judged.json is of another run: benchmarks/wild.py --judge")
    told += (
        f" That rule has since been corrected from vLLM's source: the rules of commit "
        f"`{again['recorded']['commit']}` predict {again['agree']} of the same {again['of']} "
        f"outcomes ({link('judged', 'wild-h200-judged')}, without another run of vLLM)."
    )
    return f"{paragraph(told)}\n\n" + table(["predicted", "checkpoints:", "found:"], rows)


@region
def wild_on_cpu() -> str:
    """The part of the corpus whose formats a CPU's vLLM has kernels for."""
    found = result("wild-cpu")
    rows = found["checkpoints"]
    others = [name for name, one in rows.items() if not one["agrees"]]
    told = (
        f"vLLM {found['version']} without a GPU ({found['machine']}, {found['dtype']}), by the "
        f"rules of its version only: {found['agree']} of {found['of']} as predicted "
        f"({link('recorded', 'wild-cpu')})."
    )
    if others:
        listed = ", ".join(f"`{name}`" for name in others)
        told += f" The others are formats that this build and type do not run: {listed}."
    return paragraph(told)


LABELS = {
    "int2 g128, 16-bit inputs": "W2A16 g128",
    "int4 g128, 16-bit inputs": "W4A16 g128",
    "int8 channel, int8 dynamic inputs": "W8A8 per channel",
    "fp8 channel, fp8 dynamic inputs": "FP8 per channel",
    "fp8 block, fp8 dynamic inputs": "FP8 blocks",
    "nvfp4, 16-bit inputs": "NVFP4-A16",
    "mxfp4, 16-bit inputs": "MXFP4-A16",
}
"""Formats as they were called when the result was recorded, and their labels."""


def labelled(text: str) -> str:
    """`gptq: int4 g128, 16-bit inputs` by the label that quantkit prints."""
    method, _, words = text.partition(": ")
    return f"{method}: {LABELS.get(words, words)}"


@region
def wild_peers() -> str:
    """Files of other tools, by quantkit and by the library that reads them."""
    found = result("wild_peers-cpu")
    rows = [
        [
            f"`{name.replace('mixture', 'moe')}`",
            one["package"],
            labelled(one["read_as"]),
            f"{one['mean_nats']:.4f}",
        ]
        for name, one in found["checkpoints"].items()
    ]
    worst, roundings = found["within"].values()
    told = (
        f"Checkpoints of the demo model and a small MoE model, written by the tools themselves, "
        f"then read by quantkit and by the tool's own library: {found['equal']} of {found['of']} "
        f"give the same log-probabilities ({link('recorded', 'wild_peers-cpu')}), every token "
        f"within {worst} nats. AutoRound's layers compute in float16; for those both readers do, "
        f"and their average difference is within {roundings} times float16's own rounding."
    )
    head = ["checkpoint", "written by", "read as", "nats apart:"]
    return f"{paragraph(told)}\n\n{table(head, rows)}"
