"""The calibrated pass on a model of two blocks: what it writes, and what it refuses."""

import pytest
from notes import Notes
from tiny import cut_demo

from quantkit.cli.main import main
from quantkit.errors import DataError, Interrupted, MethodError
from quantkit.model.source import ModelSource
from quantkit.onepass import feeders, onepass, probe
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import Run, quantize
from quantkit.pipeline import finished_before
from quantkit.progress import Callback
from quantkit.recipe import Recipe, load
from quantkit.verification.checkpoint import verify

pytestmark = pytest.mark.usefixtures("coarse_awq")

FEW = CalibrationChoice("python-docs", 8, 128)
WEIGHTS = "model.safetensors"
NAMES = ["gptq-w4a16", "awq-w4a16", "int8-w8a8"]


@pytest.fixture(scope="module")
def updates():
    """What the run of all recipes reported."""
    return []


@pytest.fixture(scope="module")
def together(short_demo, tmp_path_factory, updates):
    out, run = tmp_path_factory.mktemp("together"), Run(Callback(updates.append))
    made = quantize(short_demo, [Recipe.load(n) for n in NAMES], out, calibration=FEW, run=run)
    return {checkpoint.label: checkpoint for checkpoint in made}


def test_progress_counts_the_blocks_that_the_plan_announces(together, updates):
    """However many streams pass through each."""
    (plan,) = [update.text for update in updates if update.text.startswith("plan: ")]
    assert plan.startswith("plan: 2 blocks, 2 streams of 1,024 tokens; ")
    counted = [update for update in updates if update.stage == "calibrate" and not update.text]
    assert {(update.total, update.unit) for update in counted} == {(2, "blocks")}
    assert [update.done for update in counted] == [0, 1, 2, 2]  # the end counts once more


@pytest.mark.parametrize(
    ("names", "n_streams"),
    [
        (["gptq-w4a16"], 1),
        (["gguf-q4_k_m"], 1),
        (["gptq-w4a16", "gguf-q4_k_m"], 2),
        (["gptq-w4a16", "gguf-best-q4_k_m"], 2),
        (["gptq-w4a16", "awq-w4a16", "gguf-q4_k_m"], 2),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else None,
)
def test_the_plan_counts_the_streams_of_the_pass(
    short_demo, tmp_path, monkeypatch, names, n_streams
):
    """GGUF files learn from the source's own stream."""
    notes, real, streams = Notes(), onepass.streams_of, []

    def streams_of(*arguments):
        streams.extend(real(*arguments))
        raise Interrupted("enough is known")

    monkeypatch.setattr(onepass, "streams_of", streams_of)
    recipes = [load(name) for name in names]
    with pytest.raises(Interrupted):
        quantize(short_demo, recipes, tmp_path, calibration=FEW, run=Run(notes))
    (plan,) = [note for note in notes.notes if note.startswith("plan: ")]
    assert len(streams) == n_streams
    assert f" {n_streams} stream{'s' * (n_streams > 1)} of " in plan


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_writes_the_same_bytes_whoever_runs_beside_it(
    together, short_demo, tmp_path, name
):
    (alone,) = quantize(short_demo, [Recipe.load(name)], tmp_path, calibration=FEW)
    assert alone.digest == together[name].digest


def test_what_feeds_a_block_is_found_once_for_all_streams(short_demo, tmp_path, monkeypatch):
    searches, find = [], feeders.find
    monkeypatch.setattr(feeders, "find", lambda *a: searches.append(a) or find(*a))
    recipes = [Recipe.load("awq-w4a16"), Recipe.load("awq-gptq-w4a16")]
    made = quantize(short_demo, recipes, tmp_path / "both", calibration=FEW)
    assert len(searches) == 2  # blocks, where there are two streams
    (alone,) = quantize(short_demo, recipes[1:], tmp_path / "one", calibration=FEW)
    assert alone.digest == made[1].digest


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_is_accounted_for(together, name):
    checkpoint = together[name]
    assert verify(checkpoint.folder).ok
    assert len(checkpoint.manifest.layers) == 14
    for layer in checkpoint.manifest.layers.values():
        assert 0 < layer.output_error < 0.1
        assert not layer.fallback
        assert (layer.damping is not None) == (name != "awq-w4a16")
    assert checkpoint.manifest.calibration.n_samples == 8
    assert (checkpoint.folder / "folded.scales").exists() == (name != "gptq-w4a16")


def test_a_recipe_that_ruins_its_own_calibration_tokens_says_so(short_demo, tmp_path, monkeypatch):
    notes, fine = Notes(), Recipe.load("gptq-w4a16")
    rows = fine.weights.model_copy(
        update={"num_bits": 2, "strategy": "channel", "group_size": None}
    )
    coarse = fine.model_copy(update={"name": "coarse", "weights": rows, "options": {}})
    monkeypatch.setattr(probe, "WORSE", 1.04)
    quantize(short_demo, [fine, coarse], tmp_path, calibration=FEW, run=Run(progress=notes))
    (warning,) = [note for note in notes.notes if "perplexity" in note]
    assert "coarse" in warning


def test_a_changed_norm_is_found(together, tmp_path):
    """A folded norm may differ from the source's, but only by the folded scale."""
    import shutil

    from quantkit.model.shards import read_header

    folder = shutil.copytree(together["awq-w4a16"].folder, tmp_path / "copy")
    norm = read_header(folder / "model.safetensors")["model.layers.1.input_layernorm.weight"]
    with (folder / "model.safetensors").open("rb+") as stream:
        stream.seek(norm.start + 1)
        byte = stream.read(1)
        stream.seek(norm.start + 1)
        stream.write(bytes([byte[0] ^ 0x03]))
    faults = " ".join(verify(folder).faults)
    assert "model.layers.1.input_layernorm.weight is not the source's" in faults


def test_a_run_takes_up_only_what_has_the_same_calibration(together, short_demo):
    source, out = short_demo, together["gptq-w4a16"].folder.parent
    recipes = [Recipe.load(name) for name in NAMES]
    same = finished_before(source, recipes, out, FEW)
    assert {checkpoint.label for checkpoint in same} == set(NAMES)
    assert finished_before(source, recipes, out, CalibrationChoice("python-docs", 8, 64)) == []
    assert finished_before(source, recipes, out, None) == []


def test_calibration_must_be_given(tmp_path, capsys):
    assert main(["quantize", "demo", "-r", "gptq-w4a16", "-o", str(tmp_path / "out")]) == 3
    stderr = capsys.readouterr().err
    assert "recipe gptq-w4a16 needs calibration data: give --calibration" in stderr
    assert "python-docs" in stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        (CalibrationChoice("python-docs", 8, 5000), "longer than the model's context of 1,024"),
        (CalibrationChoice("python-docs", 10**6, 128), "128,000,000 for 1000000 samples"),
        (CalibrationChoice("missing.txt"), "no file or folder matches missing.txt"),
    ],
    ids=["too long", "too many", "no file"],
)
def test_calibration_that_cannot_be(tmp_path, choice, words):
    with pytest.raises(DataError, match=words):
        quantize(ModelSource.open("demo"), [Recipe.load("awq-w4a16")], tmp_path, calibration=choice)


