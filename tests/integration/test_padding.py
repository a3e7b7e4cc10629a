"""Samples of different lengths: padding is ignored, and full sets are unchanged."""

import hashlib

import pytest
import torch
from tiny import READABLE, save_llama
from transformers import AutoTokenizer

from quantkit.calibration.tokens import CalibrationTokens
from quantkit.errors import DataError
from quantkit.export.manifest import Calibration
from quantkit.gguf import imatrix
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.model.blocks import Decoder
from quantkit.model.skeleton import attentions
from quantkit.model.source import ModelSource
from quantkit.onepass import estimate, feeders, llmcompressor, prepare
from quantkit.onepass.collector import Collector
from quantkit.onepass.hidden_states import HiddenStates
from quantkit.onepass.importance import Importance
from quantkit.onepass.kvcache import Observer
from quantkit.onepass.padding import Padding, real
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize
from quantkit.onepass.streams import Stream
from quantkit.onepass.visit import Replay, Visit
from quantkit.progress import Silent
from quantkit.recipe import load

pytestmark = pytest.mark.usefixtures("coarse_awq")

CPU = torch.device("cpu")
LENGTH = 48
LENGTHS = torch.tensor([20, 48, 7, 48, 33])
BATCH = 2  # so that the longest samples make a full batch, and the last has one sample


@pytest.fixture(scope="module")
def source():
    return ModelSource.open("demo")


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two blocks, where whole passes are compared."""
    sizes = READABLE | {"hidden_size": 256, "intermediate_size": 512}
    return ModelSource.open(str(save_llama(tmp_path_factory.mktemp("small") / "model", **sizes)))


@pytest.fixture(scope="module")
def text(source):
    """Rows of real text [samples, length]."""
    tokenizer = AutoTokenizer.from_pretrained(source.folder)
    ids = tokenizer((source.folder / "config.json").read_text() * 4)["input_ids"]
    return torch.tensor(ids[: len(LENGTHS) * LENGTH]).view(-1, LENGTH)


@pytest.fixture
def padded(text):
    """Two sets that differ in nothing but what fills the padding."""
    mask = torch.arange(LENGTH) < LENGTHS[:, None]
    random = torch.randint(0, 4096, text.shape, generator=torch.Generator().manual_seed(0))
    return [
        CalibrationTokens("mine", torch.where(mask, text, fill), LENGTHS)
        for fill in (torch.zeros_like(text), random)
    ]


def alone(calibration):
    """Every sample as a full set of its own."""
    return [
        CalibrationTokens("one", row[None, :n])
        for row, n in zip(calibration.ids, calibration.lengths.tolist(), strict=True)
    ]


def observe(source, sets, n_blocks=2):
    """What all watchers together see of the last of some blocks."""
    seen = None, None, None
    for calibration in sets:
        decoder = Decoder.open(source, CPU)
        padding = Padding.of(calibration, BATCH, CPU)
        hidden, arguments = decoder.start(calibration.ids, BATCH)
        for index in range(n_blocks):
            with torch.no_grad(), decoder.loaded(index, decoder.read(index)) as block:
                linears = {n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
                if index < n_blocks - 1:
                    hidden = [
                        decoder.run(block, batch, arguments[index].common) for batch in hidden
                    ]
                    continue
                collector, importance, observer = seen
                collector = collector or Collector(linears)
                collector.linears = linears
                importance = importance or Importance()
                observer = observer or Observer(attentions(block))
                observer.attentions = attentions(block)
                seen = collector, importance, observer
                for keep, batch in zip(padding.keep, hidden, strict=True):
                    with (
                        collector.watching(keep),
                        importance.watching(block, str, keep),
                        observer.watching(keep),
                    ):
                        decoder.run(block, batch, arguments[index].common)
    seen[0].complete()
    return seen


def test_all_watchers_see_what_they_see_of_each_sample_alone(source, padded):
    expected, found = observe(source, alone(padded[1])), observe(source, padded[1:])
    (collector, importance, observer), (wanted, mattered, held) = found, expected
    close = torch.testing.assert_close
    assert collector.groups == wanted.groups
    assert ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] in [
        members[:3] for members in collector.groups.values()
    ]
    for name, statistics in wanted.statistics.items():
        mine = collector.statistics[name]
        assert mine.n_tokens == statistics.n_tokens == LENGTHS.sum()
        scale = float(statistics.gram.diagonal().max())
        close(mine.gram, statistics.gram, rtol=1e-4, atol=1e-5 * scale)
        close(mine.mean_abs, statistics.mean_abs, rtol=1e-4, atol=1e-6)
        close(mine.max_abs, statistics.max_abs, rtol=1e-4, atol=1e-5)
    assert importance.n_tokens == mattered.n_tokens
    assert set(importance.n_tokens.values()) == {int(LENGTHS.sum())}
    for name, mean in mattered.means().items():
        close(importance.means()[name], mean, rtol=1e-4, atol=1e-8)
    for name in held.keys:
        close(observer.keys[name], held.keys[name], rtol=1e-4, atol=1e-5)
        close(observer.values[name], held.values[name], rtol=1e-4, atol=1e-5)


def test_the_padding_of_this_test_would_be_noticed(source, padded):
    """Else the test above could not fail: everything differs when all positions count."""
    whole = [CalibrationTokens("mine", padded[1].ids)]
    (collector, importance, observer), (wanted, mattered, held) = (
        observe(source, sets) for sets in (whole, padded[1:])
    )
    name = "self_attn.q_proj"
    gram, other = (c.statistics[name].gram for c in (collector, wanted))
    assert (gram - other).norm() > 0.1 * other.norm()
    assert not torch.allclose(importance.means()[name], mattered.means()[name], rtol=0.01)
    assert not torch.allclose(observer.values["self_attn"], held.values["self_attn"], rtol=0.01)


class Attention(torch.nn.Module):
    """Puts given keys and values into a cache."""

    def forward(self, keys, values, past_key_values=None):
        return past_key_values.update(keys, values)


def test_the_largest_keys_and_values_are_real_ones():
    # [samples, heads, tokens, width]; one and two positions of three are real.
    keys = torch.arange(12.0).view(2, 1, 3, 2)
    observer, keep = Observer({"": Attention()}), torch.tensor([0, 3, 4])
    with observer.watching(keep):
        went_on = observer.attentions[""](keys, -keys)
    assert torch.equal(went_on[0], keys)
    assert torch.equal(went_on[1], -keys)
    assert observer.keys[""] == 9
    assert observer.values[""].tolist() == [8, 9]


@torch.no_grad()
def replayed(source, calibration):
    """The error of a block's output, on all samples, after a change to one of its weights."""
    decoder = Decoder.open(source, CPU)
    hidden, arguments = decoder.start(calibration.ids, len(calibration.ids))
    padding = Padding.of(calibration, len(calibration.ids), CPU)
    stream, state = Stream(HiddenStates(hidden, CPU), [0], False), decoder.read(0)
    visit = Visit(decoder, 0, state, stream, arguments[0], padding)
    name = "self_attn.v_proj.weight"
    return float(
        Replay(visit, visit.samples, visit.sample_arguments)({name: state[name].float() * 1.25})
    )


