"""A GGUF file's tokenizer in Hugging Face's format: the inverse of `vocabulary.py`.

llama.cpp has its ways of splitting text built in, and a file names one. Each name stands for steps
(`pretokenizers.py`), which are written out here. Nothing is added that the file does not have: NFC,
which llama.cpp does not apply, is left out.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gguf import Keys, TokenType

from quantkit.errors import SourceError
from quantkit.gguf.pretokenizers import BYTE_LEVEL
from quantkit.gguf.reader import GGUF
from quantkit.gguf.vocabulary import SPECIAL_KEYS
from quantkit.storage import write_json, write_text

ALIASES = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
    "gpt2": "gpt-2",
}
"""Other names under which llama.cpp splits the same way."""
ADDED = (TokenType.CONTROL, TokenType.USER_DEFINED)
SPACE = "▁"


def write(file: GGUF, folder: Path) -> None:
    """Write a file's tokenizer, special tokens and chat template into a folder."""
    values = file.metadata
    kind = values.get(Keys.Tokenizer.MODEL)
    tokens = _texts(file, Keys.Tokenizer.LIST)
    kinds = [TokenType(n) for n in _list(file, Keys.Tokenizer.TOKEN_TYPE, len(tokens), int)]
    if kind == "gpt2":
        described = _byte_level(file, tokens)
    elif kind == "llama":
        described = _pieces(file, tokens, kinds)
    else:
        raise _refusal(file, f"its tokenizer's kind is {str(kind)[:40]}")
    # Rows of the embedding beyond the tokenizer have names made up by the converter.
    known = {t: n for n, t in enumerate(tokens) if kinds[n] != TokenType.UNUSED}
    if len(known) < sum(k != TokenType.UNUSED for k in kinds):
        raise _refusal(file, "two tokens have the same text")
    described["model"]["vocab"] = known
    described["added_tokens"] = [
        _added(n, token, kinds[n]) for n, token in enumerate(tokens) if kinds[n] in ADDED
    ]
    specials = _specials(file, tokens)
    described["post_processor"] = _post_processor(file, kind == "llama", specials)
    write_json(folder / "tokenizer.json", {"version": "1.0", **described})
    config: dict[str, Any] = {
        # Only for this class does transformers take every step from the file.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": values.get(f"{values[Keys.General.ARCHITECTURE]}.context_length"),
        **{f"{name}_token": tokens[n] for name, n in specials.items()},
    }
    template = values.get(Keys.Tokenizer.CHAT_TEMPLATE)
    if isinstance(template, str):
        config["chat_template"] = template
        write_text(folder / "chat_template.jinja", template)
    write_json(folder / "tokenizer_config.json", config)
    _write_generation(file, folder, specials)


def _byte_level(file: GGUF, tokens: Sequence[str]) -> dict[str, Any]:
    name = str(file.metadata.get(Keys.Tokenizer.PRE))
    steps = {known: (cut, skips) for (cut, skips), known in BYTE_LEVEL.items()}
    found = steps.get(ALIASES.get(name, name))
    if found is None:
        raise _refusal(file, f"its pre-tokenizer is {name[:40]!r}")
    cut, skips = found
    merges = []
    for text in _texts(file, Keys.Tokenizer.MERGES):
        pair = text.split(" ")
        if len(pair) != 2:
            raise _refusal(file, f"its merge {text[:40]!r} is not a pair of tokens")
        merges.append(pair)
    model = {"type": "BPE", "merges": merges, "ignore_merges": skips, "byte_fallback": False}
    bytes_only = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [_cut(step) for step in cut]},
        "decoder": bytes_only | {"use_regex": True},
        "model": model,
    }


def _cut(step: tuple[Any, ...]) -> dict[str, Any]:
    """One step of `pretokenizers.steps` as in `tokenizer.json`."""
    match step:
        case ("bytes", *more):
            return {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": bool(more),
            }
        case ("single digits",):
            return {"type": "Digits", "individual_digits": True}
        case ("cut", pattern):
            return {
                "type": "Split",
                "pattern": {"Regex": pattern},
                "behavior": "Isolated",
                "invert": False,
            }
    raise AssertionError(f"a step of llama.cpp without a form of its own: {step}")


