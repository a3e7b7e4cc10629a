"""Terminal output and exit code of `quantkit verify`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from quantkit.cli import console
from quantkit.errors import CheckpointError, Faulty

if TYPE_CHECKING:
    from quantkit.export.verified import Verified
    from quantkit.proof.run import Proof
    from quantkit.verification.checkpoint import Verification

LEVELS = {
    "config": "config",
    "generate": "text",
    "logprobs": "text and log-probabilities",
}


@dataclass(frozen=True)
class View:
    """Shows results as they come."""

    many: bool
    verbose: bool
    as_json: bool

    def show(self, result: "Verification") -> None:
        """The checks of one folder."""
        if not self.as_json:
            self._heading(result.path)
            _show_checks(result)

    def show_proof(self, proof: "Proof") -> None:
        """The same, and the engine's result."""
        from quantkit.export.verified import FILE
        from quantkit.hardware.gpus import label

        if self.as_json:
            return
        self._heading(proof.folder)
        _show_checks(proof.checks)
        found = proof.verified
        if found is None:
            return
        where = f"{found.version}, {label(found.device)}"
        where += f", {found.dtype}" if found.dtype else ""
        mark = "ok " if found.ok else "?  " if found.undecided else "off"
        console.say(f"{mark}       vLLM {where}: {LEVELS[found.level]}", hang=10)
        if found.texts:
            typer.echo(f"          {len(found.texts)} texts, such as {_line(found.texts[0])}")
            for text in found.texts[1:] if self.verbose else []:
                typer.echo(f"          {_line(text)}")
        for what, part in (("prompt", found.read), ("generated", found.written)):
            if part is not None:
                typer.echo(
                    f"          {part.n_tokens:,} {what} tokens: off by {part.mean:.4f} nats, "
                    f"rounding explains {part.limit_mean:.4f}"
                )
        if found.level == "logprobs":
            console.say(f"          {_attributed(found)}", hang=0)
        typer.echo(f"          written to {proof.folder / FILE}")

    def _heading(self, folder: Path) -> None:
        if self.many:
            typer.echo(f"{folder}")


def end(results: "Sequence[Verification]", as_json: bool) -> None:
    """JSON for programs or a verdict for people, and the exit code."""
    if as_json:
        _print_json(results)
    problems = [(_faulty(result, as_json), True) for result in results if not result.ok]
    _end(problems, None if as_json else len(results))


def end_proofs(proofs: "Sequence[Proof]", as_json: bool) -> None:
    """The same for results of an engine."""
    if as_json:
        _print_json(proofs)
    problems = [found for proof in proofs for found in _problems(proof, as_json)]
    _end(problems, None if as_json else len(proofs))


def _print_json(results: Sequence[Any]) -> None:
    data = [result.to_json() for result in results]
    console.print_json(data[0] if len(data) == 1 else data)


def _show_checks(result: "Verification") -> None:
    for check in result.passed:
        console.say(f"ok        {check}", hang=10)
    for words in result.left_out:
        console.say(f"left out  {words}", hang=10)
    for fault in result.faults:
        console.say(f"wrong     {fault}", hang=10)
    if result.worst:
        what = "largest rounding errors, relative to the norm of the weights:"
        console.say(f"          {what}", hang=0)
    for name, error in result.worst[:3]:
        console.say(f"          {error:6.1%}  {name}", hang=8)


def _attributed(found: "Verified") -> str:
    """Whether the engine served the checkpoint or its source, and how certain that is."""
    whose = found.attribution
    if whose is None:
        return "not compared with the unquantised source: name it with --source"
    served = {
        "checkpoint": "the checkpoint is served, not its unquantised source",
        "source": "the unquantised source is served, not the checkpoint",
        None: "cannot tell the checkpoint and its unquantised source apart",
    }[whose.nearer]
    return (
        f"{served}: references {whose.apart:.4f} nats apart, "
        f"power {whose.power:.3f} with {whose.n_tokens:,} positions"
    )


def _line(text: str) -> str:
    """The beginning of a text in one line."""
    short = " ".join(text.split())
    return repr(short if len(short) <= 48 else f"{short[:47]}…")


def _problems(proof: "Proof", as_json: bool) -> list[tuple[str, bool]]:
    """Problems that keep a checkpoint from passing, and whether each is its own fault."""
    if not proof.checks.ok:
        return [(_faulty(proof.checks, as_json), True)]
    if proof.problem is not None:
        return [(f"{proof.folder} was not checked in vLLM: {proof.problem}", False)]
    found = proof.verified
    if found is None or found.ok:
        return []
    return [(f"{proof.folder} {found.sentence}", not found.undecided)]


def _faulty(result: "Verification", in_full: bool) -> str:
    """One sentence; with the faults themselves where the checks were not shown."""
    n = len(result.faults)
    words = f"{result.path} has {n} fault{'s' * (n > 1)}"
    if not in_full:
        return words
    return f"{words}:\n" + "\n".join(f"  {fault}" for fault in result.faults)


def _end(problems: list[tuple[str, bool]], n_shown: int | None) -> None:
    """The verdict as the last line, unless JSON was printed; exit code 1 for a fault, 3 for what
    was not checked.
    """
    n_faulty = sum(is_fault for _, is_fault in problems)
    if n_shown is not None:
        verdict = "wrong" if n_faulty else "not checked" if problems else "sound"
        n = n_faulty or len(problems) or n_shown
        typer.echo(f"verdict: {verdict}" + (f" ({n} of {n_shown} checkpoints)" * (n_shown > 1)))
    if problems:
        raise (Faulty if n_faulty else CheckpointError)("\n".join(line for line, _ in problems))
