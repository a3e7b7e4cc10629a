"""`quantkit recommend` and `quantize --fit`: what they print, and inputs that make no sense."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from configs import SMOLLM

from quantkit import resources
from quantkit.advise import recipe_choice, sizes
from quantkit.hardware import gpus
from quantkit.hardware.place import Place

PUBLISHED = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "report.json"
TWO = ["recommend", "8B", "--gpu", "L40S", "--count", "2", "--context", "16384", "--users", "40"]


@pytest.fixture
def config(tmp_path):
    """The path of a config.json, SmolLM2-135M's unless changed."""

    def write(**changed):
        path = tmp_path / "SmolLM2-135M" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(SMOLLM | changed))
        return path

    return write


def test_gpus_that_cannot_serve_say_what_would_help(run_cli):
    asked = ["recommend", "8B", "--context", "16384", "--users", "40", "--gpu"]
    some = run_cli([*asked, "L4,L40S"])
    assert some.code == 1
    assert "the choice" not in some.stdout
    for gpu in ("L4", "L40S"):
        _, _, below = some.stdout.partition(f"No format fits on {gpu}\n")
        assert "--context" in below.split("\n\n")[0]
    many = run_cli([*asked, "L4,L40S,RTX 4090,H200"])
    assert many.code == 0
    assert "No format fits on\n-  L4, L40S, RTX 4090\n" in many.stdout


def test_contexts_of_several_models_say_whose_they_are(run_cli):
    lines = run_cli(["recommend", "demo", "8B", "--gpu", "L4"]).stdout.splitlines()
    for name, context in (("demo", "1,024"), ("8B", "8,192")):
        assert any(f"{name}: Each user has a context of {context} tokens" in line for line in lines)


def test_one_answer_with_reason_runner_up_and_changes(run_cli):
    result = run_cli(TWO)
    assert (result.code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0] == "8B on 2 x L40S: fp8-dynamic+kv-fp8"
    for word in ("why", "speed", "memory", "quality", "runner-up", "changes it"):
        assert any(line.startswith(word) for line in lines), word
    assert "Left out" in lines
    assert "8B is only a size" in result.stdout
    assert "not a promise" in result.stdout


