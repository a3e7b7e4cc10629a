"""The campaign of faults: what was damaged, killed or starved, and what became of it."""

from figures.regions import region, result, table

VERDICTS = ("refused", "accepted, equivalent", "defect")
ENDS = ("killed", "too late", "defect")
LIMITS = ("refused", "done all the same", "ended by a library", "defect")


def _rows(kind: str, columns: tuple[str, ...]) -> list[list[str]]:
    counts = result("faults")[kind]["counts"]
    rows = [[name, *(f"{found.get(c, 0):,}" for c in columns)] for name, found in counts.items()]
    total = [sum(found.get(c, 0) for found in counts.values()) for c in columns]
    return [*rows, ["all", *(f"{n:,}" for n in total)]]


def _seeds(kind: str) -> str:
    ranges = result("faults")[kind]["ranges"]
    return ", ".join(f"{first:,} to {last - 1:,}" for first, last in ranges)


@region
def faults_mutations() -> str:
    """Damaged inputs."""
    found = result("faults")["mutations"]
    shown = table(["damaged", *VERDICTS], _rows("mutations", VERDICTS))
    return (
        f"{shown}\n\nSeeds {_seeds('mutations')}. The longest took {found['longest_s']:.1f} s of "
        f"CPU time; the largest peak memory was {found['most_memory']:.2f} times that of an intact "
        "input of the same kind."
    )


@region
def faults_kills() -> str:
    """Killed commands."""
    shown = table(["command", *ENDS], _rows("kills", ENDS))
    return f"{shown}\n\nSeeds {_seeds('kills')}."


@region
def faults_limits() -> str:
    """Starved commands."""
    head = ["limit", *(name.replace("done all the same", "completed") for name in LIMITS)]
    shown = table(head, _rows("limits", LIMITS))
    return f"{shown}\n\nSeeds {_seeds('limits')}."


@region
def faults_recorded() -> str:
    """When, and of which tree."""
    recorded = result("faults")["recorded"]
    return f"Measured on {recorded['date']} at commit {recorded['commit']}."
