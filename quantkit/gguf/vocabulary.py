"""A model's tokenizer as `tokenizer.*` keys of a GGUF file.

Two kinds are supported: byte-level BPE ("gpt2": tokens and merges) and SentencePiece's BPE
("llama": tokens and scores, where of all neighbours the pair with the best score is joined).

How text is split and merged is taken from the published `tokenizer.json`. transformers 5 rebuilds
some classes and loses steps on the way: SmolLM 2, which splits numbers into digits, keeps them
whole as soon as its config says GPT2Tokenizer.
"""

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gguf import Keys, TokenType

from quantkit.errors import SourceError
from quantkit.gguf import pretokenizers
from quantkit.gguf.writer import Value
from quantkit.model.source import ModelSource
from quantkit.model.tokenizer import load as load_tokenizer

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
# Some models do not mark these as special; llama.cpp must not print them.
LOOKS_SPECIAL = re.compile(
    r"<\|.*\|>|<\uff5c.*\uff5c>|<unused\d+>|<pad>|<mask>|<2mass>|\[@BOS@\]", re.DOTALL
)
SPECIAL_KEYS = {
    "bos": Keys.Tokenizer.BOS_ID,
    "eos": Keys.Tokenizer.EOS_ID,
    "unk": Keys.Tokenizer.UNK_ID,
    "pad": Keys.Tokenizer.PAD_ID,
}
ADDED_SCORE, UNUSED_SCORE = -1000.0, -10000.0


