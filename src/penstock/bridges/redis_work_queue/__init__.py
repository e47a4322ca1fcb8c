"""The key layout of redis-work-queue, so that Penstock code and that project's clients can share a queue.

``WorkQueue(url, prefix)`` has its operations. ``forward`` moves its items into a Penstock queue. Requires
``penstock[valkey]``. ``docs/bridges.md`` lists the differences from the published clients, with reasons.
"""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("hiredis") is None:
    raise ModuleNotFoundError(
        "penstock.bridges.redis_work_queue needs the package hiredis: pip install 'penstock[valkey]'",
        name="hiredis",
    )

from penstock.bridges.redis_work_queue.layout import Cleaned, Item
from penstock.bridges.redis_work_queue.queue import Forwarded, Lengths, SyncWorkQueue, WorkQueue, forward

__all__ = ["Cleaned", "Forwarded", "Item", "Lengths", "SyncWorkQueue", "WorkQueue", "forward"]