def test_the_answer_is_told_first_and_fits_a_narrow_terminal(run_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = run_cli([*TWO, "--gpu-hour", "1.5"]).stdout.split("\n\n")[1]
    assert "per 1M" in table
    assert max(map(len, table.splitlines())) <= 80


def test_json_is_alone_on_stdout_and_complete(run_cli):
    result = run_cli([*TWO, "--gpu-hour", "1.5", "--json"])
    assert (result.code, result.stderr) == (0, "")
    data = json.loads(result.stdout)
    answer = data["answers"][0]
    assert (answer["gpu"], answer["format"]) == ("L40S", "fp8-dynamic+kv-fp8")
    chosen = answer["candidates"][0]
    assert chosen["serves"]
    assert chosen["cost_per_million_tokens"]["typical"] > 0
    assert all(c["problem"] for c in answer["candidates"] if not c["serves"])


@pytest.mark.parametrize("size", ["7b", "7 B", "7000M", " 7.0B "])
def test_sizes_can_be_written_in_many_ways(run_cli, size):
    told = json.loads(run_cli(["recommend", size, "--gpu", "L4", "--json"]).stdout)
    expected = json.loads(run_cli(["recommend", "7B", "--gpu", "L4", "--json"]).stdout)
    assert told["model"]["parameters"] == expected["model"]["parameters"]
    assert told["answers"] == [{**expected["answers"][0], "notes": told["answers"][0]["notes"]}]


def test_many_gpus_are_columns(run_cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    result = run_cli(["recommend", "8B", "--gpu", "L4, H100 SXM,RTX2060,l4"])
    assert result.code == 0
    heading = next(line for line in result.stdout.splitlines() if "L4" in line)
    assert heading.split() == ["L4", "H100", "SXM"]
    assert "No format fits on" in result.stdout
    assert "RTX 2060" in result.stdout
    starred = [line for line in result.stdout.splitlines() if "*" in line and "choice" not in line]
    assert starred
    assert "* is the choice" in result.stdout


@pytest.mark.parametrize(("users", "has_gaps"), [("8", True), ("1", False)])
def test_empty_cells_are_explained(run_cli, users, has_gaps):
    question = ["recommend", "8B", "--gpu", "L4,L40S", "--context", "16384", "--users", users]
    assert ("Empty:" in run_cli(question).stdout) is has_gaps


def test_weights_of_a_small_model_are_not_zero(run_cli):
    result = run_cli(["recommend", "demo", "--gpu", "L4"])
    row = next(line for line in result.stdout.splitlines() if line.startswith(" gguf-bf16"))
    assert float(row.split()[1]) == pytest.approx(0.011, abs=0.001)


def test_weights_of_a_small_model_are_not_zero_on_its_page(run_cli, tmp_path):
    target = tmp_path / "page.html"
    run_cli(["recommend", "demo", "--gpu", "L4", "--html", target])
    text = target.read_text()
    assert ">0.011<" in text
    assert ">0.0<" not in text


def test_a_table_over_gpus_names_the_users_it_holds_for(run_cli):
    question = ["recommend", "8B", "--gpu", "L4,L40S", "--users"]
    for users, told in (("8", "8 users"), ("1", "1 user")):
        assert told in run_cli([*question, users]).stdout.splitlines()[0]
    both = run_cli(["recommend", "8B", "--gpu", "L4,L40S", "--objective", "throughput"])
    assert "all users together" in both.stdout.splitlines()[0]


def test_all_gpus_in_json_and_as_a_page(run_cli, tmp_path):
    target = tmp_path / "page.html"
    result = run_cli(["recommend", "8B", "--gpu", "all", "--json", "--html", target])
    data = json.loads(result.stdout)
    assert len(data["answers"]) >= 45
    assert "Type a GPU" in target.read_text()


def test_many_gpus_with_prices_are_sorted_by_cost(run_cli, tmp_path):
    names = [gpu.name for gpu in gpus.load() if gpu.memory_gb >= 40 and gpu.vendor == "nvidia"]
    prices = tmp_path / "prices.yaml"
    listed = "".join(f"  {name}: {n + 1}\n" for n, name in enumerate(names))
    prices.write_text(f"date: 2026-11-01\ncurrency: EUR\nper_hour:\n{listed}")
    result = run_cli(["recommend", "8B", "--gpu", ",".join(names), "--prices", prices])
    assert result.code == 0, result.stderr
    line = result.stdout.split("Cost per million")[1].splitlines()[1]
    costs = [float(text.replace(",", "")) for text in re.findall(r": ([\d.,]*\d)(?:,|$)", line)]
    assert len(costs) == len(names)
    assert costs == sorted(costs)


def test_a_gpu_that_is_not_listed_can_be_described(run_cli):
    described = ["--memory", "24GB", "--bandwidth", "1008GB/s"]
    bare = run_cli(["recommend", "8B", *described])
    assert bare.code == 0
    assert "compute rate of your GPU is not known" in bare.stdout
    full = run_cli(["recommend", "8B", *described, "--capability", "8.9", "--tflops", "165"])
    assert full.stdout.startswith("8B on your GPU: awq-gptq-w4a16")


def test_gb_on_a_card_are_gib_and_that_is_said(run_cli):
    described = ["recommend", "8B", "--bandwidth", "1008GB/s", "--json", "--memory"]
    printed, exact = (json.loads(run_cli([*described, m]).stdout) for m in ("24GB", "24GiB"))
    rows = [told["answers"][0]["candidates"] for told in (printed, exact)]
    assert rows[0] == rows[1]
    notes = [" ".join(told["answers"][0]["notes"]) for told in (printed, exact)]
    assert "24GB is taken as vendors print it, 24 GiB" in notes[0]
    assert "as vendors print it" not in notes[1]


def test_gpus_that_do_not_divide_are_shared_another_way(run_cli):
    result = run_cli(["recommend", "70B", "--gpu", "L40S", "--count", "3"])
    assert (result.code, result.stderr) == (0, "")
    line = next(line for line in result.stdout.splitlines() if line.startswith("GPUs "))
    assert "(1 left idle): 64 heads cannot be divided over 3 GPUs" in line
    assert "--tensor-parallel-size 2" in result.stdout
    forced = run_cli(["recommend", "70B", "--gpu", "L40S", "--pipeline-parallel", "3"])
    assert forced.stdout.startswith("70B on 3 x L40S: ")
    assert "as you asked" in forced.stdout
    assert "--pipeline-parallel-size 3" in forced.stdout
    assert "--tensor-parallel-size" not in forced.stdout


def test_auto_is_the_gpu_of_this_machine(run_cli, monkeypatch):
    found = gpus.find("L4")
    monkeypatch.setattr(gpus, "detect", lambda: found)
    assert run_cli(["recommend", "8B", "--gpu", "auto"]).stdout.startswith("8B on L4: ")


def test_a_report_replaces_published_figures(run_cli, config):
    model = config()
    asked = ["recommend", model, "--gpu", "L4", "--min-quality", "0.98"]
    result = run_cli([*asked, "--report", PUBLISHED])
    assert result.code == 0
    data = json.loads(run_cli([*asked, "--report", PUBLISHED, "--json"]).stdout)
    by_name = {c["format"]: c for c in data["answers"][0]["candidates"]}
    assert not by_name["int8-w8a8"]["quality"]["is_prior"]
    assert by_name["fp8-static"]["problem"].startswith("keeps 0.970")  # only in the report
    assert data["answers"][0]["format"] in ("int8-w8a8", "as it is", "gguf-bf16")
    assert by_name["fp8-dynamic"]["problem"].startswith("keeps 0.976")
    other = run_cli(["recommend", config(num_hidden_layers=29), "--gpu", "L4",
                     "--report", PUBLISHED])  # fmt: skip
    assert other.code == 3
    assert "is a report of another model" in other.stderr
    config().parent.rename(model.parents[1] / "renamed")
    renamed = run_cli(["recommend", model.parents[1] / "renamed" / "config.json", "--gpu", "L4",
                       "--report", PUBLISHED])  # fmt: skip
    assert (renamed.code, renamed.stderr.count("\n")) == (3, 1)
    assert "is a report of SmolLM2-135M" in renamed.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["8B"], 2, "--gpu NAME"),
        (["8B", "--gpu", "L4", "--users", "0"], 2, "--users: 0 is below 1"),
        (["8B", "--gpu", "L4", "--count", "0"], 2, "--count: 0 is below 1"),
        (["8B", "--gpu", "L4", "--context", "-5"], 2, "--context: -5 is below 1"),
        (["8B", "--gpu", "L4", "--memory", "24GB"], 2, "give either"),
        (["8B", "--memory", "24GB", "--objective", "latency"], 3, "--bandwidth"),
        (["8B", "--gpu", " , "], 2, "--gpu"),
        (["8B", "--gpu", "all", "--gpu-hour", "2"], 2, "price of one GPU"),
        (["8B", "--gpu", "RTX409"], 3, "Did you mean RTX 4090"),
        (["8B", "--gpu", "RTX409"], 3, "--memory 24GB --bandwidth"),
        (["8B", "--memory", "24", "--bandwidth", "1TB/s"], 2, "not a size of memory"),
        (["8B", "--memory", "24GB", "--bandwidth", "1TB"], 2, "not a bandwidth"),
        (["8B", "--memory", "24GB", "--bandwidth", "1TB/s", "--capability", "x"], 2, "capability"),
        (["8B", "--gpu", "L4", "--objective", "speed"], 2, "is not latency, throughput"),
        (["8B", "--gpu", "L4", "--min-quality", "98"], 2, "is not in 0.01 to 1"),
        (
            ["8B", "--gpu", "L4", "--context", "200000"],
            3,
            "up to 131,072 tokens",
        ),
        (["8B", "--gpu", "L4", "--context", "100", "--answer", "200"], 3, "does not fit"),
        (["8B", "--gpu", "L4", "--gpu-hour", "-1"], 2, "is below 0"),
        (["8B", "--gpu", "L4", "--tensor-parallel", "0"], 2, "--tensor-parallel: 0 is below 1"),
        (["8B", "--gpu", "L4", "--count", "2", "--tensor-parallel", "4"], 3, "--count 4"),
        (["8B", "--gpu", "L4", "--count", "2", "--expert-parallel"], 3, "--expert-parallel"),
        (["8B", "--gpu", "L4", "--report", str(PUBLISHED)], 3, "only a size"),
        (["7", "--gpu", "L4"], 3, "7 was not found"),
        (["/no/such/folder", "--gpu", "L4"], 3, "/no/such/folder was not found"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_questions_that_make_no_sense(run_cli, arguments, code, words):
    result = run_cli(["recommend", *arguments])
    assert (result.code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "mamba"),
        ({"hidden_size": "wide"}, "no usable hidden_size"),
        ({"num_attention_heads": None}, "num_attention_heads"),
    ],
)
def test_configs_that_say_nothing_usable(run_cli, config, changed, words):
    result = run_cli(["recommend", config(**changed), "--gpu", "L4"])
    assert (result.code, result.stdout) == (3, "")
    assert words in result.stderr
    assert result.stderr.count("\n") == 1


