"""Architectures: a config and its stored parameters are inspected once."""

import json

from quantkit.model import architecture
from quantkit.model.architecture import Architecture
from quantkit.model.source import ModelSource
from quantkit.onepass.run import quantize
from quantkit.recipe import load


def test_a_source_and_its_checkpoints_are_inspected_once(tiny_model, tmp_path, monkeypatch):
    built = []
    skeleton = architecture.skeleton

    def counted(folder, *rest):
        built.append(folder)
        return skeleton(folder, *rest)

    monkeypatch.setattr(architecture, "skeleton", counted)
    monkeypatch.setattr(architecture, "_KNOWN", {})
    source = tiny_model()
    known = Architecture.of(source)
    recipes = [load("fp8-dynamic"), load("fp8-tensor")]
    made = quantize(ModelSource.open(str(source)), recipes, tmp_path / "out", "cpu")
    assert [Architecture.of(each.folder) for each in made] == [known, known]
    assert built == [source]
    assert known.linears


def test_another_config_or_other_tensors_are_inspected_again(tiny_model, monkeypatch):
    monkeypatch.setattr(architecture, "_KNOWN", {})
    source = tiny_model()
    known = Architecture.of(source)
    config = json.loads((source / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (source / "config.json").write_text(json.dumps(config))
    assert len(Architecture.of(source).linears) > len(known.linears)
    for number in range(2 * architecture.MOST_KNOWN):
        config["max_position_embeddings"] = 512 + number
        (source / "config.json").write_text(json.dumps(config))
        Architecture.of(source)
    assert len(architecture._KNOWN) == architecture.MOST_KNOWN
    Architecture.of(source, trust_remote_code=True)  # code may change: never kept
    assert len(architecture._KNOWN) == architecture.MOST_KNOWN
