"""Every supported family: the streamed pass, folding and checkpoints on small random models."""

import pytest
import torch
from families import FAMILIES, loaded_by_transformers, make_source
from notes import Notes
from transformers import DynamicCache

from quantkit.export.checkpoint import Checkpoint
from quantkit.model.blocks import Decoder
from quantkit.model.shards import DTYPES
from quantkit.model.skeleton import attentions
from quantkit.onepass import feeders, kvcache
from quantkit.onepass.calibrated import Work
from quantkit.onepass.collector import Collector
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.ranks import Ranks
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring import loading
from quantkit.verification.checkpoint import verify

pytestmark = pytest.mark.usefixtures("coarse_awq")

# Groups of linears whose input scales can be folded: a norm before q/k/v and gate/up, the value
# projection before o, the up projection before down.
FOLDS = {"phi3": 2, "olmo2": 2}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    return request.param, *make_source(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def tokens():
    return torch.randint(1, 4096, (3, 48), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def test_streamed_blocks_compute_what_the_model_computes(family, tokens):
    _, model, source = family
    decoder = Decoder.open(source, torch.device("cpu"))
    hidden, arguments = decoder.start(tokens, batch_size=2)
    assert [len(batch) for batch in hidden] == [2, 1]
    outputs = []
    for index in range(len(decoder.blocks)):
        with decoder.loaded(index, decoder.read(index)) as block:
            hidden = [decoder.run(block, batch, arguments[index].common) for batch in hidden]
        outputs.append(torch.cat(hidden))
    kept = []
    for layer in model.get_submodule(decoder.prefix):
        layer.register_forward_hook(lambda m, i, o: kept.append(o if torch.is_tensor(o) else o[0]))
    model(tokens)
    for ours, theirs in zip(outputs, kept, strict=True):
        assert (ours - theirs).norm() / theirs.norm() < 1e-5
    logits = model(tokens).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="none")
    assert torch.allclose(decoder.losses(outputs[-1], tokens), expected, atol=1e-3)


@torch.no_grad()
def test_keys_and_values_are_those_that_a_real_cache_holds(family, tokens):
    _, model, source = family
    real = DynamicCache()  # without a config it keeps all, sliding windows too
    model(tokens, past_key_values=real, use_cache=True)
    decoder = Decoder.open(source, torch.device("cpu"))
    hidden, arguments = decoder.start(tokens, batch_size=2)
    for index, layer in enumerate(real.layers):
        with decoder.loaded(index, decoder.read(index)) as block:
            observer = kvcache.Observer(attentions(block))
            plain = [decoder.run(block, batch, arguments[index].common) for batch in hidden]
            with observer.watching():
                hidden = [decoder.run(block, batch, arguments[index].common) for batch in hidden]
        assert all(map(torch.equal, hidden, plain))
        assert layer.keys.shape[2] == tokens.shape[1]
        (keys,), (values,) = observer.keys.values(), observer.values.values()
        assert torch.allclose(keys, layer.keys.abs().amax((0, 2, 3)), rtol=1e-5)
        assert torch.allclose(values, layer.values.abs().amax((0, 2)).flatten(), rtol=1e-4)


def watched(decoder, block, linears, hidden, arguments):
    """A block's output, the statistics of some of its linears, and what feeds each."""
    collector = Collector(linears)
    with collector.watching():
        output = decoder.run(block, hidden, arguments)
    collector.complete()

    def again():
        return decoder.run(block, hidden[:1], arguments)

    return output, collector, feeders.find(block, collector.groups, again, 32)


def smoothed(decoder, state, collector, found, recipe):
    """The work on the first block, when scales are folded and nothing is rounded yet."""
    dtypes = {n: torch.float32 for n in decoder.tensors(0)}
    recipes = {name: recipe for names in collector.groups.values() for name in names}
    work = Work(state, dtypes, collector.groups, collector.statistics, found, recipes)
    for behind_norms in (False, True):
        Ranks().spread(work.smoothing(behind_norms))
    return work


@torch.no_grad()
def test_folding_leaves_the_function_unchanged(family, tokens):
    name, _, source = family
    decoder = Decoder.open(source, torch.device("cpu"))
    hidden, arguments = decoder.start(tokens, batch_size=3)
    state = decoder.read(0)
    with decoder.loaded(0, state) as block:
        linears = {n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
        before, collector, found = watched(decoder, block, linears, hidden[0], arguments[0].common)
    assert len(found) == FOLDS.get(name, 4)
    recipe = Recipe.load("awq-gptq-w4a16")
    recipe = recipe.resolved({n: m.in_features for n, m in linears.items()})[0]
    work = smoothed(decoder, state, collector, found, recipe)
    assert any((scale - 1).abs().max() > 0.05 for scale in work.in_scale.values())
    after = state | work.result.changed
    after |= {f"{n}.weight": work.weight(n) for n in linears}
    with decoder.loaded(0, after) as block:
        output = decoder.run(block, hidden[0], arguments[0].common)
    assert (output - before).norm() / before.norm() < 1e-5


# Fused projections, capped logits, norms behind layers: what sets families apart.
APART = ("llama", "gemma2", "phi3", "olmo2")


@pytest.mark.parametrize(
    "family",
    [n if n in APART else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES],
    indirect=True,
)
def test_checkpoints_verify_and_load_in_transformers(family, tmp_path, tokens):
    _, _, source = family
    names = ["awq-w4a16", "awq-gptq-w4a16+kv-fp8", "int8-w8a8", "fp8-static", "rtn-w4a16"]
    made = quantize(
        source,
        [Recipe.load(name) for name in names],
        tmp_path,
        calibration=CalibrationChoice("python-docs", 8, 64),
    )
    for checkpoint in made:
        result = verify(checkpoint.folder)
        assert result.ok, result.faults
        reference, inexact = loaded_by_transformers(checkpoint.folder)
        assert not inexact or checkpoint.label == "awq-w4a16", checkpoint.label
        if source.config.get("attn_logit_softcapping"):
            reference.set_attn_implementation("eager")
        ours = loading.load(Checkpoint.open(checkpoint.folder), torch.device("cpu"))
        with torch.no_grad():
            expected, logits = reference(tokens).logits, ours(tokens).logits
        # For 8-bit integers the library divides by 127.5 where vLLM's kernels, which we follow,
        # divide by 127.
        limit = 0.08 if checkpoint.label == "int8-w8a8" else 1e-3
        error = (logits - expected).norm() / expected.norm()
        assert error < max(limit, inexact), checkpoint.label


def test_types_of_stored_tensors_are_known(family):
    _, _, source = family
    assert {DTYPES[tensor.dtype] for tensor in source.tensors.values()} == {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize("left_alone", ["v_proj", "q_proj"])
def test_nothing_is_folded_past_what_a_recipe_leaves_alone(tmp_path, tokens, left_alone):
    _, source = make_source("llama", tmp_path)
    decoder = Decoder.open(source, torch.device("cpu"))
    hidden, arguments = decoder.start(tokens, batch_size=3)
    state = decoder.read(0)
    with decoder.loaded(0, state) as block:
        linears = {n: m for n, m in block.named_modules() if isinstance(m, torch.nn.Linear)}
        kept = {n: m for n, m in linears.items() if not n.endswith(left_alone)}
        before, collector, found = watched(decoder, block, kept, hidden[0], arguments[0].common)
    recipe = Recipe.load("awq-gptq-w4a16").resolved({n: m.in_features for n, m in kept.items()})[0]
    work = smoothed(decoder, state, collector, found, recipe)
    after = state | work.result.changed | {f"{n}.weight": work.weight(n) for n in kept}
    with decoder.loaded(0, after) as block:
        output = decoder.run(block, hidden[0], arguments[0].common)
    assert (output - before).norm() / before.norm() < 1e-5
    assert "mlp.down_proj" in work.in_scale
    assert "self_attn.k_proj" not in work.in_scale


def test_a_recipe_that_finds_nothing_to_fold_says_so(tmp_path):
    """Only o and down are left, and what feeds them stays as it is."""
    _, source = make_source("llama", tmp_path / "model")
    whole = Recipe.load("awq-w4a16")
    ignore = [*whole.ignore, r"re:.*\.(q|k|v|gate|up)_proj"]
    bare = whole.model_copy(update={"name": "awq-bare", "ignore": ignore})
    rounded = Recipe.load("rtn-w4a16").model_copy(update={"name": "rtn-bare", "ignore": ignore})
    text = tmp_path / "text.txt"
    text.write_text("A norm feeds more than one layer, and a layer is fed by one norm. " * 200)
    progress = Notes()
    recipes, choice = [whole, bare, rounded], CalibrationChoice(str(text), 8, 64)
    made = quantize(source, recipes, tmp_path / "out", calibration=choice, run=Run(progress))
    said = [note for note in progress.notes if "fold" in note]
    assert said == [
        "warning: awq-bare cannot fold scales in this model: no norm or projection feeds its "
        "layers alone; it only rounds"
    ]
    assert [bool(checkpoint.scales) for checkpoint in made] == [True, False, False]
