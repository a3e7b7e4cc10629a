"""Make the demo model that ships in the package: tokenizer, weights and model card.

    python scripts/train_demo_model.py OUT [--work DIR]

The text is what the running Python has on board (`quantkit.calibration.reading.python_text`, split
`train`); paragraphs that also stand in the held-out split are cut from it first. `--work` keeps
the tokens, so that they can be prepared on one machine (`--prepare-only`) and trained on another
with a GPU. The run that made the published weights took under five minutes on one H200.
"""

import argparse
import json
import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from quantkit.calibration.reading import python_text

END, USER, ASSISTANT = "<|endoftext|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|assistant|>' if message['role'] == 'assistant' else '<|user|>' }}\n"
    "{{ message['content'] }}<|endoftext|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@dataclass(frozen=True)
class Settings:
    vocabulary: int = 4096
    context: int = 1024
    batch: int = 64
    steps: int = 2000
    warmup: int = 200
    learning_rate: float = 3e-3
    weight_decay: float = 1.0  # 0.1 memorises: held-out loss turns up after 600 steps
    documents_share: float = 0.1  # of each batch; the rest is source code
    noise: float = 0.1  # share of input tokens replaced at random, against memorising
    seed: int = 0


def without_heldout(text: str, heldout: set[str]) -> str:
    """The text less every paragraph that also stands in the held-out split."""
    return "\n\n".join(p for p in text.split("\n\n") if p.strip() not in heldout)


def training_texts() -> tuple[list[str], list[str]]:
    """Documentation and source code, both free of held-out paragraphs."""
    paragraphs = {
        p.strip() for d in python_text.heldout() for p in d.text.split("\n\n") if len(p) > 40
    }
    documents = [*python_text.topics("train"), *python_text.docstrings("train")]
    code = python_text.sources("train", optional=True)
    return (
        [without_heldout(d.text, paragraphs) for d in documents],
        [without_heldout(d.text, paragraphs) for d in code],
    )


def prepare(work: Path, settings: Settings) -> None:
    """Train the tokenizer and write the texts as tokens."""
    work.mkdir(parents=True, exist_ok=True)
    documents, code = training_texts()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocabulary,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # Documentation counts three times, so that the vocabulary is not all about code.
    tokenizer.train_from_iterator([*documents * 3, *code[::4]], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=END,
        model_max_length=settings.context,
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(work / "tokenizer")
    end = tokenizer.token_to_id(END)
    text: dict[str, object] = {"python": sys.version.split()[0]}
    for name, texts in (
        ("documents", documents),
        ("code", code),
        ("heldout", [d.text for d in python_text.heldout()]),
    ):
        ids: list[int] = []
        for encoding in tokenizer.encode_batch_fast(texts):
            ids += [end, *encoding.ids]
        np.save(work / f"{name}.npy", np.array(ids, dtype=np.uint16))
        text[f"{name}_tokens"] = len(ids)
    (work / "text.json").write_text(json.dumps(text))
    print(text)


def heldout_loss(model: LlamaForCausalLM, tokens: torch.Tensor, context: int) -> float:
    """Mean negative log-likelihood per token over windows of the held-out text."""
    rows = tokens[: len(tokens) // context * context].view(-1, context)
    model.eval()
    with torch.no_grad(), torch.autocast(tokens.device.type, torch.bfloat16):
        losses = [model(input_ids=r, labels=r).loss.float() for r in rows.split(16)]
    model.train()
    return torch.stack(losses).mean().item()


def learning_rate(step: int, settings: Settings) -> float:
    """Warm up, then a cosine down to zero."""
    if step < settings.warmup:
        return settings.learning_rate * (step + 1) / settings.warmup
    progress = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def train(work: Path, out: Path, settings: Settings) -> dict[str, object]:
    """Train on the prepared tokens and save a bf16 checkpoint."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(settings.seed)
    streams = {
        name: torch.from_numpy(np.load(work / f"{name}.npy").astype(np.int64)).to(device)
        for name in ("documents", "code", "heldout")
    }
    tokenizer = PreTrainedTokenizerFast.from_pretrained(work / "tokenizer")
    config = LlamaConfig(
        vocab_size=settings.vocabulary,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=settings.context,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(device)
    matrices = [p for p in model.parameters() if p.dim() == 2]
    norms = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": norms, "weight_decay": 0.0},
        ],
        betas=(0.9, 0.98),
        fused=device == "cuda",
    )
    n_documents = round(settings.batch * settings.documents_share)
    counts = {"documents": n_documents, "code": settings.batch - n_documents}
    generator = torch.Generator().manual_seed(settings.seed)
    window = torch.arange(settings.context, device=device)
    run = torch.compile(model) if device == "cuda" else model
    curve, started = [], time.time()
    for step in range(settings.steps):
        rows = []
        for name, count in counts.items():
            last = len(streams[name]) - settings.context
            starts = torch.randint(0, last, (count,), generator=generator).to(device)
            rows.append(streams[name][starts[:, None] + window])
        batch = torch.cat(rows)
        noise = torch.randint_like(batch, settings.vocabulary)
        inputs = torch.where(torch.rand(batch.shape, device=device) < settings.noise, noise, batch)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings)
        with torch.autocast(device, torch.bfloat16):
            loss = run(input_ids=inputs, labels=batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 200 == 199:
            curve.append(
                {
                    "step": step + 1,
                    "train_loss": round(loss.item(), 4),
                    "heldout_loss": round(
                        heldout_loss(model, streams["heldout"], settings.context), 4
                    ),
                }
            )
            print(curve[-1], f"{time.time() - started:.0f} s", file=sys.stderr, flush=True)
    model = model.to(torch.bfloat16)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    result: dict[str, object] = {
        "settings": vars(settings),
        "parameters": sum(p.numel() for p in model.parameters()),
        "text": json.loads((work / "text.json").read_text()),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "seconds": round(time.time() - started),
        "curve": curve,
    }
    (out / "training.json").write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--work", type=Path, help="where the tokens lie, or are put")
    parser.add_argument("--prepare-only", action="store_true")
    parser.add_argument("--steps", type=int, default=Settings.steps)
    args = parser.parse_args()
    work = args.work or args.out.with_name(args.out.name + "-work")
    settings = Settings(steps=args.steps)
    if not (work / "heldout.npy").exists():
        prepare(work, settings)
    if not args.prepare_only:
        result = train(work, args.out, settings)
        print(json.dumps({k: v for k, v in result.items() if k != "curve"}))


if __name__ == "__main__":
    main()
