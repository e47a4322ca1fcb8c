"""The sync face: the same methods and implementation for synchronous code.

``app.sync``, ``task.sync``, ``queue.sync`` and the objects they return have the methods of their asynchronous originals
and run them on one loop thread per process (``loopthread``). Any number of threads may call them. Simultaneous calls
share round trips, as they do in asynchronous code.
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
