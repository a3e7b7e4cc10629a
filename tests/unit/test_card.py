"""Model cards: valid for the hub, safe against names, kind to what people write."""

import dataclasses
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from quantkit.errors import CheckpointError, ScoreError
from quantkit.export import card, card_facts, card_text, front_matter
from quantkit.export.card_facts import Figure, Scored
from quantkit.export.manifest import (
    Calibration,
    Described,
    Layer,
    Manifest,
    Source,
    StoredFile,
    describe_file,
    describe_folder,
)
from quantkit.model import description
from quantkit.recipe import Recipe, load
from quantkit.report import card as report_card
from quantkit.report.comparison import Report
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Score, Scorecard, Settings

HOSTILE = [
    "a: b #c",
    "- *x | `y` [z](http://evil.example)",
    "</td><script>alert(1)</script>",
    "one\n<!-- quantkit:end -->\n---\nlicense: mit",
    "'\"; rm -rf . #",
    "no",
    "{a: [",
    "日本\u2028語\x00",
]
FIGURES = (
    Figure("wikitext", "perplexity", 21.75, 0.25, 1000, False, 20.5, 0.2, "6.10% higher: a loss"),
    Figure("mmlu", "acc", 0.30125, 0.0125, 400, True, 0.31, 0.0126),
)
SCORED = Scored(FIGURES, 100, None, 2048, "float32", "2026-01-02T00:00:00+00:00", "0.4.13")


def manifest_of(kind="gptq-w4a16", name="org/Model-7B", revision="abc123", said=None, **more):
    loaded = load(kind)
    values = {
        "name": loaded.name,
        "format": "gguf" if kind.startswith("gguf") else "compressed-tensors",
        "source": Source(
            name=name,
            revision=revision,
            fingerprint="f" * 64,
            size_bytes=16_000,
            dtype="BF16",
            described=said,
        ),
        "recipe": loaded,
        "recipe_digest": loaded.digest,
        "n_parameters": 8_000,
        "size_bytes": 4_000,
        "bits_per_weight": 4.0,
        "quantized_bits_per_weight": 4.25,
        "layers": {
            f"model.layers.{i}.q_proj": Layer(relative_error=i / 100, output_error=i / 1000)
            for i in range(8)
        },
        "files": {"model.safetensors": StoredFile(sha256="0" * 64, size_bytes=4_000)},
        "versions": {"quantkit": "1.0", "torch": "2.13.0"},
        "device": "cpu",
        "seconds": 12.0,
        "peak_host_bytes": 1,
        "peak_device_bytes": None,
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Manifest(**values | more)


def card_of(manifest, scored=(), old=None, has_chat=False):
    ours = card_facts.metadata(manifest, scored)
    return card.compose(old, ours, card_text.body(manifest, scored, has_chat), "README.md")


def keys_of(text):
    return yaml.safe_load(front_matter.split(text)[0])


def test_the_hub_reads_the_metadata(tmp_path):
    said = Described(license="other", license_name="mine", license_link="LICENSE", languages=["no"])
    (tmp_path / "README.md").write_text(card_of(manifest_of(said=said), [SCORED]))
    data = ModelCard.load(tmp_path / "README.md").data
    assert data.base_model == "org/Model-7B"
    assert data.base_model_relation == "quantized"
    assert (data.license, data.license_name) == ("other", "mine")
    assert data.license_link == "https://huggingface.co/org/Model-7B/blob/main/LICENSE"
    assert data.language == ["no"]
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation")
    assert data.tags == ["quantized", "compressed-tensors", "w4a16", "int4", "gptq", "vllm"]
    values = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert values == {("wikitext", "perplexity"): 21.75, ("mmlu", "accuracy"): 0.30125}
    assert data.eval_results[0].dataset_name == "wikitext (first 100 documents)"


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("fp8-dynamic", ["w8a8", "fp8", "rtn"]),
        ("int8-w8a8", ["w8a8", "int8", "smoothquant", "gptq"]),
        ("awq-gptq-w4a16+kv-fp8", ["w4a16", "int4", "awq", "gptq", "fp8-kv-cache"]),
    ],
)
def test_tags_say_format_method_and_engine(recipe, expected):
    tags = card_facts.tags(manifest_of(recipe))
    assert tags == ["quantized", "compressed-tensors", *expected, "vllm"]


