"""One computation of memory and room: what `recommend` prints is what the plan below it prints."""

import json
import math
import re
from dataclasses import replace

import pytest

from quantkit.advise import document, memory, page, shape
from quantkit.advise.formats import considered
from quantkit.advise.question import Catalogue, Question
from quantkit.advise.recommendation import recommend
from quantkit.hardware import gpus
from quantkit.serving import questions
from quantkit.serving.plan import make

NAMES = ("fp8-dynamic", "fp8-dynamic+kv-fp8", "int8-w8a8", "awq-gptq-w4a16", "gguf-q4_k_m")


def printed(text, pattern):
    """What one pattern finds in an output, exactly once."""
    (found,) = re.findall(pattern, re.sub(r"\s+", " ", text))
    return found


@pytest.mark.parametrize("model", ["1B", "8B", "70B"])
@pytest.mark.parametrize("gpu", ["A100", "L40S", "M3 Ultra"])
@pytest.mark.parametrize(
    ("context", "users", "objective"),
    [
        (8192, None, "latency"),
        (16384, 4, "latency"),
        (4096, None, "throughput"),
        (2048, 40, "memory"),
    ],
)
def test_the_plan_has_the_memory_that_the_recommendation_has(model, gpu, context, users, objective):
    of_model = shape.of(model)
    among = tuple(form for form in considered() if form.name in NAMES)
    question = Question(
        Catalogue(of_model, among), context=context, users=users, objective=objective, count=2
        if gpu == "L40S" else 1,
    )  # fmt: skip
    found = recommend(question, gpus.find(gpu), in_depth=False)
    if found.chosen is None:
        pytest.skip("nothing serves it")
    for candidate in (c for c in found.candidates if c.serves):
        asked = questions.Query((model,), (gpus.find(gpu),))
        of_it = questions._Model(model, of_model)
        plan = questions._plan(replace(found, chosen=candidate), of_it, asked, None)
        assert plan.size.fit == candidate.fit
        # The same from scratch, as `quantkit serve` works it out.
        again = make(plan.target, plan.demand)
        assert again.size == plan.size
        told = document.to_json([found])["answers"][0]["candidates"]
        parts = next(c["memory"] for c in told if c["format"] == candidate.format.name)
        serving = plan.to_json()
        assert serving["kv_tokens"] == parts["kv_tokens"]
        assert serving["full_contexts"] == parts["users"]
        assert serving["memory"] == parts


@pytest.mark.parametrize(
    "asked",
    [
        ["8B", "--gpu", "L40S", "--count", "2", "--context", "16384", "--users", "40"],
        ["70B", "--gpu", "A100"],
        ["8B", "--gpu", "H100", "--objective", "throughput", "--context", "4096"],
        ["8B", "--gpu", "RTX 4090", "--users", "3", "--draft", "1B"],
    ],
    ids=" ".join,
)
def test_every_number_that_both_print_is_the_same(run_cli, asked):
    text = run_cli(["recommend", *asked]).stdout
    above, below = text.split("\nServe it\n")
    where = " on each GPU" if "--count" in asked else ""
    room_for = rf"{where}: room for ([\d,]+) users?, ([\d,]+) tokens"
    found = printed(above, rf"memory (.*?) per user[^,]*, of ([\d.]+ GiB){room_for}")
    parts, usable, room, tokens = found
    sizes = re.findall(r"[\d.]+ [MG]iB", parts)
    why = printed(
        below, r"--gpu-memory-utilization [\d.]+ ([\d.]+ GiB) of (?:each|the) GPU: (.*?) KV cache"
    )
    assert why[0] == usable
    # Weights, what lies beside them, and the engine; then a user here, the whole cache there.
    assert re.findall(r"[\d.]+ [MG]iB", why[1])[:-1] == sizes[:-1]
    assert printed(below, r"the cache holds about ([\d,]+) tokens") == tokens
    chosen = printed(above, r"^\S+ on [^:]*: (\S+)")
    cells = printed(above, rf"─ .*?{re.escape(chosen)} (.*?) Typical").split()
    assert cells[len(sizes) - 2] == room  # behind the weights, and what lies beside them
    assert float(cells[0]) == pytest.approx(float(sizes[0].split()[0]), abs=0.051)
    served = json.loads(run_cli(["recommend", *asked, "--json"]).stdout)
    best = next(c for c in served["answers"][0]["candidates"] if c["format"] == chosen)
    assert served["serving"]["memory"] == best["memory"]
    assert f"{served['serving']['kv_tokens']:,}" == tokens
    assert f"{served['serving']['full_contexts']:,}" == room


def adapter(folder, rank=16):
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def test_a_draft_and_adapters_are_named_as_parts_of_memory(run_cli, tmp_path):
    lora = ["--lora", f"mine={adapter(tmp_path / 'lora')}"]
    asked = ["recommend", "8B", "--gpu", "L40S", "--draft", "1B", *lora]
    plain = json.loads(run_cli([*asked[:4], "--json"]).stdout)["answers"][0]["candidates"][0]
    told = json.loads(run_cli([*asked, "--json"]).stdout)
    found = next(c for c in told["answers"][0]["candidates"] if c["format"] == plain["format"])[
        "memory"
    ]
    assert found["model_bytes"] == plain["memory"]["weight_bytes"]
    assert found["draft_bytes"] > 1 << 30
    assert 0 < found["adapter_bytes"] < 1 << 30
    assert 0 < found["draft_user_bytes"] < found["user_bytes"]
    together = found["model_bytes"] + found["draft_bytes"] + found["adapter_bytes"]
    assert found["weight_bytes"] == together
    text = re.sub(r"\s+", " ", run_cli(asked).stdout)
    assert "for the draft model," in text
    assert "for LoRA adapters," in text
    assert " format GiB draft LoRA room " in text
    assert re.search(
        r"GiB weights, [\d.]+ GiB draft model, [\d.]+ [MG]iB LoRA adapters, about", text
    )
    out = tmp_path / "page.html"
    assert run_cli([*asked, "--html", str(out)]).code == 0
    html = out.read_text()
    assert "Draft model" in html
    assert "LoRA adapters" in html
    assert "for the draft model" in html


def test_a_page_without_either_has_no_such_column():
    found = recommend(Question(Catalogue(shape.of("8B"))), gpus.find("L40S"), in_depth=False)
    assert "Draft model" not in page.render([found])


def test_what_does_not_fit_names_its_parts():
    extras = memory.Extras(draft_bytes=3 << 30, adapter_bytes=1 << 30)
    fit = memory.fits(
        shape.of("8B"), None, gpus.find("RTX 3060"), serving=memory.Serving(extras=extras)
    )
    assert "the draft model 3.0 GiB, the LoRA adapters 1.0 GiB and the engine" in fit.reason


@pytest.mark.parametrize(
    ("name", "billions"),
    [("8x7B", 46.7), ("30B-A3B", 30.5), ("gpt-oss-120b", 116.8), ("Qwen3-235B-A22B", 235.1)],
)
def test_mixtures_have_the_names_that_people_use(name, billions):
    found = shape.of(name)
    n_weights = sum(math.prod(tensor.shape) for tensor in found.tensors)
    assert n_weights / 1e9 == pytest.approx(billions, abs=0.05)
    assert found.routers
    assert found.note
