"""Answers in few forward passes equal those of lm-eval's own model, one by one."""

import pytest
import torch
from families import FAMILIES, make_source

from quantkit.errors import ScoreError
from quantkit.model.source import ModelSource
from quantkit.scoring import answering, loading
from quantkit.scoring.answering import Answerer, Request
from quantkit.scoring.cache import AnswerCache, keys_of
from quantkit.scoring.distribution import BLOCK, Distribution

pytestmark = pytest.mark.usefixtures("demo_is_short")


def one_by_one(model, request, max_length):
    """The obvious way: all logits of one sequence."""
    tokens = (request.context + request.continuation)[-(max_length + 1) :]
    logits = model(torch.tensor([tokens[:-1]])).logits[0].float().log_softmax(-1)
    n = len(request.continuation)
    targets = torch.tensor(tokens[-n:])
    chosen = logits[-n:].gather(1, targets[:, None])
    return chosen.double().sum().item(), bool((logits[-n:].argmax(-1) == targets).all())


def made_up_requests(seed=0, vocabulary=4096):
    """Questions with a shared beginning, several endings, and some with nothing in common."""
    generator = torch.Generator().manual_seed(seed)

    def some(n):
        return tuple(torch.randint(1, vocabulary, (n,), generator=generator).tolist())

    requests = []
    for length in (40, 70):
        shots = some(length)
        for _ in range(6):
            question = shots + some(int(torch.randint(3, 20, (1,), generator=generator)))
            requests += [Request(question, some(1)) for _ in range(4)]
    story = some(50)
    requests += [Request(story, some(n)) for n in (1, 3, 9, 4)]
    requests += [Request(some(n), some(m)) for n, m in ((1, 60), (90, 30), (5, 1))]
    requests.append(requests[0])
    return requests


@pytest.fixture(scope="module")
def demo():
    return loading.load(ModelSource.open("demo"), torch.device("cpu"))


@torch.no_grad()
def check(model, requests, max_length=96):
    found = {}
    for batch in Answerer(model, max_length).answers(requests):
        found.update(batch)
    assert sorted(found) == list(range(len(requests)))
    for index, request in enumerate(requests):
        value, greedy = one_by_one(model, request, max_length)
        assert found[index].log_probability == pytest.approx(value, rel=1e-5, abs=1e-4)
        assert found[index].greedy == greedy


def test_answers_equal_those_of_one_sequence_at_a_time(demo):
    check(demo, made_up_requests())


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_in_every_family(name, tmp_path):
    _, source = make_source(name, tmp_path)
    check(loading.load(source, torch.device("cpu")), made_up_requests()[12:])


def test_shared_beginnings_are_computed_once(demo, monkeypatch):
    requests = made_up_requests()
    seen = []
    handle = demo.get_decoder().register_forward_pre_hook(
        lambda module, arguments, more: seen.append(more["input_ids"].numel()), with_kwargs=True
    )
    for _ in Answerer(demo, 96).answers(requests):
        pass
    handle.remove()
    whole = sum(len(r.context + r.continuation) - 1 for r in requests)
    assert sum(seen) < whole / 4


def test_small_batches_change_nothing(demo, monkeypatch):
    requests = made_up_requests(1)
    monkeypatch.setitem(answering.TOKENS_PER_BATCH, "cpu", 40)
    monkeypatch.setitem(answering.LOGITS_BYTES, "cpu", 4 * 4096 * 3)
    check(demo, requests)


def test_batches_that_have_enough_tokens_hold_rows_of_one_length(demo, monkeypatch):
    monkeypatch.setitem(answering.TOKENS_PER_BATCH, "cpu", 900)
    monkeypatch.setitem(answering.ENOUGH_TOKENS, "cpu", 200)
    generator = torch.Generator().manual_seed(3)

    def some(n):
        return tuple(torch.randint(1, 4096, (n,), generator=generator).tolist())

    requests = [Request(some(4 + 4 * n), some(2)) for n in range(20)] + [
        Request(some(50), some(2)) for _ in range(20)
    ]
    shapes = []
    handle = demo.get_decoder().register_forward_pre_hook(
        lambda module, arguments, more: shapes.append(more["input_ids"].shape), with_kwargs=True
    )
    check(demo, requests)
    del shapes[len(shapes) - len(requests) :]  # those of the check
    handle.remove()
    n_tokens = sum(len(r.context) + 1 for r in requests)
    assert sum(shape.numel() for shape in shapes) < 1.2 * n_tokens
    assert max(shape.numel() for shape in shapes) > 800  # of those that are alike
    assert max(shape.numel() for shape in shapes) <= 900


