"""Images of chats: reads them where rows refer to them, and feeds them to the model's processor.

A row keeps references: paths relative to the row's file, or `data:` URLs. A set keeps the images
themselves, by hash. Nothing is downloaded.
"""

import base64
import binascii
import hashlib
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from quantkit.errors import DataError
from quantkit.quiet import only_errors

MOST_BYTES = 64 << 20
"""Largest image file."""
SUFFIXES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpg", b"GIF8": "gif", b"RIFF": "webp"}
IDS = ("input_ids", "attention_mask")
"""Processor outputs other than those of images."""
TYPES = ("token_type_ids", "mm_token_type_ids")
"""Model arguments that mark which tokens stand for images."""


LACKING = re.compile(r"requires the (\w+) library")
"""In transformers' words for a missing package."""


class Unusable(DataError):
    """Images cannot be used, with the reason."""


@dataclass(frozen=True)
class Picture:
    """An image file."""

    data: bytes

    @cached_property
    def name(self) -> str:
        """Its file name in a set."""
        suffix = next((s for magic, s in SUFFIXES.items() if self.data.startswith(magic)), "bin")
        return f"{hashlib.sha256(self.data).hexdigest()}.{suffix}"

    def opened(self) -> Any:
        """The decoded image."""
        from PIL import Image

        with Image.open(io.BytesIO(self.data)) as found:
            return found.convert("RGB")


def read(reference: str, folder: Path) -> Picture:
    """The image that a row of a file in `folder` refers to."""
    shown = reference if len(reference) <= 80 else f"{reference[:60]}..."
    parts = urlsplit(reference) if len(reference) < 4096 else None
    if reference.startswith("data:"):
        head, _, body = reference.partition(",")
        try:
            data = base64.b64decode(body, validate=True) if head.endswith(";base64") else b""
        except (binascii.Error, ValueError):
            data = b""
        if not data:
            raise Unusable(f"the image {shown} is not base64")
        return _checked(Picture(data), shown)
    if parts is not None and parts.scheme in ("http", "https"):
        raise Unusable(f"the image {shown} is not here; save it, and name its file")
    path = Path(unquote(parts.path) if parts is not None and parts.scheme == "file" else reference)
    try:
        with (folder / path).open("rb") as stream:
            data = stream.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise Unusable(f"cannot read the image {shown}: {reason}") from error
    return _checked(Picture(data), shown)


def _checked(picture: Picture, shown: str) -> Picture:
    if len(picture.data) > MOST_BYTES:
        raise Unusable(f"the image {shown} has more than {MOST_BYTES >> 20} MiB")
    try:
        picture.opened()
    except Exception as error:  # untrusted file; anything may be wrong with it
        raise Unusable(f"the image {shown} cannot be opened: {str(error)[:120]}") from error
    return picture


@dataclass(frozen=True)
class Vision:
    """A model's processor."""

    processor: Any

    @classmethod
    def of(cls, folder: Path | None, trust_remote_code: bool = False) -> "Vision":
        """The processor in a model's folder; raises with the reason if images cannot be used."""
        if folder is None or not any(folder.glob("*processor_config.json")):
            raise Unusable("the model has no processor for images")
        try:
            from transformers import AutoProcessor

            with only_errors("transformers"):
                found = AutoProcessor.from_pretrained(folder, trust_remote_code=trust_remote_code)
                made = cls(found)
                made.require_images()
        except Exception as error:  # untrusted files, or missing packages
            reason = " ".join(str(error).split())[:160] or type(error).__name__
            if package := LACKING.search(reason):
                name = package[1].lower()
                reason = f"it needs {name}, which is not installed: pip install {name}"
            raise Unusable(f"the model's processor cannot be loaded: {reason}") from error
        return made

    def require_images(self) -> None:
        """Load the image library, and check that the processor accepts images."""
        from PIL import Image

        assert Image
        if getattr(self.processor, "image_processor", None) is None:
            raise Unusable("the model takes no images")
        if not getattr(self.processor, "chat_template", None):
            self.processor.chat_template = self.processor.tokenizer.chat_template

    def ids(self, text: str, pictures: Sequence[Picture]) -> list[int]:
        """Tokens of a text with image markers, each expanded to all tokens of its image."""
        images = [picture.opened() for picture in pictures]
        made = self.processor(
            text=[text], images=[images], add_special_tokens=False, return_tensors="np"
        )
        return [int(n) for n in made["input_ids"][0]]

    def inputs(self, pictures: Sequence[Picture]) -> dict[str, Any]:
        """The model's inputs for images, besides tokens."""
        images = [picture.opened() for picture in pictures]
        made: Mapping[str, Any] = self.processor.image_processor(images, return_tensors="pt")
        return {name: value for name, value in made.items() if name not in IDS}

    @property
    def token(self) -> int | None:
        """The token that stands for a part of an image."""
        found = getattr(self.processor, "image_token_id", None)
        return int(found) if isinstance(found, int) else None
