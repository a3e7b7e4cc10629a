"""Payment cards and phone numbers: the part of `redact` that finds digits.

A text is searched once for runs of digits and separators. Dates are cut out of a run, and the rest
is compared with the ways in which cards and phones are written.

Phones are found by our own patterns, not by the library `phonenumbers`: that needs the country of a
text, and logs do not name one. On the corpus of `tests/redaction_corpus.py` it finds half of the
numbers without a country. Tried with the countries of the corpus one by one it finds fewer than
these patterns do, matches look-alikes that they leave, and is far slower.
"""

import re
from collections.abc import Iterator
from functools import lru_cache

Span = tuple[int, int]

# Separators as people type them; other spaces and dashes are turned into these two.
_RUN = re.compile("[+(0-9][0-9 +()./\u00a0\u202f\u2010-\u2013-]{6,}+")
_PLAIN_MARKS = {0xA0: " ", 0x202F: " "} | dict.fromkeys(range(0x2010, 0x2014), "-")
_DATE = re.compile(
    r"(?<![0-9])(?:(?:19|20)[0-9]{2}([-./])[01]?[0-9]\1[0-3]?[0-9]"
    r"|[0-3]?[0-9]([-./])[0-3]?[0-9]\2(?:19|20)[0-9]{2})(?![0-9]|\s?[-./][0-9])"
)


@lru_cache(maxsize=1)
def _runs(text: str) -> tuple[tuple[int, str], ...]:
    """Runs of digits, without dates; used twice, for cards and for phones."""
    runs = []
    for found in _RUN.finditer(text):
        start, run = found.start(), found.group().translate(_PLAIN_MARKS)
        done = 0
        for date in _DATE.finditer(run):
            runs.append((start + done, run[done : date.start()]))
            done = date.end()
        runs.append((start + done, run[done:]))
    return tuple((start, run) for start, run in runs if _n_digits(run) >= 7)


def _n_digits(run: str) -> int:
    return sum(map(str.isdigit, run))


def _before(text: str, start: int) -> str:
    return text[max(0, start - 32) : start]


_WORD_OR_DECIMAL_BEFORE = re.compile(r"(?:[^\Wnrt]|(?<!\\)[nrt]|[$€£¥#])$|[0-9][.:]$|\w[-/+]$")
"""The letter of an escape such as \\n is not a word."""
_WORD_OR_DECIMAL_AFTER = re.compile(
    r"[\w%€]|[.:/+-][0-9]|,[0-9]{3}(?![0-9])| ?(?:€|EUR|USD)\b|-[A-Za-z]"
)


def _stands_alone(text: str, start: int, end: int) -> bool:
    """Neither part of a word or a longer number nor an amount of money."""
    return not (
        _WORD_OR_DECIMAL_BEFORE.search(_before(text, start))
        or _WORD_OR_DECIMAL_AFTER.match(text, end)
    )


_CARD = re.compile(
    r"(?<![0-9])(?<![0-9][-.])(?:"
    r"[0-9]{4}([ .-])[0-9]{4}\1[0-9]{4}\1[0-9]{4}(?P<rest>\1[0-9]{1,3}(?![0-9]))?"
    r"|[0-9]{4}([ .-])[0-9]{6}\3[0-9]{4,5}"
    r"|[0-9]{4}([ .-])[0-9]{3}\4[0-9]{3}\4[0-9]{3}"
    r"|[0-9]{13,19})(?![0-9]|[-.][0-9])"
)
_CARD_WORD = re.compile(
    r"(?i)card|visa|credit|debit|amex|master|\bcc\b|\bpan\b|karte|carte|tarjeta"
)
# First digits and lengths assigned to the issuers.
_ISSUERS = (
    (range(4, 5), 1, (13, 16, 19)),  # Visa
    (range(51, 56), 2, (16,)),  # Mastercard
    (range(2221, 2721), 4, (16,)),
    (range(34, 35), 2, (15,)),  # American Express
    (range(37, 38), 2, (15,)),
    (range(300, 306), 3, (14,)),  # Diners Club
    (range(36, 37), 2, (14,)),
    (range(38, 40), 2, (14,)),
    (range(3528, 3590), 4, (16, 17, 18, 19)),  # JCB
    (range(6011, 6012), 4, (16, 17, 18, 19)),  # Discover
    (range(644, 660), 3, (16, 17, 18, 19)),
    (range(62, 63), 2, (16, 17, 18, 19)),  # UnionPay
    (range(2200, 2205), 4, (16,)),  # Mir
    *(
        (range(p, p + 1), 4, (13, 15, 16, 18, 19)) for p in (5018, 5020, 5038, 5893, 6304)
    ),  # Maestro
    *((range(p, p + 1), 4, (13, 15, 16, 18, 19)) for p in (6759, 6761, 6762, 6763)),
)


