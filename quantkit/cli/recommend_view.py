"""Terminal output of `quantkit recommend`."""

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from quantkit.advise.candidates import Candidate
    from quantkit.advise.recommendation import Recommendation
    from quantkit.calls.recommend import Advised
    from quantkit.serving.questions import Answers

HEADINGS = ("format", "GiB", "room", "first", "each", "all", "quality")
MOST_TABLES = 2
"""Tables side by side that a screen or two hold."""
SHORT = {"draft model": "draft", "LoRA adapters": "LoRA"}
LEGEND = """\
Typical figures. GiB: weights{where}. room: users at this context.
first: time to the first token. each: tokens/s of one user after it.
all: tokens/s of all users, that wait included. quality: share kept; ~ is a prior."""
LEGEND_WITHOUT_SPEED = """\
GiB: weights{where}. room: users at this context. quality: share kept; ~ is a prior."""


def show(advised: "Advised", page: "Path | None", as_json: bool) -> None:
    """Answers as JSON or on the terminal; the HTML page has everything, and more."""
    from quantkit.advise import document
    from quantkit.cli import console

    answers, mixed = advised.answers, advised.mixed
    if as_json:
        data = document.to_json(answers.found, answers.across, answers.notes)
        data |= {} if answers.plan is None else {"serving": answers.plan.to_json()}
        data |= {} if mixed is None else {"mixed": mixed.to_json()}
        console.print_json(data | ({"make": list(answers.make)} if answers.make else {}))
    elif len(advised.asked.models) > 1:
        show_models(answers)
    elif len(answers.found) == 1:
        show_one(answers)
        for line in mixed.words if mixed is not None else []:
            console.say(line)
    else:
        show_many(answers.found, answers.notes, page is not None)
    if page is not None:
        typer.echo(f"written: {page}", err=True)


def show_one(answers: "Answers") -> None:
    """One answer, then everything that was compared, then how to serve it."""
    from quantkit.advise import not_considered, words
    from quantkit.cli import console, serving_view

    (found,) = answers.found
    question = found.question
    where = words.on(found.gpu, question.count)
    label = question.catalogue.shape.label
    if found.chosen is None:
        nothing = "no format fits"
        if any(one.lacks == "quality" for one in found.candidates):
            share = "all" if question.min_quality == 1 else f"{question.min_quality:g}"
            nothing += f" and keeps {share} of the quality"
        typer.echo(console.lines_text(f"{label} on {where}: {nothing}", _refusal(found)))
    else:
        heading = f"{label} on {where}: {found.chosen.format.name}"
        typer.echo(console.lines_text(heading, _answer(found, found.chosen, answers)))
    serving = [c for c in found.candidates if c.serves]
    if serving:
        more = words.extra_parts(serving)
        headings = [*HEADINGS[:2], *(SHORT[name] for name in more), *HEADINGS[2:]]
        headings += ["per 1M"] if serving[0].cost is not None else []
        _print_table(headings, [_row(c, more) for c in serving])
        each = _each(serving)
        console.say(_legend(serving))
        if more:
            names = ", ".join(SHORT[name] for name in more)
            console.say(f"{names}: GiB{each}, in addition to the weights.")
    never = [("-", line) for line in not_considered.lines(question.catalogue)]
    console.print_lines("Left out", [*_rest(found.candidates), *never])
    console.print_lines("Assumed", [("-", note) for note in (*found.notes, *answers.notes)])
    if answers.plan is not None:
        typer.echo("\nServe it")
        serving_view.show(answers.plan)


def _print_table(
    headings: "Sequence[str]", rows: "Sequence[Sequence[str]]", words: "Sequence[int]" = (0,)
) -> None:
    """A table without its empty columns: where the bandwidth is not known, there are no speeds."""
    from quantkit.cli import console

    kept = [n for n in range(len(headings)) if any(row[n] for row in rows)]
    cells = [[row[n] for n in kept] for row in rows]
    console.print_table([headings[n] for n in kept], cells, words)


