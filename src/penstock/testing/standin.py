"""What an app talks to while it is under test: a store in memory, watched at the one seam every call goes through."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeVar, cast

from penstock.errors import PenstockError
from penstock.session import Session
from penstock.storage.coalesce import Coalescer
from penstock.testing.clock import ManualClock
from penstock.waiter import Expected, Waiter

if TYPE_CHECKING:
    from penstock.core.job import Enqueued, NewJob
    from penstock.intake import Intake
    from penstock.storage.base import Storage

__all__ = ["StandIn", "StandInSession", "stand_in"]

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# Verbs that make no job ready. One that is not named here costs a look for nothing, and misses none.
_QUIET: Final = frozenset(
    {
        *("claim", "settle", "extend", "sweep", "report", "leases_of", "depart", "wait", "listen", "watch"),
        *("announce", "lives"),
        *(
            "remove",
            "remove_unchanged",
            "unstage",
            "pause",
            "drain",
            "clean",
            "obliterate",
            "configure",
            "settings",
            "check",
        ),
        *(
            "get",
            "list_jobs",
            "scan_jobs",
            "counts",
            "queues",
            "workers",
            "clock",
            "logs",
            "read_entries",
            "read_events",
            "tail",
        ),
        *("schedulers", "pause_scheduler", "move_slot", "remove_scheduler", "dedup_of", "clear_dedup"),
        *("hold_events", "release_events", "consumers", "open", "close", "shift_clock"),
    }
)


class StandIn:
    """Passes every verb on to ``storage``, after telling its queue the time.

    ``readied`` is awaited after verbs that may have made a job ready, ``refuse`` is why no result can be waited for.
    """

    def __init__(
        self,
        storage: Storage,
        clock: ManualClock,
        *,
        readied: Callable[[], Awaitable[None]] | None = None,
        refuse: str = "",
    ) -> None:
        self._storage = storage
        self._clock = clock
        self._readied = readied
        self._refuse = refuse
        self.url = storage.url
        self.capabilities = storage.capabilities

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._storage, name)
        if not inspect.iscoroutinefunction(verb):
            return verb

        async def call(*args: Any, **kwargs: Any) -> Any:
            if self._refuse and _waits_for_results(name, args):
                raise PenstockError(self._refuse)
            if args and name != "shift_clock":
                await self._clock.tell(self._storage, args[0])
            answer = await verb(*args, **kwargs)
            if self._readied is not None and name not in _QUIET:
                await self._readied()
            return answer

        return call


PassTime: TypeAlias = Callable[[str, str, int | None], Awaitable[None]]
"""Takes a queue, the id of a job of it, and how many milliseconds its caller waits at most."""


class StandInSession(Session):
    """Sends each enqueue by itself: a task that runs inside the call may enqueue to the same queue.

    ``pass_time`` is awaited before somebody waits for the end of a job.
    """

    __slots__ = ("_pass_time",)
    remedy: ClassVar[str] = "In a harness, run jobs with h.drain() or h.run_all() before you wait for one."

    def __init__(self, storage: Storage, intake: Intake, pass_time: PassTime | None = None) -> None:
        super().__init__(storage, intake)
        self._pass_time = pass_time

    def waiter(self, queue: str) -> Waiter:
        if self._pass_time is not None and queue not in self._waiters:
            self._waiters[queue] = _TimePassingWaiter(self.storage, queue, self._pass_time)
        return super().waiter(queue)

    def _enqueues_to(self, queue: str) -> Coalescer[NewJob, Enqueued]:
        enqueue = self.storage.enqueue
        return _OneByOne(lambda jobs: enqueue(queue, jobs), size=lambda _: 1)


class _TimePassingWaiter(Waiter):
    """Lets the time pass that the awaited job needs."""

    __slots__ = ("_pass_time",)

    def __init__(self, storage: Storage, queue: str, pass_time: PassTime) -> None:
        super().__init__(storage, queue)
        self._pass_time = pass_time

    async def begin(self, expected: Expected, since: int) -> None:
        await super().begin(expected, since)
        await self._pass_time(self._queue, expected.id, expected.within_ms)

    async def watch(self, expected: Expected) -> None:
        await self._pass_time(self._queue, expected.id, expected.within_ms)
        await super().watch(expected)


class _OneByOne(Coalescer[Item, Answer]):
    """Calls that do not wait for each other."""

    __slots__ = ()

    async def call(self, item: Item) -> Answer:
        return (await self._send([item]))[0]


def stand_in(storage: Storage, clock: ManualClock, **options: Any) -> Storage:
    """A ``StandIn``, which has all verbs of a storage without naming them."""
    return cast("Storage", StandIn(storage, clock, **options))


def _waits_for_results(verb: str, args: tuple[Any, ...]) -> bool:
    return verb == "watch" or (verb == "enqueue" and any(job.notify for job in args[1]))
