"""The short part of the campaign: a fixed range of seeds, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).with_name("campaign.py")


MUTATIONS, KILLS = (0, 10), (1, 2)
"""Every kind of input once, and a kill of a calibrated run."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """What a campaign left that tried both ranges."""
    folder = tmp_path_factory.mktemp("faults")
    ranges = ["mutations", "{}:{}".format(*MUTATIONS), "--kills", "{}:{}".format(*KILLS)]
    environment = {"QUANTKIT_FAULTS": str(folder), "QUANTKIT_FAULTS_GOOD": "1"}
    done = subprocess.run(
        [sys.executable, CAMPAIGN, *ranges],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def part(parts, what, first, last):
    found = json.loads((parts / f"{what}-{first}-{last}.json").read_text())
    assert found["next"] == last
    return found


def test_mutations(parts):
    found = part(parts, "mutations", *MUTATIONS)
    assert found["defects"] == []
    total = [sum(counts.values()) for counts in found["counts"].values()]
    assert total == [1] * 10


def test_kills(parts):
    found = part(parts, "kills", *KILLS)
    assert found["defects"] == []
    assert list(found["counts"]) == ["quantize, calibrated"]


def test_a_range_that_was_stopped_goes_on(parts, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")  # as the campaign would for good
    monkeypatch.setattr(sys, "path", [*sys.path])
    from faults import campaign

    first, last = KILLS
    path = parts / f"kills-{first}-{last}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"counts": {}}))
    monkeypatch.setattr(campaign, "PARTS", parts)
    campaign.kills(first, last)
    assert part(parts, "kills", first, last)["counts"] == {}


def test_a_defect_is_seen(tmp_path):
    """A judge that finds nothing would pass everything."""
    from faults import judge

    def accepts() -> int:
        return 0

    def refuses() -> int:
        print("quantkit: no", flush=True)  # noqa: T201
        return 3

    def hangs() -> int:
        while True:
            pass

    verdicts = {}
    for name, command, same in (
        ("accepts what is the same", accepts, lambda: ""),
        ("accepts what is another", accepts, lambda: "it is another"),
        ("refuses", refuses, lambda: ""),
        ("is a bug", lambda: 70, lambda: ""),
        ("says nothing", lambda: 3, lambda: ""),
        ("dies", lambda: os.kill(os.getpid(), 9), lambda: ""),
        ("raises", lambda: {}["x"], lambda: ""),
    ):
        verdicts[name] = judge.tried(command, same, tmp_path / "log").verdict
    assert verdicts == {
        "accepts what is the same": judge.EQUIVALENT,
        "accepts what is another": judge.DEFECT,
        "refuses": judge.REFUSED,
        "is a bug": judge.DEFECT,
        "says nothing": judge.DEFECT,
        "dies": judge.DEFECT,
        "raises": judge.DEFECT,
    }
    judge.KILL_S, kept = 1.0, judge.KILL_S
    try:
        assert "hangs" in judge.tried(hangs, lambda: "", tmp_path / "log").why
    finally:
        judge.KILL_S = kept
