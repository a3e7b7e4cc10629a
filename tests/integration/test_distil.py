"""Scales that learn from the whole model: gradients against brute force, and sound files."""

import pytest
import torch
from tiny import READABLE

from quantkit.errors import RecipeError
from quantkit.export.folder import FolderWriter
from quantkit.model.source import ModelSource
from quantkit.onepass import distil, onepass
from quantkit.onepass.estimate import Estimate
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize
from quantkit.progress import Silent
from quantkit.recipe import Recipe
from quantkit.verification.checkpoint import verify


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture
def source(tiny_model):
    return ModelSource.open(str(tiny_model(**READABLE)))


@pytest.fixture
def made(source, tmp_path):
    """Makes a checkpoint of 2 bits; `passes` is None without the option."""
    place = tmp_path / "made"
    text = tmp_path / "text.txt"
    lines = (f"block {i} rounds its {i % 7} weights to a number" for i in range(400))
    text.write_text("\n".join(lines))

    def make(name, passes, notes=None, recipe="gptq-w2a16"):
        recipe = Recipe.load(recipe)
        if passes is not None:
            recipe = recipe.model_copy(update={"options": {**recipe.options, "distil": passes}})
        choice = CalibrationChoice(str(text), 16, 64)
        run = Run(progress=notes or Notes())
        return quantize(source, [recipe], place / name, "cpu", choice, run)[0]

    return make


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    """So that there are some to hold out."""
    monkeypatch.setitem(onepass.TOKENS_PER_BATCH, "cpu", 128)


def weights(checkpoint):
    return {n: tensor.read() for n, tensor in sorted(checkpoint.tensors.items())}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def whole(student, place, logits_of):
    """Gradients of a batch's mean divergence through all blocks at once."""
    lesson, decoder = student._lesson, student._lesson.decoder
    factors = [student._linears[i][name].factors.requires_grad_() for i, name in student._learning]
    with torch.enable_grad():
        states = lesson.start.batch(place)
        for index, call in enumerate(lesson.calls):
            own = student._weights(index)
            fixed = student._plain[index] | {n: w.detach() for n, w in own.items()}
            with decoder.loaded(index, fixed) as block:
                arguments = call.of_batch(place, len(states), decoder.device)
                states = torch.func.functional_call(block, own, (states,), arguments)
                states = states[0] if isinstance(states, tuple) else states
        loss, n_tokens = 0, 0
        for sample, ids in enumerate(lesson.samples[place]):
            source = logits_of(lesson.goal.batch(place)[sample : sample + 1], ids[None])
            found = logits_of(states[sample : sample + 1], ids[None])
            source, found = source.log_softmax(-1), found.log_softmax(-1)
            loss = loss + (source.exp() * (source - found)).sum()
            n_tokens += len(ids)
        return torch.autograd.grad(loss / n_tokens, factors)


def test_gradients_block_by_block_are_those_of_the_whole_model(made, monkeypatch):
    seen = []
    plain = distil._Student.learn

    def watched(self, place, logits_of):
        plain(self, place, logits_of)
        if not seen:
            expected = whole(self, place, logits_of)
            found = [self._gradients[place] for place in self._learning]
            seen.extend(zip(found, expected, strict=True))

    monkeypatch.setattr(distil._Student, "learn", watched)
    made("gradients", 1)
    assert seen
    for found, expected in seen:
        assert expected.abs().max() > 0
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


def test_only_scales_change_and_held_out_tokens_are_nearer_to_the_source(made, source):
    notes = Notes()
    before, after = made("plain", None), made("distilled", 3, notes)
    (told,) = [text for text in notes.said if "held-out" in text]
    assert "taken" in told
    assert after.folder.name in told
    old, new = weights(before), weights(after)
    changed = {name for name in new if not torch.equal(old[name], new[name])}
    assert changed
    assert all(name.endswith("weight_scale") for name in changed)
    assert verify(after.folder, source).ok


def test_scales_that_held_out_tokens_find_worse_are_not_taken(made, monkeypatch):
    found = iter([0.1, 0.2])
    monkeypatch.setattr(distil._Student, "divergence", lambda *_: next(found))
    notes = Notes()
    assert same(weights(made("worse", 1, notes)), weights(made("none", None)))
    assert any("left as they were" in text for text in notes.said)


def test_a_run_stopped_amid_the_scales_ends_in_the_same_bytes(made, monkeypatch):
    expected = weights(made("in one go", 2))
    n_left = iter(range(3))
    plain = FolderWriter.replace

    def stops(self, name, tensor):
        if next(n_left, None) is None:
            raise KeyboardInterrupt
        plain(self, name, tensor)

    with monkeypatch.context() as patch:
        patch.setattr(FolderWriter, "replace", stops)
        with pytest.raises(KeyboardInterrupt):
            made("stopped", 2)
    monkeypatch.setattr(distil, "_learn", None)  # what was found is not sought again
    assert same(weights(made("stopped", 2)), expected)


def test_a_device_without_room_for_all_blocks_keeps_the_scales_and_says_so(made, monkeypatch):
    monkeypatch.setattr(distil.devices, "free_bytes", lambda _: 1000)
    notes = Notes()
    assert same(weights(made("no room", 1, notes)), weights(made("none", None)))
    (told,) = [text for text in notes.said if "not tuned further" in text]
    assert "gptq-w2a16" in told


def test_memory_of_distillation_counts_where_it_fits():
    cost = Estimate(2, 64, 1, 10, 100, 20, 1.0, distilling_bytes=500)
    assert cost.with_distilling(505, on_host=True).device_bytes(on_host=True) == 500
    assert cost.with_distilling(505, on_host=False).device_bytes(on_host=False) == 110
    assert cost.with_distilling(None, on_host=False).device_bytes(on_host=False) == 510


def test_recipes_that_round_activations_are_refused(made):
    with pytest.raises(RecipeError, match=r"nvfp4 .*distil"):
        made("activations", 1, recipe="nvfp4")
