"""The sync face of a work queue: the same methods, run on the loop thread of the process (``loopthread``)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Self, Unpack

from penstock.bridges.redis_work_queue.cleaning import Cleaned
from penstock.bridges.redis_work_queue.forwarding import Forwarded, forward
from penstock.bridges.redis_work_queue.layout import Item
from penstock.bridges.redis_work_queue.queue import Lengths, WorkQueue
from penstock.client.loopthread import run
from penstock.core.units import Duration

if TYPE_CHECKING:
    from penstock.client.options import JobOptions
    from penstock.client.queue import Queue


class SyncWorkQueue:
    """See ``WorkQueue``. Any number of threads may use it."""

    __slots__ = ("_target",)

    def __init__(self, target: WorkQueue) -> None:
        self._target = target

    def __repr__(self) -> str:
        return f"{self._target!r}.sync"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def prefix(self) -> str:
        return self._target.prefix

    def add_item(self, item: Item) -> bool:
        """See ``WorkQueue.add_item``."""
        return run(self._target.add_item(item))

    def add_items(self, items: Iterable[Item]) -> list[bool]:
        """See ``WorkQueue.add_items``."""
        return run(self._target.add_items(items))

    def add_unique_item(self, item: Item) -> None:
        """See ``WorkQueue.add_unique_item``."""
        run(self._target.add_unique_item(item))

    def lease(self, lease: Duration, *, wait: Duration | None = None) -> Item | None:
        """See ``WorkQueue.lease``."""
        return run(self._target.lease(lease, wait=wait))

    def complete(self, item: Item) -> bool:
        """See ``WorkQueue.complete``."""
        return run(self._target.complete(item))

    def light_clean(self, *, grace: Duration = "1s") -> Cleaned:
        """See ``WorkQueue.light_clean``."""
        return run(self._target.light_clean(grace=grace))

    def deep_clean(self, *, grace: Duration = "1s") -> Cleaned:
        """See ``WorkQueue.deep_clean``."""
        return run(self._target.deep_clean(grace=grace))

    def queue_len(self) -> int:
        """See ``WorkQueue.queue_len``."""
        return run(self._target.queue_len())

    def processing(self) -> int:
        """See ``WorkQueue.processing``."""
        return run(self._target.processing())

    def lengths(self) -> Lengths:
        """See ``WorkQueue.lengths``."""
        return run(self._target.lengths())

    def forward(
        self,
        target: Queue,
        *,
        payload: Callable[[Item], Any] = Item.json,
        lease: Duration = "1m",
        wait: Duration | None = None,
        task: str = "",
        **options: Unpack[JobOptions],
    ) -> Forwarded:
        """See ``forward``."""
        return run(
            forward(self._target, target, payload=payload, lease=lease, wait=wait, task=task, **options)
        )

    def close(self) -> None:
        """See ``WorkQueue.close``."""
        run(self._target.close())