def test_nothing_fits_and_what_would(run_cli):
    result = run_cli(["recommend", "70B", "--gpu", "RTX 4090"])
    assert result.code == 1
    assert result.stdout.startswith("70B on RTX 4090: no format fits")
    assert "way 1" in result.stdout
    assert "--count 2" in result.stdout
    smaller = result.stdout.split("a smaller model: ")[1]
    assert run_cli(["recommend", smaller.split()[0], "--gpu", "RTX 4090"]).code == 0


@pytest.mark.parametrize(("text", "tokens"), [("16k", 16384), ("0.5k", 512), ("8192", 8192)])
def test_contexts_as_people_write_them(run_cli, text, tokens):
    result = run_cli(["recommend", "8B", "--gpu", "L40S", "--context", text, "--json"])
    assert json.loads(result.stdout)["serving"]["context"] == tokens


HEAVY = (
    "torch", "transformers", "numpy", "safetensors", "gguf.gguf_reader", "huggingface_hub",
    "datasets",
)  # fmt: skip


@pytest.mark.parametrize(
    "arguments",
    [
        ["recommend", "8B", "--gpu", "L40S", "--count", "2", "--users", "40"],
        ["recommend", "demo", "--gpu", "all"],
        ["recommend", "70B", "--gpu", "RTX 4090", "--json"],
        ["gpus"],
        ["gpus", "L40S"],
    ],
    ids=lambda words: " ".join(words[:2]),
)
def test_an_answer_loads_nothing_heavy_and_takes_no_time(arguments):
    program = (
        "import contextlib, io, resource, sys\n"
        "from quantkit.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    code = main({arguments!r})\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        f"heavy = [name for name in {HEAVY!r} if name in sys.modules]\n"
        "print(code, ','.join(heavy) or 'nothing', used.ru_utime + used.ru_stime)\n"
    )
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    code, heavy, seconds = answer.stdout.decode().split()
    assert (code in "01", heavy) == (True, "nothing")
    # Processor time, since machines that run tests are busy; about 0.6 s on a slow one, and twice
    # that for all GPUs.
    assert float(seconds) < 3


