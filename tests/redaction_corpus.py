"""A seeded corpus for redaction: personal and secret strings as people and programs write them,
set into chats, logs, code and tables, and strings that look like them and must stay.

Forms are listed by where they occur, not by what `redact` can do: those that it misses are kept.
Every value is made up; documentation ranges and reserved names are used where the form allows.
"""

import base64
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from quantkit.calibration.redaction.redact import KINDS, redact

ALNUM = string.ascii_letters + string.digits
HEX = "0123456789abcdef"
FIRST = (
    "anna",
    "bob",
    "chidi",
    "dmitri",
    "elena",
    "grace",
    "ines",
    "jürgen",
    "o'neill",
    "wei",
    "zoë",
)
LAST = ("smith", "müller", "garcia", "okafor", "tanaka", "rossi", "dubois", "kowalski", "silva")

CARRIERS = {
    "chat": (
        "Hi, it is {} as I said before.",
        "you can use {}, thanks!!",
        "Is {} still right? I moved last month.",
        "USER: please change it to {}.\nAGENT: done.",
        "(see {})",
        "Old one was wrong; new: {}; do not share it",
        "I already gave you {} twice",
    ),
    "log": (
        "2024-03-07 14:02:55,113 WARN  [worker-3] c.acme.Sync - rejected {} after 3 attempts",
        'Mar  7 14:02:55 web01 app[2211]: value="{}" status=failed took=12ms',
        "[2024-03-07T14:02:55.113Z] got {} from upstream (12.5 ms)",
        '{"level":"info","ts":1709820175.113,"msg":"saw {}","n":3}',
    ),
    "code": (
        'x = "{}"  # line 120',
        "const VALUE = '{}';",
        'assert parse("{}") == expected[0]',
        '  File "app/main.py", line 88, in load\n    raise ValueError("{}")\nValueError: {}',
    ),
    "data": (
        "1042,Acme GmbH,{},2024-03-07,19.90",
        '{"name": "Acme", "value": "{}", "active": true}',
        "| 17 | {} | open |",
        "name\tvalue\nAcme\t{}\n",
        "- item: {}\n- next: 3\n",
        "<td>{}</td><td>12</td>",
        "**Note:** `{}`",
        'escaped: "line one\\n{}\\nline three"',
    ),
}


@dataclass(frozen=True)
class Case:
    kind: str
    text: str
    secret: str
    """Empty for a look-alike, all of which must stay."""


def luhn_digit(digits: str) -> str:
    total = 0
    for place, digit in enumerate(map(int, reversed(digits))):
        total += digit if place % 2 else (2 * digit if digit < 5 else 2 * digit - 9)
    return str(-total % 10)


def token(rng: random.Random, alphabet: str, n: int) -> str:
    return "".join(rng.choice(alphabet) for _ in range(n))


def digits(rng: random.Random, n: int) -> str:
    return token(rng, string.digits, n)


def fill(rng: random.Random, pattern: str) -> str:
    """`#` is any digit, `N` one from 2 to 9, `§` a hexadecimal digit."""
    table = {"#": string.digits, "N": "23456789", "§": HEX}
    return "".join(rng.choice(table[c]) if c in table else c for c in pattern)


def email(rng: random.Random) -> str:
    first, last = rng.choice(FIRST), rng.choice(LAST)
    plain = last.replace("ü", "ue")
    local = rng.choice(
        (
            f"{first}.{last}",
            f"{first[0]}{plain}",
            f"{first}_{plain}{rng.randint(1, 99)}",
            f"{first}+{rng.choice(('shop', 'no-spam', '2024'))}",
            f"{plain}-{first[0]}",
            f"{first[0].upper()}.{plain.title()}",
            f"{rng.randint(1000, 99999)}",
            "info",
            "n.o.reply",
        )
    )
    domain = rng.choice(
        (
            "example.com",
            "mail.example.org",
            "example.co.uk",
            "eu.mail.example.net",
            "EXAMPLE.COM",
            "bücher.example",
            "xn--bcher-kva.example",
            "example.museum",
            "my-firm.example.de",
            "3com.example",
            "example.io",
            "corp.example.photography",
            "例え.テスト",
            "gmail.example",
        )
    )
    address = f"{local}@{domain}"
    roll = rng.random()
    if roll < 0.04:
        return address.replace("@", "%40")
    if roll < 0.05:
        return f"{local} (at) {domain.replace('.', ' (dot) ')}"
    if roll < 0.06:
        return f'"{first} {plain}"@{domain}'
    return address


