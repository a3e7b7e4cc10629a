"""One record per family: what everything that asks for a family reads."""

import re
from pathlib import Path

import pytest
from gguf import MODEL_ARCH_NAMES

from quantkit import families
from quantkit.advise import kv
from quantkit.advise.families import completed, shapes
from quantkit.errors import SourceError
from quantkit.families import FAMILIES, Family, geometry
from quantkit.gguf.families import UNWRITTEN, family_of
from quantkit.plan.checkpoint import fused_with

PACKAGE = Path(families.__file__).parents[1]
CONFIG = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "sliding_window": 16,
}


def test_records_speak_of_architectures_that_llama_cpp_has():
    for name, family in FAMILIES.items():
        assert bool(family.llamacpp) == bool(family.architecture), name
        known = family.named_as or family.llamacpp
        assert not known or known in MODEL_ARCH_NAMES.values()


def test_the_width_of_heads_is_derived_in_one_place():
    for path in PACKAGE.rglob("*.py"):
        if path.name != "geometry.py":
            text = path.read_text().replace('"hidden_size"', "hidden_size")
            derived = "// heads" in text or 'hidden_size"] // config["num_att' in text
            assert not derived, path


@pytest.fixture
def toy(monkeypatch):
    """One record more, of a family that is unusual in everything a config leaves unsaid."""
    record = Family(
        head_norms="head",
        mlp_parts=("left", "right", "out"),
        experts="moe",
        n_kv_heads=2,
        head_dim=24,
        windows="every",
        window_every=2,
    )
    monkeypatch.setitem(FAMILIES, "toy", record)
    return record


def test_a_record_is_all_that_a_family_needs(toy):
    config = completed({**CONFIG, "model_type": "toy", "num_experts": 3})
    found = shapes(config, "toy")
    assert found["model.layers.0.self_attn.q_proj.weight"] == (4 * 24, 64)
    assert found["model.layers.0.self_attn.k_proj.weight"] == (2 * 24, 64)
    assert found["model.layers.3.moe.experts.2.right.weight"] == (96, 64)
    assert found["model.layers.0.self_attn.q_norm.weight"] == (24,)
    assert [layer.window for layer in kv.layers(config)] == [16, None, 16, None]
    assert kv.bytes_for(config, 10) == 4 * 2 * 2 * 24 * 10 * 2
    expert = "model.layers.0.moe.experts.0"
    assert fused_with(f"{expert}.left", {f"{expert}.left", f"{expert}.right"}) == [
        f"{expert}.left",
        f"{expert}.right",
    ]
    assert ("out", "right") in families.folds()
    assert geometry.head_dim({**CONFIG, "model_type": "toy"}) == 24
    with pytest.raises(SourceError, match="GGUF output does not support"):
        family_of({"model_type": "toy", "architectures": ["ToyForCausalLM"]}, Path("toy"))


@pytest.mark.parametrize("name", UNWRITTEN)
def test_an_moe_model_without_files_gets_its_reason(name):
    with pytest.raises(SourceError, match=re.escape(UNWRITTEN[name])) as refused:
        family_of({"architectures": [name]}, Path("it"))
    assert "quantise it in another format" in str(refused.value)


def test_a_family_without_a_record_has_the_usual_names():
    assert families.of({"model_type": "nobody"}) == Family()
    assert geometry.head_dim({**CONFIG, "model_type": "nobody"}) == 16
    assert geometry.n_kv_heads({**CONFIG, "multi_query": True}) == 1


def test_what_differs_between_layers_is_read_without_asking_for_it():
    class Heterogeneous:
        """As transformers has configs whose layers differ, Gemma 4's among them."""

        def __init__(self) -> None:
            self.model_type, self.hidden_size, self.num_attention_heads = "gemma4_text", 256, 4
            self.head_dim, self.num_key_value_heads = 64, 2

        def __getattribute__(self, key: str) -> object:
            if key == "head_dim":
                raise RuntimeError("'head_dim' is a per-layer attribute and may vary across layers")
            return super().__getattribute__(key)

    found = geometry.of_object(Heterogeneous())
    assert geometry.head_dim(found) == 64
    assert geometry.n_kv_heads(found) == 2
