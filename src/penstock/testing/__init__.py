"""Test an app: its tasks run inline or on demand, on a store in memory with a manual clock.

Start with ``harness(app)``. Runs go through the worker's own executor, so retries, backoff, snoozing, timeouts,
middleware, context and cancellation work as in production.
"""

from __future__ import annotations

from penstock.testing.drain import ManualClock
from penstock.testing.harness import Harness, HarnessFactory, Mode, SyncHarness, harness
from penstock.testing.record import Drained, Ran, Recorded, Stub

__all__ = [
    "Drained",
    "Harness",
    "HarnessFactory",
    "ManualClock",
    "Mode",
    "Ran",
    "Recorded",
    "Stub",
    "SyncHarness",
    "harness",
]
