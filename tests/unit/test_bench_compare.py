"""Two checkpoints under the same requests: a difference is told where there is one."""

import random

import pytest
from scipy import stats

from quantkit.bench import compare, settings
from quantkit.bench.compare import Sample
from quantkit.bench.engines import sharing
from quantkit.bench.record import Press, Rate, Row, Workload
from quantkit.errors import UsageError

RATE = Rate(mean=1, low=1, high=1)


def row(model, setting=None, load="8 users"):
    return Row(
        model=model,
        setting=setting or {},
        workload=Workload(name="fixed", prompt_tokens=512, output_tokens=128),
        load=Press(kind="closed", concurrency=8),
        load_name=load,
        n_requests=1,
        n_ok=1,
        requests_per_s=RATE,
        output_tokens_per_s=RATE,
        total_tokens_per_s=RATE,
    )


def times(n, factor=1.0, noise=0.05, seed=0, drift=0.3):
    """Prompts differ a lot, stretches of a run drift, and both models see the same of it."""
    prompts, own = random.Random(1), random.Random(seed)
    found = []
    for number in range(n):
        base = prompts.uniform(0.2, 4.0) * (1 + drift * (number // 16 % 2))
        whole = base * factor * own.lognormvariate(0, noise)
        found.append(Sample(whole / 4, whole / 100, whole))
    return found


def verdicts(one, other):
    found = compare.compare([row("base"), row("fast")], [one, other])
    return {c.metric: c for c in found}


def test_a_real_difference_is_told_with_its_size():
    found = verdicts(times(128), times(128, factor=0.93, seed=2))["whole request"]
    assert found.verdict == "faster"
    assert found.low < 0.93 < found.high
    assert found.high < 1
    assert "pairs" in compare.words(found)


def test_noise_is_not_a_difference():
    wrong = 0
    for seed in range(2, 102):
        found = verdicts(times(80), times(80, seed=seed))["time per token"]
        wrong += found.verdict != "no difference within the noise"
    assert wrong <= 12  # 5 of 100 expected


def test_pairs_tell_what_means_cannot():
    # Prompts differ by a factor of twenty, so that means alone would need thousands of requests.
    one, other = times(64, noise=0.02), times(64, factor=1.05, noise=0.02, seed=3)
    assert verdicts(one, other)["whole request"].verdict == "slower"
    assert stats.ttest_ind([s.e2e_s for s in one], [s.e2e_s for s in other]).pvalue > 0.3


def test_failed_requests_make_no_pairs_and_few_tell_nothing():
    one, other = times(30), times(30, factor=0.5)
    other[3] = Sample()
    assert verdicts(one, other)["whole request"].n_pairs == 29
    few = verdicts(times(12), times(12, factor=0.5))["whole request"]
    assert (few.verdict, few.ratio) == ("too few paired requests to compare", None)


def test_only_what_was_asked_alike_is_compared():
    rows = [row("a"), row("a", {"max_num_seqs": "8"}), row("b"), row("b", {"max_num_seqs": "8"})]
    found = list(compare.compare(rows, [times(64)] * 4))
    assert {(c.model, c.against, c.setting.get("max_num_seqs")) for c in found} == {
        ("b", "a", None), ("b", "a", "8"),
    }  # fmt: skip


@pytest.mark.parametrize("freedom", [4, 5, 9, 19, 100])
def test_students_quantile(freedom):
    assert compare.quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=4e-3)


def test_sweeps_of_memory_and_tensor_parallel():
    grid = settings.grid(["gpu_memory_utilization=0.85,0.95", "tensor_parallel=1,2"])
    assert len(grid) == 4
    line = settings.flags(grid[-1], "vllm")
    assert line == ["--gpu-memory-utilization", "0.95", "--tensor-parallel-size", "2"]
    assert sharing(line) == (2, 1, False)
    for bad in ("gpu_memory_utilization=1.5", "gpu_memory_utilization=x", "tensor_parallel=0"):
        with pytest.raises(UsageError):
            settings.grid([bad])


@pytest.mark.parametrize(
    ("text", "kind", "k"),
    [("suffix:8", "suffix", 8), ("mtp:2", "mtp", 2), ("medusa:/x:3", "medusa", 3),
     ("eagle3:/x", "eagle3", 4), ("org/small:5", "draft_model", 5)],
)  # fmt: skip
def test_kinds_of_drafts_can_be_swept(text, kind, k):
    found = settings.drafts(text)
    assert (found[0], found[2]) == (kind, k)
