"""`general.*` keys: what model browsers show for a file."""

import math
from typing import Any

import gguf
from gguf import Keys, LlamaFileType

from quantkit import __version__
from quantkit.gguf.layout import Layout
from quantkit.gguf.writer import Value
from quantkit.model import description
from quantkit.model.description import text, texts
from quantkit.model.source import ModelSource

HUB = "https://huggingface.co"


def general(layout: Layout, source: ModelSource, file_type: LlamaFileType) -> dict[str, Value]:
    """What the file is, where it comes from and who made it."""
    n_parameters = sum(math.prod(tensor.shape) for tensor in layout.tensors if tensor.parts)
    card = description.read(source.folder)
    found = gguf.Metadata.get_model_id_components(
        source.name if source.revision else source.label, n_parameters
    )
    # Keep the spelling: llama.cpp looks for "phi-3" in it to drop spaces after special tokens.
    name, organization, basename, finetune, version, size_label = found
    values: dict[str, Value | None] = {
        Keys.General.ARCHITECTURE: layout.family.llamacpp,
        Keys.General.TYPE: gguf.GGUFType.MODEL,
        Keys.General.NAME: name or source.label,
        Keys.General.ORGANIZATION: organization,
        Keys.General.BASENAME: basename,
        Keys.General.FINETUNE: finetune,
        Keys.General.VERSION: version,
        Keys.General.SIZE_LABEL: size_label or gguf.size_label(n_parameters, n_parameters, 0, 0),
        Keys.General.LICENSE: text(card.get("license")),
        Keys.General.LICENSE_NAME: text(card.get("license_name")),
        Keys.General.LICENSE_LINK: text(card.get("license_link")),
        Keys.General.LANGUAGES: texts(card.get("language")) or None,
        Keys.General.TAGS: texts(card.get("tags")) or None,
        Keys.General.SOURCE_REPO_URL: f"{HUB}/{source.name}" if source.revision else None,
        Keys.General.FILE_TYPE: int(file_type),
        Keys.General.QUANTIZATION_VERSION: gguf.GGML_QUANT_VERSION,
        Keys.General.QUANTIZED_BY: f"quantkit {__version__}",
    }
    return {key: v for key, v in values.items() if v is not None} | _ancestors(card)


def _ancestors(card: dict[str, Any]) -> dict[str, Value]:
    """Hub ids of the base models that the model's card lists."""
    ids = [name for name in texts(card.get("base_model")) if name.count("/") == 1]
    values: dict[str, Value] = {Keys.General.BASE_MODEL_COUNT: len(ids)} if ids else {}
    for index, name in enumerate(ids):
        organization, title = name.split("/")
        values |= {
            Keys.General.BASE_MODEL_NAME.format(id=index): title,
            Keys.General.BASE_MODEL_ORGANIZATION.format(id=index): organization,
            Keys.General.BASE_MODEL_REPO_URL.format(id=index): f"{HUB}/{name}",
        }
    return values
