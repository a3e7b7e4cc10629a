"""Whether a folder is the checkpoint that a report scored."""

from collections.abc import Sequence
from pathlib import Path

from quantkit.gating.text import plain
from quantkit.gating.verdict import Answer, Check
from quantkit.report.document import Document


def check_folder(document: Document, folder: Path, unjudged: Sequence[str] = ()) -> Check:
    """Its files must match its manifest and what was scored, and some rule must judge it.

    A checkpoint from another tool has no manifest: it is identified by its fingerprint.
    """
    from quantkit.export import foreign_gguf
    from quantkit.verification.folder import is_foreign

    fault: str | None = None
    if (file := foreign_gguf.file_of(folder)) is not None:
        from quantkit.gguf.reader import read_file

        digest, own = foreign_gguf.digest_of(read_file(file)), file.stem
        proof = "by its fingerprint"
    elif is_foreign(folder):
        from quantkit.model.source import ModelSource

        opened = ModelSource.open(str(folder), None, False, requantize=True)
        digest, own, proof = opened.digest, opened.label, "by its fingerprint"
    else:
        from quantkit.export.manifest import Manifest
        from quantkit.verification.checkpoint import file_faults

        manifest = Manifest.read(folder)
        digest, own, proof = manifest.digest, manifest.name, "byte by byte"
        fault = next(file_faults(folder, manifest), None)
    scored = next((e for e in document.candidates if e.digest == digest), None)
    namesake = next((e for e in document.candidates if own in (e.name, e.recipe)), None)
    where = plain(str(folder))
    if fault is not None:
        answer = Answer.FAIL
        reason = f"{where} is not what its manifest says, and not what was scored: {plain(fault)}"
        if scored is not None:
            reason = f"{where} was changed after it was scored: {plain(fault)}"
    elif scored is not None and scored.name in unjudged:
        answer = Answer.FAIL
        reason = f"no rule of the policy judges {plain(scored.name)}, which is {where}"
    elif scored is not None:
        answer = Answer.PASS
        reason = f"{where} is what the report calls {plain(scored.name)}, {proof}"
    elif namesake is not None:
        answer = Answer.FAIL
        reason = (
            f"{where} was changed after it was scored, or made again: its digest is "
            f"{digest[:16]}, that of {plain(namesake.name)} in the report {namesake.digest[:16]}"
        )
    else:
        answer = Answer.FAIL
        reason = f"{where} was not scored: no candidate of the report has its digest {digest[:16]}"
    known = scored or namesake
    return Check(
        candidate=known.name if known else own,
        asked="checkpoint",
        metric="checkpoint",
        kind="digest",
        bound=None,
        against="report",
        before=None,
        after=None,
        amount=None,
        low=None,
        high=None,
        confidence=None,
        answer=answer,
        reason=reason,
    )
