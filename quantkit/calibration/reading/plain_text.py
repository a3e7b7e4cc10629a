"""Splits plain text into documents: consecutive lines, separated at blank ones if there are any."""

from collections.abc import Iterable, Iterator

from quantkit.calibration.reading.record import Reading, Record

TEXT_CHARACTERS = 8000
"""A document ends before it exceeds this; only a single line may be longer."""
LINE_CHARACTERS = 200_000
"""No article is as long as this: such a line is a whole file without line breaks."""


def documents(lines: Iterable[bytes], reading: Reading) -> Iterator[Record]:
    """Pieces of a text file, each placed at the line where it begins.

    One article per line is a common layout, so a line is cut only if it is far longer than that.
    """
    gathered = _Gathered(reading.name)
    for number, raw in enumerate(lines, 1):
        try:
            line = raw.decode()
        except UnicodeDecodeError as error:
            reading.bad(number, f"byte {error.start + 1} is not UTF-8 ({raw[error.start]:#04x})")
            continue
        if "\0" in line:
            reading.bad(number, f"byte {raw.index(0) + 1} is NUL, which text cannot contain")
            continue
        line = line.removesuffix("\n").removesuffix("\r")
        if len(line) > TEXT_CHARACTERS:
            yield from gathered.flush()
            place = f"{reading.name}:{number}"
            yield from (Record(place, part) for part in _parts(line))
            continue
        while gathered.size + len(line) > TEXT_CHARACTERS:
            yield from gathered.cut()
        gathered.add(number, line)
    yield from gathered.flush()


def _parts(line: str) -> Iterator[str]:
    """A long line whole; an excessively long one split between words."""
    start = 0
    while len(line) > LINE_CHARACTERS and len(line) - start > TEXT_CHARACTERS:
        space = line.rfind(" ", start, start + TEXT_CHARACTERS) + 1
        stop = space if space > start else start + TEXT_CHARACTERS
        yield line[start:stop]
        start = stop
    yield line[start:]


class _Gathered:
    """Lines of the current document."""

    def __init__(self, name: str) -> None:
        self.size = 0
        self._name = name
        self._lines: list[tuple[int, str]] = []
        self._paragraph = 0
        """Number of lines before the last blank one."""

    def add(self, number: int, line: str) -> None:
        blank = not line.strip()
        if blank and not self._lines:
            return
        if blank:
            self._paragraph = len(self._lines)
        self._lines.append((number, line))
        self.size += len(line) + 1

    def cut(self) -> Iterator[Record]:
        """Emit the lines before the last blank one, or all."""
        if not self._paragraph:
            yield from self.flush()
            return
        later = self._lines[self._paragraph :]
        del self._lines[self._paragraph :]
        yield from self.flush()
        for number, line in later:
            self.add(number, line)

    def flush(self) -> Iterator[Record]:
        """Emit all lines."""
        lines, self._lines = self._lines, []
        self.size = self._paragraph = 0
        while lines and not lines[-1][1].strip():
            lines.pop()
        if lines:
            text = "\n".join(line for _, line in lines)
            yield Record(f"{self._name}:{lines[0][0]}", text)