def _legend(shown: "Sequence[Candidate]") -> str:
    words = LEGEND if any(one.speed for one in shown) else LEGEND_WITHOUT_SPEED
    return words.format(where=_each(shown))


def _each(shown: "Sequence[Candidate]") -> str:
    """Which GPU's memory a table shows, if there are several."""
    if not shown or shown[0].count == 1:
        return ""
    is_partly = any(one.size is not None and one.size.offload is not None for one in shown)
    return " on all GPUs together" if is_partly else " on each GPU"


def _answer(
    found: "Recommendation", chosen: "Candidate", answers: "Answers"
) -> list[tuple[str, str]]:
    from quantkit.advise import words

    lines = [("why", found.reason)]
    speed, fit, quality = chosen.speed, chosen.fit, chosen.quality
    if speed is not None:
        first = ""
        if speed.first_token is not None:
            first = f"first token after {words.span_of_seconds(speed.first_token)}, then "
        origin = "measured" if speed.is_measured else f"estimated; {words.BOUND[speed.bound]}"
        who = "for one user"
        if chosen.load.users > 1:
            many = words.users(chosen.load.users)
            who = f"for each of {many}, {words.span(speed.total)} all together"
        if speed.drafted:
            who += f", {speed.gain:.2f} times as fast as without the draft"
        lines.append(("speed", f"{first}{words.span(speed.each)} tokens/s {who} ({origin})"))
    if fit is not None:
        lines.append(("memory", words.memory(fit)))
    if chosen.size is not None and chosen.size.offload is not None:
        lines.append(("host", words.offloaded(chosen.size.offload, fit)))
    if chosen.load.cached:
        hits = f"{chosen.load.hit_rate:.0%} of prompt tokens are found in the prefix cache"
        lines.append(("prefix", f"{hits}: {chosen.load.cached:,} of {chosen.load.prompt:,}"))
    if shared := words.sharing(chosen, found.question):
        lines.append(("GPUs", shared))
    if quality is not None:
        kind = "published for other models" if quality.is_prior else "of this model"
        lines.append(("quality", f"{words.quality_kept(chosen)}, {kind}: {quality.basis}"))
    if chosen.cost is not None:
        lines.append(("cost", words.cost(chosen)))
    if chosen.support.how == "emulated":
        lines.append(("emulated", chosen.support.reason))
    if found.runner_up is not None:
        lines.append(("runner-up", f"{found.runner_up.format.name}: {found.runner_up_reason}"))
    lines += [("changes it" if n == 0 else "", change) for n, change in enumerate(found.changes)]
    if answers.make:
        lines.append(("make it", shlex.join(answers.make)))
    if answers.make_draft:
        lines.append(("and draft", shlex.join(answers.make_draft)))
    return lines


def _refusal(found: "Recommendation") -> list[tuple[str, str]]:
    lines = [("why", found.reason)]
    for n, remedy in enumerate(found.remedies, start=1):
        lines.append((f"way {n}", f"{remedy.says} ({remedy.change})"))
    if not found.remedies:
        lines.append(("ways", "no single change of context, users, GPUs or format helps"))
    return lines


def _row(candidate: "Candidate", beside: "Sequence[str]" = ()) -> list[str]:
    from quantkit.advise import words

    speed, fit = candidate.speed, candidate.fit
    cells = [candidate.format.name, "", "", "", "", "", words.quality_kept(candidate)]
    if fit is not None:
        held = [fit.model_bytes, *(fit.parts.get(name, 0) for name in beside)]
        cells[1:3] = [*(words.weights_gib(size) for size in held), f"{fit.users:,}"]
    if speed is not None:
        first = words.first_token(speed)
        cells[-4:-1] = [first, words.number(speed.each.typical), words.number(speed.total.typical)]
    return cells if candidate.cost is None else [*cells, words.number(candidate.cost.typical)]


def _rest(candidates: "Sequence[Candidate]") -> list[tuple[str, str]]:
    """Formats that cannot be the answer, by what they lack."""
    from quantkit.advise import words

    lines: dict[str, list[str]] = {}
    for candidate in candidates:
        if not candidate.serves:
            lack, detail = words.lack(candidate)
            name = candidate.format.name
            lines.setdefault(lack, []).append(f"{name} ({detail})" if detail else name)
    return [("-", f"{lack}: {', '.join(names)}") for lack, names in lines.items()]