def test_running_out_of_memory_makes_batches_smaller(demo, monkeypatch):
    requests = made_up_requests()
    batch = Answerer._batch
    sizes = []

    def small(self, shared, rows, *rest):
        if len(rows) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(rows))
        return batch(self, shared, rows, *rest)

    monkeypatch.setattr(Answerer, "_batch", small)
    found = {}
    for part in Answerer(demo, 96).answers(requests):
        found.update(part)
    assert len(found) == len(requests)
    assert max(sizes) == 2


def questions(lengths, seed=5):
    """Questions of these lengths, each with four endings."""
    generator = torch.Generator().manual_seed(seed)

    def some(n):
        return tuple(torch.randint(1, 4096, (n,), generator=generator).tolist())

    asked = [some(length) for length in lengths]
    return [Request(question, some(n)) for question in asked for n in (2, 5, 1, 4)]


def test_questions_of_nearly_one_length_are_computed_together(demo):
    requests = questions([20, 21, 20, 20, 12, 12, 30])
    shapes = []
    handle = demo.get_decoder().register_forward_pre_hook(
        lambda module, arguments, more: shapes.append(tuple(more["input_ids"].shape)),
        with_kwargs=True,
    )
    check(demo, requests)
    handle.remove()
    # One request has one scored token, so the prefix is what comes before the question's last.
    forwards = [shape for shape in shapes if shape != (1, 1)]  # those for logits
    assert forwards[:6:2] == [(1, 29), (4, 19), (2, 11)]
    assert [n_rows for n_rows, _ in forwards[1:6:2]] == [4, 16, 8]


def test_running_out_of_memory_separates_the_questions(demo, monkeypatch):
    shared = Answerer._shared
    sizes = []

    def small(self, prefixes):
        if len(prefixes) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        sizes.append(len(prefixes))
        return shared(self, prefixes)

    monkeypatch.setattr(Answerer, "_shared", small)
    check(demo, questions([20, 20, 20]))
    assert sizes == [1, 1, 1]


def test_reading_by_blocks_gives_what_the_whole_gives():
    torch.manual_seed(0)
    logits = torch.randn(50, 1000) * 3  # no multiple of a block
    logits[3, :BLOCK] = float("-inf")
    logits[5, 7] = logits[5, 300] = 20.0  # equals: the first of them counts
    whole = logits.log_softmax(-1)
    found = Distribution(logits)
    assert found.normaliser.allclose(logits.logsumexp(-1))
    ids = torch.randint(0, 1000, (50, 4))
    assert found.log_probabilities(ids).allclose(whole.gather(1, ids), atol=1e-5)
    assert torch.equal(found.likeliest, logits.argmax(-1))


def test_a_number_that_is_none_is_not_hidden_by_blocks():
    logits = torch.randn(2, 300)
    logits[1, 77] = float("nan")
    assert Distribution(logits).normaliser.isfinite().tolist() == [True, False]


def test_cache_answers_only_what_was_asked(tmp_path):
    cache = AnswerCache(tmp_path, "model")
    asked = Request((1, 2, 3), (4,))
    assert cache.get(keys_of([asked])[0]) is None
    cache.put(keys_of([asked])[0], answering.Answer(-1.25, True))
    cache.close()
    again = AnswerCache(tmp_path, "model")
    assert again.get(keys_of([asked])[0]) == answering.Answer(-1.25, True)
    assert again.get(keys_of([Request((1, 2), (3, 4))])[0]) is None
    assert AnswerCache(tmp_path, "other").get(keys_of([asked])[0]) is None


def test_outputs_that_are_not_finite_name_the_layer(demo):
    weight = demo.get_submodule("model.layers.1.mlp.up_proj").weight
    kept = weight.data[0, 0].clone()
    weight.data[0, 0] = float("nan")
    with pytest.raises(ScoreError, match=r"from model\.layers\.1\.mlp\.up_proj on"):
        list(Answerer(demo, 96).answers(made_up_requests()[:3]))
    weight.data[0, 0] = kept
