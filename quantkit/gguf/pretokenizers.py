"""How a tokenizer splits text before merging, recognised by its structure.

llama.cpp has its ways of splitting text built in, and a file only names one. A wrong name loads and
runs, and silently feeds the model token sequences that it was never trained on. So a name is given
only to a tokenizer whose normalizer and pre-tokenizer are, step by step, what that name means in
llama.cpp; anything else is refused.
"""

from collections.abc import Mapping
from typing import Any

from quantkit.errors import SourceError

Steps = tuple[tuple[Any, ...], ...]

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LLAMA_3 = WORDS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + SPACES
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)
GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{WORDS}?|"
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{WORDS}?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + SPACES
)

DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"""
    r" ?[\p{P}\p{S}]+[\r\n]*|" + SPACES,
)

BYTES: tuple[Any, ...] = ("bytes",)
GPT_2: tuple[Any, ...] = ("bytes", "cut as GPT-2 does")
DIGITS: tuple[Any, ...] = ("single digits",)

# Steps, and whether words that are tokens skip the merges. For gpt-4o and tekken llama.cpp splits
# combining marks from their letters (Hindi, Thai, decomposed accents), in every existing file.
BYTE_LEVEL: dict[tuple[Steps, bool], str] = {
    ((GPT_2,), False): "gpt-2",
    ((DIGITS, GPT_2), False): "smollm",
    ((("cut", LLAMA_3), BYTES), True): "llama-bpe",
    ((("cut", LLAMA_3), BYTES), False): "dbrx",
    ((("cut", QWEN_2), BYTES), False): "qwen2",
    ((("cut", GPT_4O), BYTES), False): "gpt-4o",
    ((("cut", TEKKEN), BYTES), True): "tekken",
    ((*(("cut", pattern) for pattern in DEEPSEEK_3), BYTES), False): "deepseek-v3",
}
# llama.cpp does not compose letters and accents: decomposed text gets other tokens.
BYTE_LEVEL_NORMALIZERS: tuple[Steps, ...] = ((), (("NFC",),))

REPLACED = ("replace", " ", "▁")
# Normalizer and pre-tokenizer of SentencePiece models, and whether a space is prepended to a text.
# Metaspace ("spaces") prepends none before a space, nor, as "first", after special tokens;
# llama.cpp does so in both cases.
PIECES: dict[tuple[Steps, Steps], bool] = {
    ((("prepend", "▁"), REPLACED), ()): True,
    ((), (("spaces", "always"),)): True,
    ((), (("spaces", "first"),)): True,
    ((), (("spaces", "never"),)): False,
    ((REPLACED,), ()): False,
    ((REPLACED,), (("join", " "),)): False,
}


def is_byte_level(tokenizer: Mapping[str, Any]) -> bool:
    """Whether a `tokenizer.json` merges bytes rather than characters."""
    return any(step[0] == "bytes" for step in steps(tokenizer.get("pre_tokenizer")))


def byte_level_name(tokenizer: Mapping[str, Any], place: str) -> str:
    """llama.cpp's name for the way a byte-level tokenizer splits text."""
    cut, normal = steps(tokenizer.get("pre_tokenizer")), steps(tokenizer.get("normalizer"))
    skips = bool(tokenizer["model"].get("ignore_merges"))
    name = BYTE_LEVEL.get((cut, skips))
    if name is None and (cut, not skips) in BYTE_LEVEL and _merges_make_all(tokenizer):
        name = BYTE_LEVEL[cut, not skips]
    if name is None or normal not in BYTE_LEVEL_NORMALIZERS:
        raise _refusal(place, normal, cut, sorted(BYTE_LEVEL.values()))
    return name


def _merges_make_all(tokenizer: Mapping[str, Any]) -> bool:
    """Whether merging any token's text yields that token: then skipping merges changes nothing."""
    from tokenizers import models

    vocabulary = tokenizer["model"]["vocab"]
    merger = models.BPE(vocabulary, [tuple(pair) for pair in tokenizer["model"]["merges"]])
    added = {token["content"] for token in tokenizer["added_tokens"]}
    return all(len(merger.tokenize(text)) == 1 for text in vocabulary if text not in added)


def space_in_front(tokenizer: Mapping[str, Any], place: str) -> bool:
    """Whether a SentencePiece tokenizer prepends a space to a text."""
    cut, normal = steps(tokenizer.get("pre_tokenizer")), steps(tokenizer.get("normalizer"))
    found = PIECES.get((normal, cut))
    if found is None:
        raise _refusal(place, normal, cut, ["SentencePiece"])
    return found


def steps(part: Mapping[str, Any] | None) -> Steps:
    """A normalizer or pre-tokenizer as its steps, without those that change no tokens."""
    if part is None:
        return ()
    if part["type"] == "Sequence":
        inner = part.get("pretokenizers") or part.get("normalizers") or []
        return tuple(step for each in inner for step in steps(each))
    return (_step(part),)


def _step(part: Mapping[str, Any]) -> tuple[Any, ...]:
    match part:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return GPT_2 if part.get("use_regex", True) else BYTES
        case {"type": "Digits", "individual_digits": True}:
            return DIGITS
        case {"type": "Split", "pattern": {"Regex": r}, "behavior": "Isolated", "invert": False}:
            return ("cut", _escaped(r))
        # Patterns that match any text as a whole: keeping only matches keeps everything.
        case {"type": "Split", "pattern": {"Regex": r}, "behavior": "Removed", "invert": True} if (
            SPACES in r
        ):
            return ("cut", _escaped(r))
        case {"type": "Split", "pattern": {"String": text}, "behavior": "MergedWithPrevious"}:
            return ("join", text)
        case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}:
            return ("spaces", scheme)
        case {"type": "Replace", "pattern": {"String": text}, "content": content}:
            return ("replace", text, content)
        case {"type": "Prepend", "prepend": text}:
            return ("prepend", text)
        case {"type": "NFC"}:
            return ("NFC",)
    return tuple(f"{key}={value}" for key, value in sorted(part.items()))


def _escaped(pattern: str) -> str:
    """A pattern with line ends written as escapes, which mean the same."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _refusal(place: str, normal: Steps, cut: Steps, known: list[str]) -> SourceError:
    found = ", then ".join(" ".join(map(str, step)) for step in normal + cut) or "nothing"
    return SourceError(
        f"{place} prepares text in a way that llama.cpp does not support ({found[:300]}), "
        f"and under another name the file would tokenise wrongly; known: {', '.join(known)}"
    )
