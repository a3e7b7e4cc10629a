"""Texts on which tokenizers disagree: code, other scripts, emoji, runs of spaces."""

import random

ROWS = (
    "def f(x):\n    return x**2|for i in range(10):\n\t|</div>|http://a.b/c?d=e&f=g|a_b|x=1;|\\n",
    "  |   |\n|\n\n|\r\n|\t|\t\t| | a|\u00a0|\u2003|\u200b|\u2028|\u3000|\x1b",
    "Hello|HELLO|hElLo|CamelCase|don't|I'LL|we've|they'RE|it's|\u2019s",
    "1|12|123|1234567|3.14|٣٤٥|½|Ⅻ|²",
    "日本語|中文字符|한국어|русский|Ελληνικά|עברית|العربية|हिन्दी|ไทย|é|e\u0301|ß|İ|ǅ|\U0001d518\U0001d52b|𐍈",
    "🙂|👩\u200d👩\u200d👧|🇩🇪",
    "—|…|«»|!!!|?!|...|--|!=|()|{}|'|''|\"|`|$|€|~|^|@|%|*|/|\\|<",
)
PIECES = [piece for row in ROWS for piece in row.split("|")]


def texts(n_texts, specials=(), seed=0):
    """Every piece alone, then random rows of them."""
    generator = random.Random(seed)
    pieces = [*PIECES, *specials]
    rows = [
        "".join(
            generator.choice(pieces) + generator.choice(["", "", " "])
            for _ in range(generator.randint(2, 12))
        )
        for _ in range(n_texts - len(pieces))
    ]
    return pieces + rows
