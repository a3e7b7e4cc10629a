"""Questions that teams ask beyond one dense model on one GPU: each part of an answer is right."""

import datetime
import json
import re
import shlex

import pytest

from quantkit.advise import offload, shape, speculation
from quantkit.advise.efficiency import TYPICAL, of
from quantkit.advise.offload import Host
from quantkit.advise.question import Limits
from quantkit.advise.speed import Case, Load, prompt_seconds
from quantkit.errors import AdviceError, CheckpointError, UsageError
from quantkit.hardware import gpus, prices
from quantkit.serving import adapters, device, questions
from quantkit.serving.questions import Drafting, Query, answer

GIB = 1 << 30


def ask(models="8B", gpu="L40S", **more):
    names = (models,) if isinstance(models, str) else models
    return answer(Query(names, (gpus.find(gpu),), **more))


def chosen(found):
    return found.found[0].chosen


# --- drafts


def with_draft(acceptance=None, gpu="H200", **more):
    return ask("70B", gpu, drafting=Drafting("8B", acceptance), count=2, **more)


def test_a_draft_that_is_accepted_makes_answers_faster_and_says_by_how_much():
    alone, unknown, known = ask("70B", "H200", count=2), with_draft(), with_draft("0.8")
    assert chosen(unknown).speed.each.typical == pytest.approx(chosen(alone).speed.each.typical)
    assert any("--acceptance" in note for note in unknown.notes)
    assert chosen(known).speed.gain > 1.2
    faster = chosen(known).speed.each.typical / chosen(alone).speed.each.typical
    assert faster == pytest.approx(chosen(known).speed.gain, rel=0.25)
    config = json.loads(known.plan.value("--speculative-config"))
    assert config["num_speculative_tokens"] == chosen(known).speed.drafted
    assert config["model"] == "meta-llama/Llama-3.1-8B"  # which exists; 8B does not


def test_more_accepted_tokens_are_never_slower_and_many_users_gain_less():
    rates = ["0.3", "0.5", "0.7", "0.9"]
    gains = [chosen(with_draft(rate)).speed.gain for rate in rates]
    assert gains == sorted(gains)
    assert chosen(with_draft("0.7", users=48, context=2048)).speed.gain < gains[2]


def test_tokens_a_step_are_those_of_chances_that_do_not_depend_on_each_other():
    tokens = speculation.Acceptance.of_rate(0.5).tokens
    assert tokens[:3] == pytest.approx((1.5, 1.75, 1.875))


def test_what_draft_measured_is_taken_and_the_better_way_of_drafting(tmp_path):
    def way(rate):
        tokens = speculation.Acceptance.of_rate(rate).tokens
        return {"acceptance": rate, "steps": [{"tokens": n} for n in tokens]}

    path = tmp_path / "draft.json"
    path.write_text(json.dumps({"ways": {"greedy": way(0.376), "sampled": way(0.869)}}))
    found = with_draft(str(path))
    config = json.loads(found.plan.value("--speculative-config"))
    assert config["draft_sample_method"] == "probabilistic"
    greedy = ask("70B", "H200", count=2,
                 drafting=Drafting("8B", str(path), sampling="greedy"))  # fmt: skip
    assert chosen(greedy).speed.gain < chosen(found).speed.gain
    for bad, error in (("1.5", UsageError), (str(tmp_path / "none"), UsageError)):
        with pytest.raises(error, match="share"):
            with_draft(bad)
    path.write_text("{}")
    with pytest.raises(AdviceError, match="quantkit draft"):
        with_draft(str(path))


def test_the_cache_of_a_draft_is_in_fp8_where_the_targets_is():
    small = questions._draft(
        Query(("8B",), (), drafting=Drafting("1B")), questions._Model("8B", shape.of("8B"))
    )
    assert small.extras(1, 8).token_bytes * 2 == small.extras(1, 16).token_bytes
    found = ask("8B", "L40S", drafting=Drafting("1B", "0.7"))
    by_name = {c.format.name: c.fit for c in found.found[0].candidates if c.fit}
    full, half = by_name["fp8-dynamic"], by_name["fp8-dynamic+kv-fp8"]
    assert half.draft_user_bytes * 2 == full.draft_user_bytes > 0


def test_a_draft_for_llama_cpp_is_a_file_that_a_command_makes():
    found = ask("70B", "M3 Ultra", drafting=Drafting("8B", "0.7"))
    path = found.plan.value("--model-draft")
    folder, name = path.rsplit("/", 1)
    assert found.make_draft[2] == "meta-llama/Llama-3.1-8B"
    assert folder == f"{found.make_draft[-1]}/{found.make_draft[4]}"
    assert name.startswith("Llama-3.1-8B-")


