"""An app in memory, and a worker in the background."""

from __future__ import annotations

from tests.worker.conftest import memory_app, running, until, working

__all__ = ["memory_app", "running", "until", "working"]
