"""`general.*` keys: what model browsers show about a file."""

import math
from typing import Any

import gguf
import yaml
from gguf import Keys, LlamaFileType

from quantkit import __version__
from quantkit.gguf.layout import Layout
from quantkit.gguf.writer import Value
from quantkit.model.source import ModelSource

HUB = "https://huggingface.co"


def general(layout: Layout, source: ModelSource, file_type: LlamaFileType) -> dict[str, Value]:
    """What the file is, where it comes from and who made it."""
    n_parameters = sum(math.prod(tensor.shape) for tensor in layout.tensors if tensor.parts)
    card = _card(source)
    found = gguf.Metadata.get_model_id_components(
        source.name if source.revision else source.label, n_parameters
    )
    # As it is spelt: by "phi-3" in it llama.cpp knows that spaces after special tokens are dropped.
    name, organization, basename, finetune, version, size_label = found
    values: dict[str, Value | None] = {
        Keys.General.ARCHITECTURE: layout.family.name,
        Keys.General.TYPE: gguf.GGUFType.MODEL,
        Keys.General.NAME: name or source.label,
        Keys.General.ORGANIZATION: organization,
        Keys.General.BASENAME: basename,
        Keys.General.FINETUNE: finetune,
        Keys.General.VERSION: version,
        Keys.General.SIZE_LABEL: size_label or gguf.size_label(n_parameters, n_parameters, 0, 0),
        Keys.General.LICENSE: _text(card.get("license")),
        Keys.General.LICENSE_NAME: _text(card.get("license_name")),
        Keys.General.LICENSE_LINK: _text(card.get("license_link")),
        Keys.General.LANGUAGES: _texts(card.get("language")),
        Keys.General.TAGS: _texts(card.get("tags")),
        Keys.General.SOURCE_REPO_URL: f"{HUB}/{source.name}" if source.revision else None,
        Keys.General.FILE_TYPE: int(file_type),
        Keys.General.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION,
        Keys.General.QUANTIZED_BY: f"quantkit {__version__}",
    }
    return {key: v for key, v in values.items() if v is not None} | _ancestors(card)


def _ancestors(card: dict[str, Any]) -> dict[str, Value]:
    """The models that the model's card says it was made from, by their hub ids."""
    ids = [name for name in _texts(card.get("base_model")) or [] if name.count("/") == 1]
    values: dict[str, Value] = {Keys.General.BASE_MODEL_COUNT: len(ids)} if ids else {}
    for index, name in enumerate(ids):
        organization, title = name.split("/")
        values |= {
            Keys.General.BASE_MODEL_NAME.format(id=index): title,
            Keys.General.BASE_MODEL_ORGANIZATION.format(id=index): organization,
            Keys.General.BASE_MODEL_REPO_URL.format(id=index): f"{HUB}/{name}",
        }
    return values


def _card(source: ModelSource) -> dict[str, Any]:
    """The front matter of a model's README, when it has one that can be read."""
    try:
        text = (source.folder / "README.md").read_text(encoding="utf-8")
        if not text.startswith("---\n"):
            return {}
        # Read as plain texts: the language `no` is Norwegian.
        card = yaml.load(text[4:].split("\n---", 1)[0], Loader=yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError):
        return {}  # nothing but a description is lost
    return card if isinstance(card, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: Any) -> list[str] | None:
    values = value if isinstance(value, list) else [value]
    return [v for v in values if isinstance(v, str) and v] or None