def test_a_stand_in_is_named_where_it_matters():
    with pytest.raises(CheckpointError, match=r"like Mistral-7B-v0\.3.*32768 tokens"):
        ask("70B", "H200", drafting=Drafting("7B"))
    with pytest.raises(AdviceError, match=r"like Llama-3\.1-8B"):
        ask("8B", context=1 << 20)


@pytest.mark.parametrize(
    ("text", "method"), [("ngram", "ngram"), ("suffix", "suffix"), ("eagle3", "eagle3"),
                         ("medusa", "medusa")],
)  # fmt: skip
def test_every_kind_of_draft_has_its_flags(tmp_path, text, method):
    if text in ("eagle3", "medusa"):
        (tmp_path / "config.json").write_text("{}")
        (tmp_path / "model.safetensors").write_bytes(bytes(1 << 20))
        text = f"{text}:{tmp_path}"
    found = ask("8B", "L40S", drafting=Drafting(text, "0.6"))
    config = json.loads(found.plan.value("--speculative-config"))
    assert config["method"] == method
    assert ("model" in config) == (method in ("eagle3", "medusa"))
    assert chosen(found).speed.gain > 1


def test_a_model_without_layers_for_drafting_says_so():
    with pytest.raises(CheckpointError, match="no layers for drafting"):
        ask("8B", drafting=Drafting("mtp"))


# --- adapters


@pytest.fixture
def hundred(tmp_path):
    for number in range(100):
        folder = tmp_path / "loras" / f"team-{number:03}"
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text('{"r": 16}')
        (folder / "adapter_model.safetensors").write_bytes(b"")
    return tmp_path / "loras"


def test_a_folder_of_adapters_has_few_slots_and_its_own_memory(hundred):
    loras = adapters.parse([str(hundred)], is_gguf=False)
    assert (len(loras), loras.slots, loras.on_host) == (100, 8, 100)
    found = ask("8B", "L40S", adapters=loras)
    fit = chosen(found).fit
    all_of_them = adapters.slot_bytes(shape.of("8B"), loras) * 100
    assert 0 < fit.adapter_bytes == all_of_them * 8 // 100
    assert fit.users > 20
    assert found.plan.value("--max-loras") == "8"
    assert found.plan.value("--max-cpu-loras") == "100"
    assert len(next(f.words for f in found.plan.flags if f.name == "--lora-modules")) == 101
    asked = adapters.parse([str(hundred)], is_gguf=False, slots=4, on_host=50)
    assert (asked.slots, asked.on_host) == (4, 50)
    with pytest.raises(CheckpointError, match="--max-cpu-loras 3"):
        adapters.parse([str(hundred)], is_gguf=False, slots=4, on_host=3)
    (hundred / "nothing").mkdir()
    with pytest.raises(CheckpointError, match="holds no adapters"):
        adapters.parse([str(hundred / "nothing")], is_gguf=False)


# --- a part in the host's memory


@pytest.mark.parametrize("memory", ["64GB", "24GB"])
def test_layers_that_do_not_fit_lie_in_the_hosts_memory(memory):
    host = Host(89.6, gpus.printed_bytes(memory))
    found = ask("70B", "RTX 4090", host=host)
    one = chosen(found)
    split = one.size.offload
    assert 0 < split.on_gpu < split.n_layers
    assert int(found.plan.value("--n-gpu-layers")) == split.on_gpu + 1
    fit = one.fit
    assert fit.weight_bytes + fit.overhead_bytes + fit.user_bytes <= fit.usable_bytes
    assert fit.host_bytes + 2 * GIB <= host.memory_bytes
    total = sum(c.fit.weight_bytes + c.fit.host_bytes for c in (one,))
    assert total > shape.of("70B").n_parameters * 4 / 8


def test_more_layers_on_the_gpu_are_faster_and_a_faster_host_is():
    speeds = [
        chosen(ask("70B", gpu, host=Host(rate, 200 * GIB))).speed.each.typical
        for gpu, rate in (("RTX 4080", 89.6), ("RTX 4090", 89.6), ("RTX 4090", 180.0))
    ]
    assert speeds == sorted(speeds)
    # Two thirds of 35 GiB from 90 GB/s: between one and five tokens per second.
    assert 1 < speeds[1] < 5


