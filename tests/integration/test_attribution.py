"""Checkpoint or source: who is recognised, how sure that is, and when nothing can be said."""

import pytest
import torch

from quantkit.export.verified import Verified
from quantkit.scoring.attribution import POWER, UNDECIDED, attribute, fault
from quantkit.scoring.expected import Reference, WideProducts

N_PROMPTS, N_TOKENS = 16, 95


def laplace(size, seed, n_prompts=N_PROMPTS):
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(n_prompts, N_TOKENS, generator=generator, dtype=torch.float64) - 0.5
    return -size * uniform.sign() * torch.log1p(-2 * uniform.abs())


class Case:
    """A source, a checkpoint that differs from it, and engines that add their own rounding."""

    def __init__(self, apart, noise_c=0.02, noise_s=0.02, chaotic=False, n_prompts=N_PROMPTS):
        self.n, self.noise_c, self.noise_s = n_prompts, noise_c, noise_s
        self.source = -2 + laplace(1.0, 0, n_prompts)
        # Where activations are rounded, all of the difference falls another way in every engine.
        self.mean = self.source if chaotic else self.source + laplace(apart, 1, n_prompts)
        self.checkpoint = self.mean + laplace(apart, 2, n_prompts) if chaotic else self.mean

    def references(self):
        return (
            Reference(self.checkpoint, self.mean + laplace(self.noise_c, 3, self.n)),
            Reference(self.source, self.source + laplace(self.noise_s, 4, self.n)),
        )

    def attributed(self, serves, times=1.0, seed=5):
        model, noise = (
            (self.mean, self.noise_c) if serves == "checkpoint" else (self.source, self.noise_s)
        )
        told = (model + laplace(times * noise, seed, self.n)).tolist()
        return attribute(told, *self.references(), self.n)


CASES = {
    "weights alone, close": Case(apart=0.02),
    "weights alone, far": Case(apart=0.3),
    "rounded activations, all chaos": Case(apart=0.1, noise_c=0.1, chaotic=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("serves", ["checkpoint", "source"])
def test_who_is_served_is_recognised(case, serves):
    found = case.attributed(serves)
    assert found.nearer == serves
    assert min(found.power, found.recognised) >= POWER
    assert (fault(found) is None) == (serves == "checkpoint")


def test_plain_distance_would_take_an_honest_engine_for_the_source():
    """Hence likelihoods: the reason why rounded activations need more than nearest in nats."""
    case = CASES["rounded activations, all chaos"]
    told = case.mean + laplace(case.noise_c, 5)
    assert (told - case.source).abs().mean() < (told - case.checkpoint).abs().mean()
    assert case.attributed("checkpoint").nearer == "checkpoint"


def test_the_power_is_the_share_of_engines_that_are_really_recognised():
    case = Case(apart=0.004, n_prompts=2)
    found = [case.attributed("source", seed=seed) for seed in range(100, 400)]
    recognised = sum(one.ratio < 0 for one in found) / len(found)
    claimed = sum(one.power for one in found) / len(found)
    assert 0.6 < recognised < 0.99, "neither sure nor blind, or this says nothing"
    assert claimed == pytest.approx(recognised, abs=0.15)


def test_references_too_close_are_said_to_be_and_more_prompts_help():
    few = Case(apart=0.004, n_prompts=2).attributed("checkpoint")
    assert few.nearer is None
    assert few.power < POWER
    words = fault(few)
    assert words is not None
    assert words.startswith(f"{UNDECIDED} with 190 positions")
    assert few.prompts_needed is not None
    assert f"--prompts {few.prompts_needed} would do" in words
    assert few.prompts_needed < 200
    many = Case(apart=0.004, n_prompts=few.prompts_needed)
    assert many.attributed("checkpoint").nearer == "checkpoint"
    assert many.attributed("source").nearer == "source"


def test_a_model_and_itself_cannot_be_told_apart_by_any_number_of_prompts():
    case = Case(apart=0.0)
    reference = case.references()[1]
    found = attribute(reference.rounded.tolist(), reference, reference, N_PROMPTS)
    assert (found.nearer, found.prompts_needed) == (None, None)
    assert "--prompts" not in fault(found)


def test_noise_of_the_engine_lowers_the_power():
    case = Case(apart=0.01, n_prompts=4)
    quiet, loud = case.attributed("source"), case.attributed("source", times=6)
    assert loud.noise > 4 * quiet.noise
    assert loud.power < quiet.power


def test_a_single_stretch_or_no_number_decides_nothing():
    case = Case(apart=0.3)
    part = [Reference(r.exact[:1, :40], r.rounded[:1, :40]) for r in case.references()]
    assert attribute(case.checkpoint[:1, :40].tolist(), *part, 1).nearer is None
    told = case.checkpoint.clone()
    told[0, 0] = float("nan")
    assert attribute(told.tolist(), *case.references(), N_PROMPTS).nearer is None


def test_undecided_is_not_told_as_wrong_nor_as_agreement():
    found = Case(apart=0.004, n_prompts=2).attributed("checkpoint")
    record = Verified(
        ok=False,
        digest="x",
        engine="vllm",
        version="1",
        device="GPU",
        dtype=None,
        level="logprobs",
        faults=[fault(found)],
        attribution=found,
        created="now",
    )
    assert record.sentence.startswith(f"is not proven in vLLM 1 on GPU: {UNDECIDED}")
    assert record.short == "vLLM 1: log-probabilities undecided"
    assert "wrong" in record.model_copy(update={"faults": ["a", "b"]}).short


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_products_are_summed_in_float32_and_rounded_once(dtype):
    torch.manual_seed(0)
    inputs, weight = torch.randn(3, 64).to(dtype), torch.randn(5, 64).to(dtype)
    with WideProducts():
        linear = torch.nn.functional.linear(inputs, weight)
        product = inputs @ weight.T
        wide = inputs.float() @ weight.float().T
    assert linear.dtype == product.dtype == dtype
    assert wide.dtype == torch.float32
    assert torch.equal(linear, wide.to(dtype))
    assert torch.equal(product, wide.to(dtype))
