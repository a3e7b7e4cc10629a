"""A candidate, and what it is compared with."""

from dataclasses import dataclass

from quantkit.gating.figures import Figure
from quantkit.gating.intervals import n_documents
from quantkit.report.document import Comparison, Document, Entry
from quantkit.report.evidence import Counted, Floor


@dataclass(frozen=True)
class Case:
    """A candidate, and its source or itself in an earlier report."""

    document: Document
    entry: Entry
    figures: dict[str, list[Figure]]
    """What policy names refer to in the report, looked up once for all candidates."""
    floor: Floor
    """The least evidence that a check needs."""
    earlier: Document | None = None
    before: Entry | None = None

    @property
    def against(self) -> str:
        return "source" if self.earlier is None else "earlier"

    def figure_before(self, figure: Figure) -> float | None:
        if self.earlier is None:
            return figure.of(self.document.baseline, self.document)
        return None if self.before is None else figure.of(self.before, self.earlier)

    def comparisons(self, key: str) -> list[Comparison]:
        """Comparisons with the source; from both reports if two of them are compared."""
        entries = [self.entry] if self.before is None else [self.entry, self.before]
        found = [entry.comparison(key) for entry in entries]
        return [comparison for comparison in found if comparison is not None]

    @property
    def n_wanted(self) -> int:
        return 1 if self.earlier is None else 2

    def shortage(self, figure: Figure) -> str:
        """Why there is too little evidence to judge a figure; empty if there is enough."""
        if not figure.is_scored:
            return ""
        key, found = figure.key, self.entry.comparison(figure.key)
        counted = Counted.of(
            key,
            self.entry.scores,
            n_documents(self.entry, key),
            None if found is None else found.n_tokens,
            None if found is None else found.n_questions,
        )
        return counted.shortage(self.floor)
