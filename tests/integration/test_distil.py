"""Codes and scales that learn from the whole model: gradients against brute force, and sound
files.
"""

from contextlib import ExitStack

import pytest
import torch
from tiny import READABLE, cut_demo, save_llama

from quantkit import grid, numbers
from quantkit.errors import RecipeError
from quantkit.export.folder import FolderWriter
from quantkit.model.source import ModelSource
from quantkit.onepass import distil, estimate
from quantkit.onepass.estimate import Estimate
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize
from quantkit.onepass.tuning import Position
from quantkit.progress import Silent
from quantkit.recipe import Recipe
from quantkit.schemes import WeightScheme
from quantkit.verification.checkpoint import verify


class Notes(Silent):
    """Keeps what is said."""

    def __init__(self):
        self.said = []

    def note(self, text):
        self.said.append(text)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return ModelSource.open(str(save_llama(tmp_path_factory.mktemp("source"), **READABLE)))


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    """Makes a checkpoint of 2 bits; `passes` is None without the option."""
    place = tmp_path_factory.mktemp("distil")
    text = place / "text.txt"
    lines = (f"block {i} rounds its {i % 7} weights to a number" for i in range(400))
    text.write_text("\n".join(lines))

    def make(name, passes, notes=None, recipe="gptq-w2a16"):
        recipe = Recipe.load(recipe)
        options = dict(recipe.options)
        if "sweeps" in options:
            options["sweeps"] = 0  # a third of the work, and over before anything is learnt
        if passes is not None:
            options["distil"] = passes
        recipe = recipe.model_copy(update={"options": options})
        choice = CalibrationChoice(str(text), 16, 64)
        run = Run(progress=notes or Notes())
        return quantize(source, [recipe], place / name, "cpu", choice, run)[0]

    return make


@pytest.fixture(scope="module")
def plain(made):
    """What the others are before they learn."""
    return made("plain", None)


