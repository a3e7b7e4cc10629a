"""One recognised row of a source: a chat, an instruction or plain text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["chat", "instruction", "text"]
Message = Mapping[str, Any]
"""In the OpenAI API's form: `role`, `content`, and for tools `tool_calls` and the like."""


@dataclass(frozen=True)
class Row:
    """The content and location of one row."""

    source: str
    """The name of its source in the spec."""
    place: str
    """Its location for display: `traffic.jsonl:17`."""
    kind: Kind
    messages: Sequence[Message] = ()
    """Messages of a chat, or of an instruction as a chat of one turn."""
    tools: Sequence[Mapping[str, Any]] = field(default=())
    text: str = ""
    """Content of a plain text."""

    @property
    def has_images(self) -> bool:
        """Whether a message refers to images."""
        return any(message.get("images") for message in self.messages)

    @property
    def without_images(self) -> "Row":
        """The same with text only."""
        kept = [{k: v for k, v in m.items() if k != "images"} for m in self.messages]
        return replace(self, messages=kept)

    @property
    def plain(self) -> str:
        """Everything that was said, one turn below the other."""
        if self.kind == "text":
            return self.text
        return "\n\n".join(text for m in self.messages if (text := content(m)))


def content(message: Message) -> str:
    """The text of a message, whose content may have several parts or be missing."""
    parts = message.get("content")
    if parts is None:
        return ""
    if isinstance(parts, str):
        return parts
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, Mapping))
