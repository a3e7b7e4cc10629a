"""A pass that several processes share: the same numbers as alone, and a clean end when one dies."""

import json
import shutil
import time

import pytest
import ranks as helper
import torch

from quantkit.model.shards import read_header
from quantkit.quantize.ranks import Ranks
from quantkit.verify.checkpoint import verify

NAMES = ["gptq-w4a16", "awq-gptq-w4a16+kv-fp8", "awq-w4a16", "fp8-static", "fp8-dynamic"]
TEXT = "Every rank has its share of the samples, and none of them knows all. "
DIFFERS = {"device", "seconds", "stage_seconds", "peak_host_bytes", "created", "files", "layers"}


def weights(folder):
    """All numbers of a checkpoint, by name."""
    return {name: t.read() for name, t in read_header(folder / "model.safetensors").items()}


def manifest(folder):
    return json.loads((folder / "quantkit.json").read_text())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from transformers import LlamaConfig, LlamaForCausalLM

    from quantkit import resources

    folder = tmp_path_factory.mktemp("ranks") / "model"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
        )
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resources.DEMO_MODEL / file, folder)
    # Lines of different lengths make samples of different lengths.
    lines = [TEXT * (1 + i % 3) for i in range(60)]
    (folder.parent / "text.txt").write_text("\n\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def text(model):
    return model.parent / "text.txt"


@pytest.fixture(scope="module")
def alone(model, text):
    out = model.parent / "alone"
    return out, helper.quantize(None, model, text, out, NAMES)


@pytest.fixture(scope="module")
def two(model, text):
    out = model.parent / "two"
    digests, nothing = helper.run(2, helper.quantize, model, text, out, NAMES)
    assert nothing == {}
    return out, digests


def test_one_rank_writes_what_a_plain_run_writes(alone, model, text, tmp_path):
    assert helper.run(1, helper.quantize, model, text, tmp_path, NAMES) == [alone[1]]


def test_the_same_bytes_from_run_to_run(two, model, text, tmp_path):
    again, _ = helper.run(2, helper.quantize, model, text, tmp_path, NAMES)
    assert again == two[1]


def like(one, other, bound):
    """Whether two checkpoints hold nearly the same, and tell it alike."""
    first, second = manifest(one), manifest(other)
    same = first.keys() - DIFFERS - {"calibration"}
    assert {k: first[k] for k in same} == {k: second[k] for k in same}
    if first["calibration"]:
        was, now = first["calibration"].pop("perplexity"), second["calibration"].pop("perplexity")
        assert was == pytest.approx(now, rel=1e-4)
    assert first["calibration"] == second["calibration"]
    for name, layer in first["layers"].items():
        for key in ("relative_error", "output_error"):
            if layer[key] is not None:
                assert layer[key] == pytest.approx(second["layers"][name][key], rel=bound)
    assert verify(other).ok


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_are_one_up_to_the_rounding_of_sums(alone, two, name):
    like(alone[0] / name, two[0] / name, 0.02)
    ours, theirs = weights(alone[0] / name), weights(two[0] / name)
    assert ours.keys() == theirs.keys()
    for key, tensor in ours.items():
        if tensor.dtype != torch.int32:  # packed numbers are judged by the errors above
            gap = (tensor.float() - theirs[key].float()).norm()
            assert gap <= 0.02 * tensor.float().norm(), key


def test_what_needs_no_data_is_the_same_to_the_byte(alone, two):
    assert alone[1]["fp8-dynamic"] == two[1]["fp8-dynamic"]


def test_three_ranks_and_more_ranks_than_samples(alone, model, text, tmp_path):
    names = ["awq-gptq-w4a16+kv-fp8"]
    few = tmp_path / "few"
    helper.quantize(None, model, text, few, names, 2)
    helper.run(3, helper.quantize, model, text, tmp_path / "three", names, 2)
    like(few / names[0], tmp_path / "three" / names[0], 0.02)
    helper.run(3, helper.quantize, model, text, tmp_path / "all", names)
    like(alone[0] / names[0], tmp_path / "all" / names[0], 0.02)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_ends_the_run_and_one_goes_on(two, model, text, tmp_path, victim):
    names = ["gptq-w4a16", "awq-w4a16"]
    results, *processes = helper.start(
        2, helper.quantize, model, text, tmp_path, names, 8, (victim, 1)
    )
    rank, said = results.get(timeout=60)
    started = time.monotonic()
    codes = helper.end(processes, 20)
    assert time.monotonic() - started < 10
    assert codes[victim] == -9
    assert (rank, codes[1 - victim]) == (1 - victim, 3)
    assert f"RankLost: rank {victim} ended before its work was done; what is finished" in said
    assert "told: False" in said  # nobody else is left to say it
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == [f".{name}.partial" for name in sorted(names)]
    assert list(tmp_path.glob(".*/journal/00000.json"))
    assert not list(tmp_path.glob(".*/journal/00001.json"))
    helper.quantize(None, model, text, tmp_path, names)
    for name in names:
        like(two[0] / name, tmp_path / name, 0.02)


def faulty(ranks):
    from quantkit.errors import MethodError

    ranks.share("all are here")
    if ranks.rank == 1:
        raise MethodError("this tensor is no good")
    ranks.share(None, owner=1)


def test_a_failure_is_said_once_and_everywhere_known():
    results, *processes = helper.start(3, faulty)
    found = dict(results.get(timeout=60) for _ in processes)
    assert helper.end(processes, 20) == [3, 3, 3]
    assert found[0] == "RankLost: rank 1: this tensor is no good (told: False)"
    assert found[1] == "MethodError: this tensor is no good (told: True)"
    assert found[2] == "RankLost: rank 1: this tensor is no good (told: True)"


def slow(ranks):
    from quantkit.quantize import together

    together.PATIENCE_SECONDS = 0.5
    ranks.share(0)
    if ranks.rank == 1:
        time.sleep(1.5)
        return
    ranks.share(None, owner=1)


def test_one_that_does_not_answer_is_not_waited_for_for_ever():
    results, *processes = helper.start(2, slow)
    rank, said = results.get(timeout=60)
    helper.end(processes, 20)
    assert rank == 0
    assert "rank 0 waited" in said


def shared(ranks):
    state = {
        "numbers": torch.arange(5, dtype=torch.int64) * (1 + ranks.rank),
        "small": torch.tensor(0.5, dtype=torch.bfloat16),
        "fp8": torch.ones(3, 2).to(torch.float8_e4m3fn),
        "none": torch.zeros(0, 4),
        "turned": torch.arange(6).view(2, 3).t(),
        "words": ["rank", ranks.rank],
    }
    found = ranks.share(state, owner=1)
    total, largest = torch.ones(3) * ranks.rank, torch.tensor([float(ranks.rank), float("nan")])
    ranks.sum_([total])
    ranks.max_([largest])
    samples = ranks.first_samples(5, lambda n: torch.arange(9)[ranks.rank :: ranks.size][:n])
    taken = []
    from quantkit.quantize.ranks import Job

    jobs = [Job(cost, lambda c=cost: (c, ranks.rank), taken.append) for cost in (1, 5, 2, 2)]
    ranks.spread(jobs)
    plain = {k: v.float().tolist() if k != "words" else v for k, v in found.items()}
    return plain, total.tolist(), largest.tolist(), samples.tolist(), taken


def test_what_is_shared_summed_and_spread_is_the_same_everywhere():
    found = helper.run(2, shared)
    assert found[0] == found[1]
    state, total, largest, samples, taken = found[0]
    assert state["numbers"] == [0, 2, 4, 6, 8]
    assert state["small"] == 0.5
    assert state["fp8"] == [[1, 1]] * 3
    assert state["none"] == []
    assert state["turned"] == [[0, 3], [1, 4], [2, 5]]
    assert state["words"] == ["rank", 1]
    assert (total, largest) == ([1, 1, 1], [1, float("inf")])
    assert samples == [0, 1, 2, 3, 4]
    assert taken == [(1, 1), (5, 0), (2, 1), (2, 1)]


def test_a_process_alone_has_nothing_to_wait_for():
    ranks, taken = Ranks(), []
    assert ranks.share("mine") == "mine"
    assert ranks.first_samples(2, lambda n: torch.arange(5)[:n]).tolist() == [0, 1]
    ranks.spread([])
    assert (ranks.is_first, taken) == (True, [])
