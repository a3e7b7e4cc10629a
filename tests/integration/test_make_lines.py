"""Every `make it` line of a recommendation is one that `quantize` takes, on such a model."""

import json
import shlex

import pytest
import torch
import transformers
from families import FAMILIES, SMALL

from quantkit import resources

EXPERTS = {**SMALL, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}
MIXTURES = {
    "mixtral": transformers.MixtralConfig(**SMALL, num_local_experts=4),
    "qwen3_moe": transformers.Qwen3MoeConfig(**EXPERTS),
    "olmoe": transformers.OlmoeConfig(**{k: v for k, v in EXPERTS.items() if k != "head_dim"}),
}
QUICK = ("llama", "mixtral")
ASKED = [
    ("T4", "memory"), ("H100 SXM", "latency"), ("M3 Max", "memory"),
]  # fmt: skip


KINDS = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name in (*FAMILIES, *MIXTURES)
]


@pytest.mark.parametrize("family", KINDS)
def test_make_lines_are_accepted(run_cli, tmp_path, family):
    config = FAMILIES.get(family) or MIXTURES[family]
    folder = tmp_path / f"a {family}"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_bytes((resources.DEMO_MODEL / file).read_bytes())
    text = tmp_path / "text.txt"
    text.write_text("A text to learn from, which says little and says it often. " * 400)
    lines, offered = set(), set()
    for gpu, objective in ASKED:
        # By the config alone and by the weights: the same format either way.
        asked = ["--gpu", gpu, "--objective", objective, "--context", "256", "--json"]
        asked += ["--min-quality", "0.01"]
        told = [
            json.loads(run_cli(["recommend", place, *asked]).stdout)
            for place in (folder, folder / "config.json")
        ]
        answers = [one["answers"][0] for one in told]
        assert answers[0]["format"] == answers[1]["format"]
        serving = {c["format"] for one in answers for c in one["candidates"] if c["serves"]}
        offered |= serving - {"unquantised"}
        lines |= {shlex.join(one["make"]) for one in told if "make" in one}
    assert offered
    # What is offered could be the answer to another question: all of it, in one read of the model.
    every = [word for name in sorted(offered) for word in ("-r", name)]
    line = ["quantkit", "quantize", str(folder), *every, "--calibration", "general", "-o", "out"]
    for words in ([*map(shlex.split, lines)][:2], [line]):
        for made in words:
            assert made[2] == str(folder)
            if "--calibration" in made:  # the sets that ship with quantkit need the hub
                made[made.index("--calibration") + 1] = str(text)
                made += ["--samples", "2", "--length", "64"]
            result = run_cli([*made[1:], "--dry-run", "--quiet"])
            assert result.code == 0, f"{shlex.join(made)}: {result.stderr}"
