"""The divergence from the source is that of the whole vocabulary, summed the obvious way."""

import pytest
import torch

from quantkit.model.source import ModelSource
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import divergence, loading
from quantkit.scoring.answering import Answerer, Request
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions

pytestmark = pytest.mark.usefixtures("demo_is_short")

LARGE = 128_256
"""Tokens of Llama 3's vocabulary, where cutting off a tail shows."""


def brute_force(source, candidate):
    p, q = source.double().log_softmax(-1), candidate.double().log_softmax(-1)
    return (p.exp() * (p - q)).nansum(-1)


@pytest.mark.parametrize("vocabulary", [1000, LARGE])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("spread", "noise"), [(1, 0.02), (3, 0.3), (8, 2.0)])
def test_kl_equals_brute_force(vocabulary, dtype, spread, noise):
    generator = torch.Generator().manual_seed(0)
    source = spread * torch.randn(32, vocabulary, generator=generator)
    candidate = source + noise * torch.randn(source.shape, generator=generator)
    source, candidate = source.to(dtype), candidate.to(dtype)
    found = divergence.kl(source, candidate)
    expected = brute_force(source, candidate)
    assert found.double() == pytest.approx(expected, rel=1e-4)
    assert divergence.kl(source, source).tolist() == [0.0] * len(source)


def test_kl_of_tokens_that_are_ruled_out():
    source = torch.zeros(3, 100)
    candidate = source.clone()
    source[0, 5] = candidate[0, 5] = float("-inf")  # padding of a vocabulary, in both
    source[1, 5] = float("-inf")
    candidate[2, 5] = float("-inf")
    found = divergence.kl(source, candidate).tolist()
    assert found[0] == 0
    assert found[1] == pytest.approx(torch.tensor(100 / 99).log().item(), rel=1e-5)
    assert found[2] == float("inf")


@pytest.fixture(scope="module")
def rounded(tmp_path_factory):
    return quantize(
        ModelSource.open("demo"),
        [load("rtn-w8a16"), load("rtn-w4a16")],
        tmp_path_factory.mktemp("out"),
        "cpu",
    )


@torch.no_grad()
@pytest.mark.parametrize("n_documents", [2, pytest.param(None, marks=pytest.mark.slow)])
def test_scores_equal_brute_force_on_the_demo(tmp_path, rounded, n_documents):
    asked = ScoreOptions(("python_docs",), limit=n_documents, cache=tmp_path / "cache")
    source = ModelSource.open("demo")
    windows = []
    answers = Answerer.answers

    def watched(self, requests, watcher=None):
        windows[:] = requests
        return answers(self, requests, watcher)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Answerer, "answers", watched)
        evaluate(source, asked, "cpu")

    def logits(target):
        model = loading.load(target, torch.device("cpu"))
        found = []
        for window in windows:
            ids = torch.tensor([window.context + window.continuation[:-1]])
            found.append(model(ids).logits[0, -len(window.continuation) :])
        return torch.cat(found)

    theirs = logits(source)
    for candidate in rounded:
        mine = logits(candidate)
        expected = brute_force(theirs, mine).sort().values
        scores = evaluate(candidate, asked, "cpu").card.scores
        for name, value in {
            "kl_mean": expected.mean(),
            "kl_median": expected.quantile(0.5),
            "kl_p99": expected.quantile(0.99),
            "top1_agreement": (theirs.argmax(-1) == mine.argmax(-1)).double().mean(),
        }.items():
            assert scores[f"python_docs/{name}"].value == pytest.approx(value.item(), rel=0.01)
            assert scores[f"python_docs/{name}"].n == len(theirs)
        assert scores["python_docs/kl_median"].value > 0


def test_model_against_itself_is_exactly_zero(tmp_path, rounded):
    """A file that keeps every weight in 32 bits is the source, in another format."""
    (same,) = quantize(ModelSource.open("demo"), [load("gguf-f32")], tmp_path / "out", "cpu")
    asked = ScoreOptions(("python_docs",), limit=2, cache=tmp_path / "cache")
    for target in (ModelSource.open("demo"), same):
        scores = evaluate(target, asked, "cpu").card.scores
        for name in ("kl_mean", "kl_median", "kl_p99", "kl_p999"):
            assert scores[f"python_docs/{name}"].value == 0
        assert scores["python_docs/top1_agreement"].value == 1


def test_another_output_layer_is_seen(tmp_path, rounded):
    """GGUF quantises the output layer too: the source's own must be kept, not taken from there."""
    (made,) = quantize(ModelSource.open("demo"), [load("gguf-q4_0")], tmp_path / "out", "cpu")
    model = loading.load(made, torch.device("cpu"))
    source = loading.load(ModelSource.open("demo"), torch.device("cpu"))
    divergence.write_head(tmp_path / "head", source)
    head = divergence.read_head(tmp_path / "head", model)
    assert torch.equal(head.weight, source.get_output_embeddings().weight)
    hidden = torch.randn(5, source.config.hidden_size)
    expected = Answerer(source, 64).logits(hidden)
    assert torch.equal(Answerer(model, 64).logits(hidden, head), expected)
    assert not torch.equal(Answerer(model, 64).logits(hidden), expected)
    assert divergence.read_head(tmp_path / "head", source) is None


