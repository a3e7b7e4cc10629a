"""Checks that a checkpoint is complete, before an engine loads it."""

from quantkit.errors import CheckpointError
from quantkit.progress import Progress
from quantkit.serving.target import Target

SHOWN = 5


def check(target: Target, progress: Progress) -> None:
    """Refuse a folder whose files, config or tensors are not what its manifest says.

    Engines load a checkpoint with a missing scale or swapped files, and write garbage. Hashing
    costs little: the files are then in the page cache for the engine.
    """
    if not target.has_manifest:
        progress.note(f"{target.name} has no quantkit manifest to check it by")
        return
    from quantkit.verification.checkpoint import verify

    result = verify(target.folder, progress=progress, read_weights=False)
    if not result.ok:
        faults = "\n".join(f"  {fault}" for fault in result.faults[:SHOWN])
        more = len(result.faults) - SHOWN
        rest = f"\n  and {more} more" if more > 0 else ""
        raise CheckpointError(
            f"{target.folder} is not served: an engine may load it and answer wrongly; "
            f"`quantkit verify` says more:\n{faults}{rest}"
        )
