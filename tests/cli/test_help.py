"""Help, versions, wrong usage, and commands that need no model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import quantkit
from quantkit import resources

COMMANDS = [
    "demo", "run", "quantize", "convert", "verify", "score",
    "sensitivity", "report", "compare", "sweep", "gate",
    "bench", "card", "push", "serve", "draft", "calibrate", "recipes", "recommend", "gpus",
    "doctor",
]  # fmt: skip
HEAVY = ["torch", "transformers", "pydantic", "yaml", "rich", "numpy"]
RECIPES = resources.names("recipes")


def loaded_by(arguments: list[str]) -> tuple[int, list[str]]:
    """Exit code of a command line, and the heavy packages that it imported."""
    program = (
        "import contextlib, io, json, sys\n"
        "from quantkit.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()):\n"
        f"    code = main({arguments!r})\n"
        f"print(json.dumps([code, [name for name in {HEAVY!r} if name in sys.modules]]))\n"
    )
    command = [sys.executable, "-c", program]
    code, loaded = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return code, loaded


@pytest.mark.parametrize("group", [[], ["sweep"], ["calibrate"], ["recipes"]])
def test_no_description_of_a_command_is_cut(run_cli, group, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    listed = run_cli([*group, "--help"]).stdout.partition("Commands:\n")[2]
    assert listed
    assert "..." not in listed


@pytest.mark.parametrize("columns", [54, 61, 72, 80])
def test_no_help_breaks_an_option_or_a_name_at_a_hyphen(run_cli, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    for command in [[], *([name] for name in COMMANDS), ["calibrate", "build"], ["sweep", "run"]]:
        lines = run_cli([*command, "--help"]).stdout.splitlines()
        assert len(lines) > 5
        assert [line for line in lines if line.endswith("-")] == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["quantize", "--help"]])
def test_help_loads_nothing_heavy(arguments):
    assert loaded_by(arguments) == (0, [])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["quantize", "demo", "-r", "rtn-w8a16"], marks=pytest.mark.slow),
        ["calibrate", "build", "rows.txt", "--model", "demo", "--samples", "2", "--length", "16"],
    ],
    ids=["quantize", "calibrate"],
)
def test_commands_load_no_package_that_they_do_not_use(tmp_path, command):
    (tmp_path / "rows.txt").write_text("All work and no play makes Jack a dull boy.\n" * 50)
    made = "import sys\nfrom quantkit.cli.main import main\n"
    made += f"main({[*command, '-o', 'out', '--quiet']!r})\n"
    heavy = ("scipy", "sklearn", "lm_eval", "torch._dynamo")
    made += f"print([name for name in {heavy} if name in sys.modules])\n"
    line = [sys.executable, "-c", made]
    run = subprocess.run(line, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert (tmp_path / "out").is_dir()
    assert run.stdout.splitlines()[-1] == "[]"


def test_what_was_left_out_while_transformers_loaded_is_there_for_whoever_needs_it():
    made = """
import sys
from pathlib import Path
import quantkit
from quantkit.model import lean_import
lean_import.load()
import importlib.metadata, torch, transformers
from transformers import masking_utils
from transformers.utils import import_utils
with lean_import._stand_in(torch):
    from torch._dynamo.utils import is_compile_supported  # as torchvision.ops does
from quantkit.model.skeleton import skeleton
model = skeleton(Path(quantkit.__file__).parent / "_data" / "demo-model")
print(model.get_output_embeddings().weight.is_meta)
print(float(torch.nn.init.ones_(torch.zeros(2)).sum()))
print("torch._dynamo" in sys.modules, "sympy" in sys.modules)
with masking_utils.TransformGetItemToIndex():
    pass
print(torch._dynamo.is_compiling(), torch.compiler.disable(len)([1]))
print(is_compile_supported("cpu") == torch._dynamo.utils.is_compile_supported("cpu"))
print("numpy" in importlib.metadata.packages_distributions())
print(import_utils.is_accelerate_available(), import_utils.is_flash_attn_2_available())
"""
    line = [sys.executable, "-c", made]
    run = subprocess.run(line, capture_output=True, text=True, check=True)
    lines = ["True", "2.0", "False False", "False 1", "True", "True", "True False"]
    assert run.stdout.splitlines() == lines


def test_transformers_loads_lean_where_it_was_asked_about_a_package_before():
    made = """
