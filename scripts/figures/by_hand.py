"""Finds measured-looking figures that were typed by hand, outside of regions and code.

A number with a unit of time, memory or speed, a percentage, a factor or a long decimal counts as
measured, unless ALLOWED says what it is instead.
"""

import re

# (document, text as it stands there, what it is); a heading stands for its whole section.
ALLOWED = (
    ("CONTRIBUTING.md", "| 2.13 |", "a version"),
    ("CONTRIBUTING.md", "| 2.14, 2.15 |", "versions"),
    ("docs/best-bits.md", "scales may move by 3%", "a setting"),
    ("docs/best-bits.md", "capped at ten times the mean", "a setting"),
    ("docs/choosing.md", "(0.97 by default)", "a default"),
    ("docs/choosing.md", "## Thirty questions", "estimates that write_choosing_page.py writes"),
    ("docs/ci.md", "## Policies", "limits of policies, and examples of them"),
    ("docs/design.md", "the 0.14 series", "a version"),
    ("docs/design.md", "tensor table and 192 KiB of", "a definition"),
    ("docs/design.md", "confidences from 60% to 99.9%", "confidences that reports keep"),
    ("docs/design.md", "do not follow from its 95% ends", "a confidence"),
    ("docs/design.md", "of 57 intervals of 95%", "a confidence"),
    ("docs/measured.md", "aims are 5% for memory and 25% for speed", "aims"),
    ("docs/mixed.md", "three times as large", "a setting"),
    ("docs/models.md", "### What vLLM does not run", "results that write_models_page.py writes"),
    ("docs/reliability.md", "chat templates (10 s and 1 GiB in a", "limits"),
    ("docs/reliability.md", "4 times too small or 16 times too large", "limits"),
    ("docs/reliability.md", "rows of data (256 MiB)", "a limit"),
    ("docs/scaling.md", "after ten minutes", "a limit"),
    ("docs/scaling.md", "fails three times", "a limit"),
    ("docs/serving.md", "asks for 92%", "a default of vLLM"),
    ("docs/serving.md", "the 95% Student interval", "a confidence"),
    ("docs/serving.md", "99% of requests", "a default"),
    ("docs/serving.md", "below 0.99 the verdict", "a limit"),
    ("docs/serving.md", "70 GiB or more", "a rule of vLLM"),
    ("docs/serving.md", "70 GiB and more", "a rule of vLLM"),
    ("docs/serving.md", "three minutes plus reading the weights at 200 MB/s", "a definition"),
    ("docs/serving.md", "KV cache above 90%", "a limit of an alert"),
    ("docs/tasks.md", "## Generated code in a sandbox", "limits"),
    ("docs/verify.md", "3 times as far as the median", "a limit"),
    ("calibration/README.md", "eight times as large", "a definition"),
)

SKIPPED = re.compile(
    r"^<!-- figures: \S+ -->$.*?^<!-- /figures -->$"  # regions
    r"|^[ ]*```.*?^[ ]*```$"  # blocks of code and what commands print
    r"|`[^`\n]+`"  # code within a line
    r"|\]\([^)\s]+\)"  # targets of links
    r"|<!--.*?-->",
    re.M | re.S,
)
VERSION = re.compile(
    r"\b(?:vLLM|Python|llm-compressor|lm-eval|transformers|compressed-tensors|version)"
    r"\s+\d+(?:\.\d+)+(?:(?:,| to| and| or)\s+\d+(?:\.\d+)+)*"
)
WORDS = (
    "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|"
    "seventeen|eighteen|nineteen|twenty|thirty|forty|fifty|sixty|hundred|half a"
)
DIGITS = r"[+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
LONG = r"seconds?|minutes?|hours?|milliseconds?|percent|[KMGT]iB|nats|tokens (?:per|a) second"
SHORT = r"s|ms|min|[KMGT]B|[KMGT]i?B/s|points?|tokens/s|TFLOPS?|TFLOP/s|times|perplexity"
TYPED = re.compile(
    rf"(?<![\w.]){DIGITS}(?:%|x\b)"
    rf"|(?<![\w.]){DIGITS}[ \n-]?(?:{LONG}|{SHORT})(?![\w/])"
    rf"|(?<![\w-])(?:{WORDS})[ \n](?:{LONG})(?![\w/])"
    rf"|(?<![\w-])(?:{WORDS})[ \n]times(?= (?:as|faster|slower|the|larger|smaller|less|more))"
    r"|(?<![\w.])[+-]?\d+\.\d{2,}(?![\w.])"
    rf"|perplexity (?:of |is |was )?{DIGITS}",
    re.I,
)


def hidden(text: str, pattern: re.Pattern[str]) -> str:
    """The text with everything that matches blanked, line breaks kept."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def typed(text: str, allowed: list[str]) -> list[tuple[int, str]]:
    """Line and text of every measured-looking figure that is not allowed."""
    text = hidden(hidden(text, SKIPPED), VERSION)
    for phrase in allowed:
        section = rf"(?:\n(?!{phrase.split()[0]} ).*)*" if phrase.startswith("#") else ""
        text = hidden(text, re.compile(re.escape(phrase) + section))
    return [
        (text.count("\n", 0, found.start()) + 1, " ".join(found[0].split()))
        for found in TYPED.finditer(text)
    ]


def problems(document: str, text: str) -> list[str]:
    """What is typed by hand in a document, and what is allowed there but gone."""
    allowed = [phrase for name, phrase, _ in ALLOWED if name == document]
    shown = hidden(text, SKIPPED)
    gone = [phrase for phrase in allowed if phrase not in shown]
    found = [
        f"{document}:{line}: {figure!r} looks measured: write it from a result "
        "(scripts/figures), or say in scripts/figures/by_hand.py what it is"
        for line, figure in typed(text, allowed)
    ]
    return found + [
        f"{document} no longer has {phrase!r}: remove it from ALLOWED" for phrase in gone
    ]
