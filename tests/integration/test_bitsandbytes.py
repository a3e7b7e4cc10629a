"""Checkpoints of bitsandbytes are read as the library reads them, checked, and never written."""

import json
from pathlib import Path

import pytest
import torch
from foreign import changed, configured, in_bitsandbytes
from tiny import READABLE, save_llama

import quantkit
from quantkit import opening
from quantkit.model.dequantized import dequantized
from quantkit.model.headers import read_header
from quantkit.model.source import read_tensors
from quantkit.scoring import loading

LIBRARY = Path(__file__).parents[1] / "data" / "bitsandbytes.safetensors"
DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize("name", ["nf4", "double", "fp4", "int8"])
def test_numbers_are_those_that_the_library_computes(name):
    """Written and dequantised by bitsandbytes itself (`write_bitsandbytes.py`)."""
    stored = read_header(LIBRARY)
    expected = stored[f"expected.{name}"].read()
    held = {n: t for n, t in stored.items() if not n.startswith("expected.")}
    config = {"quantization_config": {"quant_method": "bitsandbytes"}, "dtype": "float32"}
    found = dequantized(held, config)
    assert set(found) == {f"{kind}.weight" for kind in ("nf4", "double", "fp4", "int8")}
    assert torch.equal(found[f"{name}.weight"].read(), expected)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("source") / "model", **READABLE)


@pytest.fixture(scope="module")
def made(model, tmp_path_factory):
    out = tmp_path_factory.mktemp("bitsandbytes")
    return {bits: in_bitsandbytes(model, out / f"bits{bits}", bits) for bits in (4, 8)}


@pytest.mark.parametrize(("bits", "kind", "most"), [(4, "nf4", 0.12), (8, "int8", 0.012)])
def test_they_are_scored_verified_and_foretold(model, made, bits, kind, most):
    found = opening.find(str(made[bits]), None, False)
    assert found.declared.words == f"bitsandbytes: {kind.upper()}"
    assert found.declared.maker == "bitsandbytes"
    with torch.no_grad():
        logits = loading.load(found, torch.device("cpu"))(torch.arange(1, 33)[None]).logits
    assert logits.isfinite().all()
    checked = quantkit.verify(made[bits], source=model)
    assert (checked.faults, checked.left_out) == ([], [])
    assert most / 4 < checked.worst[0][1] < most
    told = quantkit.predict(made[bits], version="0.26", gpu="H200")
    assert told.verdict == "loads"
    assert {choice.kernel for choice in told.kernels} == {"bitsandbytes"}
    gone = quantkit.predict(made[bits], version="0.28")
    assert [one.rule.id for one in gone.faults] == ["method"]


def test_a_report_says_who_made_it(model, made, tmp_path):
    report = quantkit.compare([model, made[4]], tasks="python_docs", limit=1, device="cpu")
    (theirs,) = report.document.candidates
    assert theirs.made.by_others == "bitsandbytes: NF4; made by bitsandbytes"
    assert "vLLM has it before 0.28" in theirs.gpus


@pytest.mark.parametrize(
    ("part", "value", "words", "rule"),
    [
        ("weight.absmax", None, "weight.absmax is missing", "bnb-state"),
        ("weight.quant_state.bitsandbytes__nf4", None, "bitsandbytes__nf4 is missing", "bnb-state"),
        ("weight.absmax", "nan", "1 of 512 scales is NaN", None),
        ("weight.absmax", "short", "[511], bitsandbytes NF4 needs [512]", None),
        ("weight.quant_state.bitsandbytes__nf4", "shape", "says [256, 128], not [128, 256]", None),
    ],
)
def test_damage_is_named(made, tmp_path, part, value, words, rule):
    name = f"{DOWN}.{part}"
    tensor = read_tensors(made[4])[name].read().clone()
    if value == "nan":
        tensor[7] = float("nan")
    elif value == "short":
        tensor = tensor[:-1].contiguous()
    elif value == "shape":
        told = json.loads(bytes(tensor.tolist())) | {"shape": [256, 128]}
        tensor = torch.tensor(list(json.dumps(told).encode()), dtype=torch.uint8)
    broken = changed(made[4], tmp_path / "x", **{name: None if value is None else tensor})
    faults = quantkit.verify(broken).faults
    assert any(words in fault for fault in faults), faults
    foretold = quantkit.predict(broken, version="0.26").faults
    assert [one.rule.id for one in foretold] == ([rule] if rule else [])


def test_an_unknown_type_is_refused_in_one_sentence(made, tmp_path, run_cli):
    import shutil

    shutil.copytree(made[4], tmp_path / "x")
    configured(tmp_path / "x", bnb_4bit_quant_type="fp3")
    ran = run_cli(["verify", tmp_path / "x"])
    assert ran.code == 3
    assert "bnb_4bit_quant_type fp3: nf4 and fp4 are supported" in ran.stderr
