"""What a sweep will cost."""

from quantkit.sweep.resolve import Resolved


def disk_bytes(sweep: Resolved) -> int:
    return 0