def test_gguf_is_for_llama_cpp():
    files = {"Model-Q8_0.gguf": StoredFile(sha256="0" * 64, size_bytes=1)}
    text = card_of(manifest_of("gguf-q8_0", files=files))
    assert keys_of(text)["library_name"] == "gguf"
    assert keys_of(text)["tags"] == ["quantized", "gguf", "q8_0", "llama.cpp"]
    assert "llama-server -m Model-Q8_0.gguf\n" in text
    assert "vllm serve" not in text


def test_a_file_by_gptq_says_so():
    text = card_of(manifest_of("gguf-best-q3_k_m"))
    assert keys_of(text)["tags"] == ["quantized", "gguf", "q3_k_m", "gptq", "llama.cpp"]
    assert "GPTQ chose the levels" in text


def test_no_scores_no_model_index():
    text = card_of(manifest_of())
    assert "model-index" not in keys_of(text)
    assert "Quality was not measured" in text


def test_scores_stand_beside_the_sources_with_intervals():
    text = card_of(manifest_of(), [SCORED])
    row = next(line for line in text.splitlines() if line.startswith("| wikitext/perplexity"))
    assert "20.500 (20.108 to 20.892)" in row
    assert "21.750 (21.260 to 22.240)" in row
    assert "+6.10%" in row
    assert "| 30.1% (27.7 to 32.6) | -0.9 points | higher | 400 questions |" in text
    assert "- wikitext/perplexity: 6.10% higher: a loss" in text
    assert "the first 100 documents" in text
    assert "Quality was not measured" not in text


def test_no_share_lies_beyond_all_questions():
    figures = tuple(dataclasses.replace(f, stderr=0.2) for f in FIGURES)
    text = card_of(manifest_of(), [dataclasses.replace(SCORED, figures=figures)])
    assert "30.1% (0.0 to 69.3)" in text


def test_the_recipe_in_the_card_makes_the_same_checkpoint():
    manifest = manifest_of("awq-gptq-w4a16+kv-fp8")
    block = re.search(r"```yaml\n(.*?)```", card_of(manifest), re.S).group(1)
    assert Recipe.validated(yaml.safe_load(block), "card").digest == manifest.recipe_digest


def test_a_card_shows_the_digest_that_recipes_show_prints(run_cli):
    printed = run_cli(["recipes", "show", "gptq-w4a16"]).stdout.split("digest ")[1].strip()
    resolved = manifest_of(asked_digest=load("gptq-w4a16").digest, recipe_digest="e" * 64)
    row = next(line for line in card_text.body(resolved).splitlines() if "| recipe |" in line)
    assert f"digest `{printed}`" in row
    assert "e" * 16 in row


def test_only_an_fp8_cache_asks_for_its_flag():
    assert "--kv-cache-dtype fp8\n" in card_of(manifest_of("fp8-static+kv-fp8"))
    assert "--kv-cache-dtype" not in card_of(manifest_of("fp8-static"))


def test_worst_layers_come_first():
    text = card_of(manifest_of())
    shown = re.findall(r"\| model\.layers\.(\d)\.q", text)
    assert shown == ["7", "6", "5", "4", "3"]


@pytest.mark.parametrize("name", HOSTILE)
def test_names_are_text_and_nothing_else(tmp_path, name):
    recipe = load("fp8-dynamic").model_copy(update={"summary": name})
    data = Calibration(name=f"/srv/{name}", digest="d" * 64, n_samples=4, length=8)
    said = Described(license=name, license_name=name, languages=[name])
    manifest = manifest_of(
        "fp8-dynamic",
        name=f"/srv/models/{name}",
        revision=None,
        said=said,
        recipe=recipe,
        calibration=data,
        notes=[name],
        layers={name: Layer(relative_error=0.1)},
    )
    figures = tuple(dataclasses.replace(f, task=name, verdict=name) for f in FIGURES)
    scored = dataclasses.replace(SCORED, figures=figures)
    text = card_of(manifest, [scored])
    keys = keys_of(text)
    assert keys["license"] == name
    assert keys["language"] == [name]
    assert "base_model" not in keys
    (tmp_path / "README.md").write_text(text)
    ModelCard.load(tmp_path / "README.md")
    prose = re.sub(r"^(```+)\w*\n.*?^\1$", "", front_matter.split(text)[1], flags=re.S | re.M)
    for forbidden in ("<script", "[z](", "<!-- quantkit:end -->\n---", "://evil"):
        assert forbidden not in prose
    assert "/srv" not in prose
    # Nobody's text ends our part early: refreshing gives the same card.
    assert card_of(manifest, [scored], old=text) == text
    command = re.search(r"--served-model-name (\S+)", text).group(1)
    assert re.fullmatch(r"[A-Za-z0-9._-]+", command)


