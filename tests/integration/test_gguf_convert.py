"""Models of every family become GGUF files that llama.cpp loads, tokenises for and computes with
as transformers does."""

import hashlib
import json
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
import transformers
from families import FAMILIES, SMALL, make_source
from odd_texts import texts
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, processors, trainers
from tokenizers import normalizers as normal
from tokenizers import pre_tokenizers as cut
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import quantkit
from quantkit.errors import SourceError
from quantkit.gguf import pretokenizers
from quantkit.gguf.families import read_config
from quantkit.gguf.general import general
from quantkit.gguf.layout import Change, Layout
from quantkit.gguf.source import open_file
from quantkit.gguf.vocabulary import vocabulary
from quantkit.gguf.writer import GGUFFile
from quantkit.model.source import ModelSource

gguf = pytest.importorskip("gguf")
llamacpp = pytest.importorskip("llamacpp", reason="llama.cpp is not installed")
floats = pytest.importorskip("gguf_floats")
convert, largest_difference, without = floats.convert, floats.largest_difference, floats.without
F16, F32 = floats.F16, floats.F32

# Larger weights than a fresh model has, so that attention looks at some places more than others.
SHARP = SMALL | {"initializer_range": 0.08}
NO_HEAD_DIM = {k: v for k, v in SHARP.items() if k != "head_dim"}
GEMMA = SHARP | {"query_pre_attn_scalar": 32, "sliding_window": 16}
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.05 * i for i in range(12)],
    "long_factor": [1 + 0.5 * i for i in range(12)],
    "partial_rotary_factor": 0.75,
}
TRAINED = {"rope_theta": 1e4, "original_max_position_embeddings": 64}
CONFIGS = {
    "llama": transformers.LlamaConfig(**SHARP),
    "llama with biases, tied": transformers.LlamaConfig(
        **SHARP, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama 3.1": transformers.LlamaConfig(**SHARP, rope_parameters=LLAMA_3 | TRAINED),
    "mistral with wide heads": transformers.MistralConfig(
        **SHARP | {"head_dim": 64}, sliding_window=None
    ),
    "qwen2": transformers.Qwen2Config(**SHARP),
    "qwen3": transformers.Qwen3Config(**SHARP, tie_word_embeddings=True),
    "qwen3 with yarn": transformers.Qwen3Config(**SHARP, rope_parameters=YARN | TRAINED),
    "gemma2": transformers.Gemma2Config(
        **GEMMA | {"num_hidden_layers": 3}, attn_logit_softcapping=2.0
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **GEMMA | {"num_hidden_layers": 7},
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "phi3": transformers.Phi3Config(**NO_HEAD_DIM),
    "phi3 for long texts": transformers.Phi3Config(
        **NO_HEAD_DIM | {"max_position_embeddings": 1024},
        original_max_position_embeddings=256,
        rope_parameters=LONG | {"rope_theta": 1e4},
    ),
    "granite": transformers.GraniteConfig(
        **SHARP,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
    ),
}
EXPERTS = SHARP | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
CONFIGS |= {
    "smollm3": transformers.SmolLM3Config(
        **SHARP | {"num_hidden_layers": 5, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    ),
    "seed_oss": transformers.SeedOssConfig(**SHARP),
    "mixtral": transformers.MixtralConfig(**SHARP, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": transformers.Qwen2MoeConfig(**EXPERTS, shared_expert_intermediate_size=160),
    "qwen3_moe": transformers.Qwen3MoeConfig(**EXPERTS, norm_topk_prob=True),
    "olmoe": transformers.OlmoeConfig(
        **SHARP | {"num_key_value_heads": SHARP["num_attention_heads"]},
        num_experts=8,
        num_experts_per_tok=2,
    ),
}
# Both compute in float32. llama.cpp looks GELU up in a table of half-precision numbers.
TOLERANCE = {"gemma2": 2e-2, "gemma3": 5e-2}


# Keys without which a file loads, but must not compute the same.
KEYS = {
    "llama": ["rope.freq_base"],
    "qwen3 with yarn": ["rope.scaling.factor", "rope.scaling.original_context_length"],
    "gemma2": ["attention.sliding_window", "attn_logit_softcapping", "final_logit_softcapping"],
    "gemma3": ["attention.sliding_window", "rope.freq_base_swa", "rope.scaling.factor"],
    "phi3 for long texts": ["rope.scaling.attn_factor"],
    "granite": ["attention.scale", "embedding_scale", "residual_scale", "logit_scale"],
    "qwen3_moe": ["expert_used_count"],
}


OFTEN = ("llama", "llama 3.1", "gemma3", "qwen3 with yarn", "qwen3_moe")
"""Between them they have every kind of change."""


@pytest.fixture(scope="module", params=CONFIGS)
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("family")
    name = request.param.split()[0]
    return request.param, *make_source(name, folder, CONFIGS[request.param])


def test_llama_cpp_computes_what_transformers_computes(family, tmp_path):
    name, model, source = family
    convert(source, tmp_path / "model.gguf")
    assert largest_difference(model, tmp_path / "model.gguf") < TOLERANCE.get(name, 2e-4)


@pytest.mark.parametrize(
    "family",
    [n if n in OFTEN else pytest.param(n, marks=pytest.mark.slow) for n in CONFIGS],
    indirect=True,
)
def test_every_change_and_key_matters(family, tmp_path):
    """What the test above compares would be off by far more than it allows."""
    name, model, source = family
    layout = Layout.of(source)
    changes = {tensor.change for tensor in layout.tensors} - {Change.NONE}
    for index, part in enumerate([*changes, *KEYS.get(name, [])]):
        path = tmp_path / f"{index}.gguf"
        convert(source, path, layout=without(layout, part))
        assert largest_difference(model, path) > 5 * TOLERANCE.get(name, 2e-4), part


def test_a_file_becomes_the_model_that_it_was_made_from(family, tmp_path):
    """Config and tensors, in the type of the file; Mistral is Llama by another name."""
    name, _, source = family
    convert(source, tmp_path / "model.gguf")
    found = open_file(tmp_path / "model.gguf")
    assert found.quantized_by is None
    assert found.label == "model"
    assert found.tensors.keys() == source.tensors.keys()
    for tensor in source.tensors.values():
        assert torch.equal(found.tensors[tensor.name].read(), tensor.read().float()), tensor.name
    ours, theirs = (read_config(folder) for folder in (found.folder, source.folder))
    beside = {"_name_or_path", "dtype", "initializer_range", "transformers_version"}
    if name.startswith("mistral"):
        beside |= {"model_type", "architectures"}
    unlike = {k for k in theirs if theirs[k] is not None and ours.get(k) != theirs[k]}
    assert unlike <= beside


def test_restore_is_the_inverse_of_build(family):
    _, _, source = family
    layout = Layout.of(source)
    for tensor in layout.tensors:
        assert tuple(layout.build(tensor.name).shape) == tensor.shape
    restored = dict(layout.restore(lambda name: layout.build(name).float()))
    tied = layout.config["tie_word_embeddings"]
    assert restored.keys() == source.tensors.keys() - ({"lm_head.weight"} if tied else set())
    for name, weight in restored.items():
        assert torch.equal(weight, source.tensors[name].read().float()), name


def test_linear_weights_name_their_modules(family):
    _, model, source = family
    linears = {n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    linears -= {"lm_head"} if model.config.tie_word_embeddings else set()
    tensors = [t for t in Layout.of(source).tensors if t.module is not None]
    routers = {t.module for t in tensors if "ffn_gate_inp.weight" in t.name}
    stacks = {t.module for t in tensors if t.change is Change.STACK}
    assert {t.module for t in tensors} - stacks - routers == linears


def test_half_precision_costs_little(tmp_path):
    model, source = make_source("llama", tmp_path / "model", CONFIGS["llama"])
    convert(source, tmp_path / "model.gguf", F16)
    assert largest_difference(model, tmp_path / "model.gguf") < 2e-2


def test_context_ends_where_a_window_would_begin(tmp_path):
    _, source = make_source("mistral", tmp_path, FAMILIES["mistral"])
    assert Layout.of(source).metadata["llama.context_length"] == 16


@pytest.mark.parametrize(
    ("name", "config", "reason"),
    [
        ("olmo2", FAMILIES["olmo2"], "Olmo2ForCausalLM.*gemma2.*llama"),
        ("llama", transformers.LlamaConfig(**SMALL, hidden_act="relu"), "activation relu"),
        ("qwen3_moe", transformers.Qwen3MoeConfig(**EXPERTS), "norm_topk_prob False"),
        (
            "qwen2_moe",
            transformers.Qwen2MoeConfig(**EXPERTS, decoder_sparse_step=2),
            "blocks without experts",
        ),
        (
            "olmoe",
            transformers.OlmoeConfig(**SHARP, num_experts=8),
            "fewer key heads than query heads",
        ),
        ("gemma3", FAMILIES["gemma3"], "query_pre_attn_scalar 256"),
        (
            "gemma2",
            transformers.Gemma2Config(**GEMMA, layer_types=["full_attention"] * 2),
            "full attention",
        ),
        (
            "qwen2",
            transformers.Qwen2Config(
                **SMALL, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
            ),
            "rope_type dynamic",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_llama_cpp_would_compute_differently_is_refused(tmp_path, name, config, reason):
    _, source = make_source(name, tmp_path, config)
    with pytest.raises(SourceError, match=reason):
        Layout.of(source)


def test_a_tensor_without_a_place_is_refused(tmp_path):
    _, source = make_source("llama", tmp_path)
    extra = replace(source.tensors["model.norm.weight"], name="model.something.weight")
    source = replace(source, tensors={**source.tensors, extra.name: extra})
    with pytest.raises(SourceError, match=r"model\.something\.weight"):
        Layout.of(source)


def different_tokens(folder, path, left_out=lambda text: False):
    """Texts that llama.cpp and transformers tokenise differently."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chosen = [t for t in texts(250, tokenizer.get_added_vocab()) if not left_out(t)]
    assert len(chosen) > 100
    with llamacpp.serve(path) as server:
        return [t for t in chosen if llamacpp.tokenize(server, t) != tokenizer.encode(t)]


def test_the_demo_model_is_tokenised_as_by_transformers(tmp_path):
    source = ModelSource.open("demo")
    convert(source, tmp_path / "demo.gguf", F16)
    assert different_tokens(source.folder, tmp_path / "demo.gguf") == []
    made = open_file(tmp_path / "demo.gguf")
    assert different_tokens(made.folder, tmp_path / "demo.gguf") == []
    ours, theirs = (AutoTokenizer.from_pretrained(one.folder) for one in (made, source))
    assert ours.chat_template == theirs.chat_template
    assert ours.special_tokens_map == theirs.special_tokens_map
    assert ours.decode(ours.encode("A b,  c")) == theirs.decode(theirs.encode("A b,  c"))


BYTES = cut.ByteLevel(add_prefix_space=False, use_regex=False)
GPT_2 = cut.ByteLevel(add_prefix_space=False)


def pattern(*texts):
    return cut.Sequence([*(cut.Split(Regex(text), "isolated") for text in texts), BYTES])


BYTE_LEVEL = {
    "gpt-2": (GPT_2, False),
    "smollm": (cut.Sequence([cut.Digits(individual_digits=True), GPT_2]), False),
    "llama-bpe": (pattern(pretokenizers.LLAMA_3), True),
    "dbrx": (pattern(pretokenizers.LLAMA_3), False),
    "qwen2": (pattern(pretokenizers.QWEN_2), False),
    "gpt-4o": (pattern(pretokenizers.GPT_4O), False),
    "tekken": (pattern(pretokenizers.TEKKEN), True),
    # As published, with line ends that are not escaped.
    "deepseek-v3": (
        pattern(*(text.replace(r"\r\n", "\r\n") for text in pretokenizers.DEEPSEEK_3)),
        False,
    ),
}
SPECIALS = ["<unk>", "<s>", "</s>"]
STARTS = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])


def has_marks(text):
    return any(unicodedata.category(letter).startswith("M") for letter in text)


def is_decomposed(text):
    return text != unicodedata.normalize("NFC", text)


def byte_level(name):
    splitter, ignore_merges = BYTE_LEVEL[name]
    inner = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    inner.pre_tokenizer = splitter
    inner.decoder = decoders.ByteLevel()
    if name == "qwen2":
        inner.normalizer = normal.NFC()
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=SPECIALS,
        initial_alphabet=cut.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(texts(1000, seed=1), trainer)
    if name in ("llama-bpe", "tekken"):
        inner.post_processor = STARTS
    return inner


def sentencepiece(normalizer, splitter, n_missing=0, spaces=()):
    """Characters and bytes; as in such models, all pairs whose sum is a token are merges."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = cut.Metaspace(prepend_scheme="always", split=True)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=1200,
        special_tokens=[*SPECIALS, *byte_tokens, *spaces],
        limit_alphabet=100,
        show_progress=False,
    )
    trained.train_from_iterator(texts(1000, seed=1), trainer)
    ids = json.loads(trained.to_str())["model"]["vocab"]
    pairs = sorted(
        (ids[text], text[:i], text[i:])
        for text in ids
        if text not in SPECIALS + byte_tokens
        for i in range(1, len(text))
        if text[:i] in ids and text[i:] in ids
    )
    merges = [pair[1:] for pair in pairs[n_missing:]]
    inner = Tokenizer(models.BPE(ids, merges, byte_fallback=True, unk_token="<unk>"))
    inner.add_special_tokens(SPECIALS)
    if normalizer:
        inner.normalizer = normalizer
    if splitter:
        inner.pre_tokenizer = splitter
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    inner.post_processor = STARTS
    return inner


def save_with(inner, folder):
    """A model of almost nothing with this tokenizer."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer) + 5,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return ModelSource.open(str(folder))


# llama.cpp neither composes letters and accents nor, for two names, keeps them together.
LEFT_OUT = {"qwen2": is_decomposed, "gpt-4o": has_marks, "tekken": has_marks}


@pytest.mark.parametrize("name", sorted(set(pretokenizers.BYTE_LEVEL.values())))
def test_every_named_pre_tokenizer_cuts_as_llama_cpp_does(name, tmp_path):
    source = save_with(byte_level(name), tmp_path / "model")
    assert vocabulary(source, 2000)["tokenizer.ggml.pre"] == name
    convert(source, tmp_path / "model.gguf")
    left_out = LEFT_OUT.get(name, lambda text: False)
    assert different_tokens(source.folder, tmp_path / "model.gguf", left_out) == []
    made = open_file(tmp_path / "model.gguf")
    left_out = has_marks if left_out is has_marks else lambda text: False  # nothing is composed
    assert different_tokens(made.folder, tmp_path / "model.gguf", left_out) == []


def test_skipping_merges_may_differ_where_it_changes_nothing(tmp_path):
    inner = byte_level("gpt-4o")
    inner.model.ignore_merges = True
    source = save_with(inner, tmp_path / "model")
    assert vocabulary(source, 1300)["tokenizer.ggml.pre"] == "gpt-4o"
    convert(source, tmp_path / "model.gguf")
    assert different_tokens(source.folder, tmp_path / "model.gguf", has_marks) == []
    file = source.folder / "tokenizer.json"
    written = json.loads(file.read_text())
    del written["model"]["merges"][-1]  # now one token comes about only by skipping
    file.write_text(json.dumps(written))
    with pytest.raises(SourceError, match=r"llama\.cpp does not support"):
        vocabulary(source, 1300)


def test_the_published_tokenizer_counts_where_transformers_builds_another(tmp_path):
    source = save_with(byte_level("smollm"), tmp_path)
    settings = tmp_path / "tokenizer_config.json"
    changed = json.loads(settings.read_text()) | {"tokenizer_class": "GPT2Tokenizer"}
    settings.write_text(json.dumps(changed))
    assert vocabulary(source, 1300)["tokenizer.ggml.pre"] == "smollm"


def meets_space_or_special(text):
    return text.startswith((" ", "▁")) or any(special in text for special in SPECIALS)


SPACES = [normal.Prepend("▁"), normal.Replace(" ", "▁")]
SENTENCEPIECE = {
    "llama 2": (normal.Sequence(SPACES), None, None),
    "always": (None, cut.Metaspace(prepend_scheme="always", split=False), meets_space_or_special),
    "first": (None, cut.Metaspace(prepend_scheme="first", split=False), meets_space_or_special),
    "never": (None, cut.Metaspace(prepend_scheme="never", split=False), None),
    "gemma": (SPACES[1], cut.Split(" ", "merged_with_previous"), None),
}


@pytest.mark.parametrize("name", SENTENCEPIECE)
def test_sentencepiece_tokenizers_agree(name, tmp_path):
    normalizer, splitter, left_out = SENTENCEPIECE[name]
    source = save_with(sentencepiece(normalizer, splitter), tmp_path / "model")
    convert(source, tmp_path / "model.gguf")
    left_out = left_out or (lambda text: False)
    assert different_tokens(source.folder, tmp_path / "model.gguf", left_out) == []
    made = open_file(tmp_path / "model.gguf")
    assert different_tokens(made.folder, tmp_path / "model.gguf", left_out) == []
    ours = AutoTokenizer.from_pretrained(made.folder)
    assert ours.decode(ours.encode("a b  ñ", add_special_tokens=False)) == "a b  ñ"


@pytest.mark.parametrize("name", ["gpt-2", "llama 2", "gemma"])
def test_added_tokens_are_found_in_text(name, tmp_path):
    added = ["<tool>", "Hello HELLO", "<|think|>", "\n\n\n"]
    if name == "gpt-2":
        inner = byte_level(name)
    else:
        inner = sentencepiece(*SENTENCEPIECE[name][:2], spaces=["▁▁", "▁▁▁"])
        added += ["▁▁", "▁▁▁"]
    inner.add_tokens([AddedToken(text, normalized=False) for text in added])
    source = save_with(inner, tmp_path / "model")
    convert(source, tmp_path / "model.gguf")
    # Nobody writes the sign for a space; after a space it would be cut off here and not there.
    path, left_out = tmp_path / "model.gguf", lambda text: "▁" in text
    assert different_tokens(source.folder, path, left_out) == []
    made = open_file(path)
    assert different_tokens(made.folder, path, left_out) == []


def varint(number):
    return bytes([number]) if number < 128 else bytes([number & 127 | 128, number >> 7])


def test_scores_of_a_sentencepiece_model_stand_in_for_missing_merges(tmp_path):
    source = save_with(sentencepiece(None, SENTENCEPIECE["never"][1], 40), tmp_path / "model")
    with pytest.raises(SourceError, match="never merges"):
        vocabulary(source, 1300)
    ids = json.loads((source.folder / "tokenizer.json").read_text())["model"]["vocab"]
    with (source.folder / "tokenizer.model").open("wb") as stream:
        for text, index in ids.items():
            score = torch.tensor(-float(index)).numpy().tobytes()
            piece = b"\x0a" + varint(len(text.encode())) + text.encode() + b"\x15" + score
            stream.write(b"\x0a" + varint(len(piece) + 2) + piece + b"\x18\x01")
    found = vocabulary(source, 1300)
    pairs = zip(found["tokenizer.ggml.tokens"], found["tokenizer.ggml.scores"], strict=True)
    scores = dict(pairs)
    assert all(scores[t] == -i for t, i in ids.items() if t not in SPECIALS)


@pytest.mark.parametrize(
    "splitter",
    [
        pattern(r"\s+|\S+"),
        cut.ByteLevel(add_prefix_space=True),
        cut.Sequence([cut.Digits(individual_digits=False), GPT_2]),
        cut.Sequence([cut.Punctuation(), GPT_2]),
    ],
    ids=["pattern", "space in front", "numbers", "punctuation"],
)
def test_an_unknown_pre_tokenizer_is_refused(splitter, tmp_path):
    inner = byte_level("gpt-2")
    inner.pre_tokenizer = splitter
    with pytest.raises(SourceError, match=r"llama\.cpp does not support"):
        vocabulary(save_with(inner, tmp_path), 2000)


def test_an_unknown_normalizer_is_refused(tmp_path):
    inner = byte_level("gpt-2")
    inner.normalizer = normal.Lowercase()
    with pytest.raises(SourceError, match="Lowercase"):
        vocabulary(save_with(inner, tmp_path), 2000)


def test_tokens_that_the_embedding_lacks_are_refused(tmp_path):
    source = save_with(byte_level("gpt-2"), tmp_path)
    with pytest.raises(SourceError, match="do not match"):
        vocabulary(source, 300)


def test_vocabulary_names_special_tokens_and_the_chat_template(tmp_path):
    source = save_with(byte_level("llama-bpe"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    found = vocabulary(source, 1300)
    assert found["tokenizer.ggml.add_bos_token"] is True
    assert found["tokenizer.ggml.add_eos_token"] is False
    assert [found[f"tokenizer.ggml.{kind}_token_id"] for kind in ("unknown", "bos", "eos")] == [
        0,
        1,
        2,
    ]
    assert found["tokenizer.chat_template"] == "{{ messages }}"
    assert found["tokenizer.ggml.tokens"][1299] == "[PAD1299]"
    assert found["tokenizer.ggml.token_type"][1299] == gguf.TokenType.UNUSED


def test_general_keys_come_from_the_model_card(tmp_path):
    _, source = make_source("llama", tmp_path / "Tiny-7B-Instruct")
    (source.folder / "README.md").write_text(
        "---\nlicense: mit\nlanguage: [en, no]\nbase_model: someone/Base-Model\n---\nText\n"
    )
    found = general(Layout.of(source), source, gguf.LlamaFileType.MOSTLY_Q4_K_M)
    assert found["general.architecture"] == "llama"
    assert found["general.name"] == "Tiny-7B-Instruct"
    assert (found["general.license"], found["general.languages"]) == ("mit", ["en", "no"])
    assert found["general.base_model.0.repo_url"].endswith("/someone/Base-Model")
    assert found["general.file_type"] == 15
    assert found["general.quantized_by"].startswith("quantkit ")


def test_llama_cpp_loads_a_model_with_the_name_of_another_vocabulary(tmp_path):
    """llama.cpp looks up Phi-3's special tokens wherever a name has "phi-3" in it."""
    expected, source = make_source("phi3", tmp_path / "my-Phi-3-tuned")
    (made,) = quantkit.quantize(source.folder, ["gguf-f32"], out=tmp_path / "out", device="cpu")
    assert made.gguf.metadata["general.name"] == "my-phi_3-tuned"
    assert largest_difference(expected, made.gguf.path) < 2e-4


def test_a_file_is_read_back_as_it_was_written(tmp_path):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5, generator=generator),
        "b": torch.randn(7, generator=generator),
        "c": torch.randn(2, 3, 4, generator=generator).half(),
    }
    metadata = {
        "general.architecture": "llama",
        "count": 7,
        "large": 1 << 40,
        "negative": -3,
        "flag": True,
        "number": 0.5,
        "texts": ["x", "é", ""],
        "types": [1, 2, 3],
        "flags": [True, False],
        "numbers": [0.5, -1.0],
    }
    path = tmp_path / "file.gguf"
    kinds = {torch.float32: F32, torch.float16: F16}
    file = GGUFFile(path, metadata, [(n, t.shape, kinds[t.dtype]) for n, t in tensors.items()])
    raw = {name: tensor.view(torch.uint8).flatten() for name, tensor in tensors.items()}
    parts = [(n, r[i : i + 9], i) for n, r in raw.items() for i in range(0, len(r), 9)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda part: file.write(*part), reversed(parts)))
    assert file.close() == hashlib.sha256(path.read_bytes()).hexdigest()
    reader = gguf.GGUFReader(path)
    assert {k: v.contents() for k, v in reader.fields.items() if k in metadata} == metadata
    types = {key: field.types[-1].name for key, field in reader.fields.items()}
    assert (types["count"], types["large"], types["negative"]) == ("UINT32", "UINT64", "INT32")
    assert (types["types"], types["numbers"]) == ("INT32", "FLOAT32")
    for tensor in reader.tensors:
        assert tensor.data_offset % 32 == 0
        assert torch.equal(torch.from_numpy(tensor.data.copy()), tensors[tensor.name])


def test_a_file_with_a_gap_is_not_closed(tmp_path):
    file = GGUFFile(tmp_path / "file.gguf", {"general.architecture": "llama"}, [("a", (4,), F32)])
    file.write("a", bytes(12))
    with pytest.raises(AssertionError, match="not written in full"):
        file.close()
