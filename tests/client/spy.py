"""A storage that passes everything on, and notes how it was called."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from penstock.core.job import Enqueued, NewJob
from penstock.errors import StorageFull
from penstock.storage.contract import Storage
from penstock.storage.values import Ticket

if TYPE_CHECKING:
    _Base = Storage
else:
    _Base = object

__all__ = ["Spy", "spy_on"]

S = TypeVar("S", bound="Spy")


class Spy(_Base):
    """``fail_enqueue_number``: that call of enqueue (from 1), and those after it, find the store full."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.url = storage.url
        self.capabilities = storage.capabilities
        self.calls: list[str] = []
        self.enqueues: list[Sequence[NewJob]] = []
        self.most_at_once = 0
        self.fail_enqueue_number: int | None = None
        self._at_once = 0

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            method = getattr(self._storage, name)

            def noted(*args: Any, **kwargs: Any) -> Any:
                self.calls.append(name)
                return method(*args, **kwargs)

            return noted

    async def enqueue(
        self, queue: str, jobs: Sequence[NewJob], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        self.enqueues.append(jobs)
        if self.fail_enqueue_number is not None and len(self.enqueues) >= self.fail_enqueue_number:
            raise StorageFull("no room")
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            return await self._storage.enqueue(queue, jobs, ticket=ticket)
        finally:
            self._at_once -= 1


def spy_on(storage: Storage, kind: type[S] | None = None) -> S:
    """A spy before ``storage``; for the type checker it has the methods that it passes on."""
    spy: S = cast(Any, kind or Spy)(storage)
    return spy