def luhn(digits: str) -> bool:
    """The check digit of payment cards."""
    doubled = "".join(str(2 * int(d)) if i % 2 else d for i, d in enumerate(reversed(digits)))
    return sum(map(int, doubled)) % 10 == 0


@lru_cache(maxsize=10_000)
def _issued(first_four: str) -> frozenset[int]:
    """Lengths of the cards that begin with these digits."""
    return frozenset(
        length
        for prefixes, n, lengths in _ISSUERS
        if int(first_four[:n]) in prefixes
        for length in lengths
    )


def _valid(digits: str) -> bool:
    return len(digits) in _issued(digits[:4]) and luhn(digits)


def find_cards(text: str) -> Iterator[Span]:
    """Card numbers, in one piece or in groups."""
    for at, run in _runs(text):
        if _n_digits(run) < 13:
            continue
        for found in _CARD.finditer(run):
            start, end = at + found.start(), at + found.end()
            digits = "".join(filter(str.isdigit, found.group()))
            if found["rest"] and not _valid(digits):  # the security code or the year beside it
                digits, end = digits[:16], at + found.start("rest")
            if not _valid(digits) or not _stands_alone(text, start, end):
                continue
            # A plain one of 13 digits is as likely a product code.
            if (
                len(digits) == 13
                and end - start == 13
                and not _CARD_WORD.search(_before(text, start))
            ):
                continue
            yield start, end


_PHONE_WORD = re.compile(
    r"(?i)(?:(?:(?<![a-z])|(?<=\\[nrt]))(?:t[eé]l|phone|mobile?|móvil|cell|handy|fax|whats?app|sms|gsm|contact|"
    r"telefono|teléfono|cellulare|portable|signal|hotline|ring|dial|call|text|reach)|"
    r"[a-z]?(?:phone|mobile|telefon|nummer|_tel|fax))"
    r"(?:[ _-]?(?:number|num|no|nr|nummer|me|us|him|her|them))?\.?"
    r"(?:\s(?:is|was|at|on|to|under|me|ist|unter|au|al))*[\s:=\"'\\>|(]{0,6}$"
)
_OTHER_NUMBER = re.compile(
    r"(?i)(?:(?<![a-z])|(?<=\\[nrt]))(?:order|invoice|ticket|case|ref|reference|id|sku|part|isbn|issn|serial|account|acct|"
    r"iban|tracking|bug|issue|po|rfc|pmid|doi|cas|ean|gtin|upc|vin|arxiv|patent|model|lot|"
    r"batch|customer|policy|vat|tax|nr|no|parcel|shipment|rechnung|bestellung|commande)"
    r"(?:[ _-]?(?:number|num|no|nr|id|code))?s?\.?[\s:=#\"'\\>|(-]{0,5}$"
)
_INTERNATIONAL = re.compile(
    r"(?<![0-9+])(?:\+|00(?=[1-9][0-9]{0,2}[ ./(-]))[ (]{0,2}"
    r"[1-9](?:[ ./()-]{0,3}[0-9]){6,14}(?![0-9])"
)
# By country, in national form; a single space between groups may be any separator.
_NATIONAL = tuple(
    re.compile(pattern)
    for pattern in (
        # North America
        r"(?:1[ .-]?)?\([2-9][0-9]{2}\)[ .-]?[2-9][0-9]{2}[ .-]?[0-9]{4}",
        r"(?:1[ .-])?[2-9][0-9]{2}([./-])[2-9][0-9]{2}[.-][0-9]{4}",
        r"(?:1 )?[2-9][0-9]{2} [2-9][0-9]{2}[ -][0-9]{4}",
        # A leading zero: Germany, Austria, Britain, the Netherlands, Sweden, Japan, Australia...
        r"\(0[1-9][0-9]{0,4}\)[ -]?[0-9]{3,4}(?:[ -]?[0-9]{2,5}){1,3}",
        r"0[1-9][0-9]{0,4}(?: ?[/-] ?| )[0-9]{2,4}(?:[ -][0-9]{2,5}){1,4}",
        r"0[1-9][0-9]{0,4}(?: ?[/-] ?| )[0-9]{5,8}(?:-[0-9]{1,4})?",
        # France, Belgium, Switzerland
        r"0[1-9](?:([ .-])[0-9]{2})(?:\1[0-9]{2}){3}",
        r"0[1-9][0-9]{1,2}(?:\.[0-9]{2,3}){3}",
        # In one piece: mobile phones of France, the Netherlands and Britain
        r"0[67][0-9]{8}",
        r"07[0-9]{9}",
        # Spain, Italy, Brazil, China
        r"[679][0-9]{2}(?: [0-9]{2}){3}",
        r"9[0-9] [0-9]{3} [0-9]{2} [0-9]{2}",
        r"3[0-9]{2}[ ./-][0-9]{6,7}",
        r"\([1-9][0-9]\) ?9?[0-9]{4}[ -][0-9]{4}",
        r"1[3-9][0-9]([ -])[0-9]{4}\1[0-9]{4}",
    )
)
_EXTENSION = re.compile(r"(?i)[ ,]{0,2}(?:x|ext\.?|extension)[ .:]{0,2}[0-9]{1,6}\b")
_DECIMAL = re.compile(r"[+0-9]+\.[0-9]+")


