"""The sync face: the same methods for synchronous code, one implementation.

``app.sync``, ``task.sync``, ``queue.sync`` and what they give have the methods of their asynchronous originals
and run them on one loop thread per process (``loopthread``), from any number of threads at once. Calls that
are made at the same time travel together, as they do in asynchronous code.
"""

from __future__ import annotations

from penstock.client.sync.apps import SyncApp, SyncQueue
from penstock.client.sync.face import Face, as_sync
from penstock.client.sync.jobs import SyncClaimedJob, SyncDispatch, SyncJobHandle, SyncTask

__all__ = [
    "Face",
    "SyncApp",
    "SyncClaimedJob",
    "SyncDispatch",
    "SyncJobHandle",
    "SyncQueue",
    "SyncTask",
    "as_sync",
]
