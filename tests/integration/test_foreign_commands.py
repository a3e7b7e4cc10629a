"""Every command that takes a checkpoint takes those of other tools: a folder and a GGUF file."""

import json
import shutil

import gguf
import pytest
import torch
from fake_openai import fake_python
from foreign import by_library
from foreign_files import write_llama
from tiny import READABLE, save_llama

import quantkit
from quantkit import opening
from quantkit.bench.model import Model
from quantkit.model.source import ModelSource
from quantkit.scoring import loading

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("source") / "model", **READABLE)


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    return by_library(model, tmp_path_factory.mktemp("theirs") / "theirs-fp8", "FP8_DYNAMIC")[0]


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    return write_llama(model, tmp_path_factory.mktemp("files") / "theirs-q8.gguf")


@pytest.fixture(scope="module")
def report(model, folder, file, tmp_path_factory):
    out = tmp_path_factory.mktemp("compared") / "out"
    scores = quantkit.score(
        [file, folder, model], tasks="python_docs", limit=2, device="cpu", out=out / "scores"
    )
    from quantkit.report import files
    from quantkit.report.comparison import Report

    files.write(Report.of(scores), out)
    return out


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "BF16"])
def test_gguf_files_of_the_package_give_the_packages_numbers(model, tmp_path, kind):
    path = write_llama(model, tmp_path / "x.gguf", kind)
    source = ModelSource.open(str(model))
    found = loading.load(opening.find(str(path), None, False, source), CPU)
    expected = loading.load(source, CPU)
    of_kind = gguf.GGMLQuantizationType[kind]
    for parameter in expected.parameters():
        if parameter.ndim == 2:
            packed = gguf.quants.quantize(parameter.detach().numpy(), of_kind)
            values = gguf.quants.dequantize(packed, of_kind)
            parameter.data = torch.from_numpy(values).reshape(parameter.shape)
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        # Rows of queries and keys lie otherwise in the file, and each row is rounded by itself.
        assert torch.allclose(found(ids).logits, expected(ids).logits, rtol=1e-5, atol=1e-6)


def test_compare_takes_files_in_any_order_and_says_who_made_them(model, file, tmp_path, run_cli):
    asked = ["--tasks", "python_docs", "--limit", "1", "--device", "cpu", "-o", tmp_path / "out"]
    ran = run_cli(["compare", file.parent, model, *asked])  # a folder that holds it alone
    assert ran.code == 0, ran.stderr
    found = json.loads((tmp_path / "out" / "report.json").read_bytes())
    (theirs,) = found["candidates"]
    assert (theirs["name"], theirs["recipe"], theirs["format"]) == (
        "theirs-q8", "gguf: Q8_0", "gguf",
    )  # fmt: skip
    assert theirs["made"]["engine"] == "somebody"
    assert "made by somebody" in found["notes"][0]
    assert theirs["bits_per_weight"] == pytest.approx(8.5, abs=0.1)
    assert theirs["scores"]["python_docs/kl_mean"]["value"] < 1e-3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rms_norm_eps": 0.001}, "llama.attention.layer_norm_rms_epsilon is 0.00"),
        ({"num_hidden_layers": 3}, "llama.block_count is 3"),
    ],
)
def test_a_file_of_another_model_is_refused(model, tmp_path, run_cli, change, words):
    other = write_llama(model, tmp_path / "other.gguf", **change)
    ran = run_cli(["score", other, "--source", model, "--tasks", "python_docs", "--limit", "1"])
    assert ran.code == 3
    assert words in ran.stderr
    assert "give the model that it was made from" in ran.stderr


def test_a_file_alone_is_refused_with_the_way_out(file, run_cli):
    ran = run_cli(["score", file, "--tasks", "python_docs", "--limit", "1"])
    assert ran.code == 3
    assert "--source MODEL" in ran.stderr