def test_a_replay_counts_real_positions_only(source, padded):
    expected = sum(replayed(source, one) for one in alone(padded[0]))
    found = [replayed(source, calibration) for calibration in padded]
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-4)
    assert replayed(source, CalibrationTokens("whole", padded[1].ids)) > 1.1 * expected


@torch.no_grad()
def test_feeders_are_judged_on_real_positions(source, padded):
    decoder = Decoder.open(source, CPU)
    calibration = CalibrationTokens("one", padded[0].ids[:1], LENGTHS[:1])
    hidden, arguments = decoder.start(calibration.ids, 1)
    keep = Padding.of(calibration, 1, CPU).first(1)
    with decoder.loaded(0, decoder.read(0)) as block:
        # A projection whose padding does not follow the trial, as nonsense may not.
        down, runs = block.mlp.down_proj, []

        def spoil(module, inputs):
            runs.append(0)
            spoiled = inputs[0].clone()
            spoiled[:, int(LENGTHS[0]) :] += 1e4 * len(runs)
            return spoiled

        handle = down.register_forward_pre_hook(spoil)
        groups = {"mlp.down_proj": ["mlp.down_proj"]}

        def find(kept):
            return feeders.find(
                block, groups, lambda: decoder.run(block, hidden[0], arguments[0].common), 32, kept
            )

        assert find(keep)["mlp.down_proj"].name == "mlp.up_proj"
        assert find(None) == {}
        handle.remove()


RUNS = [
    ["gptq-w4a16"],
    ["fp8-static"],
    ["int8-w8a8"],
    ["awq-w4a16+kv-fp8", "gguf-q4_k_m"],
]


class Notes(Silent):
    def __init__(self):
        self.said = []

    def note(self, message):
        self.said.append(message)


def written(source, names, out, calibration, monkeypatch):
    """The checkpoints of these recipes from these tokens, and what was said."""
    monkeypatch.setattr(prepare, "load_tokens", lambda *_: calibration)
    monkeypatch.setitem(estimate.TOKENS_PER_BATCH, "cpu", BATCH * LENGTH)
    notes = Notes()
    recipes, choice = [load(name) for name in names], CalibrationChoice("mine")
    made = quantize(source, recipes, out, "cpu", calibration=choice, run=Run(notes))
    return made, notes.said


@pytest.mark.parametrize("names", RUNS, ids=lambda names: names[0])
def test_what_is_in_the_padding_does_not_change_a_byte(small, padded, names, tmp_path, monkeypatch):
    made = []
    for calibration in padded:
        out = tmp_path / f"{len(made)}"
        checkpoints, said = written(small, names, out, calibration, monkeypatch)
        made.append([checkpoint.digest for checkpoint in checkpoints])
        n_tokens = int(LENGTHS.sum())
        for checkpoint in checkpoints:
            record = checkpoint.manifest.calibration
            assert (record.n_samples, record.length, record.n_tokens) == (5, LENGTH, n_tokens)
            if checkpoint.label.startswith("gguf"):
                matrix = ImportanceMatrix.read(checkpoint.folder / imatrix.FILE)
                assert {int(count) for count in matrix.counts.values()} == {n_tokens}
        assert "calibration: 5 samples of up to 48 tokens, 156 in all, from mine" in said
        assert any("156 calibration tokens are few" in note for note in said)
        assert any("1 stream of 156 tokens" in note for note in said)
    assert made[0] == made[1]