PHONES = (
    "+1 N##-N##-####",
    "+1 (N##) N##-####",
    "+1N##N######",
    "+1.N##.N##.####",
    "1-N##-N##-####",
    "(N##) N##-####",
    "(N##)N##-####",
    "N##-N##-####",
    "N##.N##.####",
    "N## N## ####",
    "+1-N##-N##-#### x###",
    "(N##) N##-#### ext. ##",
    "1 (N##) N##-####",
    "+44 20 7### ####",
    "+44 (0)20 7### ####",
    "+44 7### ######",
    "07### ######",
    "07#########",
    "020 7### ####",
    "0161 ### ####",
    "(0161) ### ####",
    "01### ######",
    "+49 30 ########",
    "+49 (0)89 / ### ## ##",
    "+49-171-#######",
    "030 ########",
    "030/#######",
    "0171 #######",
    "0171-#######",
    "089 ### ## ##",
    "(030) #### ####",
    "0049 30 #######",
    "+33 6 ## ## ## ##",
    "06 ## ## ## ##",
    "06.##.##.##.##",
    "01-##-##-##-##",
    "+33(0)1########",
    "+34 6## ### ###",
    "+34 91 ### ## ##",
    "6## ## ## ##",
    "91 ### ## ##",
    "+39 06 #### ####",
    "+39 3## #######",
    "3## #######",
    "06 #### ####",
    "+31 6 ########",
    "06-########",
    "020-#######",
    "+32 4## ## ## ##",
    "04## ## ## ##",
    "+41 44 ### ## ##",
    "079 ### ## ##",
    "+43 664 #######",
    "0664/#######",
    "+46 70 ### ## ##",
    "070-### ## ##",
    "+45 ## ## ## ##",
    "+47 ### ## ###",
    "+48 6## ### ###",
    "+351 91# ### ###",
    "+353 87 ### ####",
    "+358 40 #######",
    "+420 6## ### ###",
    "+30 69# ### ####",
    "+7 9## ###-##-##",
    "+91 98### #####",
    "+91-98########",
    "+86 138 #### ####",
    "138 #### ####",
    "+81 90-####-####",
    "090-####-####",
    "03-####-####",
    "+55 11 9####-####",
    "(11) 9####-####",
    "+61 4## ### ###",
    "0412 ### ###",
    "(02) 9### ####",
    "+65 9### ####",
    "+852 9### ####",
    "+972 54-###-####",
    "+234 803 ### ####",
    "+27 82 ### ####",
    "+52 55 #### ####",
    "+971 50 ### ####",
    "+44\u00a07###\u00a0######",
    "+49\u2011171\u2011#######",
    "tel:+1-N##-N##-####",
    "Tel. ### ####",
    "phone: ##########",
    "call me on ### ####",
    "mobile 6########",
    "WhatsApp: 98########",
    "Telefon: ######-##",
)
BARE_PHONES = ("N##N######", "6########", "98### #####", "### ### ###", "## ## ## ##")
ISSUED = (
    ("4", 16),
    ("4", 16),
    ("4", 13),
    ("4", 19),
    ("51", 16),
    ("55", 16),
    ("2221", 16),
    ("2720", 16),
    ("34", 15),
    ("37", 15),
    ("36", 14),
    ("305", 14),
    ("6011", 16),
    ("65", 16),
    ("3530", 16),
    ("62", 16),
    ("6304", 16),
    ("6759", 18),
    ("2200", 16),
)