def test_an_unknown_licence_is_said_and_not_invented():
    for said in (None, Described()):
        text = card_of(manifest_of(said=said))
        assert not {"license", "license_name", "license_link"} & keys_of(text).keys()
        assert "Unknown: the source does not state one" in text


def test_a_licence_file_is_linked_where_it_lies():
    said = Described(license="other", license_link="LICENSE.txt")
    files = {"LICENSE.txt": StoredFile(sha256="0" * 64, size_bytes=1)}
    assert card_facts.license_link(manifest_of(said=said, files=files)) == "LICENSE.txt"
    local = manifest_of(name="/models/m", revision=None, said=said)
    assert card_facts.license_link(local) is None  # it leads nowhere from here


def test_a_folder_of_this_machine_is_no_base_model():
    text = card_of(manifest_of(name="/data/secret-project/Model-7B", revision=None))
    assert not {"base_model", "base_model_relation"} & keys_of(text).keys()
    assert "secret-project" not in text
    assert "# Model-7B, gptq-w4a16" in text
    named = Described(hub_id="org/Real-7B")
    text = card_of(manifest_of(name="/data/x", revision=None, said=named))
    assert keys_of(text)["base_model"] == "org/Real-7B"


SOURCE_CARD = """---
license: other
license_name: qwen
license_link: https://example.org/terms
language: [no, en]
model_name: org/Own-Name
base_model: org/Ancestor
---
# Title
"""


def test_the_source_tells_its_licence_itself(tmp_path):
    (tmp_path / "README.md").write_text(SOURCE_CARD)
    assert describe_folder(tmp_path, {"license": "mit"}) == Described(
        license="other",
        license_name="qwen",
        license_link="https://example.org/terms",
        languages=["no", "en"],
        hub_id="org/Own-Name",
    )
    (tmp_path / "README.md").unlink()
    assert describe_folder(tmp_path, {"license": "mit"}) == Described(license="mit")
    assert describe_folder(tmp_path, {"license": {"a": 1}}) == Described()
    metadata = {"general.license": "mit", "general.languages": ["de"], "general.name": "x"}
    assert describe_file(metadata) == Described(license="mit", languages=["de"])


@pytest.mark.parametrize(
    "text", ["", "# no metadata", "---\n{a: [\n---\n", "---\n- a\n---\n", "---\n" + "[" * 5000]
)
def test_a_broken_source_card_costs_nothing(tmp_path, text):
    (tmp_path / "README.md").write_text(text)
    assert description.read(tmp_path) == {}


def test_what_people_write_stays():
    manifest = manifest_of(said=Described(license="mit"))
    text = card_of(manifest)
    edited = text.replace("license: mit", "license: apache-2.0  # we asked\nthumbnail: a.png")
    edited = edited.replace("pipeline_tag: text-generation\n", "")
    edited = edited.replace(card.BEGIN, f"# Ours\n\nAbove.\n\n{card.BEGIN}") + "\nBelow.\r\nend"
    again = card_of(manifest, [SCORED], old=edited)
    keys = keys_of(again)
    assert (keys["license"], keys["thumbnail"]) == ("apache-2.0", "a.png")
    assert "pipeline_tag" not in keys
    assert keys["model-index"][0]["results"]
    assert "# we asked" in again
    assert "# Ours\n\nAbove.\n\n<!-- quantkit:begin -->" in again
    assert again.endswith("<!-- quantkit:end -->\n\nBelow.\r\nend")
    assert again.count(card.BEGIN) == 1
    # Without scores our results go, and theirs stay as they are.
    assert card_of(manifest, old=again).count("model-index") == 0
    assert keys_of(card_of(manifest, old=again))["license"] == "apache-2.0"


def test_results_of_a_person_are_kept():
    text = card_of(manifest_of(), [SCORED]).replace("value: 21.75", "value: 19.5")
    again = card_of(manifest_of(), [SCORED], old=text)
    results = keys_of(again)["model-index"][0]["results"]
    assert results[0]["metrics"][0]["value"] == 19.5


