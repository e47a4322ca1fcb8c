"""The client API: apps, tasks, queues, job handles, flows, schedules and searches."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.client.sync import SyncApp as SyncApp
    from penstock.client.sync import SyncDispatch as SyncDispatch
    from penstock.client.sync import SyncQueue as SyncQueue
    from penstock.client.sync import SyncSubscription as SyncSubscription
    from penstock.client.sync import SyncWhole as SyncWhole

_SYNC: Final = frozenset({"SyncApp", "SyncDispatch", "SyncQueue", "SyncSubscription", "SyncWhole"})


def __getattr__(name: str) -> object:
    """Import the sync API when it is first used. It is made of the classes whose ``sync`` property returns it."""
    if name in _SYNC:
        return getattr(import_module("penstock.client.sync"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