def phone(rng: random.Random) -> str:
    return fill(rng, rng.choice(BARE_PHONES if rng.random() < 0.02 else PHONES))


def card(rng: random.Random) -> str:
    prefix, n = rng.choice(ISSUED)
    body = prefix + digits(rng, n - 1 - len(prefix))
    number = body + luhn_digit(body)
    if n == 13:
        return f"Visa {number}"
    if rng.random() < 0.3:
        return number
    mark = rng.choice((" ", " ", "-", "-", ".", "\u00a0"))
    if rng.random() < 0.015:
        mark = rng.choice(("  ", " - ", "_"))
    cuts = (4, 10, n) if n < 16 else (*range(4, 17, 4), n)
    groups = [number[a:b] for a, b in zip((0, *cuts), cuts, strict=False)]
    return mark.join(group for group in groups if group)


def jwt(rng: random.Random) -> str:
    parts = (
        b'{"alg":"HS256","typ":"JWT"}',
        b'{"sub":"%d"}' % rng.randint(1, 10**9),
        rng.randbytes(32),
    )
    return ".".join(base64.urlsafe_b64encode(part).decode().rstrip("=") for part in parts)


def pem(rng: random.Random) -> str:
    name = rng.choice(("RSA ", "EC ", "OPENSSH ", "", "ENCRYPTED "))
    body = base64.b64encode(rng.randbytes(240)).decode()
    end = rng.choice(("\n", "\\n"))
    lines = end.join(body[i : i + 64] for i in range(0, len(body), 64))
    return f"-----BEGIN {name}PRIVATE KEY-----{end}{lines}{end}-----END {name}PRIVATE KEY-----"


def password(rng: random.Random) -> str:
    return rng.choice(
        (
            f"{rng.choice(('Summer', 'Winter', 'Monday'))}{rng.randint(2010, 2030)}!",
            f"{rng.choice(LAST)}{rng.randint(10, 9999)}",
            token(rng, ALNUM + "!#%*_-", rng.randint(9, 20)),
            f"Tr0ub{rng.randint(1, 9)}dor&{rng.randint(1, 9)}",
            token(rng, ALNUM, 24),
        )
    )


