"""The tokenizer of a model folder, as transformers loads it."""

from pathlib import Path
from typing import Any

from quantkit.errors import SourceError
from quantkit.quiet import only_errors

LONG_TEXTS = "sequence-length-is-longer-than-the-specified-maximum"


def load(folder: Path, trust_remote_code: bool = False) -> Any:
    """Without the warning about long texts, which quantkit splits into windows wherever it uses
    them.
    """
    from transformers import AutoTokenizer

    try:
        with only_errors("transformers"):
            found = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # untrusted files; anything may be wrong with them
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise SourceError(f"cannot load the tokenizer of {folder}: {reason}") from error
    if hasattr(found, "deprecation_warnings"):
        found.deprecation_warnings[LONG_TEXTS] = True  # where it records the warnings already given
    return found
