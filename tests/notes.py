"""A progress that keeps what it is told."""

from quantkit.progress import Silent


class Notes(Silent):
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
