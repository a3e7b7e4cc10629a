"""Elements of inline SVG. Colours and fonts come from the style sheet, so dark pages work."""

import unicodedata

from markupsafe import Markup, escape

SIZE = 12
"""Text size in the figure's units; the style sheet has the same."""


def element(name: str, *children: str | Markup, **attributes: object) -> Markup:
    """One element; `class_` is its class, other underscores are hyphens, None is left out."""
    given = Markup("").join(
        Markup(' {}="{}"').format(Markup(_attribute(key)), _value(value))
        for key, value in attributes.items()
        if value is not None
    )
    tag = Markup(name)
    return Markup("<{0}{1}>{2}</{0}>").format(tag, given, Markup("").join(map(escape, children)))


def drawing(width: float, height: float, title: str, summary: str, *children: Markup) -> Markup:
    """A drawing with a text alternative for screen readers."""
    return element(
        "svg",
        element("title", title),
        element("desc", summary),
        *children,
        role="img",
        viewBox=f"0 0 {_value(width)} {_value(height)}",
        width=width,
        height=height,
    )


def text(x: float, y: float, content: str, anchor: str | None = None, class_: str = "") -> Markup:
    """A line of text at a position, aligned by `anchor`."""
    return element("text", content, x=x, y=y, text_anchor=anchor, class_=class_ or None)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def with_tooltip(tooltip: str, *children: Markup, class_: str | None = None) -> Markup:
    """Some marks that show their exact values on hover."""
    return element("g", element("title", tooltip), *children, class_=class_)


def text_width(content: str, size: float = SIZE) -> float:
    """Approximate width of a text, on the wide side, since fonts differ."""
    return size * sum(map(_character_width, content))


def _character_width(character: str) -> float:
    if unicodedata.combining(character):
        return 0.0
    if unicodedata.east_asian_width(character) in "WF" or character in "mMwW@%…":
        return 1.0
    if character in "ijlI.,:;|!' -":
        return 0.38
    return 0.8 if character.isupper() or character in "<>=+~&#" else 0.63


def shorten(content: str, width: float, size: float = SIZE) -> str:
    """A text that fits, with an ellipsis where it was cut."""
    if text_width(content, size) <= width:
        return content
    while content and text_width(content + "…", size) > width:
        content = content[:-1]
    return content.rstrip() + "…"


SHAPES = ("circle", "square", "triangle", "diamond", "cross", "ring")
"""One marker per series, since not everybody can tell series apart by colour."""


def marker(series: int, x: float, y: float, radius: float = 4.5) -> Markup:
    """The mark of a series."""
    shape, r = SHAPES[series % len(SHAPES)], radius
    class_ = f"mark series-{series % len(SHAPES) + 1}"
    if shape in ("circle", "ring"):
        return element("circle", cx=x, cy=y, r=r, class_=f"{class_} {shape}")
    paths = {
        "square": f"M{-r} {-r}H{r}V{r}H{-r}Z",
        "triangle": f"M0 {-1.2 * r}L{1.15 * r} {0.9 * r}H{-1.15 * r}Z",
        "diamond": f"M0 {-1.3 * r}L{1.3 * r} 0L0 {1.3 * r}L{-1.3 * r} 0Z",
        "cross": f"M{-r} {-r}L{r} {r}M{-r} {r}L{r} {-r}",
    }
    place = f"translate({_value(x)} {_value(y)})"
    return element("path", d=paths[shape], transform=place, class_=f"{class_} {shape}")


def path(points: list[tuple[float, float]]) -> str:
    """Straight segments through some points."""
    return "M" + "L".join(f"{_value(x)} {_value(y)}" for x, y in points)


def _attribute(key: str) -> str:
    return key.rstrip("_").replace("_", "-")


def _value(value: object) -> str:
    if isinstance(value, float):
        shown = f"{value:.2f}".rstrip("0").rstrip(".")
        return "0" if shown == "-0" else shown
    return str(value)