def show_models(answers: "Answers") -> None:
    """Formats by rows, models by columns, then each model's format; on one kind of GPU."""
    from quantkit.advise import words
    from quantkit.cli import console

    found = answers.found
    question = found[0].question
    meaning = words.meaning(question)
    heading = f"{len(found)} models on {words.on(found[0].gpu, question.count)}"
    chosen = {_label(one): one.chosen for one in found if one.chosen is not None}
    if chosen:
        console.say(f"{heading}: {meaning}, by format")
        as_gpus = [replace(one, gpu=replace(one.gpu, name=_label(one))) for one in found]
        _print_side_by_side(*_side_by_side_tables(as_gpus))
        rows = [[label, *_row(one)] for label, one in chosen.items()]
        _print_table(["model", *HEADINGS], rows, words=(0, 1))
        console.say(_legend(list(chosen.values())))
    else:
        console.say(f"{heading}: no format fits for any of them")
    across = answers.across if chosen else None
    if across is not None and across.best is not None:
        accuracies = [(name, f"{share:.3f}") for name, share in across.accuracy.items()]
        console.print_lines(
            f"Accuracy on {', '.join(across.tasks)}, on the same questions", accuracies
        )
        console.say(f"{across.best} answers most questions correctly.")
    elif across is not None:
        console.say(f"\nThese figures do not say which model is better: {across.why_not}.")
    for one in found:
        if one.chosen is None:
            console.print_lines(f"{_label(one)} is not served", _refusal(one))
    notes = (*words.notes_by_model(found), *answers.notes)
    console.print_lines("Assumed", [("-", note) for note in notes])


def _label(found: "Recommendation") -> str:
    return found.question.catalogue.shape.label


def show_many(
    found: "Sequence[Recommendation]", notes: "Sequence[str]" = (), has_page: bool = False
) -> None:
    """Formats by rows, GPUs by columns; only the choices if that takes many tables or a page has
    the rest.
    """
    from quantkit.advise import words
    from quantkit.cli import console

    question = found[0].question
    of_each = "" if question.count == 1 else f", {question.count} of each GPU"
    heading = f"{_label(found[0])}{of_each}"
    meaning = words.meaning(question)
    served = [one for one in found if one.chosen is not None]
    tables, legend = _side_by_side_tables(found)
    is_short = len(tables) <= MOST_TABLES
    if not served:
        console.say(f"{heading}: no format fits on any of these GPUs")
    elif is_short and not has_page:
        console.say(f"{heading}: {meaning}, by format and GPU")
        _print_side_by_side(tables, legend)
        console.say("Name one GPU for the reasons, the runner-up and the serving command.")
    elif is_short:
        typer.echo(console.lines_text(heading, _choices(served)))
    else:
        heading = f"{heading}: {meaning}, by the format chosen for each GPU"
        typer.echo(console.lines_text(heading, _choices_by_format(served)))
        also = "" if has_page else "; --html FILE writes every format on every GPU"
        console.say(f"Name one GPU for the reasons and the serving command{also}.")
    costs = [(one.gpu.name, one.chosen) for one in served if one.chosen and one.chosen.cost]
    if costs and is_short:
        console.print_lines("Cost", [(name, words.cost(chosen)) for name, chosen in costs])
    elif costs:
        cheapest = sorted((c.cost.typical, name) for name, c in costs if c.cost)
        figures = ", ".join(f"{name}: {words.number(cost)}" for cost, name in cheapest)
        console.print_lines("Cost per million answer tokens, prompts included", [("-", figures)])
    _show_unserved(found)
    console.print_lines("Assumed", [("-", note) for note in (*found[0].notes, *notes)])


def _choices(served: "Sequence[Recommendation]") -> list[tuple[str, str]]:
    """Each GPU's choice."""
    from quantkit.advise import words

    return [
        (
            one.gpu.name,
            f"{one.chosen.format.name}: {words.figure(one.chosen, one.question.objective)}",
        )
        for one in served
        if one.chosen is not None
    ]


