"""Triton kernels against their torch twins."""

import pytest
import torch
from transformers.models.llama import modeling_llama

from quantkit import grid, numbers
from quantkit.methods import awq, gptq, products, refine, rounding, scales
from quantkit.methods.contract import Linears
from quantkit.methods.statistics import Statistics, add_magnitudes_
from quantkit.model import fast_modules, rotary
from quantkit.model.source import ModelSource
from quantkit.numbers.activations import round_inputs
from quantkit.recipe import ActivationScheme, WeightScheme
from quantkit.scoring import divergence, loading
from quantkit.scoring.answering import Answerer, Request
from quantkit.scoring.distribution import Distribution, block_sums
from quantkit.scoring.rows import row_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("columns", [576, 1024])
@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_kernel_equals_its_twin(columns, symmetric, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(300, columns, device="cuda")
    inputs = torch.randn(4 * columns, columns, device="cuda") * torch.rand(columns, device="cuda")
    scheme = WeightScheme(num_bits=4, strategy="group", group_size=64, symmetric=symmetric)
    view = grid.tiles(weight, scheme)
    scale, zero = grid.parameters(view.amin(-1), view.amax(-1), scheme)
    gram = inputs.t() @ inputs
    factor = gptq.factor(gram)
    fused = gptq.solve(weight, factor, scale, zero, scheme)
    monkeypatch.setattr(gptq, "kernel", lambda: gptq.update_block)
    plain = gptq.solve(weight, factor, scale, zero, scheme)
    assert (fused.values == plain.values).float().mean() > 0.999

    def error(result):
        change = grid.dequantize(result, scheme) - weight
        return ((change @ gram) * change).sum().item()

    assert error(fused) == pytest.approx(error(plain), rel=1e-3)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("shape", [(96, 768), (200, 320)])
def test_weights_side_by_side_are_those_one_by_one(shape, symmetric):
    torch.manual_seed(0)
    rows, columns = shape
    scheme = WeightScheme(num_bits=4, strategy="group", group_size=64, symmetric=symmetric)
    batch = []
    for _ in range(5):
        statistics = Statistics.zeros(columns, torch.device("cuda"))
        inputs = torch.randn(2 * columns, columns, device="cuda")
        statistics.add(inputs * torch.rand(columns, device="cuda"))
        statistics.complete()
        weight = torch.randn(rows, columns, device="cuda")
        batch.append(Linears(weight, torch.bfloat16, scheme, statistics=statistics))
    method = gptq.ColumnByColumn()
    for linears, found in zip(batch, method.round_batch(batch), strict=True):
        alone = method.round(linears)
        assert (found.quantized.values == alone.quantized.values).float().mean() > 0.999
        assert torch.equal(found.quantized.scale, alone.quantized.scale)


SCHEMES = [
    WeightScheme(num_bits=4, strategy="group", group_size=64),
    WeightScheme(num_bits=4, strategy="group", group_size=128, symmetric=False),
    WeightScheme(num_bits=8, strategy="channel"),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rounding_kernels_equal_their_twins(scheme, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(301, 1152, device="cuda")
    weight[3, :128] = 0
    view = grid.tiles(weight, scheme)
    low, high = view.amin(-1) * 0.8, view.amax(-1) * 0.8
    parameters = grid.parameters(low.bfloat16(), high.bfloat16(), scheme)
    candidates = _candidates(weight, scheme)
    importance = torch.rand(1152, device="cuda") * 10
    smoothing = torch.rand(1152, device="cuda") + 0.5

    def all_three():
        return (
            rounding.change(weight, *parameters, scheme).float(),
            rounding.weighted_errors(weight, *candidates, importance, scheme),
            rounding.smoothed_change(weight, smoothing, scheme).float(),
        )

    fused = all_three()
    monkeypatch.setattr(rounding, "_fused", lambda weight, scheme: False)
    for ours, twin in zip(fused, all_three(), strict=True):
        assert (ours - twin).norm() / twin.norm() < 4e-3  # bf16 against float32


@pytest.mark.parametrize("scheme", SCHEMES[:2], ids=str)
def test_errors_of_tiles_equal_their_twin(scheme, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(301, 1152, device="cuda")
    inputs = torch.randn(2000, 1152, device="cuda") * torch.rand(1152, device="cuda")
    grams = scales.tile_grams(inputs.t() @ inputs, scheme.group_size)
    candidates = _candidates(weight, scheme)
    fused = rounding.tile_errors(weight, *candidates, grams, scheme)
    monkeypatch.setattr(rounding, "_fused", lambda weight, scheme: False)
    twin = rounding.tile_errors(weight.cpu(), *(_host(c) for c in candidates), grams.cpu(), scheme)
    for ours, theirs in zip(fused.cpu(), twin, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 4e-3


def _candidates(weight, scheme):
    """Scales and zero points at three ratios, one of them negative where that is possible."""
    view = grid.tiles(weight, scheme)
    ratios = torch.tensor([1.0, 0.8, 0.6], device="cuda")[:, None, None]
    ends = ((end * ratios).bfloat16() for end in (view.amin(-1), view.amax(-1)))
    scale, zero = grid.parameters(*ends, scheme)
    if zero is None:
        scale[1] *= -1
    return scale, zero


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_candidates_tried_together_are_those_one_by_one(scheme, monkeypatch):
    """Same bits, whatever the number that a kernel tries: what is written does not change."""
    torch.manual_seed(0)
    weight = torch.randn(301, 1152, device="cuda")
    inputs = torch.randn(2000, 1152, device="cuda") * torch.rand(1152, device="cuda")
    statistics = Statistics.zeros(1152, weight.device)
    statistics.add(inputs)
    statistics.complete()
    options = {"signed": True} if scheme.symmetric else {}
    linears = Linears(weight, torch.bfloat16, scheme, statistics=statistics, options=options)
    methods = [gptq.ColumnByColumn(), awq.Clipping()]
    together = [method.round(linears).quantized for method in methods]
    monkeypatch.setattr(grid, "SEARCHED", 1)
    for method, found in zip(methods, together, strict=True):
        alone = method.round(linears).quantized
        assert torch.equal(found.scale, alone.scale)
        assert torch.equal(found.values, alone.values)
        assert found.zero_point is None or torch.equal(found.zero_point, alone.zero_point)


def _host(tensor):
    return None if tensor is None else tensor.cpu()


def test_products_on_tensor_cores_are_precise():
    torch.manual_seed(0)
    left, right = torch.randn(300, 500, device="cuda"), torch.randn(500, 400, device="cuda")
    wanted = left.double() @ right.double()
    assert (
        products.precise(left, products.Halves.of(right)) - wanted
    ).norm() / wanted.norm() < 2e-5
    lower = torch.randn(3000, 3000, device="cuda").tril() / 60
    lower.diagonal().copy_(torch.rand(3000) + 1)
    inverse = products.invert_lower_(lower.clone())
    unit = torch.eye(3000, device="cuda", dtype=torch.float64)
    assert (inverse.double() @ lower.double() - unit).abs().max() < 1e-3


def test_gram_by_slabs_is_the_whole_gram():
    torch.manual_seed(0)
    inputs = torch.randn(5, 200, 2300, device="cuda", dtype=torch.bfloat16)
    statistics = Statistics.zeros(2300, inputs.device)
    for sample in inputs:
        statistics.add(sample)
    statistics.complete()
    flat = inputs.reshape(-1, 2300).double()
    wanted = flat.t() @ flat
    assert (statistics.gram - wanted).norm() / wanted.norm() < 1e-5
    assert torch.equal(statistics.gram, statistics.gram.t())
    assert torch.allclose(statistics.mean_abs.double(), flat.abs().mean(0), rtol=1e-5)
    assert torch.equal(statistics.max_abs.double(), flat.abs().amax(0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("vocabulary", [49152, 1000])
def test_block_sums_equal_their_twin(dtype, vocabulary):
    torch.manual_seed(0)
    logits = (torch.randn(70, vocabulary, device="cuda") * 5).to(dtype)
    logits[2, :64] = float("-inf")
    logits[4, 5] = float("nan")
    for fused, plain in zip(block_sums(logits), block_sums(logits.cpu()), strict=True):
        torch.testing.assert_close(fused[:4].cpu(), plain[:4], rtol=1e-5, atol=0)
    found = Distribution(logits)
    assert found.normaliser.isnan().sum() == 1
    clean, values = Distribution(logits[5:]), logits[5:]
    assert torch.equal(values.gather(1, clean.likeliest[:, None])[:, 0], values.amax(1))
    ids = values.topk(48).indices
    expected = values.float().log_softmax(-1).gather(1, ids)
    torch.testing.assert_close(clean.log_probabilities(ids), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocabulary", [1000, 40_001, 151_936])
@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
def test_divergence_kernel_equals_its_twin(dtype, vocabulary, noise):
    torch.manual_seed(0)
    source = 4 * torch.randn(70, vocabulary, device="cuda")
    candidate = (source + noise * torch.randn_like(source)).to(dtype)
    source = source.to(dtype)
    source[0, 5] = candidate[0, 5] = float("-inf")
    source[1, 5] = candidate[2, 6] = float("-inf")
    fused = divergence.kl(source, candidate)
    twin = divergence.kl(source.cpu(), candidate.cpu())
    assert fused[2] == twin[2] == float("inf")
    torch.testing.assert_close(fused.cpu(), twin, rtol=1e-4, atol=1e-8)
    p, q = source.double().log_softmax(-1), candidate.double().log_softmax(-1)
    exact = (p.exp() * (p - q)).nansum(-1)
    torch.testing.assert_close(fused[3:].double(), exact[3:], rtol=1e-4, atol=1e-8)
    assert not divergence.kl(source, source).any()
    # Every second column of a wider array: rows that do not lie in one piece.
    wide = torch.stack([source, candidate], -1)
    assert torch.equal(divergence.kl(wide[..., 0], wide[..., 1]), fused)


@torch.no_grad()
def test_comparison_with_the_source_waits_for_nothing(tmp_path):
    """Twenty rounds of the comparison on a GPU, and the host does not wait in any of them."""
    model = loading.load(ModelSource.open("demo"), torch.device("cuda"))
    torch.manual_seed(0)
    texts = [tuple(torch.randint(1, 4096, (n,)).tolist()) for n in (60, 45)]
    requests = [Request((0,), text) for text in texts]
    recorder = divergence.Recorder(torch.ones(105, dtype=torch.bool))
    seen = []

    def see(one):
        seen.append(one)
        recorder.see(one)

    answerer = Answerer(model, 96)
    list(answerer.answers(requests, see))
    recorder.reference.write(tmp_path / "reference")
    reference = divergence.Reference.read(tmp_path / "reference", answerer.device)
    assert torch.equal(reference.hidden, recorder.reference.hidden)
    compared = divergence.Divergence(reference, 105, answerer, None)
    compared.see(seen[0])  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        for one in seen * 20:
            compared.see(one)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not compared.kl.any()
    assert compared.agrees.all()
    divergence.write_head(tmp_path / "head", model)
    assert divergence.read_head(tmp_path / "head", model) is None
    on_host = loading.load(ModelSource.open("demo"), torch.device("cpu"), dtype=model.dtype)
    ours, theirs = divergence.head_of(model)["weight"], divergence.head_of(on_host)["weight"]
    assert torch.equal(divergence.digest_of(ours), divergence.digest_of(theirs))


FP4_SCHEMES = [
    WeightScheme(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    WeightScheme(num_bits=4, type="float", strategy="group", group_size=32),
]


@pytest.mark.parametrize("scheme", FP4_SCHEMES, ids=str)
def test_search_for_scales_of_fp4_equals_its_twin(scheme):
    torch.manual_seed(0)
    statistics = Statistics.zeros(768, torch.device("cuda"))
    statistics.add(torch.randn(2000, 768, device="cuda") * torch.rand(768, device="cuda"))
    statistics.complete()
    weight = torch.randn(301, 768, device="cuda")
    weight[3, :64] = 0
    linears = Linears(weight, torch.bfloat16, scheme, statistics=statistics)
    whole = scales.global_scale(linears)
    view = grid.tiles(weight, scheme)
    ends = view.amin(-1).bfloat16(), view.amax(-1).bfloat16()
    start, _ = grid.parameters(*ends, scheme, linears.scale_dtype, whole)
    twin = scales.best(linears, numbers.of(scheme).near(start), whole)
    found = scales.searched(linears)
    same = found.view(torch.uint8) == twin.view(torch.uint8)
    assert same.float().mean() > 0.999  # sums in another order


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("strategy", "size"), [("tensor_group", 16), ("group", 32)], ids=["NVFP4", "MXFP4"]
)
def test_inputs_rounded_to_fp4_on_a_gpu_are_those_of_a_cpu(dtype, strategy, size):
    torch.manual_seed(0)
    local = "local" if strategy == "tensor_group" else True
    scheme = ActivationScheme(
        num_bits=4, type="float", strategy=strategy, group_size=size, dynamic=local
    )
    values = (torch.randn(5, 70, 256) * torch.rand(70, 1) * 9).to(dtype)
    values[1, 2] = 0
    number = numbers.of(scheme)
    whole = number.global_scale(values.abs().amax().float()) if scheme.is_static else None
    expected = round_inputs(values, scheme, whole)
    found = round_inputs(values.cuda(), scheme, whole)
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "group", "width"), [(2, 6, 128), (3, 1, 64), (1, 20, 256)])
def test_attention_of_rows_equals_its_twin(dtype, heads, group, width):
    from quantkit.scoring import kernels

    torch.manual_seed(0)
    query = torch.randn(5, heads, group, width, device="cuda", dtype=dtype)
    keys, values = torch.randn(2, 7, heads, 300, width, device="cuda", dtype=dtype)
    lengths = torch.tensor([1, 64, 65, 300, 37], device="cuda")
    found = kernels.row_attention(query, keys[:5], values[:5], lengths, 0.1)
    expected = row_attention(query.float(), keys[:5].float(), values[:5].float(), lengths, 0.1)
    within = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), expected, atol=within, rtol=within)


@pytest.mark.parametrize(
    "scheme",
    [
        WeightScheme(num_bits=4, strategy="group", group_size=64),
        WeightScheme(num_bits=2, strategy="group", group_size=64),
        WeightScheme(num_bits=4, type="float", strategy="group", group_size=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("columns", [576, 1024])
def test_descent_kernel_equals_its_twin(columns, scheme, monkeypatch):
    torch.manual_seed(0)
    weight = torch.randn(300, columns, device="cuda")
    inputs = torch.randn(4 * columns, columns, device="cuda") * torch.rand(columns, device="cuda")
    inputs[:, 5] = 0  # a channel that is never active
    gram = inputs.t() @ inputs
    view = grid.tiles(weight, scheme)
    scale, _ = grid.parameters(view.amin(-1).bfloat16(), view.amax(-1).bfloat16(), scheme)
    start = grid.quantize(weight, scale, None, scheme)
    fused, known = refine.refine(weight, gram, start, scheme, 2)
    monkeypatch.setattr(refine, "_kernel", lambda: refine.descend_block)
    plain, _ = refine.refine(weight, gram, start, scheme, 2)

    def error(result):
        change = grid.dequantize(result, scheme) - weight
        return ((change @ gram) * change).sum().item()

    # The kernel fits a scale right after its codes, the twin all scales of a block at its end.
    assert (fused.values == plain.values).float().mean() > 0.9
    assert error(fused) == pytest.approx(error(plain), rel=1e-2)
    assert error(fused) < 0.9 * error(start)
    assert known.sum().item() == pytest.approx(error(fused), rel=1e-3)


@pytest.mark.parametrize("width", [4096, 5120, 128])
def test_norms_and_gated_units_equal_their_twins(width):
    torch.manual_seed(0)
    states = 3 * torch.randn(2, 33, width, device="cuda").bfloat16()
    weight = (1 + torch.randn(width, device="cuda") / 3).bfloat16()
    gate, up = (torch.randn(2, 33, 3 * width, device="cuda").bfloat16() for _ in range(2))
    for found, expected in (
        (
            fast_modules.norm(states, weight, 1e-5),
            fast_modules.norm(states.cpu(), weight.cpu(), 1e-5),
        ),
        (fast_modules.gated(4 * gate, up), fast_modules.gated(4 * gate.cpu(), up.cpu())),
    ):
        assert (found.cpu() == expected).float().mean() > 0.99
        torch.testing.assert_close(found.cpu(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("heads", [(12, 2), (5, 5), (64, 8)])
@pytest.mark.parametrize("width", [64, 80, 128])
@pytest.mark.parametrize("shared", [True, False])
def test_rotary_embeddings_equal_those_of_transformers(heads, width, shared):
    """Bit for bit, and laid out alike, so that attention takes the same kernel."""
    torch.manual_seed(0)
    made = [torch.randn(3, 77, n, width, device="cuda").bfloat16().transpose(1, 2) for n in heads]
    angles = torch.randn(2, 1 if shared else 3, 77, width, device="cuda").bfloat16()
    for given in (made, [x.contiguous() for x in made], [made[0], made[1].contiguous()]):
        assert rotary._fits(*given, *angles)
        expected = modeling_llama.apply_rotary_pos_emb(*given, *angles)
        for found, wanted in zip(rotary.rotate(*given, *angles), expected, strict=True):
            assert torch.equal(found, wanted)
            assert found.stride() == wanted.stride()
    assert rotary._gives_the_same(modeling_llama.apply_rotary_pos_emb, torch.device("cuda"))


def test_products_that_are_added_are_those_that_were_not_there():
    torch.manual_seed(0)
    target = torch.randn(300, 1000, device="cuda")
    left, right = torch.randn(300, 500, device="cuda"), torch.randn(500, 400, device="cuda")
    wanted = target.double()
    wanted[:, 600:] -= left.double() @ right.double()
    products.add_precise_(target[:, 600:], left, products.Halves.of(right), alpha=-1)
    assert (target - wanted).norm() / wanted.norm() < 2e-5
    low, narrow = left.bfloat16(), right.bfloat16()
    wanted[:, :400] += low.double() @ narrow.double()
    products.add_(target[:, :400], low, narrow)
    assert (target - wanted).norm() / wanted.norm() < 2e-5


@pytest.mark.parametrize("shape", [(2, 40), (128, 3000), (2050, 128)])
@pytest.mark.parametrize("kind", ["whole", "part", "columns", "part of columns"])
def test_halves_equal_their_twin(shape, kind, monkeypatch):
    """Bit for bit and laid out alike, also of a part of a matrix, or of one stored by columns."""
    torch.manual_seed(0)
    rows, columns = shape
    extra = (9, 30) if "part" in kind else (0, 0)
    whole = torch.randn(rows + extra[0], columns + extra[1], device="cuda") * 1e3
    if "columns" in kind:
        whole = whole.t().contiguous().t()
    whole = whole[extra[0] :, extra[1] // 4 :][:rows, :columns]

    def all_of_them():
        made = products.Halves.of(whole)
        return made.high, made.low, products._side_by_side(whole), products._stacked(whole)

    found = all_of_them()
    monkeypatch.setattr(products, "_kernels", lambda matrix: False)
    for ours, twin in zip(found, all_of_them(), strict=True):
        assert torch.equal(ours, twin)
        assert ours.stride() == twin.stride()


@pytest.mark.parametrize("shape", [(1, 40), (700, 1000), (2048, 4096)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_magnitudes_equal_their_twin(shape, dtype):
    torch.manual_seed(0)
    batches = [torch.randn(shape, device="cuda").to(dtype) * (3 - n) for n in range(3)]
    sums, largest = torch.zeros(2, shape[1], device="cuda")
    expected = torch.zeros(2, shape[1])
    for flat in (*batches, batches[0][:0]):
        add_magnitudes_(sums, largest, flat)
    for flat in batches:
        add_magnitudes_(*expected, flat.cpu())
    torch.testing.assert_close(sums.cpu(), expected[0], rtol=1e-5, atol=1e-6)
    assert torch.equal(largest.cpu(), expected[1])
