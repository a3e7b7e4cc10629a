"""Special cases of vLLM's loaders for single families: one function for each."""

from collections.abc import Iterator

from quantkit.dispatch.layers import EXPERT
from quantkit.dispatch.rules import Consequence, Finding, finding
from quantkit.dispatch.schemes import Judged

GRANITE_NAMES = ("gate_proj", "up_proj", "down_proj")
GONE: dict[str, Consequence] = {"BambaForCausalLM": "refuses", "MiniMaxForCausalLM": "garbage"}
"""Classes of transformers that vLLM has dropped, and what it does with them now."""

YOUNG = ("MuseGlimmerForCausalLM", "MuseGlimmerForConditionalGeneration")


def findings(judged: Judged) -> Iterator[Finding]:
    """Findings for the family that the config names."""
    for check in (_gone, _laguna, _plain_layers, _neox, _granite, _gpt_oss, _deepseek_v4):
        yield from check(judged)


def _type(judged: Judged) -> str:
    return str(judged.checkpoint.config.get("model_type"))


def _gone(judged: Judged) -> Iterator[Finding]:
    for name in judged.checkpoint.config.get("architectures") or ():
        if name in GONE:
            yield finding(
                "family-gone", "config.json", f"{name} was last served by 0.23", GONE[name]
            )
        if name in YOUNG:
            yield finding(
                "family-new", "config.json", f"{name} has a class of its own from 0.28 on"
            )


def _laguna(judged: Judged) -> Iterator[Finding]:
    rope = judged.checkpoint.config.get("rope_parameters")
    if _type(judged) != "laguna" or not isinstance(rope, dict):
        return
    if any(isinstance(value, dict) for value in rope.values()):
        yield finding("laguna-rope", "config.json", f"rope_parameters holds {', '.join(rope)}")


def _plain_layers(judged: Judged) -> Iterator[Finding]:
    """Mixers built without a quantised method: short convolutions, and Mamba-1's."""
    layers = judged.checkpoint.layers
    for name, layer in layers.items():
        parent, _, last = name.rpartition(".")
        if not layer.is_quantized or last not in ("in_proj", "out_proj"):
            continue
        if _type(judged).startswith("lfm2") and parent.endswith(".conv"):
            if judged.version < (0, 28):
                yield finding("plain-mixer", name, "next to a short convolution, before 0.28")
        elif f"{parent}.x_proj" in layers:
            yield finding("plain-mixer", name, "in a mixer of the first Mamba")


def _neox(judged: Judged) -> Iterator[Finding]:
    if _type(judged) != "gpt_neox":
        return
    for name, layer in judged.checkpoint.linears.items():
        if not layer.is_quantized or not name.endswith(".query_key_value"):
            continue
        rows = 3 * int(judged.checkpoint.config.get("hidden_size") or 0)
        odd = [part for part, spec in layer.parts.items() if spec.shape[:1] != (rows,)]
        if odd:
            yield finding("neox-rows", name, f"{odd[0]} has no row for each of the weight's {rows}")


def _granite(judged: Judged) -> Iterator[Finding]:
    if _type(judged) != "granitemoehybrid":
        return
    for name, layer in judged.checkpoint.linears.items():
        match = EXPERT.match(name)
        if match is None or not layer.is_quantized:
            continue
        if match["layer"] not in GRANITE_NAMES:
            yield finding("granite-experts", name, f"it is called {match['layer']}")
            return
        if judged.version < (0, 29):
            words = "quantised experts are read one by one from 0.29 on"
            yield finding("granite-experts", name, words)
            return


def _gpt_oss(judged: Judged) -> Iterator[Finding]:
    if _type(judged) != "gpt_oss" or judged.method in ("mxfp4", "quark"):
        return
    for name in judged.checkpoint.linears:
        if EXPERT.match(name):
            late = judged.version >= (0, 31)
            words = "its experts are read in MXFP4, or all of a block in one 16-bit tensor"
            yield finding("gpt-oss-experts", name, words, "garbage" if late else "refuses")
            return


def _deepseek_v4(judged: Judged) -> Iterator[Finding]:
    if _type(judged) != "deepseek_v4" or judged.method in ("fp8", "deepseek_v4_fp8"):
        return
    kinds = judged.checkpoint.config.get("mlp_layer_types") or ()
    if odd := [kind for kind in kinds if kind not in ("sparse", "dense")]:
        words = f"mlp_layer_types has {odd[0]}; published files say num_hash_layers"
        yield finding("deepseek-v4", "config.json", words)
    if judged.version >= (0, 30):
        return
    for name in judged.checkpoint.linears:
        if name.endswith(".wo_a"):
            yield finding("deepseek-v4", name, "it has no FP8 blocks, which are read before 0.30")
            return