def test_digests_tell_tensors_apart():
    torch.manual_seed(0)
    tensor = torch.randn(300, 70).bfloat16()
    digest = divergence.digest_of(tensor)
    assert torch.equal(divergence.digest_of(tensor.clone()), digest)
    assert torch.equal(divergence.digest_of(tensor.t().contiguous().t()), digest)
    one_bit = tensor.clone()
    one_bit.view(torch.int16)[299, 69] ^= 1
    swapped = tensor.clone()
    swapped[[0, 4]] = tensor[[4, 0]]
    others = [one_bit, swapped, tensor.reshape(70, 300), tensor.flip(0), tensor.view(torch.int16)]
    others += [tensor[:299], torch.zeros_like(tensor), -torch.zeros_like(tensor)]
    found = {tuple(divergence.digest_of(other).tolist()) for other in [tensor, *others]}
    assert len(found) == 1 + len(others)


def test_digests_of_large_tensors_cover_all_parts(monkeypatch):
    monkeypatch.setattr(divergence, "DIGEST_WORDS", 7)
    parts = divergence.digest_of(torch.arange(100))
    monkeypatch.undo()
    assert torch.equal(parts, divergence.digest_of(torch.arange(100)))


@torch.no_grad()
def test_comparison_costs_one_more_output_layer(tmp_path, monkeypatch):
    """The candidate's own logits are not computed again, and its output layer is not read."""
    model = loading.load(ModelSource.open("demo"), torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    texts = [tuple(torch.randint(1, 4096, (n,), generator=generator).tolist()) for n in (60, 45)]
    requests, answerer = [Request((0,), text) for text in texts], Answerer(model, 96)
    recorder = divergence.Recorder(torch.ones(105, dtype=torch.bool))
    list(answerer.answers(requests, recorder.see))
    recorder.reference.write(tmp_path / "reference")
    divergence.write_head(tmp_path / "head", model)
    n_rows = []
    logits = Answerer.logits

    def counted(self, hidden, head=None):
        n_rows.append(len(hidden))
        return logits(self, hidden, head)

    monkeypatch.setattr(Answerer, "logits", counted)
    reading = divergence.StoredTensor.read
    n_read = []

    def read(self, pinned=False):
        n_read.append(self.size_bytes)
        return reading(self, pinned)

    monkeypatch.setattr(divergence.StoredTensor, "read", read)
    head = divergence.read_head(tmp_path / "head", model)
    assert sum(n_read) == 16
    reference = divergence.Reference.read(tmp_path / "reference", answerer.device)
    compared = divergence.Divergence(reference, 105, answerer, head)
    list(answerer.answers(requests, compared.see))
    assert sum(n_rows) == 2 * 105
    assert not compared.kl.any()
    assert compared.agrees.all()


def test_long_texts_are_compared_at_even_distances(monkeypatch):
    monkeypatch.setattr(divergence, "MOST_POSITIONS", 100)
    is_text = torch.ones(950, dtype=torch.bool)
    is_text[:3] = False
    places = divergence.chosen(is_text)
    assert places[:3].tolist() == [3, 13, 23]
    assert len(places) == 95
    monkeypatch.setattr(divergence, "MOST_POSITIONS", 1000)
    assert divergence.chosen(is_text).tolist() == list(range(3, 950))


@torch.no_grad()
def test_sparse_comparison_takes_the_right_positions(monkeypatch):
    monkeypatch.setattr(divergence, "MOST_POSITIONS", 40)
    source = loading.load(ModelSource.open("demo"), torch.device("cpu"))
    generator = torch.Generator().manual_seed(2)
    texts = [tuple(torch.randint(1, 4096, (n,), generator=generator).tolist()) for n in (60, 45)]
    requests = [Request((0,), text) for text in texts]
    is_text = torch.ones(105, dtype=torch.bool)
    recorder = divergence.Recorder(is_text)
    list(Answerer(source, 96).answers(requests, recorder.see))
    before = [source(torch.tensor([(0, *t[:-1])])).logits[0] for t in texts]
    weight = source.get_input_embeddings().weight
    weight.data += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    after = [source(torch.tensor([(0, *t[:-1])])).logits[0] for t in texts]
    expected = brute_force(torch.cat(before), torch.cat(after))
    # Tied, so that the output layer has changed too; the old one is handed over.
    head = torch.nn.Linear(*reversed(weight.shape), bias=False)
    head.weight = torch.nn.Parameter(
        loading.load(ModelSource.open("demo"), torch.device("cpu")).get_output_embeddings().weight
    )
    compared = divergence.Divergence(recorder.reference, 105, Answerer(source, 96), head)
    list(Answerer(source, 96).answers(requests, compared.see))
    assert len(compared.places) == 35
    assert compared.kl.double() == pytest.approx(expected[compared.places], rel=1e-3)
