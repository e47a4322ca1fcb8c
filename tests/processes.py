"""Which processes live: for tests that kill, and look for what was left behind."""

from __future__ import annotations

from pathlib import Path


def is_alive(pid: int) -> bool:
    """Whether such a process runs. A zombie has ended, and only waits for whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it ended between the open and the read
        return False
