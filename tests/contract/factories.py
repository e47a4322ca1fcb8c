"""A bench to put jobs on: any state of the lifecycle, reached through verbs alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from penstock.core.event import Event
from penstock.core.job import Conflict, Enqueued, Extras, Job, Lease, NewJob, Options
from penstock.core.lifecycle import TERMINAL, EventType, State, sources
from penstock.core.outcome import Complete, Fail, Failure, Outcome
from penstock.storage.contract import Storage
from penstock.storage.values import Settled, Settlement, Take

__all__ = [
    "BOOM",
    "LEASE_MS",
    "MINUTE_MS",
    "STATES",
    "TERMINAL_STATES",
    "Bench",
    "Seen",
    "other_states",
    "redispatch",
    "start_states",
]

STATES: Final = list(State)
TERMINAL_STATES: Final = [state for state in STATES if state in TERMINAL]
MINUTE_MS: Final = 60_000
LEASE_MS: Final = MINUTE_MS
BOOM: Final = Failure("Boom", "it went off", "at line 1")
PAUSED: Final = "paused group"


def start_states(verb: str) -> list[State]:
    """The states from which the table lets ``verb`` change a job."""
    return [state for state in STATES if state in sources(verb)]


def other_states(verb: str) -> list[State]:
    """The states in which ``verb`` must leave a job alone."""
    return [state for state in STATES if state not in sources(verb)]


def redispatch(**fields: Any) -> Conflict:
    return Conflict(mode="redispatch", **fields)


class Seen(NamedTuple):
    """An event as most tests look at it."""

    type: EventType | str
    id: str
    state: str


class Bench:
    """One queue of a store. What it does is a verb or two; it keeps only its position in the log."""

    def __init__(self, storage: Storage, queue: str) -> None:
        self.storage = storage
        self.queue = queue
        self.read = 0

    # Putting jobs into states

    async def put(self, id: str = "job", **fields: Any) -> Enqueued:
        """Enqueue one job. Fields of ``Options`` may stand beside those of ``NewJob``."""
        [answer] = await self.put_all([self.new(id, **fields)])
        return answer

    async def put_all(self, jobs: Sequence[NewJob]) -> list[Enqueued]:
        return await self.storage.enqueue(self.queue, jobs)

    def new(self, id: str, **fields: Any) -> NewJob:
        options = {name: fields.pop(name) for name in list(fields) if name in Options.__struct_fields__}
        if options:
            fields["options"] = Options(**options)
        return NewJob(id, **fields)

    async def bring(self, state: State, id: str = "job", **fields: Any) -> Lease | None:
        """A new job in this state, and its lease if it was claimed. Nothing else may be waiting."""
        if state is State.SCHEDULED:
            await self.put(id, **{"delay_ms": MINUTE_MS, **fields})
            return None
        if state is State.BLOCKED:
            await self.storage.pause(self.queue, group=PAUSED)
            await self.put(id, **{"extras": Extras(group=PAUSED), **fields})
            return None
        await self.put(id, **fields)
        match state:
            case State.WAITING:
                return None
            case State.CANCELLED:
                await self.storage.cancel(self.queue, [id])
                return None
            case State.ACTIVE:
                return await self.claim()
            case State.COMPLETED:
                return await self._settled(Complete(b"result"))
            case State.FAILED:
                return await self._settled(Fail(BOOM, final=True))
            case _:
                raise NotImplementedError(state)

    async def bring_all(self) -> dict[State, str]:
        """One job in every state, named after it."""
        order = sorted(STATES, key=lambda state: state is State.WAITING)
        for state in order:
            await self.bring(state, state.value)
        return {state: state.value for state in STATES}

    async def _settled(self, outcome: Outcome) -> Lease:
        lease = await self.claim()
        await self.settle(lease, outcome)
        return lease

    # Working

    async def claim(self, *, worker: str = "worker", lease_ms: int = LEASE_MS) -> Lease:
        """The next job in line, which must be there."""
        [lease] = await self.claim_all(1, worker=worker, lease_ms=lease_ms)
        return lease

    async def claim_all(
        self, count: int = 1000, *, worker: str = "worker", lease_ms: int = LEASE_MS
    ) -> list[Lease]:
        return (await self.storage.claim(self.queue, Take(worker, count, lease_ms))).leases

    async def settle(self, lease: Lease, outcome: Outcome) -> Settled:
        batch = await self.storage.settle(self.queue, [Settlement(lease.id, lease.token, outcome)])
        [answer] = batch.answers
        return answer

    async def shift(self, ms: int) -> None:
        await self.storage.shift_clock(self.queue, ms)

    async def jump(self, ms: int) -> None:
        """Let the store's wall clock jump, without telling the queue."""
        await self.storage.shift_clock(self.queue, ms, jump=True)

    async def now(self) -> int:
        return (await self.storage.clock(self.queue)).now_ms

    # Looking

    async def find(self, id: str = "job") -> Job | None:
        [job] = await self.storage.get(self.queue, [id])
        return job

    async def job(self, id: str = "job") -> Job:
        job = await self.find(id)
        assert job is not None, f"no record of {id}"
        return job

    async def state(self, id: str = "job") -> State | None:
        """Its state, after making sure that the record, the counts and the list of that state agree."""
        job = await self.find(id)
        if job is not None:
            page = await self.storage.list_jobs(self.queue, job.state, limit=1000)
            assert id in [listed.id for listed in page.jobs]
            assert getattr(await self.storage.counts(self.queue), job.state) == len(page.jobs)
        return job.state if job else None

    async def ids(self, state: State) -> list[str]:
        page = await self.storage.list_jobs(self.queue, state, limit=10_000)
        return [job.id for job in page.jobs]

    async def counts(self) -> dict[State, int]:
        """The states that have jobs, and how many."""
        counts = await self.storage.counts(self.queue)
        return {state: number for state in State if (number := getattr(counts, state))}

    async def events(self) -> list[Event]:
        """What was appended since the last look, without a hole."""
        events: list[Event] = []
        while True:
            page = await self.storage.read_events(self.queue, after=self.read)
            numbers = [event.seq for event in page.events]
            assert numbers == list(range(self.read + 1, self.read + 1 + len(numbers)))
            assert page.next == self.read + len(numbers)
            self.read = page.next
            events += page.events
            if self.read == page.last:
                return events
            assert numbers, "there is more, but it is not given"

    async def seen(self) -> list[Seen]:
        return [Seen(event.type, event.id, event.state) for event in await self.events()]

    async def picture(self) -> object:
        """All that can be seen of the queue. Two that are equal: nothing happened in between."""
        jobs = [await self.storage.list_jobs(self.queue, state, limit=1000) for state in State]
        page = await self.storage.read_events(self.queue, after=0)
        return jobs, await self.counts(), page.last
