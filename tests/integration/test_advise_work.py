"""What a token costs, from real folders: experts told from the rest, and answers for them."""

from quantkit.advise import formats, shape, work
from quantkit.advise.question import Catalogue, Question
from quantkit.advise.recommendation import recommend
from quantkit.hardware import gpus
from quantkit.recipe import load


def test_experts_are_told_from_the_rest(tiny_experts):
    model = shape.of(str(tiny_experts))
    for recipe in (None, load("fp8-dynamic")):
        found = work.of(model, formats.of(recipe))
        assert (found.n_experts, found.n_chosen) == (4, 2)
        experts = found.own.experts + found.plain.experts
        assert experts == 2 * 4 * 3 * 128 * 128  # layers, experts, gate, up and down
        assert 0 < found.read.experts < found.stored_bytes
        assert found.bytes_read(1) < found.bytes_read(4) <= found.stored_bytes
    own = work.of(model, formats.of(load("fp8-dynamic"))).own
    assert own.experts == 2 * 4 * 3 * 128 * 128


def test_a_mixture_of_experts_gets_an_answer(tiny_experts):
    question = Question(Catalogue(shape.of(str(tiny_experts))), context=64)
    assert recommend(question, gpus.find("RTX 4090")).chosen is not None