def test_the_rest_of_gguf_comes_when_it_is_asked_for():
    program = (
        "import sys\n"
        "from quantkit.gguf import names\n"
        "assert 'numpy' not in sys.modules\n"
        "import gguf\n"
        "assert gguf.GGUFReader.__module__ == 'gguf.gguf_reader'\n"
        "assert gguf.constants.Keys is gguf.Keys is names.Keys\n"
        "assert gguf.GGMLQuantizationType is names.GGMLQuantizationType\n"
        "assert not hasattr(gguf, 'no such name')\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_quantize_takes_the_recipe_that_fits(run_cli, tmp_path):
    out = tmp_path / "out"
    fit = ["quantize", "demo", "--fit", "RTX4090", "--context", "64", "--users", "40", "-o", out]
    fit += ["--calibration", "python-docs", "--samples", "4", "--length", "32"]
    plan = run_cli([*fit, "--dry-run"])
    assert plan.code == 0
    name = plan.stderr.split(" for RTX 4090: ")[0]
    assert name in resources.names("recipes")
    assert name in plan.stdout
    assert not out.exists()
    result = run_cli([*fit, "--quiet"])
    assert (result.code, result.stderr) == (0, "")
    assert [path.name for path in out.iterdir()] == [name]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["demo", "--fit", "RTX4090", "-r", "rtn-w4a16"], 2, "leave out --recipe"),
        (["demo", "-r", "rtn-w4a16", "--users", "4"], 2, "need --fit"),
        (["demo", "-r", "rtn-w4a16", "--context", "4"], 2, "need --fit"),
        (["demo", "-r", "rtn-w4a16", "--min-quality", "0.9"], 2, "need --fit"),
        (["demo", "-r", "rtn-w4a16", "--objective", "memory"], 2, "need --fit"),
        (["demo", "--fit", "RTX4090", "--objective", "speed"], 2, "is not latency"),
        (["demo", "--fit", "RTX4090", "--objective", "memory", "--mixed"], 2, "leave them out"),
        (["8B", "--fit", "RTX4090"], 3, "only a size"),
        (["demo", "--fit", "RTX409"], 3, "Did you mean"),
        (["demo", "--fit", "RTX4090", "--context", "5000"], 3, "up to 1,024 tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_fits_that_make_no_sense(run_cli, out, arguments, code, words):
    result = run_cli(["quantize", *arguments, "-o", out])
    assert (result.code, result.stdout) == (code, "")
    assert words in " ".join(result.stderr.split())
    assert not out.exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--objective", "memory"],
        ["--objective", "memory", "--min-quality", "0.9"],
        ["--objective", "throughput", "--count", "2"],
        ["--users", "8", "--min-quality", "0.995"],
    ],
    ids=" ".join,
)
def test_a_recipe_that_fits_is_the_quantised_one_that_recommend_would_choose(run_cli, out, more):
    plan = run_cli(["quantize", "demo", "--fit", "L4", "--dry-run", "-o", out, *more])
    assert plan.code == 0, plan.stderr
    answer = json.loads(run_cli(["recommend", "demo", "--gpu", "L4", "--json", *more]).stdout)
    ranked = [c["format"] for c in answer["answers"][0]["candidates"] if c["serves"]]
    made = [name for name in ranked if name not in ("unquantised", "gguf-bf16")]
    assert plan.stderr.startswith(f"{made[0]} for ")


