"""Keys, tokens and passwords: the part of `redact` that finds secrets.

Three ways to recognise one: its issuer's prefix, its location (a header, a URL, a key file), and
the name it is assigned to, if the value is as random as a secret.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain

Span = tuple[int, int]

# `re` skips fast to a literal, slowly to one of several characters: so every pattern that runs over
# a whole text starts with a literal, and what precedes it is read backwards.
_BEFORE_UNDERSCORE = (
    (4, "gh[pousr]_", "[A-Za-z0-9]{30,255}"),
    (11, "github_pat_", "[A-Za-z0-9_]{36,255}"),
    (8, "[srp]k_(?:live|test)_", "[A-Za-z0-9]{16,}"),
    (6, "whsec_", "[A-Za-z0-9+/=]{24,}"),
    (4, "gsk_", "[A-Za-z0-9]{40,}"),
    (3, "hf_", "[A-Za-z0-9]{30,}"),
    (4, "npm_", "[A-Za-z0-9]{36,}"),
    (7, "dop_v1_", "[a-f0-9]{64}"),
    (6, "shp(?:at|ca|pa|ss)_", "[a-fA-F0-9]{32}"),
    (9, "dckr_pat_", "[A-Za-z0-9_-]{20,}"),
)
_BEFORE_DASH = (
    (6, "gl(?:pat|ptt|dat|imt|agt|cbt)-", "[A-Za-z0-9_=.-]{18,}"),
    (5, "glrt-", "[A-Za-z0-9_=.-]{18,}"),
    (5, "xox[abeoprs]-", "[A-Za-z0-9-]{10,}"),
    (5, "xapp-", "[A-Za-z0-9-]{20,}"),
    # Without a digit it is a style sheet class.
    (3, "[sr]k-", "(?=[A-Za-z_-]{0,60}[0-9])[A-Za-z0-9_-]{20,}"),
    (5, "pypi-", "Ag[A-Za-z0-9_-]{50,}"),
    (4, "key-", "[a-f0-9]{32}"),
)
_BY_MARK = tuple(
    (
        re.compile(
            rf"{mark}(?<=[a-z1].)(?:{'|'.join(f'((?<={p}){body})' for _, p, body in rows)})(?!\w)"
        ),
        tuple(width for width, _, _ in rows),
    )
    for mark, rows in (("_", _BEFORE_UNDERSCORE), ("-", _BEFORE_DASH))
)
_BY_WORD = {
    "AKIA": r"AKIA[A-Z2-7]{16}(?![A-Za-z0-9])",  # AWS
    "ASIA": r"ASIA[A-Z2-7]{16}(?![A-Za-z0-9])",
    "AIza": r"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])",  # Google
    "ya29.": r"ya29\.[A-Za-z0-9_-]{20,}",
    "AC": r"AC[a-f0-9]{32}(?![A-Za-z0-9])",  # Twilio
    "SK": r"SK[a-f0-9]{32}(?![A-Za-z0-9])",
    "SG.": r"SG\.[A-Za-z0-9_-]{16,32}\.[A-Za-z0-9_-]{32,64}(?![A-Za-z0-9_-])",  # SendGrid
    # A JSON web token; only from the start of a word, or every part of a long one would be read.
    "eyJ": r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))eyJ"
    r"[A-Za-z0-9_-]{8,}+\.[A-Za-z0-9_-]{8,}+(?:\.[A-Za-z0-9_-]*+)*+",
    "hooks.slack": r"hooks\.slack\.com/services/\w+/\w+/[A-Za-z0-9]{16,}",
}
_UNLIKE_A_WORD = re.compile(r"[0-9]|[a-z][A-Z]")
_WORDS = tuple((word, re.compile(pattern)) for word, pattern in _BY_WORD.items())
_PEM = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,30}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:(?:[A-Za-z0-9+/=\s\\:,.()>#]|-(?!----)){0,30000}+-----END [A-Z0-9 ]{0,40}-----"
    r"|(?:(?:\s|\\[nr])*+[A-Za-z0-9+/=]{20,}+)*+)"
)
_BEARER = re.compile(r"earer\s{1,4}([A-Za-z0-9._~+/-]{16,}=*)")
_URL_PASSWORD = re.compile(r"://[^\s/:@\"'<>\[\]]{0,128}:([^\s/\"'<>]{1,256})@(?=[\w\[$])")
_NO_SECRET = re.compile(
    r"\[[A-Z]+\]|[$%{<*]|x{3,}|\.{3}|(?i:your|my|example|changeme|none|null|true|false|redacted|"
    r"placeholder|todo|str\b|string|self\.|os\.|process\.|env\.|config\.|settings\.|secrets\.|"
    r"data:|https?:|/|\./|~/)"
)
"""How a placeholder for a secret starts, or a reference to where it is stored."""


def find_keys(text: str) -> Iterator[Span]:
    """Secrets found in any of the three ways; the names they are assigned to stay."""
    spans = [*_by_shape(text), *_by_place(text), *_by_name(text)]
    yield from sorted(spans, key=lambda span: (span[0], -span[1]))


def _by_shape(text: str) -> Iterator[Span]:
    for pattern, widths in _BY_MARK:
        for found in pattern.finditer(text):
            start = found.start() + 1 - widths[(found.lastindex or 1) - 1]
            key = found.group().rstrip(".-=_")
            if _starts_freely(text, start) and _UNLIKE_A_WORD.search(key):
                yield start, found.start() + len(key)
    for word, pattern in _WORDS:
        if word in text:
            for found in pattern.finditer(text):
                if _starts_freely(text, found.start()):
                    yield found.span()


def _starts_freely(text: str, start: int) -> bool:
    """Not in a word or in base64; the letter of an escape such as \\n is not a word."""
    return not re.search(r"(?:[^\Wnrt]|(?<!\\)[nrt]|[_+])$", text[max(0, start - 3) : start])


def _by_place(text: str) -> Iterator[Span]:
    if "-----BEGIN" in text:
        yield from (found.span() for found in _PEM.finditer(text))
    for found in _BEARER.finditer(text):
        if _mixed(found.group(1)):
            yield found.span(1)
    for found in _URL_PASSWORD.finditer(text):
        if not re.match(r"\[[A-Z]+\]$|[$%{<*]", found.group(1)):
            yield found.span(1)


# A name precedes `:`, `=` or `>`, maybe in quotes; it is read backwards from there.
_ASSIGNMENTS = [re.compile(rf"{mark}(?<=[\w\"'\])\\ ].)[>=]?(?![>=])") for mark in ":=>"]
_NAME_BACKWARDS = re.compile(r"[ \t]{0,4}[\"'\\\])]{0,4}((?i:yek )[\w-]{3,12}|[\w.-]{3,48})")
_PASSWORD = re.compile(
    r"pass(?:word|wd|phrase|code|wort)|(?<![a-z])pass(?![a-z])|pwd|kennwort|contraseña"
)
_TOKEN = re.compile(
    r"secret|token|credential|sess(?:ion)?[_-]?(?:id|key)?$|csrf|xsrf|(?<![a-z])sig(?:nature)?$|jwt|"
    r"auth(?:orization)?(?:[_-]?(?:key|code|header))?$|webhook|"
    r"(?:api|access|auth|private|secret|encryption|signing|account|master|license|subscription|"
    r"shared|storage|instrumentation|app|client|service|deploy|bot)[_ -]?key"
)
_VALUE = re.compile(
    r"\s{0,4}(?:[brfu]?[\"'`]|\\[\"'])([^\s\"'`\\<>]{6,256})"
    r"|[ \t]{0,8}(?:(?:Basic|Token|token|Bearer|Digest|ApiKey)\s)?"
    r"((?:[^\s\"'`\\<>,;&|]|&(?!\w+=)){6,256})"
)
_SAID = re.compile(
    r"ass(?:word|code|phrase|wort)\s(?:is|was|to|ist)\s?:?\s?[\"'`]?([^\s\"'`<>]{6,64})"
)
_KEY_IS = re.compile(r" is (?<=(?:key|ken|ret) is )[\"'`]?([^\s\"'`<>]{16,256})")
_FLAG = re.compile(
    r"--(?=[a-z])[a-z-]{0,20}(?:password|token|secret|api-?key)[ =][\"']?([^\s\"'`]{6,256})"
)


@lru_cache(maxsize=4096)
def _role(name: str) -> str:
    """What a name says about its value: `password`, `token` or nothing."""
    name = name.lower()
    if _PASSWORD.search(name):
        return "password"
    return "token" if _TOKEN.search(name) else ""


def _by_name(text: str) -> Iterator[Span]:
    for mark in chain.from_iterable(pattern.finditer(text) for pattern in _ASSIGNMENTS):
        at = mark.start()
        name = _NAME_BACKWARDS.match(text[max(0, at - 56) : at][::-1])
        role = _role(name.group(1)[::-1]) if name else ""
        value = _VALUE.match(text, mark.end()) if role else None
        if value:
            start = value.start(value.lastindex or 1)
            secret = _trimmed(value[value.lastindex or 1])
            if _like_a_password(secret) if role == "password" else _random(secret):
                yield start, start + len(secret)
    for pattern, is_secret in (
        (_SAID, _like_a_password),
        (_FLAG, _like_a_password),
        (_KEY_IS, _random),
    ):
        for found in pattern.finditer(text):
            secret = _trimmed(found.group(1))
            if is_secret(secret):
                yield found.start(1), found.start(1) + len(secret)


def _trimmed(value: str) -> str:
    """Without the end of the sentence or of the bracket around it."""
    return value.rstrip(".,:?" + "".join(end for end in ")]}" if end not in value[:-1]))


_DIGIT, _LOWER, _UPPER = map(re.compile, ("[0-9]", "[a-z]", "[A-Z]"))
_LETTER = re.compile("[A-Za-z]")
_SIGN = re.compile(r"[!@#$%^&*+?~/_-]")
_CODE = re.compile(r"[A-Za-z_][\w.]*[(\[]|[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+$|[A-Z][A-Z_]+$")


def _like_a_password(value: str) -> bool:
    """Not a word, a call or a placeholder: something with a digit or a symbol in it."""
    if len(value) < 6 or _NO_SECRET.match(value) or _CODE.match(value):
        return False
    n_kinds = sum(bool(kind.search(value)) for kind in (_DIGIT, _LOWER, _UPPER, _SIGN))
    return n_kinds >= 3 or (n_kinds == 2 and bool(_DIGIT.search(value)))


def _random(value: str) -> bool:
    """Whether the value is long and mixed, unlike a word or a number."""
    if len(value) < 16 or _NO_SECRET.match(value) or _CODE.match(value):
        return False
    return _mixed(value) and _entropy(value) >= 3.0


def _mixed(value: str) -> bool:
    """Both digits and letters, and not snake_case words with a number."""
    return bool(_LETTER.search(value)) and len(_DIGIT.findall(value)) > len(value) // 24


def _entropy(value: str) -> float:
    """Bits per character."""
    shares = [n / len(value) for n in Counter(value).values()]
    return -sum(share * math.log2(share) for share in shares)