B64 = ALNUM + "+/"
URL64 = ALNUM + "_-"
KEYS: tuple[tuple[str, Callable[[random.Random], str]], ...] = (
    ("{}", lambda r: "AKIA" + token(r, string.ascii_uppercase + "234567", 16)),
    ("aws_access_key_id = {}", lambda r: "ASIA" + token(r, string.ascii_uppercase + "234567", 16)),
    ("aws_secret_access_key = {}", lambda r: token(r, B64, 40)),
    ('"SecretAccessKey": "{}"', lambda r: token(r, B64, 40)),
    ("{}", lambda r: f"gh{r.choice('pousr')}_" + token(r, ALNUM, 36)),
    ("{}", lambda r: "github_pat_" + token(r, ALNUM, 22) + "_" + token(r, ALNUM, 59)),
    ("https://{}@github.com/acme/app.git", lambda r: "ghp_" + token(r, ALNUM, 36)),
    ("{}", lambda r: "glpat-" + token(r, URL64, 19) + "x"),
    (
        "{}",
        lambda r: f"xox{r.choice('bpas')}-{digits(r, 12)}-{digits(r, 12)}-" + token(r, ALNUM, 24),
    ),
    (
        "https://{}",
        lambda r: (
            f"hooks.slack.com/services/T{digits(r, 8)}/B{digits(r, 8)}/" + token(r, ALNUM, 24)
        ),
    ),
    ("{}", lambda r: f"{r.choice('sr')}k_{r.choice(('live', 'test'))}_" + token(r, ALNUM, 24)),
    ("{}", lambda r: "sk-" + token(r, ALNUM, 48)),
    ("OPENAI_API_KEY={}", lambda r: "sk-proj-" + token(r, URL64, 120) + "A"),
    ("{}", lambda r: "sk-ant-api03-" + token(r, URL64, 93) + "AA"),
    ("{}", lambda r: "AIza" + token(r, URL64, 34) + "w"),
    ("HF_TOKEN={}", lambda r: "hf_" + token(r, string.ascii_letters, 34)),
    ("{}", lambda r: "hf_" + token(r, ALNUM, 34)),
    ("//registry.npmjs.org/:_authToken={}", lambda r: "npm_" + token(r, ALNUM, 36)),
    ("{}", lambda r: "pypi-AgEIcHlwaS5vcmc" + token(r, URL64, 120) + "g"),
    ("{}", lambda r: "SG." + token(r, URL64, 22) + "." + token(r, URL64, 42) + "k"),
    ("{}", lambda r: r.choice(("AC", "SK")) + token(r, HEX, 32)),
    ("TWILIO_AUTH_TOKEN: {}", lambda r: token(r, HEX, 32)),
    ("{}", jwt),
    ("Authorization: Bearer {}", jwt),
    ("Authorization: Bearer {}", lambda r: token(r, URL64, 40) + "7a"),
    ("-H 'authorization: bearer {}'", lambda r: token(r, HEX, 40)),
    ("Authorization: Basic {}", lambda r: base64.b64encode(f"bob:{password(r)}".encode()).decode()),
    ("X-Api-Key: {}", lambda r: token(r, ALNUM, 32)),
    ("{}", pem),
    ("password={}", password),
    ("DB_PASSWORD={}", password),
    ('"password": "{}"', password),
    ("password: {}", password),
    ("PGPASSWORD='{}' psql", password),
    ("my password is {}", password),
    ("mysql --password={} -u root", password),
    ("<password>{}</password>", password),
    ("passwd = '{}'", password),
    ('\\"db_pass\\": \\"{}\\"', password),
    ('api_key: "{}"', lambda r: token(r, ALNUM, 32)),
    ("api_key = '{}'", lambda r: token(r, HEX, 40)),
    ("apiKey: '{}',", lambda r: token(r, ALNUM, 24)),
    ("client_secret={}&grant_type=x", lambda r: token(r, URL64, 39) + "3"),
    ("SECRET_KEY = '{}'", lambda r: "django-insecure-" + token(r, ALNUM, 50)),
    ("?access_token={}&v=2", lambda r: token(r, ALNUM, 40)),
    (
        "Set-Cookie: sessionid={}; Path=/",
        lambda r: token(r, string.ascii_lowercase + string.digits, 32),
    ),
    ("AccountKey={};EndpointSuffix=x", lambda r: base64.b64encode(r.randbytes(64)).decode()),
    ("postgres://app:{}@db.internal:5432/main", lambda r: token(r, ALNUM + "!*", 12)),
    ("redis://:{}@cache:6379/0", lambda r: token(r, ALNUM, 20)),
    ("https://bob:{}@git.acme.test/x.git", password),
    ("mongodb+srv://root:{}@cluster0.acme.test/", lambda r: token(r, ALNUM + "@", 10) + "x"),
    ("the api key is {}", lambda r: token(r, ALNUM, 32)),
    ("curl -u admin:{} localhost", lambda r: token(r, ALNUM, 12)),
)


def ip(rng: random.Random) -> str:
    def v4() -> str:
        first = rng.choice(
            (10, 172, 192, 203, 198, 8, 34, 51, 85, 91, 151, 212, rng.randint(1, 223))
        )
        return f"{first}.{rng.randint(0, 255)}.{rng.randint(1, 255)}.{rng.randint(1, 254)}"

    def group() -> str:
        return f"{rng.randint(0, 0xFFFF):x}"

    first = rng.choice(("2001", "2a02", "2606", "2001:db8", "fd12", "fe80"))
    return rng.choice(
        (
            v4,
            v4,
            v4,
            v4,
            v4,
            lambda: f"{first}::{group()}",
            lambda: f"{first}:{group()}::{group()}",
            lambda: first + ":" + ":".join(group() for _ in range(7 - first.count(":"))),
            lambda: f"{first}:{group()}:{group()}::1".upper(),
            lambda: f"::ffff:{v4()}",
        )
    )()