def test_empty_and_short_text_is_refused(tmp_path):
    source, recipe = ModelSource.open("demo"), Recipe.load("gptq-w4a16")
    text = tmp_path / "text.txt"
    for content, words in (("", "is empty"), ("a few words", "has 4 tokens in 1 pieces")):
        text.write_text(content)
        with pytest.raises(DataError, match=words):
            quantize(source, [recipe], tmp_path / "o", calibration=CalibrationChoice(str(text)))


def demo_with(tmp_path, change) -> ModelSource:
    """Two blocks of the demo model with some of their tensors changed."""
    from safetensors.torch import load_file, save_file

    folder = cut_demo(tmp_path / "model")
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    change(tensors)
    (folder / WEIGHTS).unlink()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    return ModelSource.open(str(folder))


def test_layers_that_see_only_zeros_are_an_error(tmp_path):
    def silence(tensors):
        tensors["model.layers.1.input_layernorm.weight"].zero_()

    source = demo_with(tmp_path, silence)
    with pytest.raises(MethodError, match=r"layers\.1\.self_attn\.q_proj first"):
        quantize(source, [Recipe.load("gptq-w4a16")], tmp_path / "out", calibration=FEW)
    assert list((tmp_path / "out").iterdir()) == []


def test_outliers_do_not_break_the_numbers(tmp_path):
    def shout(tensors):
        tensors["model.layers.1.mlp.up_proj.weight"][5, 7] = 1e4

    source = demo_with(tmp_path, shout)
    recipes = [Recipe.load(name) for name in ("awq-gptq-w4a16", "int8-w8a8")]
    by_awq, by_smoothing = quantize(source, recipes, tmp_path / "out", calibration=FEW)
    assert verify(by_awq.folder).ok
    # One channel is so large that smoothing leaves its layer hardly any of the others: that costs
    # little of its output, and it is first among the layers that are told.
    smoothed = verify(by_smoothing.folder)
    assert smoothed.ok, smoothed.faults
    assert "layers.1.mlp.down_proj" in smoothed.worst[0][0]
    assert smoothed.worst[0][1] > 0.9
