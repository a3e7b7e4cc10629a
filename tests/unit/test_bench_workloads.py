"""Workloads, settings, metrics and choices: what is asked, with which flags, and what is taken."""

import json

import pytest

from quantkit.bench import arguments, choice, metrics, offline, settings, table, workloads
from quantkit.bench.arrivals import Load
from quantkit.bench.record import Press, Rate, Row, Target, Workload
from quantkit.bench.workloads import Fixed
from quantkit.errors import DataError, EngineError, UsageError


def written(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_fixed_prompts_have_their_lengths_and_share_what_they_should():
    found = Fixed(20, 7, shared_prefix=8).requests(5, seed=1)
    assert {(len(r.prompt), r.n_output, r.exact) for r in found} == {(20, 7, True)}
    assert len({tuple(r.prompt[:8]) for r in found}) == 1
    assert len({tuple(r.prompt[8:]) for r in found}) == 5
    assert found == Fixed(20, 7, shared_prefix=8).requests(5, seed=1)
    assert found[0].prompt != Fixed(20, 7).requests(1, seed=2)[0].prompt


def test_a_prefix_leaves_something_of_the_prompt():
    with pytest.raises(DataError, match="make it shorter"):
        Fixed(8, 1, shared_prefix=8)


def test_a_trace_of_texts_ids_and_lengths(tmp_path):
    path = written(
        tmp_path,
        {"at": 0, "prompt": "Once upon", "output_tokens": 3},
        "",
        {"timestamp": 1.5, "prompt": [1, 2, 3], "max_tokens": 4},
        {"prompt_tokens": 9, "output_tokens": 5},
    )
    found = workloads.trace(path)
    assert [r.n_output for r in found.trace] == [3, 4, 5]
    assert [r.at for r in found.trace] == [0.0, 1.5, None]
    assert found.trace[0].prompt == "Once upon"
    assert found.trace[1].prompt == [1, 2, 3]
    assert len(found.trace[2].prompt) == 9
    assert not found.has_times
    assert found.about.prompt_tokens is None


def test_a_mooncake_trace_repeats_what_its_hashes_repeat(tmp_path):
    path = written(
        tmp_path,
        {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 2500, "input_length": 700, "output_length": 6, "hash_ids": [7, 9]},
    )
    first, second = workloads.trace(path).trace
    assert (first.at, second.at) == (0.0, 2.5)
    assert first.prompt[:512] == second.prompt[:512]
    assert first.prompt[512:] != second.prompt[512:600]
    assert (len(first.prompt), len(second.prompt)) == (600, 700)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{", "is not a request"),
        ("[]", "is not a request"),
        ("[" * 100_000, "is not a request"),
        ({"prompt": "a"}, "output_tokens is missing"),
        ({"prompt": "a", "output_tokens": 0}, "output_tokens is 0"),
        ({"prompt": "a", "output_tokens": "many"}, "output_tokens is 'many'"),
        ({"prompt": "", "output_tokens": 1}, "prompt is neither"),
        ({"prompt": ["a"], "output_tokens": 1}, "prompt is neither"),
        ({"output_tokens": 1}, "prompt_tokens is missing"),
        ('{"at": NaN, "prompt": "a", "output_tokens": 1}', "NaN"),
        ({"at": "late", "prompt": "a", "output_tokens": 1}, "is not a request"),
        ({"input_length": 600, "output_length": 1, "hash_ids": [1]}, "512 tokens"),
    ],
)
def test_a_bad_line_of_a_trace_is_named(tmp_path, row, words):
    good = {"prompt": "a", "output_tokens": 1}
    with pytest.raises(DataError, match=words) as caught:
        workloads.trace(written(tmp_path, good, row))
    assert "trace.jsonl:2" in str(caught.value)


def test_an_empty_trace_and_none_are_errors(tmp_path):
    with pytest.raises(DataError, match="no requests"):
        workloads.trace(written(tmp_path))
    with pytest.raises(DataError, match="cannot read"):
        workloads.trace(tmp_path / "none.jsonl")


def test_recorded_requests_start_again_when_more_are_asked_for(tmp_path):
    found = workloads.trace(written(tmp_path, {"at": 3, "prompt": "a", "output_tokens": 1}))
    assert [r.at for r in found.requests(3, 0)] == [3.0, None, None]
    assert len(found.requests(None, 0)) == 1
    with pytest.raises(DataError, match="times for 1 of the 3 requests"):
        Load("trace").times(found.requests(3, 0), seed=0)