IP_PLACES = (
    "{}",
    "{}",
    "{}:8080",
    "{}/24",
    "http://{}/index.html",
    "host={}",
    "[{}]:443",
    "from {}.",
    "({})",
    "client: {}, server: _",
    "inet addr:{} Bcast",
    "db.acme.test/{}:5432",
    "{},",
    "ssh root@{}",
    '{} - - [07/Mar/2024:14:02:55 +0000] "GET / HTTP/1.1" 200 612',
    "X-Forwarded-For: {}",
    "ip-{}",
)

LOOK_ALIKES: dict[str, tuple[str | Callable[[random.Random], str], ...]] = {
    "email": (
        "git@github.com:acme/app.git",
        "@app.route",
        "icon@2x.png",
        "lodash@4.17.21",
        "root@localhost",
        "@types/node@18.0.0",
        "A@B.T",
        "x @ self.weight",
        "@dataclass(frozen=True)",
        "q@k.transpose(1, 2)",
        "user@",
        "@param name the name",
        "meet @ 5.pm",
        "foo@bar",
        "x@self.weight",
        "python@3.11",
        "a@b.mean(0)",
        "actions/checkout@v4",
        "acme/app@sha256:ab12",
        "@media (max-width: 9em)",
    ),
    "phone": (
        "2024-03-07",
        "07.03.2024",
        "07/03/2024 14:30",
        "2024-03-07 14:02:55",
        "20240307140255",
        "ISBN 978-3-16-148410-0",
        "ISBN 0-306-40615-2",
        "ISBN-10: 0306406152",
        "ISSN 2049-3630",
        "version 1.2.3",
        "v2024.03.07",
        "order 1029384756",
        "order no. 0123-456789",
        "#1029384756",
        "invoice 2024-000123",
        "$1,299.00",
        "1 299 000 EUR",
        "3.14159265358979",
        "-122.4194155",
        "1709820175",
        "1709820175113",
        "line 120, column 4",
        "0x7ffee4c0",
        "1234567890",
        "99999999999",
        "10-20-30",
        "1920x1080",
        "12:30:45.123456",
        "48.858370, 2.294481",
        "+48.858370",
        "1e-10",
        "100-200",
        "2019-2024",
        "1 000 000 000",
        "123 456 789",
        "DE89 3704 0044 0532 0130 00",
        "RFC 2616",
        "CAS 7732-18-5",
        "10.1000/182",
        "arXiv:2301.12345",
        "T+00:00:12",
        "2024-03-07T14:02:55+01:00",
        "1.000.000,00",
        "SKU 445-221-9987",
        "0.1234567890",
        "ticket 070-123456",
        "3/4/5/6/7/8/9",
        "1 2 3 4 5 6 7 8 9 10",
        "0000123456",
        "tracking 1Z999AA10123456784",
        "part no. 030-1234567",
        "range(1000000, 2000000)",
        "00:00:00 0 0",
        "1.5 2.5 3.5 4.5 5.5",
        "12 345 678",
        "0.12 0.34 0.56 0.78",
        "2024-W10-4",
        "(1999) 2001-2003",
        "pp. 1234-1256",
        lambda r: digits(r, 8),
        lambda r: digits(r, 9),
        lambda r: "1" + digits(r, 9),
        lambda r: digits(r, 12),
        lambda r: fill(r, "§§§§§§§§-§§§§-4§§§-a§§§-§§§§§§§§§§§§"),
        lambda r: f"{r.randint(1, 99)}.{digits(r, 9)}",
        lambda r: f"2024-{r.randint(1, 12):02}-{r.randint(1, 28):02}_{digits(r, 6)}",
        lambda r: " ".join(digits(r, 3) for _ in range(6)),
        lambda r: f"order #{digits(r, 3)}-{digits(r, 7)}-{digits(r, 7)}",
        lambda r: f"{r.randint(1, 31):02}.{r.randint(1, 12):02}.{r.randint(1950, 2030)}",
    ),
    "card": (
        "4111 1111 1111 1112",
        "1234 5678 9012 3456",
        "0000 0000 0000 0000",
        "9780306406157",
        "4006381333931",
        lambda r: "1" + digits(r, 12),
        lambda r: "1" + digits(r, 18),
        lambda r: digits(r, 20),
        lambda r: "8" + digits(r, 15),
        lambda r: f"0.4{digits(r, 15)}",
        lambda r: "0" + digits(r, 15),
        lambda r: token(r, HEX, 16),
        lambda r: f"id_{digits(r, 16)}",
        lambda r: digits(r, 12),
        lambda r: f"1{digits(r, 17)}",
        lambda r: f"4{digits(r, 15)}",
    ),
    "key": (
        lambda r: token(r, HEX, 40),
        lambda r: token(r, HEX, 64),
        lambda r: "commit " + token(r, HEX, 40),
        lambda r: fill(r, "§§§§§§§§-§§§§-4§§§-a§§§-§§§§§§§§§§§§"),
        lambda r: "sha256:" + token(r, HEX, 64),
        lambda r: "data:image/png;base64,iVBORw0KGgo" + token(r, B64, 200) + "==",
        lambda r: "integrity sha512-" + token(r, B64, 86) + "==",
        lambda r: "request_id=" + token(r, HEX, 32),
        "password = os.environ['DB_PASSWORD']",
        "password=None",
        "password: str",
        "password: required",
        "api_key=YOUR_API_KEY",
        "api_key: <your-api-key>",
        "token = get_token(user, 3600)",
        "max_tokens=1024",
        "secret: ${DB_SECRET}",
        "password=$DB_PASSWORD",
        "forgot your password?",
        "the password is required",
        "tokenizer=AutoTokenizer.from_pretrained('x')",
        "sk-learn-pipeline-components",
        "key=lambda x: x[1]",
        "primary_key: customer_order_item_id",
        "password: ********",
        "pad_token_id=50256",
        "sort_key = name_2",
        'class="sk-fading-circle-and-more"',
        "self.password = password",
        "if token == expected_token:",
        "secret_name: my-app-database-credentials",
        "ghp_short",
        "hf_hub_download",
        "xoxo-love",
        "npm_config_registry",
        "token_type: access",
        "-----BEGIN CERTIFICATE-----",
        "-----BEGIN PUBLIC KEY-----",
        "http://localhost:8080/@x",
        "https://example.com:443/a@b",
        "AKIA stands for a key",
        "passengers: 123456",
        "bypass=route66a",
        "getUserAuthenticationTokenFromSession",
        "Bearer of bad news",
        "compass=north_12",
        "signature: def f(x1, y2)",
        'def authenticate(user: str, password: str = "") -> bool:',
        "auth: oauth2-proxy",
        "token: Token = Token.EOF_1",
    ),
    "ip": (
        "version 1.2.3.4",
        "v1.2.3.4",
        "127.0.0.1",
        "0.0.0.0",
        "255.255.255.0",
        "Chrome/120.0.0.0",
        "1.2.3",
        "Chrome/121.0.6167.85",
        "12:30:45",
        "std::vector",
        "::",
        "x[1::2]",
        "a::b",
        "foo-1.2.3.4.tar.gz",
        "300.1.2.3",
        "00:1a:2b:3c:4d:5e",
        "1.3.6.1.4.1.311",
        "Section 4.3.2.1",
        "numpy==1.26.4.1",
        "Ada::Text_IO",
        "localhost:8080",
        'AssemblyVersion("4.0.0.0")',
        "release 5.15.0.91",
        "build 10.0.19045.3930",
        "1.2.3.4.5",
        "dead::beef::cafe",
        "::1",
        "08:00",
        "1:2:3",
        "10.0.0",
        "Version=2.1.3.4, Culture=neutral",
        "16:9",
        "Face::Detect",
        "abc::def::ghi",
        "d41d:8cd9",
        "fe::ed",
        "e::a",
        "x[::2]",
        "2024:03:07",
        "firmware 7.4.1.12",
        "driver 31.0.15.4601",
        "libfoo.so.1.2.3.4",
        "foo_1.2.3.4",
        "== 3.2.1.0",
        "curl/8.4.0.1",
    ),
}


