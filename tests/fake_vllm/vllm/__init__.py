"""A stand-in for vLLM with the few names that our worker uses; the arithmetic is ours.

What goes wrong is said by FAKE_VLLM: `die`, `hang`, `refuse`, `blank`, `nan`, or `louder`, which
multiplies one layer's output by 1.1, as a wrong scale would. `canned` answers without a model;
`source` serves the model that the checkpoint was made from, as an engine does that ignores the
quantisation it is asked for.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

__version__ = "9.9.9"
MODE = os.environ.get("FAKE_VLLM", "")
COMPUTING = ("", "louder", "source")


class EngineArgs:
    def __init__(self, model, **settings):
        self.model = model
        self.settings = settings

    def create_engine_config(self):
        if MODE == "refuse":
            raise ValueError("Minimum capability: 89. Current capability: 80")
        return config(self.settings)


def config(settings):
    kind = "bfloat16" if settings["dtype"] == "auto" else settings["dtype"]
    return SimpleNamespace(
        model_config=SimpleNamespace(dtype=f"torch.{kind}", quantization="compressed-tensors")
    )


class SamplingParams:
    def __init__(self, **wanted):
        self.wanted = wanted


class LLM:
    def __init__(self, model, **settings):
        if MODE == "die":
            sys.exit("torch.OutOfMemoryError: CUDA out of memory")
        if MODE == "hang":  # with a worker, as engines have
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            time.sleep(60)
        self.llm_engine = SimpleNamespace(vllm_config=config(settings))
        if MODE in COMPUTING:
            self.model = self.load(model)

    def load(self, model):
        from quantkit.model import lean_import

        lean_import.load()  # in a third less time
        import torch

        from quantkit.export import manifest
        from quantkit.export.checkpoint import Checkpoint
        from quantkit.model.source import ModelSource
        from quantkit.scoring import loading
        from quantkit.verification.checkpoint import source_of

        kind = getattr(torch, self.llm_engine.vllm_config.model_config.dtype.split(".")[1])
        is_source = not (Path(model) / manifest.FILE).exists()
        target = ModelSource.open(model) if is_source else Checkpoint.open(Path(model))
        if MODE == "source":
            target = source_of(target.manifest)
        loaded = loading.load(target, torch.device("cpu"), dtype=kind)
        if MODE == "louder":
            layer = loaded.get_submodule("model.layers.1.mlp.down_proj")
            layer.register_forward_hook(lambda module, inputs, output: output * 1.1)
        return loaded

    def generate(self, prompts, params):
        if MODE not in COMPUTING:
            value = float("nan") if MODE == "nan" else -1.0
            n = params.wanted["max_tokens"]
            given = [prompt["prompt_token_ids"] for prompt in prompts]
            return [output(ids + [7] * n, [value] * (len(ids) + n - 1), len(ids)) for ids in given]
        import torch

        from quantkit.scoring.expected import WideProducts

        ids = torch.tensor([prompt["prompt_token_ids"] for prompt in prompts])
        n_before, wanted = ids.shape[1], params.wanted
        with torch.no_grad(), WideProducts():
            known, new = None, ids
            for _ in range(wanted["max_tokens"]):
                step = self.model(input_ids=new, past_key_values=known, use_cache=True)
                known, new = step.past_key_values, step.logits[:, -1:].argmax(-1)
                ids = torch.cat([ids, new], 1)
            logits = self.model(input_ids=ids).logits[:, :-1].float()
        told = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].tolist()
        return [output(ids[i].tolist(), told[i], n_before) for i in range(len(ids))]


def output(ids, told, n_before):
    known = [{token: SimpleNamespace(logprob=value)} for token, value in zip(ids[1:], told)]  # noqa: B905
    text = " " if MODE == "blank" else "a text"
    after = SimpleNamespace(text=text, token_ids=ids[n_before:], logprobs=known[n_before - 1 :])
    return SimpleNamespace(prompt_logprobs=[None, *known[: n_before - 1]], outputs=[after])
