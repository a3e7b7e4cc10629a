"""Checkpoints that other tools wrote, read by quantkit and by the library that reads them.

    python benchmarks/wild_peers.py --work DIR [--out FILE]

Run in an environment that has AutoRound, llm-compressor and quantkit; what is not installed is
left out by name. Each tool quantises the demo model, or a small mixture of experts, by its own
command and in its own layout. The same texts then go through the checkpoint as transformers loads
it with that tool's library, and as quantkit loads it: every token's log-probability is compared.
"""

import argparse
import copy
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from recording import without_folders, write

from quantkit import opening, resources
from quantkit.model.source import ModelSource
from quantkit.scoring import loading
from quantkit.scoring.expected import log_probabilities

RESULT = Path(__file__).parent / "results" / "wild_peers-cpu.json"
DEMO = Path(resources.DEMO_MODEL)
AUTO_ROUND = {
    # name: scheme, the layout that is written
    "autoround-gptq": ("W4A16", "auto_gptq"),
    "autoround-awq": ("W4A16", "auto_awq"),
    "autoround": ("W4A16", "auto_round"),
    "autoround-mixture": ("W4A16", "auto_round"),
    "autoround-2-bit": ("W2A16", "auto_round"),
}
LLM_COMPRESSOR = {
    "llmcompressor-w4a16": "W4A16", "llmcompressor-w8a8": "W8A8",
    "llmcompressor-fp8": "FP8_DYNAMIC", "llmcompressor-fp8-block": "FP8_BLOCK",
    "llmcompressor-nvfp4a16": "NVFP4A16", "llmcompressor-mxfp4a16": "MXFP4A16",
    "llmcompressor-mixture": "W4A16",
}  # fmt: skip
TRANSFORMERS = ("transformers-fp8", "transformers-nf4", "transformers-nf4-mixture")
UNLIKE = ("W8A8",)
"""Inputs that the library rounds by |x|/127.5, and vLLM and quantkit by |x|/127: not rounded."""
PACKAGES = ("auto-round", "llmcompressor", "transformers")
WITHIN = 1e-3
"""Nats, of the worst token, where both readers compute in float32."""
HALF = ("auto-round",)
"""Their layers compute in float16 alone. Both readers then do, and may be apart by twice what
float16 itself moves on average, the limit that `verify --backend` has for engines."""
ROUNDINGS = 2