def test_nothing_is_taken_off_a_bandwidth_that_was_timed():
    printed, timed = (
        chosen(ask("70B", "RTX 4090", host=Host(90.0, 200 * GIB, is_measured=is_measured)))
        for is_measured in (False, True)
    )
    share = of("llama.cpp", "cpu")[TYPICAL].bandwidth
    ratio = printed.speed.step.typical / timed.speed.step.typical
    assert 1.1 < ratio < 1 / share  # the GPU's part stays as it is


def test_without_the_hosts_memory_it_is_a_way_out():
    found = ask("70B", "RTX 4090").found[0]
    assert found.chosen is None
    way = next(r for r in found.remedies if r.change.startswith("--host-memory"))
    assert "--n-gpu-layers" in way.says
    assert not offload.is_possible(gpus.find("M3 Max"))
    assert ask("405B", "M3 Max").found[0].chosen is None
    changes = [r.change for r in ask("405B", "M3 Max").found[0].remedies]
    assert not any("--host-memory" in change for change in changes)


# --- limits


def test_what_is_too_slow_is_left_out_with_its_figure():
    free = ask("8B", "L4", context=32768, users=4)
    limit = chosen(free).speed.first_token.typical / 2
    strict = ask("8B", "L4", context=32768, users=4, limits=Limits(ttft=limit))
    for candidate in strict.found[0].candidates:
        if candidate.serves:
            assert candidate.speed.first_token.typical <= limit
        elif candidate.lacks == "speed":
            assert re.search("later than|slower than", candidate.problem)
    none = ask("8B", "L4", limits=Limits(tpot=1e-6)).found[0]
    assert none.chosen is None
    assert "too slow" in none.reason
    way = next(r for r in none.remedies if r.change.startswith("--tpot"))
    seconds = float(way.change.split()[1].removesuffix("ms")) / 1000
    assert ask("8B", "L4", limits=Limits(tpot=seconds)).found[0].chosen is not None


def test_the_closest_format_to_a_missed_limit_is_the_one_named():
    found = ask("8B", "L4", context=16384, limits=Limits(ttft=1.0)).found[0]
    assert found.chosen is None
    slow = [c for c in found.candidates if c.lacks == "speed" and c.quality.recovery >= 0.97]
    nearest = min(slow, key=lambda c: c.speed.first_token.typical)
    as_fast = {c.format.name for c in slow if c.speed.first_token == nearest.speed.first_token}
    assert any(name in found.reason for name in as_fast)
    assert nearest.problem in found.reason
    way = next(r for r in found.remedies if r.change.startswith("--ttft"))
    assert way.format in as_fast
    allowed = float(way.change.split()[1].removesuffix("ms")) / 1000
    assert allowed == pytest.approx(nearest.speed.first_token.typical, abs=0.001)
    assert way.change not in way.says  # both stand side by side
    assert ask("8B", "L4", context=16384, limits=Limits(ttft=allowed)).found[0].chosen is not None


# --- prefixes


def test_a_shared_prefix_is_computed_and_kept_once():
    plain = ask("8B", "L40S", users=20, context=4096)
    shared = ask("8B", "L40S", users=20, context=4096, shared_prefix=2000)
    before = chosen(plain)
    after = next(c for c in shared.found[0].candidates if c.format == before.format)
    assert after.speed.first_token.typical < 0.6 * before.speed.first_token.typical
    assert after.load.cached == 2000 // 16 * 16
    assert after.load.hit_rate == after.load.cached / (4096 - 1024)
    assert after.fit.shared_bytes + after.fit.user_bytes == before.fit.user_bytes
    assert after.fit.users > 1.5 * before.fit.users
    with pytest.raises(AdviceError, match="does not fit into prompts"):
        ask("8B", context=4096, shared_prefix=4000)


def test_a_cached_prompt_still_attends_to_all_of_it():
    of_8b = ask("8B").found[0]
    case = Case(
        of_8b.question.catalogue.shape,
        of_8b.question.catalogue.work(of_8b.chosen.format),
        of_8b.chosen.format,
        of_8b.gpu,
    )
    end = of("vllm", "nvidia")[TYPICAL]
    whole, tail = prompt_seconds(case, 8192, end)[0], prompt_seconds(case, 8192, end, 6144)[0]
    assert prompt_seconds(case, 2048, end)[0] < tail < whole
    assert Load(8192, 2048, 1, 6144).cached == 6128  # the last token is computed in any case


# --- costs