def _pieces(file: GGUF, tokens: Sequence[str], kinds: Sequence[TokenType]) -> dict[str, Any]:
    """SentencePiece's BPE: of all neighbours that make up a token, the best pair is joined."""
    scores = _list(file, Keys.Tokenizer.SCORES, len(tokens), float)
    rank = {t: s for t, s, k in zip(tokens, scores, kinds, strict=True) if k == TokenType.NORMAL}
    places = {token: n for n, token in enumerate(tokens)}
    pairs = [
        (-score, places[text[:cut]], places[text[cut:]], [text[:cut], text[cut:]])
        for text, score in rank.items()
        for cut in range(1, len(text))
        if text[:cut] in rank and text[cut:] in rank
    ]
    steps: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    ]
    decoder: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if file.metadata.get(Keys.Tokenizer.ADD_PREFIX, True):
        steps.insert(0, {"type": "Prepend", "prepend": SPACE})
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    unknown = file.metadata.get(Keys.Tokenizer.UNK_ID)
    return {
        "normalizer": {"type": "Sequence", "normalizers": steps},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoder},
        "model": {
            "type": "BPE",
            "unk_token": tokens[unknown] if isinstance(unknown, int) else None,
            "fuse_unk": True,
            "byte_fallback": TokenType.BYTE in kinds,
            "ignore_merges": False,
            "merges": [pair for *_, pair in sorted(pairs)],
        },
    }


def _added(index: int, text: str, kind: TokenType) -> dict[str, Any]:
    return {
        "id": index,
        "content": text,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": kind == TokenType.CONTROL,
    }


def _specials(file: GGUF, tokens: Sequence[str]) -> dict[str, int]:
    found = {}
    for name, key in SPECIAL_KEYS.items():
        number = file.metadata.get(key)
        if number is None:
            continue
        if type(number) is not int or not 0 <= number < len(tokens):
            raise _refusal(file, f"its {key} {str(number)[:40]} is not the id of a token")
        found[name] = number
    return found


def _post_processor(
    file: GGUF, is_pieces: bool, specials: Mapping[str, int]
) -> dict[str, Any] | None:
    """Special tokens added to a text; where the file does not say, llama.cpp's default."""
    pre = str(file.metadata.get(Keys.Tokenizer.PRE))
    usual = is_pieces or ALIASES.get(pre, pre) == "llama-bpe"
    front = file.metadata.get(Keys.Tokenizer.ADD_BOS, usual) and "bos" in specials
    back = file.metadata.get(Keys.Tokenizer.ADD_EOS, False) and "eos" in specials
    if not front and not back:
        return None
    tokens = _texts(file, Keys.Tokenizer.LIST)
    wanted = [*(["bos"] if front else []), *(["eos"] if back else [])]

    def single(text: str) -> list[dict[str, Any]]:
        start = [{"SpecialToken": {"id": tokens[specials["bos"]], "type_id": 0}}] * bool(front)
        stop = [{"SpecialToken": {"id": tokens[specials["eos"]], "type_id": 0}}] * bool(back)
        return [*start, {"Sequence": {"id": text, "type_id": 0}}, *stop]

    return {
        "type": "TemplateProcessing",
        "single": single("A"),
        "pair": single("A") + single("B"),
        "special_tokens": {
            tokens[specials[name]]: {
                "id": tokens[specials[name]],
                "ids": [specials[name]],
                "tokens": [tokens[specials[name]]],
            }
            for name in wanted
        },
    }


def _write_generation(file: GGUF, folder: Path, specials: Mapping[str, int]) -> None:
    """Where answers end: at the end of a turn as well as of the text."""
    ends = [specials.get("eos"), file.metadata.get(Keys.Tokenizer.EOT_ID)]
    unique = list(dict.fromkeys(n for n in ends if isinstance(n, int)))
    known = {f"{name}_token_id": n for name, n in specials.items() if name in ("bos", "pad")}
    if unique:
        known["eos_token_id"] = unique[0] if len(unique) == 1 else unique  # type: ignore[assignment]
        write_json(folder / "generation_config.json", known)


def _texts(file: GGUF, key: str) -> list[str]:
    found = file.metadata.get(key)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise _refusal(file, f"it has no list of texts as {key}")
    return [str(text) for text in found]


def _list(file: GGUF, key: str, length: int, kind: type) -> list[Any]:
    found = file.metadata.get(key)
    if not isinstance(found, list) or len(found) != length:
        raise _refusal(file, f"it has no {key} for each of its {length} tokens")
    return [kind(value) for value in found]


def _refusal(file: GGUF, reason: str) -> SourceError:
    return SourceError(
        f"{file.path}: cannot derive its tokenizer: {reason}; give the model that it was made from"
    )