def test_a_recipe_that_fits_is_chosen_by_the_scores_of_a_report(run_cli, out, tmp_path):
    model = tmp_path / "SmolLM2-135M"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SMOLLM))
    scored = Path(__file__).parents[2] / "reports" / "smollm2-135m" / "report.json"
    question = ["--min-quality", "0.98", "--objective", "memory", "--report", scored]
    answer = json.loads(run_cli(["recommend", model, "--gpu", "L4", "--json", *question]).stdout)
    ranked = [c["format"] for c in answer["answers"][0]["candidates"] if c["serves"]]
    made = [name for name in ranked if name not in ("unquantised", "gguf-bf16")]
    chosen = recipe_choice.choose(
        str(model), Place("L4", objective="memory", min_quality=0.98, report=scored)
    )
    assert chosen.recipe == made[0]
    assert chosen.recipe != recipe_choice.choose(str(model), Place("L4", objective="memory")).recipe


def test_a_model_that_fits_nowhere_says_what_would_help(run_cli, config, out):
    model = config(hidden_size=9216, intermediate_size=36864, num_hidden_layers=40).parent
    result = run_cli(["quantize", model, "--fit", "RTX 4060", "-o", out])
    assert result.code == 3
    assert "no recipe makes" in result.stderr
    assert "What would: " in result.stderr


def test_the_answer_comes_with_the_plan_of_its_server(run_cli):
    result = run_cli(["recommend", "8B", "--gpu", "L40S", "--count", "2", "--users", "40"])
    command, _, why = result.stdout.partition("\nServe it\n")[2].partition("\nWhy, for ")
    chosen = result.stdout.split("\n")[0].partition(": ")[2]
    assert command.startswith(f"vllm serve out/{chosen} ")
    assert "--tensor-parallel-size 2" in command
    assert "--max-num-seqs 40" in command
    assert why.startswith("2 x L40S and chat traffic")
    told = json.loads(run_cli(["recommend", "8B", "--gpu", "L40S", "--json"]).stdout)
    assert told["serving"]["command"][:2] == ["vllm", "serve"]