def test_prompts_and_answers_have_prices_that_add_up(tmp_path):
    found = ask("8B", "L40S", gpu_hour=1.2, users=16, context=4096)
    one = chosen(found)
    load = one.load
    per_answer = one.costs.answer.typical + one.costs.prompt.typical * load.prompt / load.answer
    assert per_answer == pytest.approx(one.cost.typical, rel=0.02)
    assert one.costs.prompt.typical < one.costs.answer.typical
    path = tmp_path / "prices.yaml"
    path.write_text("date: 2026-11-01\ncurrency: USD\nper_hour:\n  l40s: 1.2\n  H200: 3.5\n")
    known = prices.read(path)
    assert (known.date, known.of(gpus.find("L40S"))) == (datetime.date(2026, 11, 1), 1.2)
    asked = Query(("8B",), (gpus.find("L40S"), gpus.find("H200"), gpus.find("T4")), prices=known)
    many = answer(asked)
    costs = [one.chosen.cost and one.chosen.cost.typical for one in many.found]
    assert costs[0] == pytest.approx(chosen(ask("8B", gpu_hour=1.2)).cost.typical)
    assert costs[2] is None
    assert any("2026-11-01" in note for note in many.notes)
    assert any("price for T4" in note for note in many.notes)
    path.write_text("per_hour: {L40S: 1}\n")
    with pytest.raises(AdviceError, match="date"):
        prices.read(path)


# --- devices


def test_memory_alone_tells_what_fits():
    found = answer(Query(("7B",), (gpus.describe("8GB", None),)))
    one = chosen(found)
    assert one.speed is None
    serving = [c for c in found.found[0].candidates if c.serves]
    assert one.quality.recovery == max(c.quality.recovery for c in serving)
    notes = " ".join(found.found[0].notes)
    assert "--bandwidth" in notes
    assert "--capability" in notes


def test_a_cpu_is_a_device_too():
    found = answer(Query(("8B",), (device.cpu(64 * GIB),)))
    assert chosen(found).format.engine == "llama.cpp"
    assert "bandwidth of 2 x DDR5-5600 is assumed" in " ".join(found.found[0].notes)
    assert 2 < chosen(found).speed.each.typical < 25


@pytest.mark.parametrize("name", ["Raspberry Pi 5", "CPU 12 x DDR5-4800"])
def test_many_users_of_a_cpu_are_promised_little_more_than_one(name):
    """Its compute rate is not known, and cores have little to spare while memory is read."""
    found = ask(("1B",), name, objective="throughput").found[0]
    alone = {c.format.name: c for c in ask(("1B",), name).found[0].candidates}
    for candidate in found.candidates:
        if candidate.speed is not None:
            one = alone[candidate.format.name].speed
            assert candidate.load.users > 10
            assert candidate.speed.total.typical < 2.1 * one.total.typical
            assert candidate.speed.total.high < 4.1 * one.total.high


def test_boards_are_larger_boards_and_not_several():
    remedies = ask("8B", "Jetson Orin Nano 8GB", context=16384, users=2).found[0].remedies
    changes = [remedy.change for remedy in remedies]
    assert "--gpu 'Jetson Orin NX 16GB'" in changes
    assert not any(change.startswith("--count") for change in changes)
    (larger,) = (r for r in ask("70B", "T4").found[0].remedies if r.change.startswith("--gpu"))
    assert "Jetson" not in larger.change
    assert "Spark" not in larger.change


def test_a_board_is_served_by_llama_cpp_alone():
    found = ask(("1B",), "Raspberry Pi 5").found[0]
    assert {c.format.engine for c in found.candidates if c.serves} == {"llama.cpp"}
    vllm = [c for c in found.candidates if c.format.engine == "vllm"]
    assert vllm
    assert all(c.problem.startswith("vLLM") for c in vllm)


# --- several models


def test_models_side_by_side_claim_nothing_without_reports():
    found = ask(("70B", "32B", "14B"), "RTX 4090")
    served = {one.question.catalogue.shape.label: one.chosen for one in found.found}
    assert served["70B"] is None
    assert served["32B"]
    assert served["14B"]
    assert found.across.best is None
    assert found.across.why_not == "no reports were given"
    assert found.plan is None
    smaller = [r for r in found.found[0].remedies if "as the model" in r.change]
    assert [r.change.split()[0] for r in smaller] == ["32B"]


def test_commands_name_the_folder_of_a_config(tmp_path):
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(shape.of("8B").config)))
    found = ask(str(folder / "config.json"))
    assert found.make[2] == str(folder)
    assert shlex.join(found.make).count("'") == 2
