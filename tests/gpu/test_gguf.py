"""A GPU writes the GGUF blocks that a CPU writes, and reads the same numbers from them."""

import pytest
import torch
from unit.test_gguf_kquants import IMPORTANCE, WEIGHTS
from unit.test_kquants_by_gram import inputs, weights

from quantkit.gguf import by_gram
from quantkit.gguf.blocks import KINDS
from quantkit.gguf.values import dequantize

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


@each_kind
@pytest.mark.parametrize("importance", IMPORTANCE.values(), ids=IMPORTANCE.keys())
def test_a_gpu_writes_the_same_bytes(kind, importance):
    x = torch.cat(list(WEIGHTS.values()))
    found = KINDS[kind](x.cuda(), None if importance is None else importance.cuda())
    assert found.is_cuda
    assert torch.equal(found.cpu(), KINDS[kind](x, importance))


@each_kind
def test_a_gpu_reads_the_same_numbers(kind):
    data = KINDS[kind](WEIGHTS["student-t"], None)
    found = dequantize(data.cuda(), kind)
    assert found.is_cuda
    assert torch.equal(found.cpu(), dequantize(data, kind))


@pytest.mark.parametrize("kind", sorted(by_gram.KINDS), ids=lambda kind: kind.name)
def test_levels_by_gptq_lose_on_a_gpu_what_they_lose_on_a_cpu(kind):
    """Sums in another order round some levels otherwise."""
    weight, seen = weights(64, 512), inputs(512, 2048)
    here = by_gram.quantize(weight, kind, by_gram.Inputs.of(seen))
    for name in ("gram", "total", "max_abs"):
        setattr(seen, name, getattr(seen, name).cuda())
    there = by_gram.quantize(weight.cuda(), kind, by_gram.Inputs.of(seen))
    assert there.damping == here.damping
    assert there.sums == pytest.approx(here.sums, rel=0.02)