def find_phones(text: str) -> Iterator[Span]:
    """Phone numbers, with the extension."""
    for at, run in _runs(text):
        for start, end in sorted(_phones(text, at, run)):
            extension = _EXTENSION.match(text, end)
            yield start, extension.end() if extension else end


def _phones(text: str, at: int, run: str) -> Iterator[Span]:
    for found in _INTERNATIONAL.finditer(run):
        start, end = at + found.start(), at + found.end()
        shape = found.group()
        in_groups = not shape.lstrip("+ (").isdigit()  # `+ 123456789` is a sum
        if _DECIMAL.fullmatch(shape) or (not in_groups and _n_digits(shape) < 10):
            continue
        if shape.startswith("0") and _among_numbers(run, found.start(), found.end()):
            continue
        if _ends_well(text, end) and not _WORD_OR_DECIMAL_BEFORE.search(_before(text, start)):
            yield start, end
    announced = _announced(text, at, run)
    if announced:
        yield announced
        return
    for national in _NATIONAL:
        for found in national.finditer(run):
            start, end = at + found.start(), at + found.end()
            shape = found.group()
            if not 9 <= _n_digits(shape) <= 12 or not _stands_alone(text, start, end):
                continue
            if not _ends_well(text, end) or _OTHER_NUMBER.search(_before(text, start)):
                continue
            if _among_numbers(run, found.start(), found.end()):
                continue
            yield start, end


def _ends_well(text: str, end: int) -> bool:
    return bool(_EXTENSION.match(text, end)) or not re.compile(r"[\w%]|[.:/+-][0-9]").match(
        text, end
    )


def _among_numbers(run: str, start: int, end: int) -> bool:
    """Whether other numbers are beside it, as in a table or an IBAN."""
    left, right = run[max(0, start - 2) : start], run[end : end + 2]
    if re.search(r"[0-9][-./+(]$", left) or re.match(r"[-./+][0-9]", right):
        return True
    return bool(re.search(r"[0-9] $", left) or re.match(r" [0-9]", right))


def _announced(text: str, at: int, run: str) -> Span | None:
    """A number of any form after a word such as `phone:`."""
    digits = re.match(r"\(?[0-9](?:[ ./()-]{0,2}[0-9]){6,14}(?![0-9])", run)
    if not digits or not _PHONE_WORD.search(_before(text, at)):
        return None
    end = at + digits.end()
    if _DECIMAL.fullmatch(digits.group()) or not _ends_well(text, end):
        return None
    return at, end