def test_a_card_that_is_wholly_a_persons_gets_our_part_at_its_end():
    mine = "---\nlicense: mit\ntags: [mine, vllm]\nlanguage: no\n---\n# My model\n\nText.\n"
    text = card_of(manifest_of(), old=mine)
    keys = keys_of(text.replace("language: no", "language: 'no'"))
    assert (keys["license"], keys["language"]) == ("mit", "no")
    assert keys["tags"][:2] == ["mine", "vllm"]
    assert "gptq" in keys["tags"]
    assert "# My model\n\nText.\n\n<!-- quantkit:begin -->" in text
    assert card_of(manifest_of(), old=text) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"a\n{card.BEGIN}\nb\n", "must have one line"),
        (f"{card.END}\n{card.BEGIN}\n", "must have one line"),
        (f"{card.BEGIN}\n{card.END}\n" * 2, "must have one line"),
        ("---\na: [\n---\n", "not valid YAML"),
        ("---\n- a\n---\n", "`key: value` lines"),
    ],
)
def test_a_damaged_card_is_refused_and_left(tmp_path, text, said):
    (tmp_path / "README.md").write_text(text)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        card.refresh(tmp_path, manifest_of())
    assert (tmp_path / "README.md").read_text() == text


def scorecard(name, recipe, digest, value, **settings):
    defaults = {"tasks": {"wikitext": "2"}, "limit": None, "num_fewshot": None}
    return Evaluation(
        Scorecard(
            name=name,
            recipe=recipe,
            format="safetensors",
            size_bytes=1,
            bits_per_weight=4,
            digest=digest,
            source_fingerprint="f" * 64,
            scores={
                "wikitext/perplexity": Score(value=value, stderr=0.1, n=10),
                "wikitext/kl_p75": Score(value=0.1, stderr=None, n=10),
                "wikitext/kl_mean": Score(value=0.1, stderr=None, n=10),
                "other/acc": Score(value=0.1, stderr=None, n=10),
            },
            settings=Settings(**defaults | {"max_length": 128, "seed": 0} | settings),
            versions={"lm_eval": "0.4.13"},
            device="served at http://10.0.0.1:8000",
            seconds=1,
            created="2026-01-02T00:00:00+00:00",
        ),
        [],
    )


def test_scores_are_taken_by_digest_and_put_beside_the_source():
    manifest = manifest_of()
    given = [
        scorecard("m", None, "f" * 64, 20.0),
        scorecard("gptq-w4a16", "gptq-w4a16", manifest.digest, 21.0),
        scorecard("fp8-dynamic", "fp8-dynamic", "e" * 64, 20.1),
    ]
    (run,) = report_card.scored(manifest, given, None)
    figure, distance = run.figures
    assert (distance.metric, distance.source) == ("kl_mean", None)
    assert (figure.task, figure.metric, figure.value, figure.source) == (
        "wikitext",
        "perplexity",
        21.0,
        20.0,
    )
    assert "10.0.0.1" not in card_of(manifest, [run])
    document = Report.of(given).document
    (told,) = report_card.scored(manifest, given, document)
    assert told.figures == run.figures
    # A source that was scored otherwise says nothing here.
    other = [scorecard("m", None, "f" * 64, 20.0, limit=5), given[1]]
    assert report_card.scored(manifest, other, None)[0].figures[0].source is None


def test_scores_of_other_files_are_refused():
    manifest = manifest_of()
    stale = [scorecard("gptq-w4a16", "gptq-w4a16", "a" * 64, 21.0)]
    with pytest.raises(
        ScoreError, match=r"no score of this checkpoint.*scored were gptq-w4a16 \(digest"
    ):
        report_card.scored(manifest, stale, None)
    source = scorecard("m", None, "f" * 64, 20.0)
    with pytest.raises(ScoreError, match="no score of this checkpoint"):
        report_card.scored(manifest, [], Report.of([source, *stale]).document)


def test_what_a_score_was_measured_on_has_a_unit():
    text = card_of(manifest_of(), [SCORED])
    rows = [line for line in text.splitlines() if line.startswith(("| wikitext/", "| mmlu/"))]
    assert [row.split("|")[-2].strip() for row in rows] == ["1,000 tokens", "400 questions"]


@pytest.mark.parametrize("name", ["fp8-dynamic", "gguf-q8_0", "int8-w8a8"])
def test_a_card_has_no_share_of_the_size_but_the_measured_one(name):
    """Embeddings stay in 16 bits: of a small model much more than half is left."""
    manifest = manifest_of(name)
    first = card_text.body(manifest).split("## ")[0]
    assert f"{manifest.size_bytes / manifest.source.size_bytes:.1%} of the source" in first
    assert not re.search(r"\b(half|quarter|third)\b", first)
