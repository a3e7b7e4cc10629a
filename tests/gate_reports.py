"""Reports for tests of the gate: scored models whose figures a test chooses."""

from quantkit.report.comparison import Report
from quantkit.report.document import Document, Entry
from quantkit.scoring.answers import Outcome
from quantkit.scoring.evaluation import Evaluation
from quantkit.scoring.scorecard import Provenance, Score, Scorecard, Settings

SETTINGS = Settings(
    tasks={"wiki": "1", "quiz": "1"},
    limit=None,
    num_fewshot=None,
    max_length=128,
    seed=0,
    data={"wiki": "a", "quiz": "b"},
)
N = 400
DOCUMENTS = 30
TOKENS = 400
"""Of every document."""


def made(bits=4, method="gptq"):
    return Provenance(
        method=method,
        weight_bits=bits,
        recipe_digest="0",
        engine="native",
        disk_bytes=1,
        seconds=1,
        peak_host_bytes=1,
        peak_device_bytes=None,
        device="cpu",
    )


def card(
    name,
    recipe=None,
    right=0.7,
    loss=2.0,
    bits=4,
    n=N,
    n_documents=DOCUMENTS,
    n_tokens=TOKENS,
    **more,
):
    import math

    total = n_documents * n_tokens
    scores = {
        "wiki/word_perplexity": Score(value=2 * math.exp(loss), stderr=None, n=n_documents),
        "wiki/perplexity": Score(value=math.exp(loss), stderr=0.1, n=total),
        "wiki/kl_mean": Score(value=0.0 if recipe is None else 0.05, stderr=0.001, n=total),
        "wiki/top1_agreement": Score(
            value=1.0 if recipe is None else 0.9,
            stderr=0.001,
            n=total,
            higher_is_better=True,
        ),
        "quiz/acc": Score(value=right, stderr=None, n=n, higher_is_better=True),
    }
    known = {
        "name": name,
        "recipe": recipe,
        "format": "safetensors",
        "size_bytes": 1000 if recipe is None else 300,
        "bits_per_weight": 16.0 if recipe is None else 4.8,
        "digest": "f" * 64 if recipe is None else name.encode().hex(),
        "source_fingerprint": "f" * 64,
        "scores": scores,
        "settings": SETTINGS,
        "made": None if recipe is None else made(bits),
        "versions": {"lm_eval": "0"},
        "device": "cpu",
        "seconds": 1.0,
        "created": "2026-01-01T00:00:00+00:00",
    }
    return Scorecard(**known | more)


def outcomes(right, loss, spread=0.0, n=N, n_documents=DOCUMENTS, n_tokens=TOKENS):
    """Documents differ a little, so that there is an interval."""
    answers = [
        Outcome("quiz", place, f"q{place}", "acc", float(place < right * n), 1.0, 0.25)
        for place in range(n)
    ]
    texts = [
        Outcome(
            "wiki",
            place,
            f"w{place}",
            "loss",
            n_tokens * (loss + spread * (-1) ** place),
            float(n_tokens),
        )
        for place in range(n_documents)
    ]
    return answers + texts


def report(*candidates, source_right=0.7, **counts):
    """A document from `(name, recipe, right, loss)` and so on; `counts` of `card`."""
    source = card("src", right=source_right, **counts)
    evaluations = [Evaluation(source, outcomes(source_right, 2.0, **counts))]
    for number, (name, recipe, right, loss, *bits) in enumerate(candidates):
        one = card(name, recipe, right, loss, *bits, **counts)
        evaluations.append(Evaluation(one, outcomes(right, loss, 0.005 * (number + 1), **counts)))
    return Report.of(evaluations).document


def changed(document: Document, place=0, **updates) -> Document:
    """The same with keys of one candidate set anew."""
    entries = list(document.candidates)
    entries[place] = entries[place].model_copy(update=updates)
    return document.model_copy(update={"candidates": entries})


def rescored(document: Document, key, value, place=0) -> Document:
    """The same with one score of a candidate set anew, or of the source with place None."""
    entry: Entry = document.baseline if place is None else document.candidates[place]
    scores = dict(entry.scores)
    if value is None:
        scores.pop(key)
    else:
        scores[key] = scores[key].model_copy(update={"value": value})
    if place is None:
        baseline = entry.model_copy(update={"scores": scores})
        return document.model_copy(update={"baseline": baseline})
    return changed(document, place, scores=scores)