@pytest.fixture(scope="module", autouse=True)
def small_batches():
    """So that there are some to hold out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(estimate.TOKENS_PER_BATCH, "cpu", 128)
        yield


def weights(checkpoint):
    return {n: tensor.read() for n, tensor in sorted(checkpoint.tensors.items())}


def same(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[n], two[n]) for n in one)


def whole(student, place, logits_of):
    """Gradients of a batch's mean divergence with respect to all weights, through all blocks at
    once.
    """
    lesson, decoder = student.lesson, student.lesson.decoder
    blocks, weights = [], []
    with torch.enable_grad(), ExitStack() as stack:
        states = lesson.start.batch(place)
        for index, call in enumerate(lesson.calls):
            block = stack.enter_context(student._block(index))
            weights += [block.get_parameter(f"{name}.weight") for name in student._learners[index]]
            blocks.append(block)
            arguments = call.of_batch(place, len(states), decoder.device)
            states = block(states, **arguments)
            states = states[0] if isinstance(states, tuple) else states
        loss, n_tokens = 0, 0
        for sample, ids in enumerate(lesson.samples[place]):
            source = logits_of(lesson.goal.batch(place)[sample : sample + 1], ids[None])
            found = logits_of(states[sample : sample + 1], ids[None])
            source, found = source.log_softmax(-1), found.log_softmax(-1)
            loss = loss + (source.exp() * (source - found)).sum()
            n_tokens += len(ids)
        return torch.autograd.grad(loss / n_tokens, weights)


@pytest.mark.parametrize("room", [None, 500_000], ids=["codes", "scales"])
def test_gradients_block_by_block_are_those_of_the_whole_model(made, monkeypatch, room):
    seen, counted = [], []
    plain, count = distil._Student.learn, distil._Learner.learn

    def watched(self, place, logits_of):
        expected = None if seen else whole(self, place, logits_of)
        counted.clear()
        plain(self, place, logits_of)
        if expected is not None:
            # Blocks come last to first, the linears of each in their order.
            sizes = [len(learners) for learners in self._learners]
            by_block = [counted[sum(sizes[i + 1 :]) :][: sizes[i]] for i in range(len(sizes))]
            seen.extend(zip((g for some in by_block for g in some), expected, strict=True))

    def counting(self, gradient):
        counted.append(gradient.clone())
        count(self, gradient)

    monkeypatch.setattr(distil._Student, "learn", watched)
    monkeypatch.setattr(distil._Learner, "learn", counting)
    monkeypatch.setattr(distil.devices, "free_bytes", lambda _: room)
    made(f"gradients with room of {room}", 1)
    assert seen
    for found, expected in seen:
        assert expected.abs().max() > 0
        assert torch.allclose(found, expected, rtol=1e-3, atol=1e-3 * expected.abs().max().item())


@pytest.mark.parametrize("n_blocks", [1, 2])
def test_blocks_that_keep_their_graphs_change_no_byte(made, plain, monkeypatch, n_blocks):
    kept = []
    keep = distil._Student.keep_graphs

    def watched(self, place):
        keep(self, place)
        self._n_graphs = min(self._n_graphs, n_blocks)
        kept.append(self._n_graphs)

    monkeypatch.setattr(distil._Student, "keep_graphs", watched)
    found = weights(made(f"{n_blocks} kept", 2))
    assert kept == [n_blocks]
    assert not same(found, weights(plain))
    monkeypatch.setattr(distil._Student, "_graph_bytes", lambda *_: 10**15)
    assert same(found, weights(made(f"{n_blocks} run again", 2)))
    assert kept[1:] == [0]


@pytest.mark.parametrize(
    ("lengths", "n_parts"),
    [([64] * 5, 3), ([64, 64, 30, 30, 30, 30, 64], 3), ([300, 300], 6), ([], 0)],
)
def test_logits_of_every_token_are_made_once_and_few_at_a_time(lengths, n_parts, monkeypatch):
    monkeypatch.setattr(distil, "POSITIONS", 128)
    counts = [torch.zeros(length) for length in lengths]
    parts = list(distil._parts(lengths))
    assert len(parts) == n_parts
    for samples, positions in parts:
        together = torch.stack(counts[samples])[:, positions]
        assert 0 < together.numel() <= 128
        for count in counts[samples]:
            count[positions] += 1
    assert all((count == 1).all() for count in counts)


def test_slopes_of_codes_and_scales_follow_from_those_of_weights():
    torch.manual_seed(0)
    weight = torch.randn(6, 64)
    scheme = WeightScheme(num_bits=4, type="int", strategy="group", group_size=32, symmetric=False)
    low, high = grid.tiles(weight, scheme).aminmax(dim=-1)
    scale = (high - low).div(15).bfloat16()
    zero = (-low / scale.float()).round().to(torch.int8)
    state = Position.towards(weight, grid.quantize(weight, scale, zero, scheme), scheme)
    gradient = torch.randn(6, 64)
    of_scales, of_codes = state.slopes(gradient)
    number = numbers.of(scheme)
    codes, factors = state.codes.clone().requires_grad_(), state.factors.requires_grad_()
    near = codes + (number.widen(number.round(codes.detach().clone())) - codes).detach()
    plain = near - zero.float().unsqueeze(-1)
    made = grid.untile(plain * (scale.float().unsqueeze(-1) * factors), weight.shape, scheme)
    expected = torch.autograd.grad(made, [factors, codes], gradient)
    assert torch.allclose(of_scales, expected[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(of_codes, expected[1], rtol=1e-5)


def test_codes_and_scales_change_and_held_out_tokens_are_nearer_to_the_source(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(distil, "STEP", 4 * distil.STEP)  # or two passes move no code
    source = ModelSource.open(str(cut_demo(tmp_path / "demo")))  # random weights have less to learn
    notes, recipe = Notes(), Recipe.load("gptq-w2a16")
    plain, after = (
        quantize(
            source,
            [recipe.model_copy(update={"options": {"distil": passes}})],
            tmp_path / f"{passes} passes",
            calibration=CalibrationChoice("python-docs", 48, 64),
            run=Run(progress=notes),
        )[0]
        for passes in (0, 2)
    )
    (told,) = [text for text in notes.said if "held-out" in text]
    assert told.startswith("gptq-w2a16: distilled")
    assert [told] == [f"gptq-w2a16: {note}" for note in after.manifest.notes]
    changed = differing(plain, after)
    assert {name.rpartition(".")[2] for name in changed} == {"weight_scale", "weight_packed"}
    assert verify(after.folder, source).ok


def test_without_room_for_moving_codes_only_scales_change(made, plain, source, monkeypatch):
    monkeypatch.setattr(distil.devices, "free_bytes", lambda _: 500_000)
    notes = Notes()
    after = made("little room", 1, notes)
    assert any("only scales were distilled" in text for text in notes.said)
    changed = differing(plain, after)
    assert {name.rpartition(".")[2] for name in changed} == {"weight_scale"}
    assert verify(after.folder, source).ok


def test_memory_that_runs_out_while_codes_move_leaves_the_scales(made, plain, monkeypatch):
    learn = distil._Student.learn

    def runs_out(self, *given):
        if self._journal is not None:
            raise torch.OutOfMemoryError("CUDA out of memory")
        learn(self, *given)

    monkeypatch.setattr(distil._Student, "learn", runs_out)
    notes = Notes()
    after = made("memory runs out", 1, notes)
    assert any("only scales were distilled" in text for text in notes.said)
    assert {name.rpartition(".")[2] for name in differing(plain, after)} == {"weight_scale"}


def differing(before, after):
    old, new = weights(before), weights(after)
    return {name for name in new if not torch.equal(old[name], new[name])}


def test_scales_that_held_out_tokens_find_worse_are_not_taken(made, plain, monkeypatch):
    found = iter([0.1, 0.2])
    monkeypatch.setattr(distil._Student, "divergence", lambda *_: next(found))
    notes = Notes()
    assert same(weights(made("worse", 1, notes)), weights(plain))
    assert any(("not distilled" in text and "KL" in text) for text in notes.said)


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
    resumed = made("stopped", 2)
    assert same(weights(resumed), expected)
    assert any("held-out" in note for note in resumed.manifest.notes)


def test_a_device_without_room_for_all_blocks_keeps_the_scales_and_says_so(
    made, plain, monkeypatch
):
    monkeypatch.setattr(distil.devices, "free_bytes", lambda _: 1000)
    notes = Notes()
    assert same(weights(made("no room", 1, notes)), weights(plain))
    (told,) = [text for text in notes.said if "not distilled" in text]
    assert told.startswith("gptq-w2a16: not distilled")
    assert "memory" in told


def test_memory_of_distillation_counts_where_it_fits():
    cost = Estimate(2, 64, 1, 10, 100, 20, 1.0, distilling_bytes=(900, 500))
    assert cost.with_distilling(905, on_host=True).device_bytes(on_host=True) == 900
    assert cost.with_distilling(905, on_host=False).device_bytes(on_host=False) == 510
    assert cost.with_distilling(505, on_host=False).device_bytes(on_host=False) == 110
    assert cost.with_distilling(None, on_host=False).device_bytes(on_host=False) == 910


def test_recipes_that_round_activations_are_refused(made):
    with pytest.raises(RecipeError, match=r"nvfp4 .*distil"):
        made("activations", 1, recipe="nvfp4")
