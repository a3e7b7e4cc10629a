"""Replaces personal data and secrets in a text by placeholders before anything is written.

    email   Jane <jane+list@example.org>          ->  Jane <[EMAIL]>
    phone   call +49 30 1234567                   ->  call [PHONE]
    card    4111 1111 1111 1111                   ->  [CARD]
    key     API_KEY=..., ghp_..., -----BEGIN ...  ->  API_KEY=[KEY], [KEY], [KEY]
    ip      198.51.100.7, 2001:db8::7             ->  [IP], [IP]

Each kind is found by its shape, by a check of its own (Luhn, `ipaddress`, entropy) and by the words
before it, so that dates, versions, hashes and prices stay. Nothing is looked up online.

Not attempted, because shape alone is not enough: names, postal addresses, dates of birth, bank
accounts, passport, tax and patient numbers, number plates, user names, bare phone digits without a
label, and whatever is disguised on purpose ("jane at example dot org"). Addresses that identify
nobody (loopback, netmasks, x.0.0.0) stay. Redaction lowers the risk of keeping a text; it does not
make the text anonymous.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import AddressValueError, IPv4Address, IPv6Address, IPv6Network

from quantkit.calibration.redaction.keys import find_keys
from quantkit.calibration.redaction.numbers import find_cards, find_phones
from quantkit.errors import UnknownName

Span = tuple[int, int]

MOST_PASSES = 8
"""A replacement may expose its neighbour. Usually the second of two passes finds nothing."""


@dataclass(frozen=True)
class Redacted:
    """A text with its findings replaced."""

    text: str
    counts: Mapping[str, int]
    """Replacements per requested kind."""


# Patterns start with a rare character: `re` skips to it quickly, and what precedes it is read
# backwards from there.
_DOMAIN = re.compile(
    r"(?:@|%40)"
    r"((?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,10}"
    r"(?:xn--[a-z0-9-]{2,59}|[^\W\d_]{2,24}+))(?![\w(\[])"
)
_LOCAL_BACKWARDS = re.compile(r"[\w.+%&'~-]{1,64}")
_FILE_ENDINGS = frozenset(("png", "jpg", "jpeg", "gif", "svg", "webp", "css", "js", "json", "html"))


def find_emails(text: str) -> Iterator[Span]:
    """E-mail addresses, also with the `%40` of a URL."""
    if "@" not in text and "%40" not in text:
        return
    for found in _DOMAIN.finditer(text):
        at, end = found.span()
        local_part = _LOCAL_BACKWARDS.match(text[max(0, at - 64) : at][::-1])
        if not local_part:
            continue
        local = local_part.group()[::-1]
        if local[0] in "nrt" and text[: at - len(local)].endswith("\\"):
            local = local[1:]  # the rest of an escape such as \n
        local = local.lstrip(".+%&'~-")
        domain = found.group(1).lower()
        if not local or domain.rpartition(".")[2] in _FILE_ENDINGS:  # icon@2x.png
            continue
        if domain.startswith("self.") or (local == "git" and text[end : end + 1] in ":/"):
            continue  # a matrix product; a git remote
        yield at - len(local), end


_IPV4 = re.compile(r"\.(?<=[0-9].)[0-9]{1,3}\.[0-9]{1,3}\.[0-9]{1,3}(?!\w|\.[0-9]|-[A-Za-z])")
_IPV4_NO_START = re.compile(
    r"(?:[^\Wnrt]|(?<!\\)[nrt]|[.+$])$|(?<!\bip)(?<!\\nip)(?<=[A-Za-z_])[-/]$"
)
_NUMBERING = re.compile(
    r"(?i)(?:\bv|version|\bver\.?|release|\brev|build|firmware|driver|section|\bsec\.|chapter|"
    r"clause|figure|\bfig\.|table|appendix|article|paragraph|step|rule|\boid|§)s?[\W_]{0,7}$"
    r"|[=<>~!^]=\s?$"
)
_HEADING = re.compile(r"(?:^|\n)[#\s]*$")


def _ipv4(text: str) -> Iterator[Span]:
    for found in _IPV4.finditer(text):
        start, end = found.span()
        before = text[max(0, start - 4) : start]
        start -= min(3, len(before) - len(before.rstrip(_DECIMAL)))
        before = text[max(0, start - 20) : start]
        try:
            address = IPv4Address(text[start:end])
        except AddressValueError:
            continue
        first, *others = address.packed
        if first in (0, 127) or not any(others) or (first, others[0]) == (255, 255):
            continue
        if _IPV4_NO_START.search(before):
            # Java writes host/address:port; a browser's version follows a slash, too.
            if not (before.endswith("/") and re.match(r":[0-9]", text[end : end + 2])):
                continue
        elif _NUMBERING.search(before):
            continue
        heading = max(address.packed) <= 20 and _HEADING.search(before)
        if heading and re.match(r"\.?\s[A-Z]", text[end : end + 3]):
            continue
        yield start, end


_COLONS = re.compile(r":[0-9A-Fa-f]{0,4}:[0-9A-Fa-f:.]*")
_DECIMAL = "0123456789"
_HEX = "0123456789abcdefABCDEF"
_IPV6_IN_USE = tuple(
    map(
        IPv6Network,
        ("2000::/3", "fc00::/7", "fe80::/10", "ff00::/8", "64:ff9b::/96", "::ffff:0:0/96"),
    )
)
"""Assigned ranges; excludes `a::b` of C++, `x[1::2]` of Python, and hardware addresses."""


def _ipv6(text: str) -> Iterator[Span]:
    for found in _COLONS.finditer(text):
        start, end = found.span()
        before = text[max(0, start - 5) : start]
        start -= min(4, len(before) - len(before.rstrip(_HEX)))
        before = text[max(0, start - 3) : start]
        shape = text[start:end]
        if re.match(r":(?:::|[^:])", shape):
            start, shape, before = start + 1, shape[1:], ""  # the colon of `addr:2001:db8::7`
        shape = shape.rstrip(".")
        if shape.endswith(":") and not shape.endswith("::"):
            shape = shape[:-1]
        end = start + len(shape)
        if re.search(r"(?:[^\Wnrt]|(?<!\\)[nrt])\[?$", before) or text[end : end + 1].isalnum():
            continue
        try:
            address = IPv6Address(shape)
        except AddressValueError:
            continue
        if any(address in network for network in _IPV6_IN_USE):
            zone = re.compile(r"%\w{1,16}").match(text, end)
            yield start, zone.end() if zone else end


def find_ips(text: str) -> Iterator[Span]:
    """Addresses of version 4 and 6, without port and prefix length."""
    yield from sorted((*_ipv4(text), *_ipv6(text)))


_FINDERS: Mapping[str, Callable[[str], Iterable[Span]]] = {
    "email": find_emails,
    "phone": find_phones,
    "card": find_cards,
    "key": find_keys,
    "ip": find_ips,
}
KINDS: tuple[str, ...] = tuple(_FINDERS)
LABELS: Mapping[str, str] = {
    "email": "e-mail addresses",
    "phone": "phone numbers",
    "card": "card numbers",
    "key": "keys and passwords",
    "ip": "IP addresses",
}
_ORDER = ("key", "email", "ip", "card", "phone")
"""Keys contain everything else, such as the password in a URL; phones have the loosest shape."""


def redact(text: str, kinds: Collection[str] = KINDS) -> Redacted:
    """Replace the findings of some kinds; a second call changes nothing."""
    for kind in kinds:
        if kind not in KINDS:
            raise UnknownName("kind of redaction", kind, KINDS)
    counts = {kind: 0 for kind in KINDS if kind in kinds}
    for _ in range(MOST_PASSES):
        before = text
        for kind in _ORDER:
            if kind in counts:
                text, n = _replace(text, _FINDERS[kind](text), f"[{kind.upper()}]")
                counts[kind] += n
        if text == before:
            break
    return Redacted(text, counts)


def _replace(text: str, spans: Iterable[Span], placeholder: str) -> tuple[str, int]:
    parts, done, n = [], 0, 0
    for start, end in spans:
        if start < done:  # overlaps with the one before
            continue
        parts += [text[done:start], placeholder]
        done, n = end, n + 1
    return ("".join([*parts, text[done:]]), n) if n else (text, 0)
