"""Real llama.cpp in this process, asked for tokens and probabilities."""

import json
import urllib.request
from contextlib import contextmanager

import torch
import xllamacpp


@contextmanager
def serve(path, n_context=256):
    """A GGUF file loaded by llama.cpp, its cache and arithmetic in float32."""
    wanted = xllamacpp.CommonParams()
    wanted.model.path = str(path)
    wanted.n_ctx = n_context
    wanted.cpuparams.n_threads = 1
    wanted.warmup = False
    wanted.verbosity = -1
    wanted.cache_type_k = wanted.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    wanted.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(wanted)
    try:
        yield server
    finally:
        del server


def next_token(server, tokens, n_vocabulary):
    """Log-probabilities of all tokens after these."""
    request = {
        "prompt": tokens,
        "n_predict": 1,
        "n_probs": n_vocabulary,
        "temperature": 0,
        "cache_prompt": False,
        # Chooses a plain letter, since half a character or an end has no probabilities in an
        # answer. What is told is from before the choice.
        "logit_bias": [["a", 1000]],
    }
    answer = server.handle_completions(request)
    result = torch.full((n_vocabulary,), float("nan"))
    for entry in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]:
        result[entry["id"]] = entry["logprob"]
    return result


def tokenize(server, text):
    """The tokens of a text, special ones recognised and added."""
    asked = {"content": text, "add_special": True, "parse_special": True}
    request = urllib.request.Request(
        f"{server.listening_address}/tokenize",
        data=json.dumps(asked).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())["tokens"]
