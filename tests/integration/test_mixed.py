"""From a table of candidates to a checkpoint of mixed formats, on a small random model."""

import json
import re
import shutil

import pytest
import torch
from notes import Notes
from tiny import READABLE, save_llama

import quantkit
from quantkit import grid
from quantkit.errors import DataError, HardwareError, StorageError
from quantkit.export import format_map
from quantkit.export.card_markup import plain
from quantkit.mixed import candidates, rounding, run
from quantkit.mixed.budget import Budget, one_percent_more
from quantkit.mixed.run import MixedOptions, choose, write_table
from quantkit.mixed.table import Table
from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.recipe import Recipe, load
from quantkit.scoring.provenance import of_manifest
from quantkit.tensorspec import TensorSpec


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """Calibration from a small file, which is quick to read."""
    from pydoc_data.topics import topics

    path = tmp_path_factory.mktemp("text") / "topics.txt"
    path.write_text("\n\n".join(topics[name] for name in ("assert", "import", "yield", "with")))
    return CalibrationChoice(str(path), 4, 64)


@pytest.fixture(scope="module")
def made(tmp_path_factory, text):
    """A model, and the folder of its table."""
    folder = tmp_path_factory.mktemp("mixed")
    save_llama(folder / "model", **READABLE)
    source = ModelSource.open(str(folder / "model"))
    table = write_table(source, folder / "table", "cpu", text, Run())
    return source, folder / "table", table


def test_errors_are_what_gptq_leaves_of_the_rounded_weights(made, text):
    """tr(D G D^T) / n by obvious arithmetic: the outputs' squared error on the very inputs."""
    source, _, table = made
    from transformers import AutoModelForCausalLM

    from quantkit.model.architecture import Architecture
    from quantkit.onepass.prepare import load_tokens

    architecture = Architecture.of(source.folder, tensors=source.tensors)
    tokens = load_tokens(source, architecture, text)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    seen = []
    layer = model.get_submodule("model.layers.1.mlp.down_proj")
    layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].flatten(0, 1)))
    with torch.no_grad():
        model(tokens.ids)
    inputs = torch.cat(seen)
    unit = next(u for u in table.units if u.name == "model.layers.1.mlp.down_proj")
    weight = layer.weight.detach()
    energy = (inputs @ weight.t()).square().sum() / len(inputs)
    assert unit.energy == pytest.approx(float(energy), rel=1e-3)
    place = table.formats.index("w8a16-g128")
    scheme = candidates.find("w8a16-g128").weights
    view = grid.tiles(weight, scheme)
    low, high = view.amin(-1).bfloat16(), view.amax(-1).bfloat16()
    scale, _ = grid.parameters(low, high, scheme)
    change = grid.dequantize(grid.quantize(weight, scale, None, scheme), scheme) - weight
    left = rounding.Solver.of(inputs.t() @ inputs).left(change)
    error = (inputs @ left.t()).square().sum() / len(inputs)
    assert unit.errors[place] == pytest.approx(float(error), rel=0.05)


def test_a_unit_changed_alone_costs_what_the_probe_says(made, text):
    """The KL of the whole model with one layer changed as GPTQ would, computed without the pass."""
    source, _, table = made
    from transformers import AutoModelForCausalLM

    from quantkit.model.architecture import Architecture
    from quantkit.onepass.prepare import load_tokens

    architecture = Architecture.of(source.folder, tensors=source.tensors)
    tokens = load_tokens(source, architecture, text)
    model = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32)
    unit = next(u for u in table.units if u.name == "model.layers.0.self_attn.o_proj")
    layer, seen = model.get_submodule(unit.name), []
    hook = layer.register_forward_pre_hook(lambda _, x: seen.append(x[0].flatten(0, 1)))
    with torch.no_grad():
        wanted = model(tokens.ids).logits.log_softmax(-1)
        hook.remove()
        gram = seen[0].t() @ seen[0]
        rounded = rounding.probe_change(layer.weight, torch.bfloat16)
        change = rounding.Solver.of(gram).left(rounded)
        layer.weight += change
        found = model(tokens.ids).logits.log_softmax(-1)
    left = float(((change @ gram) * change).sum()) / len(seen[0])
    assert unit.probe_error == pytest.approx(left, rel=1e-2)
    kl = (wanted.exp() * (wanted - found)).sum(-1).mean()
    assert table.n_probe_tokens == tokens.ids.numel()
    assert unit.probe_kl == pytest.approx(float(kl), rel=0.02)


