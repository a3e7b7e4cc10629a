"""The suite: how long it takes, and its longest tests (benchmarks/suite.py)."""

from figures.regions import link, number, paragraph, region, result, table


@region
def suite() -> str:
    found = result("suite")
    before = found.get("before")
    was = f"; {number(before['seconds'] / 60)} before" if before else ""
    words = paragraph(
        f"The {found['n_tests']:,} tests take {number(found['seconds'] / 60)} minutes on "
        f"{found['cores']} cores ({found['machine']}{was}; {link('every file', 'suite', '')}). "
        "The longest, each including the fixtures that it is the first to use:"
    )
    rows = [
        [f"`{one['test'].removeprefix('tests/')}`", f"{one['seconds']:.0f}"]
        for one in found["slowest"]
    ]
    return f"{words}\n\n" + table(["test", "seconds:"], rows)
