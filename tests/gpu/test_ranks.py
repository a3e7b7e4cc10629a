"""One rank on one GPU over NCCL: what torchrun starts writes what a plain run writes."""

import pytest
import torch
from processes import free_port

from quantkit import launch, recipe
from quantkit.model.source import ModelSource
from quantkit.onepass.distributed import Packed, joined, unpack
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.ranks import Ranks
from quantkit.onepass.run import quantize

pytestmark = pytest.mark.gpu
NAMES = ("gptq-w4a16", "awq-gptq-w4a16+kv-fp8", "awq-w4a16", "fp8-static", "gguf-q4_k_m")
FEW = CalibrationChoice("python-docs", 8, 128)


def made(out, ranks):
    recipes = [recipe.load(name) for name in NAMES]
    source = ModelSource.open("demo")
    found = quantize(source, recipes, out, device="cuda:0", calibration=FEW, run=Run(ranks=ranks))
    return {checkpoint.label: checkpoint.digest for checkpoint in found}


def test_one_rank_over_nccl_writes_what_a_plain_run_writes(tmp_path, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with joined(launch.Place(0, 1, 0, 1), "auto") as ranks:
        assert ranks.device == torch.device("cuda", 0)
        together = made(tmp_path / "together", ranks)
    assert not torch.distributed.is_initialized()
    assert together == made(tmp_path / "alone", Ranks())


def test_packed_values_come_back_where_they_were():
    value = {
        "fp8": torch.ones(3, 5, device="cuda").to(torch.float8_e4m3fn),
        "host": torch.arange(7),
        "scalar": torch.tensor(2.5, device="cuda", dtype=torch.bfloat16),
        "words": ("a", 1),
    }
    packed = Packed.of(value)
    raw = torch.empty(packed.n_bytes, dtype=torch.uint8, device="cuda")
    packed.fill(raw)
    found = unpack(packed.text, raw)
    assert found["words"] == ("a", 1)
    for name in ("fp8", "host", "scalar"):
        assert found[name].device == value[name].device
        assert found[name].dtype == value[name].dtype
        assert torch.equal(found[name].float(), value[name].float())