def _choices_by_format(served: "Sequence[Recommendation]") -> list[tuple[str, str]]:
    """Each chosen format, and the GPUs that it is chosen for, with their figures."""
    from quantkit.advise import words

    lines: dict[str, list[str]] = {}
    for one in served:
        if one.chosen is not None:
            figure = words.short_figure(one.chosen, one.question.objective)
            lines.setdefault(one.chosen.format.name, []).append(f"{one.gpu.name}: {figure}")
    return [(name, ", ".join(gpus)) for name, gpus in lines.items()]


def _show_unserved(found: "Sequence[Recommendation]") -> None:
    from quantkit.cli import console
    from quantkit.serving.questions import FEW_GPUS

    without = [one for one in found if one.chosen is None]
    if len(found) <= FEW_GPUS:
        for one in without:
            console.print_lines(f"No format fits on {one.gpu.name}", _refusal(one))
    elif without:
        names = ", ".join(one.gpu.name for one in without)
        console.print_lines("No format fits on", [("-", names)])


def _side_by_side_tables(
    found: "Sequence[Recommendation]",
) -> tuple[list[list[list[str]]], str]:
    """Columns of tables, the formats first, each table as wide as the terminal; and the legend."""
    from quantkit.advise import words
    from quantkit.cli import console

    served = [one for one in found if one.chosen is not None]
    names = list(dict.fromkeys(f.name for one in found for f in one.question.catalogue.formats))
    cells = {one.gpu.name: {c.format.name: _cell(c, one) for c in one.candidates} for one in served}
    chosen = {one.chosen.format.name for one in served if one.chosen is not None}
    # An FP8 cache gets a row only where it is chosen, or fits where 16 bits do not.
    served_somewhere = [
        name for name in names if any(column.get(name) for column in cells.values())
    ]

    def matters(name: str) -> bool:
        plain = name.removesuffix("+kv-fp8")
        alone = any(c.get(name) and not c.get(plain) for c in cells.values())
        return name == plain or name in chosen or alone

    kept = [name for name in served_somewhere if matters(name)]
    columns = [
        [_short(one.gpu.name), *(cells[one.gpu.name].get(name, "") for name in kept)]
        for one in served
    ]
    parts = _side_by_side(columns, console.width() - max(map(len, kept), default=0))
    has_gaps = not all(all(column) for column in columns)
    legend = [words.star(found[0].question.objective)]
    legend += [words.EMPTY] if has_gaps else []
    legend += [words.NO_FP8_CACHE] if len(kept) < len(served_somewhere) else []
    return [[["", *kept], *part] for part in parts], " ".join(legend)


def _print_side_by_side(tables: "Sequence[Sequence[Sequence[str]]]", legend: str) -> None:
    from quantkit.cli import console

    for columns in tables:
        headings, *rows = zip(*columns, strict=True)
        console.print_table(headings, rows)
    console.say(legend)


def _side_by_side(columns: list[list[str]], width: int) -> list[list[list[str]]]:
    """Columns in groups that fit the terminal, at least one in each."""
    groups: list[list[list[str]]] = []
    room = 0
    for column in columns:
        needed = 3 + max(len(line) for cell in column for line in cell.split("\n"))
        if not groups or room < needed:
            groups.append([])
            room = width
        groups[-1].append(column)
        room -= needed
    return groups


def _cell(candidate: "Candidate", found: "Recommendation") -> str:
    from quantkit.advise import words

    if not candidate.serves:
        return ""
    star = "*" if candidate is found.chosen else ""
    return f"{star}{words.short_figure(candidate, found.question.objective)}"


def _short(name: str) -> str:
    """A name on up to two lines, so that columns stay narrow."""
    if len(name) <= 9:
        return name
    head, _, tail = name.partition(" ")
    while len(head) < 5 and " " in tail:
        more, _, tail = tail.partition(" ")
        head = f"{head} {more}"
    return f"{head}\n{tail}"