def test_a_grid_is_every_combination():
    found = settings.grid(["max_num_seqs=64,256", "prefix-caching=on,off", "max_num_seqs=64"])
    assert len(found) == 4
    assert {"max_num_seqs": "256", "prefix_caching": "off"} in found
    assert settings.grid([]) == [{}]


@pytest.mark.parametrize(
    ("sweep", "error", "words"),
    [
        ("max_num_seq=1", UsageError, "Did you mean max_num_seqs"),
        ("max_num_seqs", UsageError, "name values"),
        ("max_num_seqs=many", UsageError, "takes a number"),
        ("prefix_caching=maybe", UsageError, "neither on nor off"),
        ("speculative=ngram:0", UsageError, "at least 1"),
    ],
)
def test_a_bad_sweep_is_refused_before_anything_starts(sweep, error, words):
    with pytest.raises(error, match=words):
        settings.grid([sweep])


def test_settings_as_flags_of_each_engine(tmp_path):
    setting = {"max_num_seqs": "8", "kv_cache_dtype": "fp8", "chunked_prefill": "off"}
    assert settings.flags(setting, "vllm") == [
        "--max-num-seqs", "8", "--kv-cache-dtype", "fp8", "--no-enable-chunked-prefill",
    ]  # fmt: skip
    flags = settings.flags({"speculative": f"{tmp_path}:3"}, "vllm")
    config = {"method": "draft_model", "num_speculative_tokens": 3, "model": str(tmp_path)}
    assert (flags[0], json.loads(flags[1])) == ("--speculative-config", config)
    assert settings.flags({"speculative": "none"}, "vllm") == []
    assert settings.flags({"max_num_seqs": "8"}, "llama.cpp") == ["--parallel", "8"]
    with pytest.raises(EngineError, match="no flag for chunked_prefill"):
        settings.flags({"chunked_prefill": "on"}, "llama.cpp")
    assert settings.flags({"speculative": "org/draft:3"}, "llama.cpp") == [
        "--spec-type", "draft-simple", "--model-draft", "org/draft", "--spec-draft-n-max", "3",
    ]  # fmt: skip


def test_drafts_by_name():
    assert settings.drafts("ngram") == ("ngram", "", 4)
    assert settings.drafts("ngram:2") == ("ngram", "", 2)
    assert settings.drafts("org/draft:6") == ("draft_model", "org/draft", 6)
    assert settings.drafts("eagle:org/head:3") == ("eagle", "org/head", 3)


def test_the_kind_of_a_head_is_what_its_files_say(tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}')
    assert settings.drafts(f"eagle:{head}:2") == ("eagle3", str(head), 2)
    (head / "config.json").write_text('{"architectures": ["EagleLlamaForCausalLM"]}')
    assert settings.drafts(f"eagle:{head}") == ("eagle", str(head), 4)


def test_settings_and_flags_as_keywords_of_the_library():
    assert offline.keywords({"max_num_seqs": "8", "prefix_caching": "on"}) == {
        "max_num_seqs": 8,
        "enable_prefix_caching": True,
    }
    flags = ("--max-model-len", "64", "--enforce-eager", "--dtype=half", "--no-enable-x", "--a-b")
    assert offline.engine_arguments(flags) == {
        "max_model_len": 64,
        "enforce_eager": True,
        "dtype": "half",
        "enable_x": False,
        "a_b": True,
    }
    with pytest.raises(EngineError, match="not JSON"):
        offline.engine_arguments(("--hf-overrides", "{half}"))
    with pytest.raises(EngineError, match="not a flag"):
        offline.engine_arguments(("serve",))


PAGE = """\
# HELP vllm:kv_cache_usage_perc used
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="0",model_name="m"}} {kv}
vllm:num_requests_waiting{{engine="0"}} {waiting}
vllm:num_requests_waiting{{engine="1"}} 1.0
vllm:prefix_cache_queries_total{{engine="0"}} {queries}
vllm:prefix_cache_hits_total{{engine="0"}} {hits}
vllm:spec_decode_num_drafts_total 10.0
vllm:spec_decode_num_draft_tokens_total{{a="}}"}} nonsense
"""


def test_metrics_are_what_grew_and_what_was_worst():
    watch = metrics.Watch()
    for kv, waiting, queries, hits in ((0.1, 0, 100, 50), (0.8, 6, 150, 70), (0.2, 0, 300, 100)):
        page = PAGE.format(kv=kv, waiting=waiting, queries=queries, hits=hits)
        watch.see(metrics.parse(page))
    found = watch.result()
    assert found.kv_cache_peak == 0.8
    assert found.queue_peak == 7
    assert found.prefix_hit_rate == pytest.approx(50 / 200)
    assert found.draft_acceptance is None


