"""The corpus: every broken checkpoint is flagged by the right rule, and none of the sound ones."""

import re

import pytest
import wild
from tiny import READABLE, save_llama

import quantkit

GPUS = ("H200", "B200", "A100", "L40S")
QUICK = (
    "W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4", "gptq", "awq", "fp8-blocks", "w3a16", "gptq-act-order",
    "experts", "gpt-oss",
)  # fmt: skip
"""What the broken ones are made from; test_verify_foreign.py has the other schemes."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("wild")
    sizes = {"hidden_size": 256, "num_key_value_heads": 2, "head_dim": 64}
    wanted = lambda name: name in QUICK or name in wild.BROKEN  # noqa: E731
    source = save_llama(out / "source", **READABLE | sizes)
    return {case.name: case for case in wild.make(out / "corpus", source, wanted)}


@pytest.mark.parametrize("name", QUICK)
def test_sound_ones_are_not_flagged(corpus, name):
    folder = corpus[name].folder
    for version in ("0.26", "0.28", "0.32"):
        found = quantkit.predict(folder, version=version)
        gone = name == "gptq-act-order" and version == "0.32"
        assert [one.rule.id for one in found.faults] == (["act-order-gone"] if gone else [])
        assert not any("was not read" in told for told in found.left_out)
    for gpu in GPUS:
        found = quantkit.predict(folder, version="0.26", gpu=gpu)
        if not (name == "W8A8" and gpu == "B200"):  # no INT8 kernels there
            assert found.faults == []
            assert found.kernels
            assert not any("experts" in told for told in found.left_out)
    assert quantkit.verify(folder, read_weights=False).faults == []


@pytest.mark.parametrize("name", wild.BROKEN)
def test_broken_ones_are_flagged_by_the_right_rule(corpus, name):
    case = corpus[name]
    found = quantkit.predict(case.folder, version="0.26", gpu="H200")
    if case.rule is None:
        faults = quantkit.verify(case.folder).faults
        assert any(re.search(case.verify, fault) for fault in faults), faults
        # Only Marlin's kernel for FP4 makes another number of NaN.
        is_borne = "Marlin FP4" in {one.kernel for one in found.kernels}
        assert case.consequence == ("accuracy" if is_borne else "garbage")
        return
    flagged = [one for one in found.faults if one.rule.id == case.rule]
    assert flagged, [str(one) for one in found.findings]
    assert flagged[0].consequence == case.consequence
    assert not found.ok
    assert found.verdict == (
        "will not load" if case.consequence == "refuses" else "loads, answers garbage"
    )
