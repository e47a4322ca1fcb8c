"""What the crash tests and the processes they start both need to know."""

from __future__ import annotations

QUEUE = "crash"
TICKS = "ticks"
PRODUCERS = ("producer-0", "producer-1")