def test_formats_that_round_activations_cost_more_than_their_weights(made, text, tmp_path):
    source, _, _ = made
    table = write_table(source, tmp_path / "fp", "cpu", text, Run(), ("nvfp4", "mxfp4"))
    assert table.formats == ["nvfp4", "fp8", "bf16", "mxfp4", "mxfp8"]
    for unit in table.units:
        nvfp4, fp8, sixteen, mxfp4, mxfp8 = unit.errors
        assert 0 == sixteen < fp8 < nvfp4
        assert mxfp8 < mxfp4
        # 4-bit inputs move outputs about as much as 4-bit weights do.
        assert nvfp4 / unit.energy > 0.005


def test_a_budget_becomes_a_checkpoint_that_verifies_and_a_recipe_that_runs_again(
    made, text, tmp_path
):
    source, table, _ = made
    (checkpoint,) = quantkit.quantize(
        source,
        out=tmp_path,
        bits=5.0,
        sensitivity=table,
        calibration=text.name,
        samples=4,
        length=64,
        device="cpu",
    )
    manifest = checkpoint.manifest
    assert 4.5 < manifest.quantized_bits_per_weight <= 5.0
    assert [path.name for path in tmp_path.iterdir()] == ["mixed-5bits"]
    assert quantkit.verify(checkpoint, source=source).ok
    recipe = load(str(checkpoint.folder / "recipe.yaml"))
    assert isinstance(recipe, Recipe)
    assert recipe.digest == manifest.recipe_digest
    assert len(recipe.parts) > 1
    formats = format_map.rows(manifest)
    assert {row[2] for row in formats} == {format_map.label(part) for part in recipe.parts}
    card = (checkpoint.folder / "README.md").read_text()
    assert all(plain(kind) in card and format in card for kind, _, format in formats)
    assert of_manifest(manifest).formats == formats
    (again,) = quantkit.quantize(
        source, recipe, out=tmp_path / "again", calibration=text.name, samples=4, length=64
    )
    assert again.manifest.files["model.safetensors"] == manifest.files["model.safetensors"]


def test_sizes_count_whole_files(made, text, tmp_path):
    source, table, known = made
    limit = known.other_bytes + 6 * known.n_weights // 8
    wanted = MixedOptions(Budget(size_bytes=limit), table=table)
    choice = choose(source, wanted, known)
    (checkpoint,) = quantkit.quantize(
        source, choice.recipe, out=tmp_path, calibration=text.name, samples=4, length=64
    )
    size = checkpoint.manifest.files["model.safetensors"].size_bytes
    assert 0.98 * limit < size <= limit


def test_budgets_that_cannot_be_kept_are_refused_with_one_that_can(made):
    source, table, known = made
    with pytest.raises(HardwareError, match=r"smallest that works is (\d\.\d+) bits") as error:
        choose(source, MixedOptions(Budget(bits=2.0), table=table), known)
    smallest = float(str(error.value).split("works is ")[1].split()[0])
    found = choose(source, MixedOptions(Budget(bits=smallest + 0.001), table=table), known)
    assert found.bits == pytest.approx(smallest, abs=0.001)
    assert any("w3a16" in note and "7.5" in note for note in found.notes)


def test_experts_have_widths_that_every_version_reads():
    weight = TensorSpec("weight", "BF16", (256, 256))
    expert, layer = "model.layers.0.mlp.experts.0.up_proj", "model.layers.0.mlp.up_proj"
    for name, runs in {"w4a16-g128": True, "w8a16-g32": True, "w5a16-g128": False}.items():
        candidate = candidates.find(name)
        assert candidate.size_bytes(layer, weight)
        assert bool(candidate.size_bytes(expert, weight)) == runs


def test_widths_that_a_gpu_has_no_kernels_for_are_left_out(made):
    source, _, known = made
    free = choose(source, MixedOptions(Budget(bits=5)), known)
    assert {"w5a16-g128", "w6a16-g128"} & {*free.counts}
    common = choose(source, MixedOptions(Budget(bits=5, only_common=True)), known)
    assert {name[:2] for name in common.counts} <= {"w4", "w8", "bf"}
    assert common.allocation.cost > free.allocation.cost
    assert not common.notes
    named = choose(source, MixedOptions(Budget(bits=5), formats=("int4-int8",)), known)
    assert named.counts == common.counts


