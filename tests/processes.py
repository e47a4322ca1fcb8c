"""Which processes live: for tests that kill, and look for what was left behind."""

from __future__ import annotations

import psutil


def is_alive(pid: int) -> bool:
    """Whether such a process runs. A zombie has ended, and only waits for whoever adopted it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
