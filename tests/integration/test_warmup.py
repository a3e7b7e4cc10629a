"""Loading a GPU's libraries ahead never stops a command, and costs a CPU nothing."""

import threading

import pytest
import torch

from quantkit.onepass import warmup


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


@pytest.mark.gpu
def test_a_gpu_computes_as_it_does_without():
    torch.manual_seed(0)
    matrix = torch.randn(300, 300, device="cuda")
    found = torch.linalg.cholesky_ex(matrix @ matrix.mT + torch.eye(300, device="cuda"))[0]
    warmup.use(torch.device("cuda", torch.cuda.current_device()))
    again = torch.linalg.cholesky_ex(matrix @ matrix.mT + torch.eye(300, device="cuda"))[0]
    assert torch.equal(found, again)