def mixture(folder: Path) -> Path:
    """A small mixture of experts with the demo's tokenizer."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, moe_intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=64, num_experts=8,
        num_experts_per_tok=2, vocab_size=4096, max_position_embeddings=512, decoder_sparse_step=1,
        norm_topk_prob=True, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(DEMO / name, folder / name)
    return folder


def loaded(folder: Path, dtype: torch.dtype = torch.float32, **how: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu", **how).eval()


def by_auto_round(name: str, source: Path, folder: Path) -> tuple[Path, Any]:
    """Round to nearest and export.

    AutoRound reads its own layout, and GPTQ's under the name that it has for it. It has no reader
    of AWQ's for CPUs: the reference is then the same rounding, exported in its own layout.
    """
    model = loaded(source)
    from auto_round import AutoRound
    from transformers import AutoTokenizer

    scheme, layout = AUTO_ROUND[name]
    tokenizer = AutoTokenizer.from_pretrained(source)

    def export(form: str, out: Path) -> Path:
        maker = AutoRound(
            copy.deepcopy(model), tokenizer, scheme=scheme, iters=0, disable_opt_rtn=True,
            device_map="cpu",
        )  # fmt: skip
        maker.quantize_and_save(str(out), format=form)
        return next(path.parent for path in out.rglob("config.json"))

    made = export(layout, folder)
    if layout == "auto_round":
        return made, loaded(made, torch.float16)
    asked = folder.with_name(f"{folder.name}-asked")
    if layout == "auto_awq":
        return made, loaded(export("auto_round", asked), torch.float16)
    shutil.copytree(made, asked)
    config = json.loads((asked / "config.json").read_text())
    config["quantization_config"] |= {
        "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"
    }  # fmt: skip
    (asked / "config.json").write_text(json.dumps(config))
    return made, loaded(asked, torch.float16)


def by_llm_compressor(name: str, source: Path, folder: Path) -> tuple[Path, Any]:
    """One shot without data. transformers reads the files by compressed-tensors, but for experts
    and FP4 on a CPU: there the reference is the model in memory, before it was packed."""
    from compressed_tensors.quantization import disable_quantization
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from transformers import AutoTokenizer

    model = loaded(source)
    scheme = LLM_COMPRESSOR[name]
    oneshot(
        model=model,
        tokenizer=AutoTokenizer.from_pretrained(source),
        recipe=QuantizationModifier(
            targets="Linear", scheme=scheme, ignore=["lm_head", "re:.*mlp.gate$"]
        ),
        pipeline="datafree",
    )
    in_memory = name.endswith("mixture") or "FP4" in scheme
    reads = log_probabilities(model, texts()) if in_memory else None
    model.save_pretrained(folder, save_compressed=True)
    for path in source.iterdir():
        if not (folder / path.name).exists() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    if reads is not None:
        return folder, reads
    reference = loaded(folder)
    if scheme in UNLIKE:
        reference.apply(disable_quantization)  # weights are decompressed; inputs stay as they are
    return folder, reference


def by_transformers(name: str, source: Path, folder: Path) -> tuple[Path, Any]:
    """By transformers itself: NF4 through bitsandbytes, or FP8 in blocks, which needs a GPU."""
    from transformers import BitsAndBytesConfig, FineGrainedFP8Config

    config: Any = FineGrainedFP8Config()
    if "nf4" in name:
        config = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
        )
    loaded(source, quantization_config=config).save_pretrained(folder)
    for path in source.iterdir():
        if not (folder / path.name).exists() and path.suffix != ".safetensors":
            shutil.copyfile(path, folder / path.name)
    if "nf4" in name:
        return folder, loaded(folder)
    return folder, loaded(folder, quantization_config=FineGrainedFP8Config(dequantize=True))


Writer = Callable[[str, Path, Path], tuple[Path, Any]]
MAKERS: dict[str, tuple[str, Writer]] = {
    **{name: ("auto-round", by_auto_round) for name in AUTO_ROUND},
    **{name: ("llmcompressor", by_llm_compressor) for name in LLM_COMPRESSOR},
    **{name: ("transformers", by_transformers) for name in TRANSFORMERS},
}


def texts() -> torch.Tensor:
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)[:4])).ids
    return torch.tensor(ids[:512]).reshape(4, 128)


def compared(made: Path, reads: torch.Tensor, package: str, rounds: bool) -> dict[str, Any]:
    """Every token by both readers; where the library's does not round inputs, neither does ours."""
    found = opening.find(str(made), None, False)
    assert isinstance(found, ModelSource)

    def ours(dtype: torch.dtype) -> torch.Tensor:
        model = loading.load(found, torch.device("cpu"), dtype=dtype)
        for part in model.modules() if not rounds else ():
            part._forward_pre_hooks.clear()
        return log_probabilities(model, texts())

    half = package in HALF
    read = ours(torch.float16 if half else torch.float32)
    apart = (read - reads).abs()
    moved = float((read - ours(torch.float32)).abs().mean()) if half else None
    equal = apart.max() <= WITHIN if moved is None else apart.mean() <= ROUNDINGS * moved
    told = getattr(found, "declared", None)
    return {
        "read_as": told and told.words,
        "made_by": told and told.maker,
        "most_nats": round(float(apart.max()), 6),
        "mean_nats": round(float(apart.mean()), 6),
        **({} if moved is None else {"float16_moves_nats": round(moved, 6)}),
        "equal": bool(equal),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="the checkpoints go here")
    parser.add_argument("--package", choices=PACKAGES, help="in this process; default: all, apart")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args(arguments)
    if args.package is None:
        shutil.rmtree(args.work, ignore_errors=True)
        args.work.mkdir(parents=True)
        mixture(args.work / "mixture")
        write(args.out, together([one_package(name, args.work) for name in PACKAGES]))
        return
    experts = args.work / "mixture"
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name, (package, make) in MAKERS.items():
        if package != args.package:
            continue
        try:
            told = {"package": f"{package} {version(package)}"}
        except PackageNotFoundError:
            print(f"{name}: {package} is not installed", file=sys.stderr)
            continue
        source = experts if name.endswith("mixture") else DEMO
        try:
            made, reference = make(name, source, args.work / name)
            reads = reference
            if not isinstance(reference, torch.Tensor):
                reads = log_probabilities(reference, texts())
        except Exception as error:  # whatever the tool raises: the others go on
            print(f"{name}: {package}: {error}", file=sys.stderr)
            failed[name] = without_folders(f"{type(error).__name__}: {error}")[:300]
            continue
        rows[name] = told | compared(
            made, reads, package, rounds=LLM_COMPRESSOR.get(name, "W8A8") not in UNLIKE
        )
        print(json.dumps({name: rows[name]}), flush=True)
    args.out.write_text(json.dumps({"checkpoints": rows, "failed": failed}))


def one_package(name: str, work: Path) -> dict[str, Any]:
    """In a process of its own: these tools change transformers where they are imported."""
    out = work / f"{name}.json"
    asked = ["--package", name, "--work", str(work), "--out", str(out)]
    subprocess.run([sys.executable, __file__, *asked], check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def together(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rows = {name: row for part in parts for name, row in part["checkpoints"].items()}
    return {
        "what": "log-probabilities by quantkit's reader and by the library's own, nats per token",
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "with": {name: version(name) for name in ("transformers", "compressed-tensors", "torch")},
        "within": {"float32, the worst token, nats": WITHIN, "float16, of its rounding": ROUNDINGS},
        "equal": sum(row["equal"] for row in rows.values()),
        "of": len(rows),
        "checkpoints": rows,
        "failed_in_the_tool": {k: v for part in parts for k, v in part["failed"].items()},
    }


if __name__ == "__main__":
    main()