def test_a_budget_that_everything_fits_keeps_16_bits(made, text, tmp_path):
    source, table, _ = made
    made_ = quantkit.quantize(
        source, out=tmp_path, bits=16, sensitivity=table, calibration=text.name
    )
    assert made_ == []
    assert not any(tmp_path.iterdir())


def test_one_percent_more_is_worth_what_the_next_choice_says(made):
    source, _, known = made
    now = choose(source, MixedOptions(Budget(bits=5)), known)
    more = choose(source, MixedOptions(Budget(bits=5.05)), known)
    told = one_percent_more(now)
    assert re.match(r"1% more room \(\d+ KiB\) would buy", told)
    share = float(told.split("buy ")[1].split("%")[0])
    assert share == pytest.approx(100 * (1 - more.allocation.cost / now.allocation.cost), abs=0.5)


def test_more_bits_never_cost_more(made):
    source, _, known = made
    costs = [
        choose(source, MixedOptions(Budget(bits=bits)), known).allocation.cost
        for bits in (4.2, 4.5, 5, 6, 8, 12)
    ]
    assert costs == sorted(costs, reverse=True)


def test_a_stopped_table_goes_on_from_its_journal(made, text, tmp_path, monkeypatch):
    from quantkit.mixed import sensitivity

    source, _, known = made
    see = sensitivity.Watch.see

    def stop(self, visit, found):
        if visit.index == 1:
            raise KeyboardInterrupt
        see(self, visit, found)

    monkeypatch.setattr(sensitivity.Watch, "see", stop)
    with pytest.raises(KeyboardInterrupt):
        write_table(source, tmp_path / "t", "cpu", text, Run())
    monkeypatch.setattr(sensitivity.Watch, "see", see)
    rounded, keep = [], sensitivity.Watch._keep
    monkeypatch.setattr(
        sensitivity.Watch, "_keep", lambda self, i, sums: (rounded.append(i), keep(self, i, sums))
    )
    notes = Notes()
    table = write_table(source, tmp_path / "t", "cpu", text, Run(notes))
    assert rounded == [1], "what the journal has is not rounded again"
    (plan,) = [note for note in notes.notes if note.startswith("plan: ")]
    assert "of disk" not in plan, "no weights are written"
    assert not any("bits per weight" in note for note in notes.notes)
    assert [u.errors for u in table.units] == [u.errors for u in known.units]
    assert [u.probe_kl for u in table.units] == [u.probe_kl for u in known.units]
    assert sorted(p.name for p in (tmp_path / "t").iterdir()) == [
        "sensitivity.html",
        "sensitivity.json",
    ]


def test_the_command_line_shows_and_refuses(made, tmp_path, run_cli):
    source, table, _ = made
    arguments = ["quantize", source.folder, "--sensitivity", table, "--dry-run", "-q"]
    shown = run_cli([*arguments, "--bits", "5", "--json"])
    assert shown.code == 0, shown.stderr
    assert json.loads(shown.stdout)["bits_per_weight"] <= 5
    refused = run_cli([*arguments, "--bits", "2"])
    assert refused.code == 3
    assert "smallest that works" in refused.stderr
    both = run_cli([*arguments, "--bits", "5", "--size", "1GiB"])
    assert both.code == 2
    assert run_cli([*arguments, "--bits", "5", "-r", "rtn-w4a16"]).code == 2
    fit = run_cli([*arguments, "--fit", "RTX4090", "--context", "128", "--users", "4", "--mixed"])
    assert fit.code == 0, fit.stderr
    assert "16 bits" in fit.stdout
    asked = ["recommend", source.folder, "--gpu", "RTX4090", "--sensitivity", table]
    advised = run_cli([*asked, "--context", "128"])
    assert "is room for all" in advised.stdout
    other = tmp_path / "other"
    shutil.copytree(table, other)
    data = json.loads((other / "sensitivity.json").read_text()) | {"source": "0" * 64}
    (other / "sensitivity.json").write_text(json.dumps(data))
    wrong = run_cli(["quantize", source.folder, "--sensitivity", other, "--dry-run", "--bits", "5"])
    assert wrong.code == 3
    assert "another model" in wrong.stderr


def test_a_table_is_read_as_it_was_written(made):
    _, folder, table = made
    assert Table.read(folder) == table
    page = (folder / "sensitivity.html").read_text().replace("<wbr>", "")
    assert "model.layers.0.mlp.gate_up_proj" in page


