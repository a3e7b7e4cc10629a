"""What must hold on a machine with a GPU."""

import pytest
import torch

from quantkit.model.source import ModelSource
from quantkit.onepass.prepare import CalibrationChoice, Run
from quantkit.onepass.run import quantize
from quantkit.recipe import Recipe
from quantkit.scoring.harness import score

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
NAMES = ["fp8-dynamic", "rtn-w8a16", "rtn-w4a16", "rtn-nvfp4-a16", "rtn-mxfp4-a16", "mxfp8"]


def test_gpu_and_cpu_write_the_same_bytes(tmp_path):
    recipes = [Recipe.load(name) for name in NAMES]
    source = ModelSource.open("demo")
    on_cpu = quantize(source, recipes, tmp_path / "cpu", device="cpu")
    on_gpu = quantize(source, recipes, tmp_path / "gpu", device="cuda")
    for cpu, gpu in zip(on_cpu, on_gpu, strict=True):
        assert cpu.digest == gpu.digest
        for name, layer in cpu.manifest.layers.items():
            assert gpu.manifest.layers[name].relative_error == pytest.approx(
                layer.relative_error, rel=1e-4
            )


def test_scores_on_gpu_and_cpu_agree():
    source = ModelSource.open("demo")
    values = [
        score(source, ["python_docs"], limit=8, device=device).scores["python_docs/perplexity"]
        for device in ("cpu", "cuda")
    ]
    assert values[0].n == values[1].n
    assert values[1].value == pytest.approx(values[0].value, rel=5e-3)  # bf16 against float32


def test_offloading_changes_no_byte(tmp_path):
    names = ["gptq-w4a16", "awq-w4a16", "int8-w8a8", "fp8-static"]
    recipes = [Recipe.load(name) for name in names]
    source = ModelSource.open("demo")
    text = CalibrationChoice("python-docs", 128, 256)
    made = [
        quantize(source, recipes, tmp_path / mode, "cuda", calibration=text, run=Run(offload=mode))
        for mode in ("never", "always")
    ]
    for kept, moved in zip(*made, strict=True):
        assert kept.digest == moved.digest


@pytest.mark.parametrize("options", [{}, {"tune": 20}, {"distil": 1}], ids=str)
def test_a_calibrated_run_on_a_gpu_repeats_itself(tmp_path, options):
    recipe = Recipe.load("awq-gptq-w4a16")
    recipe = recipe.model_copy(update={"options": {**recipe.options, **options}})
    source = ModelSource.open("demo")
    text = CalibrationChoice("python-docs", 32, 256)
    first, second = (
        quantize(source, [recipe], tmp_path / str(i), "cuda", calibration=text)[0] for i in (0, 1)
    )
    assert first.digest == second.digest


@torch.no_grad()
def test_recorded_steps_write_what_transformers_writes():
    """In float32, with rows that leave and join, by graphs and without."""
    from quantkit.model.tokenizer import load as load_tokenizer
    from quantkit.scoring import loading
    from quantkit.scoring.decoding import Decoder
    from quantkit.scoring.rules import Rules

    source = ModelSource.open("demo")
    model = loading.load(source, torch.device("cuda"), dtype=torch.float32)
    tokenizer = load_tokenizer(source.folder)
    texts = [f"def sort_{i}(values" + ", more" * (i % 5) for i in range(40)]
    prompts = [tuple(tokenizer(text)["input_ids"]) for text in texts]
    newline = tokenizer("\n")["input_ids"][-1]
    rules = Rules(40, ends=(0, newline))
    for graphs in (True, False):
        decoder = Decoder(model, 24, graphs)
        found = dict(a for part in decoder.answers(prompts, rules, tokenizer.decode) for a in part)
        assert decoder._graphs == graphs  # none was given up
        for place, prompt in enumerate(prompts):
            ids = torch.tensor([prompt], device="cuda")
            made = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=rules.max_new,
                do_sample=False,
                eos_token_id=list(rules.ends),
                pad_token_id=0,
            )
            assert found[place] == tuple(made[0, len(prompt) :].tolist())