def test_files_of_a_deployment(run_cli, tmp_path):
    command = ["recommend", "8B", "--gpu", "L40S", "--emit", "compose", "-o", tmp_path]
    assert run_cli(command).code == 0
    assert "vllm" in (tmp_path / "compose.yaml").read_text()
    refused = run_cli(
        ["recommend", "70B", "--gpu", "RTX4090", "--emit", "compose", "-o", tmp_path / "other"]
    )
    assert refused.code == 3
    assert "no format fits" in refused.stderr
    several = run_cli(["recommend", "8B", "--gpu", "L40S,L4", "--emit", "compose"])
    assert several.code == 2


@pytest.mark.parametrize(
    ("more", "code", "words"),
    [
        (["--emit", "helm"], 2, "'helm' is not compose, k8s or grafana"),
        (["--emit", "compose"], 3, "compose.yaml exists already"),
        (["--emit", "k8s", "--image", "a b"], 3, "NAME:TAG"),
        (["--profile", "chatt"], 2, "did you mean chat?"),
        (["--objective", "sped"], 2, "'sped' is not latency"),
    ],
)
def test_names_and_targets_are_checked_before_a_model_is_looked_up(
    run_cli, tmp_path, monkeypatch, more, code, words
):
    from quantkit.advise import shape

    def slow(model):
        raise AssertionError("looked up before it was known that there is a use for it")

    monkeypatch.setattr(shape, "of", slow)
    (tmp_path / "compose.yaml").write_text("mine")
    result = run_cli(["recommend", "8B", "--gpu", "L40S", *more, "-o", tmp_path])
    assert result.code == code
    assert words in result.stderr


def test_a_draft_model_takes_its_memory(run_cli, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(sizes.config_of(sizes.parse("8B"))[1]))
    command = ["recommend", "8B", "--gpu", "L40S", "--json"]
    alone, beside = (
        json.loads(run_cli([*command, *more]).stdout) for more in ([], ["--draft", tmp_path])
    )

    def room(told):
        rows = told["answers"][0]["candidates"]
        return {row["format"]: row["memory"]["users"] for row in rows if row["memory"]}

    assert room(alone)
    assert all(room(beside)[name] < n or not n for name, n in room(alone).items())
    assert "--speculative-config" in beside["serving"]["command"]


def test_emitted_files_find_a_checkpoint_that_is_yet_to_be_made(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["recommend", "8B", "--gpu", "RTX4090", "--users", "4", "--emit", "compose"]
    assert run_cli([*command, "-o", "deploy"]).code == 0
    engine = yaml.safe_load(Path("deploy/compose.yaml").read_text())["services"]["engine"]
    assert engine["volumes"][0]["source"].startswith(f"{tmp_path}/out/")
    # An alert that would ring in normal operation is none.
    answer = json.loads(run_cli([*command[:6], "--json"]).stdout)["answers"][0]
    chosen = next(c for c in answer["candidates"] if c["format"] == answer["format"])
    rules = yaml.safe_load(Path("deploy/alerts.yaml").read_text())["groups"][0]["rules"]
    slow = next(rule for rule in rules if rule["alert"] == "FirstTokenIsSlow")
    assert float(slow["expr"].rpartition("> ")[2]) > chosen["speed"]["first_token_seconds"]["high"]


def test_nobody_takes_a_board_in_place_of_a_card(run_cli):
    result = run_cli(["recommend", "70B", "--gpu", "RTX4090", "--users", "4"])
    (way,) = [line for line in result.stdout.splitlines() if "a larger GPU" in line]
    assert "Jetson" not in way


def test_with_a_page_the_terminal_has_one_line_per_gpu(run_cli, tmp_path):
    result = run_cli(["recommend", "8B", "--gpu", "L4,L40S", "--html", tmp_path / "page.html"])
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines() if line.strip()]
    assert (result.code, [line[0] for line in lines[:4]]) == (0, ["8B", "L4", "L40S", "Assumed"])
    assert all("a whole answer in" in told for _, told in lines[1:3])
    assert any("8,192 tokens" in told for _, told in lines[4:])
    assert "written" in result.stderr