def cases(seed: int = 0, n_each: int = 1000) -> Iterator[Case]:
    """Of every kind `n_each` secrets and as many look-alikes."""
    rng = random.Random(seed)
    for kind in KINDS:
        for _ in range(n_each):
            yield _positive(rng, kind)
            form = rng.choice(LOOK_ALIKES[kind])
            yield Case(kind, _set(rng, form if isinstance(form, str) else form(rng)), "")


def _positive(rng: random.Random, kind: str) -> Case:
    if kind == "key":
        place, make = rng.choice(KEYS)
        secret = make(rng)
        return Case(kind, _set(rng, place.replace("{}", secret)), secret)
    secret = {"email": email, "phone": phone, "card": card, "ip": ip}[kind](rng)
    place = rng.choice(IP_PLACES) if kind == "ip" else "{}"
    if ":" in secret and not place.startswith("["):
        place = place.replace("{}:", "[{}]:").replace("/{}/", "/[{}]/")
    text = _set(rng, place.replace("{}", secret))
    if kind == "phone":  # the word before it is not a secret
        secret = secret[next(i for i, c in enumerate(secret) if c in "+(0123456789") :]
    if kind == "card":
        secret = secret.removeprefix("Visa ")
    return Case(kind, text, secret)


def _set(rng: random.Random, string: str) -> str:
    carrier = rng.choice(CARRIERS[rng.choice(tuple(CARRIERS))])
    return carrier.replace("{}", string)


