"""Checkpoints that others made: scored with the numbers that their own libraries compute with."""

import json

import pytest
import torch
from foreign import by_library, changed, configured, disowned
from tiny import READABLE, save_llama

import quantkit
from quantkit import opening
from quantkit.errors import CheckpointError, ScoreError
from quantkit.export.foreign import ForeignCheckpoint
from quantkit.model.source import read_tensors
from quantkit.report.comparison import Report
from quantkit.scoring import loading

PRESETS = [
    "W4A16", "W4A16_ASYM", "W8A16", "FP8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4", "NVFP4A16",
    "MXFP4", "MXFP4A16", "MXFP8",
]  # fmt: skip
OURS = [
    ("rtn-w4a16", "gptq", "gptq: W4A16 g128"),
    ("rtn-w4a16", "awq", "awq: W4A16 g128 asymmetric"),
    ("int8-w8a8", None, "compressed-tensors: W8A8 per channel"),
    ("fp8-block", "fp8", "fp8: FP8 blocks"),
    ("fp8-tensor", "fp8", "fp8: FP8 per tensor"),
    ("fp8-static", "fp8", "fp8: FP8 per tensor, static activations"),
    ("nvfp4", "modelopt", "modelopt: NVFP4"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(
        tmp_path_factory.mktemp("source") / "model", **READABLE | {"num_key_value_heads": 4}
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_files_of_compressed_tensors_give_the_librarys_logits(model, tmp_path, preset):
    folder, expected = by_library(model, tmp_path / preset, preset)
    found = opening.find(str(folder), None, False)
    assert isinstance(found, ForeignCheckpoint)
    assert found.declared.maker.startswith("compressed-tensors ")
    loaded = loading.load(found, CPU)
    with torch.no_grad():
        logits = loaded(torch.arange(1, 33)[None]).logits
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    """Ours, by recipe and format."""
    out = tmp_path_factory.mktemp("made")
    read = quantkit.calibrate("python-docs", model=model, samples=4, length=64)
    found = {}
    for form in dict.fromkeys(form for _, form, _ in OURS):
        recipes = [recipe for recipe, own, _ in OURS if own == form]
        done = quantkit.quantize(
            model, recipes, out=out / str(form), format=form, device="cpu", calibration=read
        )
        found |= {(recipe, form): one for recipe, one in zip(recipes, done, strict=True)}
    return found


@pytest.mark.parametrize(("recipe", "form", "words"), OURS, ids=[f"{r}-{f}" for r, f, _ in OURS])
def test_files_of_known_layouts_are_computed_as_ours_are(made, tmp_path, recipe, form, words):
    ours = made[recipe, form]
    theirs = opening.find(str(disowned(ours.folder, tmp_path / "theirs")), None, False)
    assert theirs.declared.words == words
    ids = torch.arange(1, 33)[None]
    with torch.no_grad():
        expected, found = (
            loading.load(target, CPU, dtype=torch.float32)(ids).logits for target in (ours, theirs)
        )
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_a_report_holds_them_against_the_source_and_says_whose_they_are(
    model, made, tmp_path, run_cli
):
    ours = made["rtn-w4a16", "gptq"]
    theirs = configured(
        disowned(ours.folder, tmp_path / "theirs"), meta={"quantizer": ["gptqmodel:4.0.0"]}
    )
    scores = tmp_path / "scores"
    asked = ["--tasks", "python_docs", "--limit", "2", "--device", "cpu"]
    ran = run_cli(["score", model, ours.folder, theirs, *asked, "-o", scores])
    assert ran.code == 0, ran.stderr
    card = json.loads((scores / "theirs.json").read_bytes())
    assert card["recipe"] == "gptq: W4A16 g128"
    assert card["made"]["engine"] == "GPTQModel 4.0.0"
    mine = json.loads((scores / f"{ours.label}.json").read_bytes())
    for name, score in mine["scores"].items():
        assert card["scores"][name]["value"] == pytest.approx(score["value"], rel=0.02), name
    assert card["scores"]["python_docs/kl_mean"]["value"] > 0
    assert card["bits_per_weight"] == pytest.approx(mine["bits_per_weight"], rel=1e-3)
    report = tmp_path / "report"
    ran = run_cli(["report", scores, "-o", report])
    assert ran.code == 0, ran.stderr
    (note,) = json.loads((report / "report.json").read_bytes())["notes"]
    assert "theirs was not made by quantkit (gptq: W4A16 g128; made by GPTQ" in note
    assert "by architecture and vocabulary" in note
    assert "GPTQModel 4.0.0" in (report / "report.html").read_text()
    assert run_cli(["gate", report]).code in (0, 1)


def test_scored_alone_it_is_compared_by_architecture_and_vocabulary(model, made, tmp_path):
    theirs = disowned(made["rtn-w4a16", "awq"].folder, tmp_path / "theirs")
    how = {"tasks": ["python_docs"], "limit": 1, "device": "cpu"}
    (source,) = quantkit.score(model, **how)
    (alone,) = quantkit.score(theirs, **how)
    assert alone.card.source_fingerprint == ""
    assert "python_docs/kl_mean" not in alone.card.scores
    assert Report.of([source, alone]).candidates[0].name == "theirs"
    (told,) = quantkit.score(theirs, source=model, **how)
    assert told.card.source_fingerprint == source.card.digest
    assert "python_docs/kl_mean" in told.card.scores
    other = save_llama(tmp_path / "other", **READABLE | {"num_hidden_layers": 1})
    (unlike,) = quantkit.score(other, **how)
    with pytest.raises(ScoreError, match=r"theirs was not made from other: it is .*layers 2.*is "):
        Report.of([unlike, alone])
    with pytest.raises(CheckpointError, match="theirs was not made from other"):
        quantkit.score(theirs, source=other, **how)


def test_what_nobody_reads_is_refused(model, made, tmp_path):
    theirs = disowned(made["rtn-w4a16", "awq"].folder, tmp_path / "theirs")
    for changes, words in (
        ({"version": "gemv"}, "version gemv: only gemm"),
        ({"quant_method": "aqlm"}, "quantised by aqlm, which quantkit does not read"),
    ):
        with pytest.raises(CheckpointError, match=words):
            opening.find(str(configured(theirs, **changes)), None, False)


def test_compare_scores_and_reports_any_mix(model, made, tmp_path, run_cli):
    ours = made["fp8-block", "fp8"]
    theirs = disowned(made["rtn-w4a16", "gptq"].folder, tmp_path / "theirs")
    out, asked = tmp_path / "out", ["--tasks", "python_docs", "--limit", "1", "--device", "cpu"]
    ran = run_cli(["compare", theirs, model, ours.folder, *asked, "-o", out])
    assert ran.code == 0, ran.stderr
    report = json.loads((out / "report.json").read_bytes())
    assert {entry["name"] for entry in report["candidates"]} == {"theirs", ours.label}
    assert sorted(path.stem for path in (out / "scores").glob("*.json")) == sorted(
        ["source", "theirs", ours.label]
    )
    same = quantkit.compare(
        [model, ours, theirs], tasks=["python_docs"], limit=1, device="cpu"
    ).document
    for one, other in zip(report["candidates"], same.candidates, strict=True):
        assert one["scores"] == {k: s.model_dump() for k, s in other.scores.items()}
    refused = run_cli(["compare", theirs, *asked, "-o", tmp_path / "none"])
    assert refused.code == 3
    assert "a comparison needs one source model, found: none" in refused.stderr


def test_gptq_with_act_order_and_the_second_version_of_its_zeros(model, made, tmp_path):
    """Columns in any order of groups, and zero points stored as they are."""
    name = "model.layers.0.mlp.down_proj"
    plain = disowned(made["rtn-w4a16", "gptq"].folder, tmp_path / "plain")
    stored = {n: t.read() for n, t in read_tensors(plain).items() if n.startswith(f"{name}.")}
    order = torch.randperm(256, generator=torch.Generator().manual_seed(0))
    groups = stored[f"{name}.g_idx"][order].contiguous()
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    values = (stored[f"{name}.qweight"][:, None] >> shifts[None, :, None]) & 15
    values = values.reshape(256, 128).float()  # [columns, rows]
    zeros = ((stored[f"{name}.qzeros"][:, :, None] >> shifts) & 15).reshape(-1, 128).float() + 1
    scales = stored[f"{name}.scales"].float()
    expected = ((values - zeros[groups.long()]) * scales[groups.long()]).t()
    ordered = changed(plain, tmp_path / "ordered", **{f"{name}.g_idx": groups})
    found = opening.find(str(configured(ordered, desc_act=True)), None, False)
    assert torch.equal(found.read(f"{name}.weight"), expected)
    every = {n: t.read() for n, t in read_tensors(plain).items() if n.endswith(".qzeros")}
    raised = {n: zeros + 0x11111111 for n, zeros in every.items()}
    second = changed(ordered, tmp_path / "second", **raised)
    found = opening.find(str(configured(second, checkpoint_format="gptq_v2")), None, False)
    assert torch.equal(found.read(f"{name}.weight"), expected)
    assert quantkit.verify(second).faults == []