def test_accepted_drafts():
    watch = metrics.Watch()
    names = [n[0] for n in (metrics.DRAFTS, metrics.DRAFTED, metrics.ACCEPTED)]
    watch.see(dict(zip(names, (10.0, 40.0, 20.0), strict=True)))
    watch.see(dict(zip(names, (20.0, 80.0, 50.0), strict=True)))
    assert watch.result().draft_acceptance == pytest.approx(0.75)
    assert watch.result().tokens_per_step == pytest.approx(4.0)


def test_an_engine_without_metrics_says_nothing():
    assert metrics.Watch().result() is None


def row(setting, rate, meets, attained=1.0, model="m", failures=None, n_prompt=8):
    same = Rate(mean=rate, low=rate, high=rate)
    return Row(
        model=model,
        setting=setting,
        workload=Workload(name="fixed", prompt_tokens=n_prompt, output_tokens=8),
        load=Press(kind="closed", concurrency=4),
        load_name="4 users",
        n_requests=10,
        n_ok=10 - sum((failures or {}).values()),
        failures=failures or {},
        requests_per_s=same,
        output_tokens_per_s=same,
        total_tokens_per_s=same,
        attained=attained,
        meets=meets,
    )


def test_the_fastest_setting_within_the_target_is_taken():
    rows = [
        row({"max_num_seqs": "8"}, 100, True),
        row({"max_num_seqs": "64"}, 300, True),
        row({"max_num_seqs": "256"}, 900, False, attained=0.5),
    ]
    (found,) = choice.choose(rows, Target(ttft_s=0.5, tpot_s=0.03))
    assert found.setting == {"max_num_seqs": "64"}
    assert "first tokens within 500 ms and 30 ms per token for 99% of requests" in found.reason
    (found,) = choice.choose(rows, None)
    assert found.setting == {"max_num_seqs": "256"}


def test_no_setting_within_the_target_is_said_with_the_nearest():
    rows = [row({}, 100, False, attained=0.2), row({"max_num_seqs": "8"}, 50, False, attained=0.9)]
    (found,) = choice.choose(rows, Target(ttft_s=0.5))
    assert found.setting is None
    assert "max_num_seqs=8" in found.reason
    assert "90.0%" in found.reason


def test_every_model_has_its_own_choice():
    rows = [row({}, 1, True, model="a"), row({}, 2, True, model="b")]
    assert [c.model for c in choice.choose(rows, None)] == ["a", "b"]


def test_every_workload_has_its_own_choice():
    small, large = {"max_num_seqs": "8"}, {"max_num_seqs": "64"}
    rows = [
        row(small, 100, True),
        row(large, 300, True),
        row(small, 10, True, n_prompt=4096),
        row(large, 30, False, n_prompt=4096),
    ]
    found = choice.choose(rows, Target(ttft_s=0.5))
    assert [(c.workload, c.setting) for c in found] == [("8/8", large), ("4096/8", small)]
    assert "4096/8" in table.chosen(found[1])


@pytest.mark.parametrize(
    ("text", "value"), [("500ms", 0.5), ("2s", 2.0), ("0.25", 0.25), ("30 ms", 0.03)]
)
def test_times(text, value):
    assert arguments.seconds(text, "--ttft") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "0", "0ms", "5 minutes", "."])
def test_times_that_are_none(text):
    with pytest.raises(UsageError, match="--ttft takes a time"):
        arguments.seconds(text, "--ttft")


def test_loads():
    assert arguments.loads("1,8,1", "0.5", "constant", None, False) == [
        Load("closed", concurrency=1),
        Load("closed", concurrency=8),
        Load("constant", rate=0.5),
    ]
    assert arguments.loads(None, None, "poisson", None, True) == [Load("batch", concurrency=1)]
    for bad in ("0", "a", "1.5", ","):
        with pytest.raises(UsageError, match="--concurrency"):
            arguments.loads(bad, None, "poisson", None, False)
    for bad in ("0", "a", "inf", "nan", ","):
        with pytest.raises(UsageError, match="--rate"):
            arguments.loads(None, bad, "poisson", None, False)
    with pytest.raises(UsageError, match="--arrivals"):
        arguments.loads(None, "1", "sometimes", None, False)
    with pytest.raises(UsageError, match="needs a server"):
        arguments.loads(None, "1", "poisson", None, True)