@dataclass
class Tally:
    """What became of one kind."""

    n: int = 0
    found: int = 0
    """Those that are gone in full or in part, with the right placeholder."""
    exact: int = 0
    """Those of which nothing is left, while all around them stays."""
    n_look_alikes: int = 0
    replaced: int = 0
    """Replacements by this placeholder, in all cases of all kinds."""
    wrong: int = 0
    """Those of them that are no secret of this kind."""

    @property
    def recall(self) -> float:
        return self.found / self.n

    @property
    def precision(self) -> float:
        return 1 - self.wrong / self.replaced


def measure(seed: int = 0, n_each: int = 1000) -> tuple[dict[str, Tally], list[tuple[Case, str]]]:
    """A tally by kind, and the cases that went wrong with what was made of them."""
    tallies = {kind: Tally() for kind in KINDS}
    failures = []
    for case in cases(seed, n_each):
        result = redact(case.text)
        right = 0
        if case.secret:
            tallies[case.kind].n += 1
            times = case.text.count(case.secret)
            found = case.secret not in result.text and result.counts[case.kind] >= times
            # All around it has to stay as well.
            clean = result.text == case.text.replace(case.secret, f"[{case.kind.upper()}]")
            tallies[case.kind].found += found
            tallies[case.kind].exact += clean
            right = times if found else 0
        else:
            tallies[case.kind].n_look_alikes += 1
            found, clean = True, result.text == case.text
        for kind, count in result.counts.items():
            tallies[kind].replaced += count
            tallies[kind].wrong += count - (min(count, right) if kind == case.kind else 0)
        if not found or not clean:
            failures.append((case, result.text))
    return tallies, failures