def test_layers_of_a_file_are_held_against_the_source(model, file, tmp_path):
    found = quantkit.verify(file, source=model)
    assert (found.faults, found.left_out) == ([], [])
    assert found.worst[0][1] < 0.01
    spoilt = write_llama(model, tmp_path / "spoilt.gguf")
    held = gguf.GGUFReader(str(spoilt), "r+")
    tensor = next(t for t in held.tensors if t.name == "blk.1.ffn_up.weight")
    tensor.data[:40] = tensor.data[40:80]
    held.data.flush()
    (fault,) = quantkit.verify(spoilt, source=model).faults
    assert "model.layers.1.mlp.up_proj is " in fault


def test_gate_knows_them_by_their_fingerprint(report, folder, file, tmp_path, run_cli):
    ran = run_cli(["gate", report, "--checkpoint", file, "--checkpoint", folder, "--json"])
    checks = [c for c in json.loads(ran.stdout)["checks"] if c["kind"] == "digest"]
    assert [(c["candidate"], c["answer"]) for c in checks] == [
        ("theirs-q8", "pass"), ("theirs-fp8", "pass"),
    ]  # fmt: skip
    changed = tmp_path / "theirs-q8.gguf"
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    changed.write_bytes(raw)
    ran = run_cli(["gate", report, "--checkpoint", changed])
    assert ran.code == 1
    assert "was changed after it was scored" in " ".join((ran.stdout + ran.stderr).split())


def test_recommend_names_them_with_what_they_keep(report, model, run_cli):
    ran = run_cli(["recommend", model, "--gpu", "RTX 4090", "--report", report, "--json"])
    assert ran.code == 0, ran.stderr
    notes = " ".join(json.loads(ran.stdout)["notes"])
    assert "theirs-q8, in the report, was made by another tool (gguf: Q8_0" in notes
    assert "theirs-fp8, in the report, was made by another tool" in notes
    assert "RTX 4090: native (FP8 tensor cores" in notes


def test_bench_measures_them_under_the_digest_of_their_scores(report, folder, file):
    scored = json.loads((report / "report.json").read_bytes())["candidates"]
    digests = {entry["name"]: entry["digest"] for entry in scored}
    for path in (folder, file):
        found = Model.of(path)
        assert found.digest == digests[found.name]


def test_serve_plans_both(folder, file, tmp_path, run_cli):
    python = fake_python(tmp_path)
    ran = run_cli(["serve", folder, "--dry-run", "--python", python])
    assert ran.code == 0, ran.stderr
    assert "theirs-fp8" in ran.stdout
    ran = run_cli(["serve", file, "--dry-run"])
    assert ran.code == 0, ran.stderr
    assert "llama-server -m" in ran.stdout


def test_card_keeps_what_people_wrote_and_adds_what_was_measured(
    report, folder, file, tmp_path, run_cli
):
    theirs = tmp_path / folder.name
    shutil.copytree(folder, theirs)
    (theirs / "README.md").write_text("---\nlicense: apache-2.0\n---\n\nMade with love.\n")
    lone = tmp_path / "alone" / file.name
    lone.parent.mkdir()
    shutil.copyfile(file, lone)
    ran = run_cli(["card", theirs, lone, "--report", report / "report.json"])
    assert ran.code == 0, ran.stderr
    text = (theirs / "README.md").read_text()
    assert "Made with love." in text
    assert "license: apache-2.0" in text
    assert "not by quantkit" in text
    assert "compressed-tensors: FP8 per channel" in text
    assert "python_docs" in text
    assert "model-index" in text
    of_file = (lone.parent / "README.md").read_text()
    assert "Quantised by somebody, not by quantkit" in of_file
    assert f"llama-server -m {file.name}" in of_file
    again = run_cli(["card", theirs, lone, "--report", report / "report.json"])
    assert again.stdout.count("is up to date") == 2
    # The card is not part of what was scored.
    assert ModelSource.open(str(theirs), requantize=True).digest == Model.of(folder).digest


def test_a_card_of_a_plain_model_is_refused(model, run_cli):
    ran = run_cli(["card", model])
    assert ran.code == 3
    assert "is not quantised" in ran.stderr