from transformers.utils import import_utils
assert import_utils.is_scipy_available()
from quantkit.model import lean_import
lean_import.load()
import transformers.modeling_utils
import scipy.stats
assert scipy._lib
"""
    subprocess.run([sys.executable, "-c", made], check=True)


def test_checking_recipes_needs_no_torch():
    code, loaded = loaded_by(["recipes", "show", RECIPES[0]])
    assert code == 0
    assert not {"torch", "transformers", "numpy"} & set(loaded)


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_root_help_lists_every_command(run_cli, flag):
    result = run_cli([flag])
    assert (result.code, result.stderr) == (0, "")
    commands, codes = result.stdout.split("Commands:")[1].strip().split("\n\n")
    listed = [line.split()[0] for line in commands.split("\n")]
    assert sorted(listed) == sorted(COMMANDS)
    assert codes.split()[:4] == ["Exit", "codes:", "0", "done,"]


@pytest.mark.parametrize(
    "command",
    [[name] for name in COMMANDS]
    + [["recipes", "show"], ["recipes", "validate"], ["sweep", "run"], ["sweep", "status"]],
)
def test_help_of_every_command(run_cli, command):
    result = run_cli([*command, "--help"])
    assert (result.code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"Usage: quantkit {' '.join(command)} ")
    assert "Options:" in result.stdout


def test_version(run_cli):
    assert run_cli(["--version"]) == (0, f"quantkit {quantkit.__version__}\n", "")


def test_module_is_the_command():
    command = [sys.executable, "-m", "quantkit", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == f"quantkit {quantkit.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["quantise"], "quantise"),
        (["--verbos"], "--verbos"),
        (["quantize"], "MODEL"),
        (["quantize", "demo"], "--recipe"),
        (["quantize", "demo", "-r"], "-r"),
        (["quantize", "demo", "-r", "rtn-w4a16", "--bits", "4"], "--bits"),
        (["quantize", "demo", "extra", "-r", "rtn-w4a16"], "extra"),
        (["score", "demo", "--limit", "0"], "--limit"),
        (["score", "demo", "--limit", "many"], "--limit"),
        (["score", "demo", "--tasks", " , "], "name at least one"),
        (["recipes", "sho"], "sho"),
        (["recipes", "show"], "NAME"),
        (["recipes", "validate"], "FILE"),
        (["doctor", "me"], "me"),
        (["verify"], "DIR"),
        (["report"], "SCORES"),
        (["gate"], "REPORT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage(run_cli, arguments, words):
    result = run_cli(arguments)
    assert (result.code, result.stdout) == (2, "")
    assert words in result.stderr.split("quantkit: ")[1]
    assert "Traceback" not in result.stderr


def test_no_arguments_show_the_help(run_cli):
    result = run_cli([])
    assert result.code == 2
    assert "Usage: quantkit" in result.stdout + result.stderr


def test_recipes(run_cli):
    result = run_cli(["recipes"])
    assert (result.code, result.stderr) == (0, "")
    table, _, additions = result.stdout.strip().partition("\n\n")
    assert [line.split()[0] for line in table.strip().split("\n")[2:]] == RECIPES
    assert additions.startswith("+kv-fp8, appended to any recipe except GGUF, keeps")


def test_recipes_json(run_cli):
    result = run_cli(["recipes", "--json"])
    assert (result.code, result.stderr) == (0, "")
    listed = json.loads(result.stdout)
    assert [recipe["name"] for recipe in listed] == RECIPES
    assert all(r["summary"] and (r.get("gguf") or r["weights"]["num_bits"]) for r in listed)


@pytest.mark.parametrize("name", RECIPES)
def test_show(run_cli, name):
    text = run_cli(["recipes", "show", name])
    data = run_cli(["recipes", "show", name, "--json"])
    assert (text.code, text.stderr, data.code, data.stderr) == (0, "", 0, "")
    recipe = json.loads(data.stdout)
    assert recipe["name"] == name
    assert text.stdout.startswith(resources.find("recipes", name).read_text().rstrip())
    assert text.stdout.rstrip().endswith(f"digest {recipe['digest'][:16]}")


def test_show_with_an_addition(run_cli):
    plain = run_cli(["recipes", "show", "fp8-dynamic"]).stdout
    added = run_cli(["recipes", "show", "fp8-dynamic+kv-fp8"]).stdout
    assert "append +kv-fp8" in plain
    assert "needs no data" in plain
    assert "KV cache: FP8" in added
    assert "needs calibration" in added
    data = run_cli(["recipes", "show", "fp8-dynamic+kv-fp8", "--json"])
    assert json.loads(data.stdout)["kv_cache"]["strategy"] == "tensor"


def test_show_unknown(run_cli):
    result = run_cli(["recipes", "show", "fp8-dynamics"])
    assert (result.code, result.stdout) == (3, "")
    assert "Did you mean fp8-dynamic" in result.stderr


def test_validate(run_cli):
    files = [resources.find("recipes", name) for name in RECIPES]
    result = run_cli(["recipes", "validate", *files])
    assert (result.code, result.stderr) == (0, "")
    lines = result.stdout.strip().split("\n")
    assert [line.split()[:2] for line in lines] == [["ok", str(file)] for file in files]


def test_validate_lists_every_bad_file(run_cli, tmp_path):
    good = resources.find("recipes", RECIPES[0])
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("metod: rtn\nweights: {num_bits: 9}\n")
    two.write_text("[")
    result = run_cli(["recipes", "validate", one, good, two, tmp_path / "none.yaml"])
    assert result.code == 3
    assert result.stdout.split()[:2] == ["ok", str(good)]
    for words in (
        f"{one} is not a valid recipe:",
        "metod: unknown key; did you mean method?",
        "weights.num_bits: 9 bits",
        f"{two} is not valid YAML",
        f"cannot read {tmp_path / 'none.yaml'}",
    ):
        assert words in result.stderr


def test_doctor(run_cli):
    text = run_cli(["doctor"])
    data = run_cli(["doctor", "--json"])
    assert (text.code, text.stderr, data.code, data.stderr) == (0, "", 0, "")
    findings = json.loads(data.stdout)
    assert findings["versions"]["quantkit"] == quantkit.__version__
    assert "cores" in findings["devices"]["cpu"]
    assert findings["environment"]["HF_HUB_OFFLINE"] == "1"
    engines = {"vllm", "llama-server", "xllamacpp", "llmcompressor"}
    assert set(findings["optional engines"]) == engines
    for section, lines in findings.items():
        assert f"{section}\n" in text.stdout
        assert all(f"\n{name}  " in text.stdout for name in lines)


def test_quantize_json_is_alone_on_stdout(run_cli, tiny_model, tmp_path):
    command = ["quantize", tiny_model(), "-r", "rtn-w4a16", "-r", "fp8-dynamic", "-o", tmp_path]
    result = run_cli([*command, "--json"])
    assert result.code == 0
    written = json.loads(result.stdout)
    assert [Path(one["path"]).name for one in written] == ["rtn-w4a16", "fp8-dynamic"]
    assert all(Path(one["path"], "quantkit.json").is_file() for one in written)
    assert "linear layers" in result.stderr


def test_dry_run_shows_the_plan_and_writes_nothing(run_cli, tmp_path):
    out = tmp_path / "out"
    arguments = ["quantize", "demo", "-r", "rtn-w4a16", "-r", "fp8-block", "-o", out, "--dry-run"]
    result = run_cli([*arguments, "-q"])
    assert result.code == 0
    assert "39.3%" in result.stdout
    plan = json.loads(run_cli([*arguments, "-q", "--json"]).stdout)
    assert [c["n_layers"] for c in plan["checkpoints"]] == [42, 42]
    assert plan["checkpoints"][0]["size_bytes"] == 4537504
    assert not out.exists()


REFUSED = [
    ("bnb-nf4", "NF4 is a run-time format of bitsandbytes"),
    ("NF4", "use nvfp4-a16 or awq-gptq-w4a16"),
    ("BitsAndBytes", "bitsandbytes quantises while loading"),
    ("INT4", "use awq-gptq-w4a16, or rtn-w4a16"),
    ("exl3", "ExLlamaV3"),
    ("Hqq", "HQQ quantises while loading"),
]


def test_recipes_that_nobody_should_want_are_refused_with_the_reason(run_cli):
    for name, words in REFUSED:
        result = run_cli(["recipes", "show", name])
        assert result.code == 3
        assert words in result.stderr


def test_options_named_like_their_metavar_spell_out_their_flag():
    """Typer before 0.28 takes such a metavar for the flag, and makes --model --MODEL."""
    import importlib
    import inspect
    import pkgutil

    from typer.models import OptionInfo

    import quantkit.cli

    bare, n_options = [], 0
    for module in pkgutil.iter_modules(quantkit.cli.__path__, "quantkit.cli."):
        functions = inspect.getmembers(importlib.import_module(module.name), inspect.isfunction)
        for _, function in functions:
            for name, hint in function.__annotations__.items():
                for option in getattr(hint, "__metadata__", ()):
                    if isinstance(option, OptionInfo):
                        n_options += 1
                        flags = [option.default, *(option.param_decls or ())]
                        bare_name = not any(str(flag).startswith("-") for flag in flags)
                        if (option.metavar or "").lower() == name and bare_name:
                            bare.append(f"{module.name}.{function.__name__}: --{name}")
    assert n_options > 100
    assert not bare
