"""GGUF files of every type, from the command's own code to real llama.cpp."""

import shutil
from dataclasses import replace

import gguf
import pytest
import torch
from llamacpp import next_token, serve

from quantkit import resources
from quantkit.errors import DataError, RecipeError, ScoreError, SourceError, UnknownName
from quantkit.gguf import blocks, imatrix
from quantkit.gguf.imatrix import ImportanceMatrix
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.onepass.from_gguf import quantize_file
from quantkit.onepass.prepare import CalibrationChoice, Run, load_tokens
from quantkit.onepass.run import quantize
from quantkit.recipe import load
from quantkit.scoring import loading
from quantkit.scoring.harness import evaluate
from quantkit.scoring.options import ScoreOptions
from quantkit.verification.checkpoint import verify

pytestmark = pytest.mark.usefixtures("demo_is_short")
NAMES = [
    name
    for name in resources.names("recipes")
    if name.startswith("gguf-") and not load(name).needs_calibration
]
TEXT = CalibrationChoice("python-docs", 16, 128)
TOKENS = list(range(40, 72))
# Of the divergence between both, in nats. llama.cpp also rounds what goes into layers, to 8 bits or
# to the type of plain floats.
TOLERANCE = {"gguf-f32": 1e-5, "gguf-f16": 1e-4, "gguf-bf16": 1e-3}
ROUNDED_INPUTS = 5e-3


@pytest.fixture(scope="module")
def source():
    return ModelSource.open("demo")


class Made(dict):
    """Checkpoints by recipe, each made when a test first asks for it."""

    def __init__(self, source, out):
        super().__init__()
        self._source, self._out = source, out

    def __missing__(self, name):
        (self[name],) = quantize(self._source, [load(name)], self._out, "cpu")
        return self[name]


@pytest.fixture(scope="module")
def made(source, tmp_path_factory):
    return Made(source, tmp_path_factory.mktemp("out"))


# One of every kind of blocks; the others mix the same kinds.
KINDS = (
    "f16",
    "bf16",
    "q8_0",
    "q4_0",
    "q5_1",
    "q2_k",
    "q3_k_m",
    "q4_k_m",
    "q6_k",
    "iq4_nl",
    "iq4_xs",
)
EVERY = [
    n if n.removeprefix("gguf-") in KINDS else pytest.param(n, marks=pytest.mark.slow)
    for n in NAMES
]


@pytest.mark.parametrize("name", EVERY)
def test_llama_cpp_computes_what_our_reading_of_the_file_computes(made, name):
    checkpoint = made[name]
    model = loading.load(checkpoint, torch.device("cpu"))
    with torch.no_grad():
        expected = model(torch.tensor([TOKENS])).logits[0, -1].log_softmax(-1)
    with serve(checkpoint.gguf.path) as server:
        found = next_token(server, TOKENS, len(expected))
        answer = server.handle_completions({"prompt": "The ", "n_predict": 8, "temperature": 0})
    assert answer["choices"][0]["text"]
    divergence = (expected.exp() * (expected - found)).sum().item()
    assert abs(divergence) < TOLERANCE.get(name, ROUNDED_INPUTS)


@pytest.mark.parametrize("name", EVERY)
def test_every_file_passes_verification(made, source, name):
    result = verify(made[name].folder, source)
    assert not result.faults
    assert "weights" in result.passed


def test_more_bits_are_closer_to_the_source(made):
    def error(name):
        layers = made[name].manifest.layers.values()
        return sum(layer.relative_error for layer in layers) / len(layers)

    order = ["gguf-q8_0", "gguf-q6_k", "gguf-q5_k_m", "gguf-q4_k_m", "gguf-q3_k_m", "gguf-q2_k"]
    errors = [error(name) for name in order]
    assert errors == sorted(errors)