def test_lengths_that_pad_nothing_write_what_no_lengths_write(small, text, tmp_path, monkeypatch):
    full = torch.full((len(text),), LENGTH)
    made = []
    for lengths in (None, full):
        calibration = CalibrationTokens("mine", text, lengths)
        out = tmp_path / f"{len(made)}"
        (checkpoint,), said = written(small, ["gptq-w4a16"], out, calibration, monkeypatch)
        made.append((checkpoint.digest, checkpoint.manifest.calibration))
        assert "calibration: 5 samples of 48 tokens from mine" in said
    assert made[0] == made[1]


def test_a_digest_tells_real_tokens_and_lengths_but_no_padding(text, padded):
    raw = text.to(torch.int32).numpy().tobytes()
    plain = hashlib.sha256(b"(5, 48)" + raw).hexdigest()
    full = torch.full((len(text),), LENGTH)
    assert CalibrationTokens("a", text).digest == plain
    assert CalibrationTokens("a", text, full).digest == plain
    assert padded[0].digest == padded[1].digest != plain
    assert CalibrationTokens("a", padded[0].ids).digest != padded[0].digest
    shorter = CalibrationTokens("a", padded[0].ids, LENGTHS - (LENGTHS == 20).int())
    assert shorter.digest != padded[0].digest
    other = padded[0].ids.clone()
    other[2, 6] += 1
    assert CalibrationTokens("a", other, LENGTHS).digest != padded[0].digest


def test_masks_and_counts(text, padded):
    assert CalibrationTokens("a", text).mask is None
    assert CalibrationTokens("a", text, torch.full((5,), LENGTH)).mask is None
    assert CalibrationTokens("a", text).n_tokens == 5 * LENGTH
    assert padded[0].n_tokens == 156
    assert padded[0].mask.sum(1).tolist() == LENGTHS.tolist()
    assert padded[0].mask[2].tolist() == [True] * 7 + [False] * 41


def test_the_longest_samples_come_first_and_full_batches_are_left_alone(padded):
    ordered = padded[0].longest_first()
    assert ordered.lengths.tolist() == [48, 48, 33, 20, 7]
    assert torch.equal(ordered.ids, padded[0].ids[[1, 3, 4, 0, 2]])
    padding = Padding.of(ordered, BATCH, CPU)
    assert padding.keep[0] is None
    assert padding.keep[1].tolist() == [*range(33), *range(48, 68)]
    assert padding.keep[2].tolist() == [*range(7)]
    states = torch.zeros(2, 48, 3)
    assert real(states, padding.keep[0]) is states
    full = CalibrationTokens("a", padded[0].ids)
    assert full.longest_first() is full
    assert Padding.of(full, BATCH, CPU).keep == [None] * 3


@pytest.mark.parametrize(
    ("n_tokens", "n_samples", "kept"),
    [(1, 1, None), (96, 2, None), (130, 3, 129), (10**6, 5, 156)],
)
def test_samples_to_try_things_on_are_counted_in_real_tokens(padded, n_tokens, n_samples, kept):
    padding = Padding.of(padded[0].longest_first(), 8, CPU)
    assert padding.n_samples(n_tokens) == n_samples
    keep = padding.first(n_samples)
    assert (None if keep is None else len(keep)) == kept


@pytest.mark.parametrize(
    ("lengths", "words"),
    [
        ([48] * 4, "5 samples but 4 lengths"),
        ([48, 0, 48, 48, 48], "sample 1 of mine has 0 tokens: it must have 1 to 48"),
        ([48, 48, 48, 48, 49], "sample 4 of mine has 49 tokens"),
    ],
    ids=["too few", "empty", "too long"],
)
def test_lengths_that_cannot_be(text, lengths, words):
    with pytest.raises(DataError, match=words):
        CalibrationTokens("mine", text, torch.tensor(lengths))


def test_the_other_engine_gets_samples_without_padding(padded, text):
    for row, ids, n in zip(
        llmcompressor._rows(padded[1]), padded[1].ids, LENGTHS.tolist(), strict=True
    ):
        assert torch.equal(row["input_ids"], ids[:n])
        assert row["attention_mask"].tolist() == [1] * n
    full = llmcompressor._rows(CalibrationTokens("a", text))
    assert torch.equal(torch.stack([row["input_ids"] for row in full]), text)


def test_a_manifest_of_old_is_read():
    record = Calibration.model_validate({"name": "a", "digest": "b", "n_samples": 1, "length": 2})
    assert record.n_tokens is None