def test_experts_of_a_block_have_one_format(made):
    from quantkit.errors import RecipeError
    from quantkit.plan.checkpoint import _check_experts

    names = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in (0, 1)]
    recipe = Recipe.validated(
        {
            "name": "x",
            "summary": "x",
            "method": "gptq",
            "weights": {"num_bits": 4, "group_size": 32},
            "groups": [
                {"targets": [names[1]], "weights": {"num_bits": 8, "group_size": 32}},
            ],
        },
        "x",
    )
    with pytest.raises(RecipeError, match="experts of a block"):
        _check_experts(recipe, names)


def test_gguf_files_of_any_types_have_names_of_their_own(tmp_path, text):
    """Rows of 128 hold no K-quants, those of 256 do; embedding and head are units too."""
    save_llama(tmp_path / "model", **READABLE, num_hidden_layers=1, tie_word_embeddings=False)
    source = ModelSource.open(str(tmp_path / "model"))
    names = ("Q3_K", "Q4_K", "IQ4_NL", "Q5_0", "Q8_0")
    table = write_table(source, tmp_path / "table", "cpu", text, Run(), names, "llama.cpp")
    assert table.engine == "llama.cpp"
    sizes = {unit.name: unit.sizes for unit in table.units}
    assert {"lm_head", "model.embed_tokens"} < set(sizes)
    assert sizes["model.layers.0.self_attn.q_proj"][:2] == [None, None]
    assert None not in sizes["model.layers.0.mlp.down_proj"][:2]
    assert all(unit.weight is not None and unit.weight > 0 for unit in table.units)
    limit = table.other_bytes + int(5.2 * table.n_weights / 8) + 300_000
    (made,) = quantkit.quantize(
        source,
        out=tmp_path / "out",
        size=limit,
        target="llama.cpp",
        sensitivity=tmp_path / "table",
        calibration=text.name,
        samples=4,
        length=64,
    )
    (file,) = (p for p in made.folder.glob("*.gguf") if p.name != "imatrix.gguf")
    assert file.name == f"model-{made.label}.gguf"
    assert 0.97 * limit < file.stat().st_size <= limit
    assert quantkit.verify(made, source=source).ok
    recipe = load(str(made.folder / "recipe.yaml"))
    assert recipe.digest == made.manifest.recipe_digest
    rows = format_map.rows(made.manifest)
    assert ["ffn_down.weight", "0"] in [row[:2] for row in rows]
    assert ["output.weight", ""] in [row[:2] for row in rows]
    with pytest.raises(DataError, match="not for vLLM"):
        choose(source, MixedOptions(Budget(bits=5)), table)


@pytest.mark.parametrize("common", [0.0, 0.8])
def test_gptq_leaves_the_error_that_was_predicted(common):
    """Inputs that depend on each other, or not: GPTQ itself against what its factor says."""
    from quantkit.methods import gptq

    torch.manual_seed(0)
    shared = torch.randn(2048, 8) @ torch.randn(8, 128)
    inputs = common * shared / 8**0.5 + (1 - common) * torch.randn(2048, 128)
    gram, weight = inputs.t() @ inputs, torch.randn(64, 128)
    change = rounding.probe_change(weight, torch.float32)
    scheme = candidates.find("w4a16-g128").weights
    view = grid.tiles(weight, scheme)
    scale, _ = grid.parameters(view.amin(-1), view.amax(-1), scheme)
    factor = gptq.factor(gram)
    solved = gptq.solve(weight, factor, scale, None, scheme)
    left = grid.dequantize(solved, scheme) - weight
    solver = rounding.Solver.of(gram)
    expected = solver.left(change)
    damped = torch.linalg.inv(factor.upper.t() @ factor.upper)
    ordered = expected[:, factor.order]
    by_damped = float(((ordered @ damped) * ordered).sum())
    assert float(solver.energy(change)) == pytest.approx(by_damped, rel=1e-3)
    errors = [float(((d @ gram) * d).sum()) for d in (left, expected, change)]
    assert errors[1] == pytest.approx(errors[0], rel=0.2)
    assert (errors[1] < 0.5 * errors[2]) == (common > 0)


def test_a_finished_folder_is_refused_before_the_pass(made, text, tmp_path, monkeypatch):
    (tmp_path / "mixed-5bits").mkdir()
    monkeypatch.setattr(run, "_measured", lambda *_: pytest.fail("a pass was begun"))
    wanted = MixedOptions(Budget(bits=5))
    with pytest.raises(StorageError, match="exists already"):
        run.quantize(made[0], wanted, tmp_path, "cpu", text, Run())
