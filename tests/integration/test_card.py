"""Cards on real checkpoints: written with them, refreshed by scores, no part of their digest."""

import json
import shutil

import pytest
import yaml
from huggingface_hub import ModelCard

from quantkit import metrics
from quantkit.cli.main import main
from quantkit.export.manifest import Manifest
from quantkit.model.source import ModelSource
from quantkit.onepass.run import quantize
from quantkit.recipe import load

pytestmark = pytest.mark.usefixtures("demo_is_short")
RECIPES = ("fp8-dynamic", "gguf-q8_0")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Two checkpoints of the demo model, scored beside it."""
    out = tmp_path_factory.mktemp("cards")
    command = ["run", "demo", "-r", RECIPES[0], "-r", RECIPES[1], "--tasks", "python_docs"]
    assert main([*command, "--limit", "4", "--max-length", "64", "-o", str(out), "-q"]) == 0
    return out


@pytest.fixture
def out(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "out")


def text_of(folder):
    return (folder / "README.md").read_text()


def keys_of(folder):
    return yaml.safe_load(text_of(folder).split("---\n")[1])


def value_of(out, name):
    score = json.loads((out / "scores" / f"{name}.json").read_text())
    return score["scores"]["python_docs/perplexity"]["value"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_leaves_cards_with_its_scores(finished, name):
    folder = finished / name
    data = ModelCard.load(folder / "README.md").data
    assert data.license == "apache-2.0"
    assert data.language == ["en"]
    assert data.library_name == ("gguf" if name.startswith("gguf") else "transformers")
    assert not data.base_model  # the demo model is not on the hub
    values = {r.metric_name: r.metric_value for r in data.eval_results}
    assert values["perplexity"] == value_of(finished, name)
    assert metrics.shown("perplexity", value_of(finished, "source")) in text_of(folder)
    assert str(finished) not in text_of(folder)
    assert "README.md" not in Manifest.read(folder).files


@pytest.mark.parametrize("name", RECIPES)
def test_refreshing_changes_neither_digest_nor_verification(run_cli, out, name):
    folder = out / name
    digest, whole = Manifest.read(folder).digest, text_of(folder)
    assert run_cli(["verify", folder, "-q"]).code == 0
    refused = run_cli(["card", folder])
    assert refused.code == 3
    assert "--without-scores" in refused.stderr
    assert text_of(folder) == whole
    bare = run_cli(["card", folder, "--without-scores"])
    assert (bare.code, bare.stdout) == (0, f"{folder / 'README.md'} written\n")
    assert "model-index" not in keys_of(folder)
    assert run_cli(["card", folder, "--scores", out / "scores"]).code == 0
    assert text_of(folder) == whole
    told = run_cli(["card", folder, "--report", out / "report.json", "--json"])
    entry = {"path": str(folder / "README.md"), "changed": True, "tasks": ["python_docs"]}
    assert json.loads(told.stdout) == [entry]  # a report does not know lm-eval's version
    assert keys_of(folder)["model-index"]
    assert run_cli(["verify", folder, "-q"]).code == 0
    assert Manifest.read(folder).digest == digest


def test_what_a_person_wrote_outlives_everything(run_cli, out):
    folder = out / "fp8-dynamic"
    edited = text_of(folder).replace("license: apache-2.0", "license: mit")
    (folder / "README.md").write_text(f"{edited}\n## Contact\n\nAsk us.\n")
    assert run_cli(["card", folder, "--scores", out / "scores"]).code == 0
    assert keys_of(folder)["license"] == "mit"
    assert run_cli(["verify", folder, "-q"]).code == 0
    command = ["quantize", "demo", "-r", "fp8-dynamic", "-o", out, "--force", "-q"]
    assert run_cli(command).code == 0
    assert keys_of(folder)["license"] == "mit"
    assert text_of(folder).endswith("\n## Contact\n\nAsk us.\n")
    assert "No scores" in text_of(folder)


def test_scores_of_another_checkpoint_are_refused(run_cli, out):
    folder, before = out / "fp8-dynamic", text_of(out / "fp8-dynamic")
    path = out / "scores" / "fp8-dynamic.json"
    path.write_text(path.read_text().replace(Manifest.read(folder).digest, "0" * 64))
    found = run_cli(["card", out / "gguf-q8_0", folder, "--scores", out / "scores"])
    assert (found.code, found.stdout) == (3, "")
    assert "no score of this checkpoint" in found.stderr
    assert "fp8-dynamic (digest 000000000000" in found.stderr
    assert text_of(folder) == before


def test_what_is_no_checkpoint_is_refused(run_cli, tmp_path):
    found = run_cli(["card", tmp_path])
    assert (found.code, found.stdout) == (3, "")
    assert found.stderr.startswith(f"quantkit: {tmp_path} ")
    assert "config.json" in found.stderr
    assert found.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_card_stops_a_run_before_its_work(run_cli, out):
    folder = out / "fp8-dynamic"
    (folder / "README.md").write_text("<!-- quantkit:begin -->\nmine\n")
    digest = Manifest.read(folder).digest
    found = run_cli(["quantize", "demo", "-r", "fp8-dynamic", "-o", out, "--force", "-q"])
    assert found.code == 3
    assert "must have one line" in found.stderr
    assert text_of(folder) == "<!-- quantkit:begin -->\nmine\n"
    assert Manifest.read(folder).digest == digest


def test_the_sources_own_card_is_not_copied_and_its_place_not_told(tiny_model, tmp_path):
    model = tiny_model()
    (model / "README.md").write_text("---\nlicense: mit\n---\n# A card about the source\n")
    made = quantize(ModelSource.open(str(model)), [load("rtn-w4a16")], tmp_path / "o", "cpu")
    text = text_of(made[0].folder)
    assert "A card about the source" not in text
    assert keys_of(made[0].folder)["license"] == "mit"
    assert str(tmp_path) not in text
    assert f"# {model.name}, rtn-w4a16" in text
