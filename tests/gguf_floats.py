"""GGUF files in plain floats, and how far llama.cpp is from transformers with them."""

from dataclasses import replace

import gguf
import llamacpp
import torch

from quantkit.gguf.general import general
from quantkit.gguf.layout import Change, Layout
from quantkit.gguf.vocabulary import vocabulary
from quantkit.gguf.writer import GGUFFile

F16, F32 = gguf.GGMLQuantizationType.F16, gguf.GGMLQuantizationType.F32
FLOATS = {F16: torch.float16, F32: torch.float32}


def convert(source, path, kind=F32, layout=None):
    layout = layout or Layout.of(source)
    metadata = general(layout, source, gguf.LlamaFileType.ALL_F32) | layout.metadata
    metadata |= vocabulary(source, layout.n_vocabulary)
    kinds = {t.name: kind if len(t.shape) > 1 else F32 for t in layout.tensors}
    file = GGUFFile(path, metadata, [(t.name, t.shape, kinds[t.name]) for t in layout.tensors])
    for tensor in layout.tensors:
        file.write(tensor.name, layout.build(tensor.name).to(FLOATS[kinds[tensor.name]]))
    return file.close()


def largest_difference(model, path):
    found = []
    with llamacpp.serve(path) as server:
        for n_tokens in (5, 40):  # 40 is beyond the sliding windows
            generator = torch.Generator().manual_seed(n_tokens)
            tokens = torch.randint(3, 4096, (1, n_tokens), generator=generator)
            with torch.no_grad():
                expected = model(tokens).logits[0, -1].log_softmax(-1)
            got = llamacpp.next_token(server, tokens[0].tolist(), 4096)
            found.append((got - expected).abs().max().item())
    return max(found)


def without(layout, part):
    """A layout without a change of its tensors, or with a wrong number under a key."""
    if isinstance(part, str):
        key = f"{layout.family.llamacpp}.{part}"
        wrong = layout.metadata[key] // 2 if "window" in part else layout.metadata[key] * 3
        return replace(layout, metadata=layout.metadata | {key: wrong})
    kept = [t for t in layout.tensors if not t.change is part is Change.COMPUTE]
    if part is Change.STACK:  # experts in another order than their router knows
        wrong = [replace(t, parts=t.parts[::-1]) if t.change is part else t for t in kept]
        return replace(layout, tensors=wrong)
    plain = [replace(t, change=Change.NONE) if t.change is part else t for t in kept]
    return replace(layout, tensors=plain)
