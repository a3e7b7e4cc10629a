"""Loading a GPU's libraries ahead never stops a command, and costs a CPU nothing."""

import threading

import pytest
import torch

from quantkit.model.source import ModelSource
from quantkit.onepass import warmup
from quantkit.onepass.prepare import CalibrationChoice, Run, prepare
from quantkit.recipe import load


def test_a_cpu_needs_none():
    before = threading.active_count()
    assert warmup.begin(torch.device("cpu")) is None
    assert threading.active_count() == before


def test_a_device_that_fails_is_left_to_the_pass(monkeypatch, capfd):
    def fail(device):
        raise torch.OutOfMemoryError(f"{device} is full")

    monkeypatch.setattr(warmup, "use", fail)
    thread = warmup.begin(torch.device("cuda"))
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("recipe", "wanted"), [("gptq-w4a16", True), ("fp8-dynamic", False)])
def test_only_a_calibrated_pass_asks_for_it(recipe, wanted, tmp_path, monkeypatch):
    """It waits for the thread; data-free recipes would use the GPU beside it."""
    begun = []
    monkeypatch.setattr(warmup, "begin", begun.append)
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"{i} words that are not like the others {i * i}\n" for i in range(999))
    )
    choice = CalibrationChoice(str(text), 4, 64)
    prepare(ModelSource.open("demo"), [load(recipe)], tmp_path / "o", "cpu", choice, Run())
    assert bool(begun) == wanted


@pytest.mark.gpu
def test_a_gpu_computes_as_it_does_without():
    torch.manual_seed(0)
    matrix = torch.randn(300, 300, device="cuda")
    found = torch.linalg.cholesky_ex(matrix @ matrix.mT + torch.eye(300, device="cuda"))[0]
    warmup.use(torch.device("cuda", torch.cuda.current_device()))
    again = torch.linalg.cholesky_ex(matrix @ matrix.mT + torch.eye(300, device="cuda"))[0]
    assert torch.equal(found, again)
