"""What torchrun passes to a process, and which commands use it."""

import pytest

from quantkit import launch

PLACE = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


@pytest.fixture
def told(monkeypatch):
    for name, value in PLACE.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_a_plain_process_is_first_and_has_no_place(monkeypatch):
    for name in PLACE:
        monkeypatch.delenv(name, raising=False)
    assert launch.place() is None
    assert launch.is_first()


def test_a_rank_knows_its_place(told):
    assert launch.place() == launch.Place(1, 2, 1, 2)
    assert not launch.is_first()
    told.setenv("RANK", "0")
    assert launch.is_first()


@pytest.mark.parametrize("name", PLACE)
def test_what_a_scheduler_sets_without_torchrun_counts_for_nothing(told, name):
    told.delenv(name)
    assert launch.place() is None


@pytest.mark.parametrize("wrong", ["-1", "x", "2"])
def test_a_rank_that_cannot_be_counts_for_nothing(told, wrong):
    told.setenv("RANK", wrong)
    assert launch.place() is None


def test_commands_that_share_nothing_say_so_once(told, run_cli):
    result = run_cli(["gpus"])
    assert (result.code, result.stdout, result.stderr) == (3, "", "")
    told.setenv("RANK", "0")
    result = run_cli(["gpus"])
    assert result.code == 3
    assert result.stderr == (
        "quantkit: quantkit gpus works in one process, and torchrun started 2; run it without "
        "torchrun\n"
    )
    told.setenv("WORLD_SIZE", "1")
    assert run_cli(["gpus"]).code == 0


def test_wrong_usage_is_said_once(told, run_cli):
    assert run_cli(["quantize", "--no-such-option"]) == (2, "", "")
    told.setenv("RANK", "0")
    assert "no such option" in run_cli(["quantize", "--no-such-option"]).stderr