@pytest.fixture(scope="module")
def weighted(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("weighted")
    recipes = [load("gguf-q4_k_m"), load("fp8-static")]
    return quantize(source, recipes, out, "cpu", calibration=TEXT)[0]


def test_what_matters_is_learnt_in_the_pass_that_serves_the_others(
    source, made, weighted, tmp_path
):
    assert weighted.manifest.calibration is not None
    assert weighted.digest != made["gguf-q4_k_m"].digest
    alone = quantize(source, [load("gguf-q4_k_m")], tmp_path / "o", "cpu", calibration=TEXT)[0]
    assert alone.digest == weighted.digest


def test_importance_is_the_mean_square_of_what_a_layer_reads(source, weighted):
    matrix = ImportanceMatrix.read(weighted.folder / imatrix.FILE)
    model = loading.load(source, torch.device("cpu"))
    ids = load_tokens(source, Architecture.of(source.folder), TEXT).ids
    seen = []
    layer = model.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        for row in ids:
            model(row[None])
    handle.remove()
    expected = torch.cat(seen, 1)[0].square().mean(0)
    torch.testing.assert_close(
        matrix.values["blk.1.ffn_down.weight"], expected, rtol=1e-3, atol=1e-8
    )
    assert matrix.counts["blk.1.ffn_down.weight"].tolist() == [ids.numel()]


def test_a_matrix_that_is_brought_along_gives_the_same_file(source, weighted, tmp_path):
    path = weighted.folder / imatrix.FILE
    again = quantize(source, [load("gguf-q4_k_m")], tmp_path, "cpu", run=Run(imatrix=path))[0]
    name = weighted.gguf.path.name
    same = [
        kind == again.gguf.tensors[tensor].kind
        for tensor, kind in ((n, e.kind) for n, e in weighted.gguf.tensors.items())
    ]
    assert all(same)
    # Sums and counts are what is stored, so means differ in their last bits.
    differing = sum(
        not torch.equal(weighted.gguf.read(tensor), again.gguf.read(tensor))
        for tensor in weighted.gguf.tensors
    )
    assert name == again.gguf.path.name
    assert differing <= 0.1 * len(weighted.gguf.tensors)


def test_a_matrix_of_another_model_is_refused(source, weighted, tmp_path):
    matrix = ImportanceMatrix.read(weighted.folder / imatrix.FILE)
    other = {name: torch.ones(7) for name in matrix.values}
    ImportanceMatrix(other, matrix.counts, ("other",)).write(tmp_path / "other.gguf")
    with pytest.raises(DataError, match="another model"):
        quantize(
            source,
            [load("gguf-q4_k_m")],
            tmp_path / "o",
            "cpu",
            run=Run(imatrix=tmp_path / "other.gguf"),
        )


def test_a_matrix_without_a_gguf_recipe_is_refused(source, tmp_path):
    with pytest.raises(RecipeError, match="--imatrix"):
        quantize(source, [load("fp8-dynamic")], tmp_path, "cpu", run=Run(imatrix=tmp_path / "x"))


def test_damage_is_found(made, source, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(made["gguf-q4_0"].folder, folder)
    entry = made["gguf-q4_0"].gguf.tensors["blk.1.ffn_up.weight"]
    path = folder / made["gguf-q4_0"].gguf.path.name
    data = bytearray(path.read_bytes())
    data[entry.offset : entry.offset + entry.n_bytes] = data[: entry.n_bytes]
    path.write_bytes(data)
    faults = verify(folder, source).faults
    assert any("sha256" in fault or "hash" in fault for fault in faults)
    assert any("blk.1.ffn_up.weight" in fault for fault in faults)


def test_metadata_are_what_model_browsers_show(made):
    metadata = made["gguf-q4_k_m"].gguf.metadata
    assert metadata["general.file_type"] == int(gguf.LlamaFileType.MOSTLY_Q4_K_M)
    assert metadata["general.quantized_by"].startswith("quantkit")
    assert metadata["tokenizer.ggml.pre"]


def test_one_tensor_can_have_another_type(source, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("summary: a test\ngguf: q4_k_m\ntensors: {ffn_down: q8_0}\n")
    (checkpoint,) = quantize(source, [load(str(path))], tmp_path / "out", "cpu")
    kinds = {n: e.kind.name for n, e in checkpoint.gguf.tensors.items() if "ffn_down" in n}
    assert set(kinds.values()) == {"Q8_0"}


def test_a_file_makes_the_same_file_as_the_model_it_came_from(source, made, tmp_path):
    whole = made["gguf-f32"].gguf.path
    (again,) = quantize_file(whole, [load("gguf-q4_k_m")], tmp_path, "cpu")
    direct = made["gguf-q4_k_m"].gguf
    assert again.gguf.path.name == direct.path.name
    assert list(again.gguf.metadata) == list(direct.metadata)
    for name in direct.tensors:
        assert torch.equal(again.gguf.read(name), direct.read(name)), name
    assert not verify(again.folder).faults
    with serve(again.gguf.path) as server:
        answer = server.handle_completions({"prompt": "The ", "n_predict": 4, "temperature": 0})
    assert answer["choices"][0]["text"]


def test_a_quantised_file_is_taken_only_when_asked(made, tmp_path):
    path = made["gguf-q8_0"].gguf.path
    with pytest.raises(SourceError, match="--requantize"):
        quantize_file(path, [load("gguf-q4_0")], tmp_path / "a", "cpu")
    (again,) = quantize_file(path, [load("gguf-q4_0")], tmp_path / "b", "cpu", requantize=True)
    assert again.gguf.tensors["blk.0.ffn_up.weight"].kind.name == "Q4_0"


def test_only_gguf_can_be_made_from_gguf(made, tmp_path):
    path = made["gguf-f32"].gguf.path
    with pytest.raises(RecipeError, match="needs a model in Hugging Face form"):
        quantize_file(path, [load("fp8-dynamic")], tmp_path, "cpu")


def test_experts_are_quantised_each_by_what_matters_to_it(tmp_path):
    torch.manual_seed(0)
    weight, importance = torch.randn(3, 8, 256), torch.rand(3, 256)
    writer = gguf.GGUFWriter(tmp_path / "moe-F32.gguf", "llama")
    writer.add_block_count(1)
    writer.add_tensor("token_embd.weight", torch.randn(16, 256).numpy())
    writer.add_tensor("blk.0.ffn_up_exps.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    name = "blk.0.ffn_up_exps.weight"
    matrix = ImportanceMatrix({name: importance}, {name: torch.tensor([5000] * 3)}, ("text",))
    matrix.write(tmp_path / "m.gguf")
    (made,) = quantize_file(
        tmp_path / "moe-F32.gguf",
        [load("gguf-q4_k_s")],
        tmp_path / "out",
        "cpu",
        Run(imatrix=tmp_path / "m.gguf"),
    )
    stored = made.gguf.read(name).view(3, 8, -1)
    kept = ImportanceMatrix.read(tmp_path / "m.gguf").values[name]
    for expert in range(3):
        alone = blocks.quantize(weight[expert], made.gguf.tensors[name].kind, kept[expert])
        assert torch.equal(stored[expert], alone)


def test_scores_in_llama_cpp_are_those_of_our_reading(made, tmp_path):
    asked = ScoreOptions(
        ("python_docs", "python_quiz"), limit=2, max_length=64, cache=tmp_path / "cache"
    )
    here = evaluate(made["gguf-q8_0"], asked, "cpu").card.scores
    there = evaluate(made["gguf-q8_0"], replace(asked, backend="llama.cpp"), "cpu").card
    assert there.settings.dtype == "llama.cpp"
    for name in ("python_docs/perplexity", "python_quiz/acc"):
        assert there.scores[name].n == here[name].n
        assert there.scores[name].value == pytest.approx(here[name].value, rel=0.02)


def test_only_gguf_is_scored_in_llama_cpp(source):
    with pytest.raises(ScoreError, match="runs GGUF files"):
        evaluate(source, ScoreOptions(("python_quiz",), limit=1, backend="llama.cpp"), "cpu")
    with pytest.raises(UnknownName, match="backend"):
        evaluate(source, ScoreOptions(("python_quiz",), limit=1, backend="llama"), "cpu")