def vocabulary(source: ModelSource, n_tokens: int) -> dict[str, Value]:
    """The tokenizer of a model whose embedding has `n_tokens` rows."""
    tokenizer = _load(source)
    place = str(source.folder / "tokenizer.json")
    described = _describe(source.folder, tokenizer)
    if described["model"]["type"] != "BPE":
        raise SourceError(
            f"{place} is of type {described['model']['type']}; "
            "GGUF files of text models take BPE, byte-level or from SentencePiece"
        )
    tokens, kinds = _tokens(described, n_tokens, place)
    merges = [m.split(" ") if isinstance(m, str) else m for m in described["model"]["merges"]]
    values: dict[str, Value] = {}
    if pretokenizers.is_byte_level(described):
        values[Keys.Tokenizer.MODEL] = "gpt2"
        values[Keys.Tokenizer.PRE] = pretokenizers.byte_level_name(described, place)
        # A merge's two parts are separated by a space, so a space within a token is written as
        # bytes are.
        values[Keys.Tokenizer.MERGES] = [
            " ".join(part.replace(" ", "Ġ") for part in pair) for pair in merges
        ]
    else:
        values[Keys.Tokenizer.MODEL] = "llama"
        values[Keys.Tokenizer.PRE] = "default"
        values[Keys.Tokenizer.ADD_PREFIX] = pretokenizers.space_in_front(described, place)
        kinds = _spaces_as_pieces(described, kinds, merges)
        values[Keys.Tokenizer.SCORES] = _scores(source.folder, tokens, kinds, merges)
        # A text has spaces where pieces have their placeholder character.
        tokens = [
            token.replace("▁", " ") if kind == TokenType.USER_DEFINED else token
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    values[Keys.Tokenizer.LIST] = tokens
    values[Keys.Tokenizer.TOKEN_TYPE] = [int(kind) for kind in kinds]
    return values | _specials(source, tokenizer, n_tokens) | _templates(tokenizer)


def _load(source: ModelSource) -> Any:
    tokenizer = load_tokenizer(source.folder, source.trust_remote_code)
    if not getattr(tokenizer, "is_fast", False):
        raise SourceError(
            f"{source.folder} has a tokenizer in Python only; GGUF needs one with a tokenizer.json"
        )
    return tokenizer


def _describe(folder: Path, tokenizer: Any) -> dict[str, Any]:
    """The tokenizer as `tokenizer.json` describes it, with everything that other files add."""
    from tokenizers import Tokenizer

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    file = folder / "tokenizer.json"
    if file.is_file():
        # Through the library, which fills in what older files omit.
        published = json.loads(Tokenizer.from_file(str(file)).to_str())
        described |= {part: published[part] for part in ("normalizer", "pre_tokenizer", "model")}
    return described


def _tokens(
    described: Mapping[str, Any], n_tokens: int, place: str
) -> tuple[list[str], list[TokenType]]:
    """Texts and types by id; rows of the embedding beyond the tokenizer get made-up names."""
    known = {index: text for text, index in described["model"]["vocab"].items()}
    added = {token["id"]: token for token in described["added_tokens"]}
    known |= {index: token["content"] for index, token in added.items()}
    if max(known) >= n_tokens:
        raise SourceError(
            f"{place} has tokens up to {max(known)}, but the model's embedding only {n_tokens} "
            "rows; they do not match"
        )
    tokens, kinds = [], []
    for index in range(n_tokens):
        text = known.get(index, f"[PAD{index}]")
        tokens.append(text)
        if index not in known:
            kinds.append(TokenType.UNUSED)
        elif index in added:
            special = added[index]["special"] or LOOKS_SPECIAL.fullmatch(text)
            kinds.append(TokenType.CONTROL if special else TokenType.USER_DEFINED)
        elif described["model"].get("byte_fallback") and BYTE.fullmatch(text):
            kinds.append(TokenType.BYTE)
        else:
            kinds.append(TokenType.NORMAL)
    # llama.cpp aborts the process on the first, and truncates a text at the second.
    if len(set(tokens)) < n_tokens or any("\0" in text for text in tokens):
        raise SourceError(
            f"{place} has two tokens of the same text, or one with a null character, "
            "which a GGUF file cannot hold"
        )
    return tokens, kinds


def _spaces_as_pieces(
    described: Mapping[str, Any], kinds: list[TokenType], merges: list[list[str]]
) -> list[TokenType]:
    """Runs of spaces that a model lists as added tokens (Gemma does), turned into pieces.

    Added tokens are matched in text before its spaces are replaced, so only merges find these.
    """
    made = {"".join(pair) for pair in merges}
    pieces = {
        token["id"]
        for token in described["added_tokens"]
        if "▁" in token["content"] and token["content"] in made
        if not token["special"] and not token["normalized"]
    }
    return [TokenType.NORMAL if i in pieces else kind for i, kind in enumerate(kinds)]


def _scores(
    folder: Path,
    tokens: list[str],
    kinds: list[TokenType],
    merges: list[list[str]],
) -> list[float]:
    """Scores that join pieces in the order of the merges.

    llama.cpp joins any two pieces that concatenate to a token, so every such pair must be a merge.
    """
    rank: dict[str, int] = {}
    for index, pair in enumerate(merges):
        rank.setdefault("".join(pair), index)
    listed = {tuple(pair) for pair in merges}
    normal = [t for t, k in zip(tokens, kinds, strict=True) if k == TokenType.NORMAL]
    possible = set(normal)
    missing = [
        (text[:cut], text[cut:])
        for text in normal
        for cut in range(1, len(text))
        if text[:cut] in possible and text[cut:] in possible
        if (text[:cut], text[cut:]) not in listed
    ]
    file = folder / "tokenizer.model"
    if missing and not file.is_file():
        raise SourceError(
            f"{folder / 'tokenizer.json'} never merges {missing[0][0]!r} and {missing[0][1]!r} "
            "though their sum is a token, so it is not a SentencePiece model and llama.cpp would "
            "tokenise differently"
        )
    given = {text: score for text, score in _pieces(file)} if missing else {}
    scores = []
    for text, kind in zip(tokens, kinds, strict=True):
        if kind == TokenType.UNUSED:
            scores.append(UNUSED_SCORE)
        elif kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            scores.append(ADDED_SCORE)
        else:
            scores.append(given.get(text, -float(rank.get(text, 0))))
    return scores


def _pieces(file: Path) -> Iterator[tuple[str, float]]:
    """Texts and scores of a SentencePiece model: field 1 of its protocol buffer, repeated."""
    try:
        for number, value in _fields(file.read_bytes()):
            if number == 1:
                piece = dict(_fields(value))
                yield piece[1].decode(), struct.unpack("<f", piece.get(2, bytes(4)))[0]
    except (OSError, ValueError, IndexError, KeyError, struct.error) as error:
        raise SourceError(f"{file} is not a SentencePiece model: {error}") from error


def _fields(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and contents of a protocol buffer's fields; integers are skipped."""
    place = 0

    def number() -> int:
        nonlocal place
        result = shift = 0
        while True:
            byte = raw[place]
            place += 1
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return result

    while place < len(raw):
        key = number()
        kind = key & 7
        if kind == 0:
            number()
            continue
        size = {1: 8, 5: 4}.get(kind) or (number() if kind == 2 else 0)
        if kind not in (1, 2, 5) or place + size > len(raw):
            raise ValueError("an unknown field")
        yield key >> 3, raw[place : place + size]
        place += size


def _specials(source: ModelSource, tokenizer: Any, n_tokens: int) -> dict[str, Value]:
    """Ids of special tokens, and which of them are added to a text."""
    values: dict[str, Value] = {}
    ids = {}
    for kind, key in SPECIAL_KEYS.items():
        found = getattr(tokenizer, f"{kind}_token_id", None)
        if found is None:
            found = source.config.get(f"{kind}_token_id")
            found = found[0] if isinstance(found, list) and found else found
        if isinstance(found, int) and 0 <= found < n_tokens:
            values[key] = ids[kind] = found
    bare = tokenizer.encode("a", add_special_tokens=False)
    dressed = tokenizer.encode("a")
    for front in (False, True):
        for back in (False, True):
            expected = [ids.get("bos")] * front + bare + [ids.get("eos")] * back
            if dressed == expected:
                values[Keys.Tokenizer.ADD_BOS] = front
                values[Keys.Tokenizer.ADD_EOS] = back
                return values
    raise SourceError(
        f"the tokenizer of {source.folder} adds {dressed} around {bare}, more than the begin and "
        "end tokens that a GGUF file supports"
    )


def _templates(tokenizer: Any) -> dict[str, Value]:
    template = tokenizer.chat_template
    if not template:
        return {}
    if isinstance(template, str):
        return {Keys.Tokenizer.CHAT_TEMPLATE: template}
    values: dict[str, Value] = {
        Keys.Tokenizer.CHAT_TEMPLATE_N.format(name=name): text
        for name, text in template.items()
        if name != "default"
    }
    if values:
        values[Keys.Tokenizer.CHAT_TEMPLATES] = [n for n in template if n != "default"]
    if "default" in template:
        values[Keys.Tokenizer.CHAT_TEMPLATE] = template["default"]
    return values
