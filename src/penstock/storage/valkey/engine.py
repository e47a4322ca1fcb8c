"""The verbs on schedulers."""

from __future__ import annotations

import inspect
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, Self, TypeVar

import msgspec

from penstock.core.flow import DependencyRecord, DependencyState, Node, woven
from penstock.core.job import Dependency, Dependent, Enqueued, NewJob, Policy
from penstock.core.lifecycle import State
from penstock.core.names import check_namespace
from penstock.errors import InvalidOption, PenstockError, StorageError, StorageRefused
from penstock.storage.contract import Storage
from penstock.storage.valkey.calls import Calls, Refused
from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.codec import encode_after, encode_jobs
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.identity import Identity
from penstock.storage.valkey.jobs import decode_failure
from penstock.storage.valkey.library import DEFAULT_NAMESPACE, Keys, library
from penstock.storage.valkey.lives import Lives
from penstock.storage.valkey.operating import Limiting, Operating
from penstock.storage.valkey.outbox import Courier
from penstock.storage.valkey.reading import Reading
from penstock.storage.valkey.replies import Arg
from penstock.storage.valkey.routers import Router, router_for
from penstock.storage.valkey.running import ENQUEUED, STATE_OF, Running, refusal
from penstock.storage.values import (
    AttachAnswer,
    Fired,
    NewScheduler,
    Scheduler,
    SchedulerAnswer,
    Schedulers,
    Ticket,
    WorkerRecord,
    with_deaths,
)

_ANSWERS: Final[Mapping[bytes, SchedulerAnswer]] = {b"c": "created", b"u": "updated", b"s": "unchanged"}
_HEAD: Final = struct.Struct(">HIHIHIHIHIHIBH")


class Scheduling(Running):
    """Each verb is one call of its function. A ``fire`` that is repeated finds that its slot has gone by."""

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
        """As ``Storage.put_scheduler``."""
        if queue not in self._registered:
            await self._register(queue)
        new = scheduler
        repeat_ms = -1 if new.repeat_ms is None else new.repeat_ms
        reply: bytes = await self._calls.call(
            queue, "put_scheduler", new.name, new.next_ms, int(new.keep_next), new.limit, new.end_ms, repeat_ms,
            new.spec,
        )  # fmt: skip
        return _ANSWERS[reply]

    async def schedulers(self, queue: str, names: Sequence[str] | None = None) -> Schedulers:
        """As ``Storage.schedulers``."""
        asked = () if names is None else ("1", *names)
        now_ms, rows = await self._calls.call(queue, "schedulers", *asked)
        found = (_decode(name.decode(), record) for name, record in zip(rows[::2], rows[1::2], strict=True))
        return Schedulers(int(now_ms), sorted(found, key=lambda one: one.name))

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        """As ``Storage.pause_scheduler``."""
        return bool(await self._calls.call(queue, "pause_scheduler", name))

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        """As ``Storage.resume_scheduler``."""
        given = "" if next_ms is None else next_ms
        return bool(await self._calls.call(queue, "resume_scheduler", name, given))

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        """As ``Storage.move_slot``."""
        return bool(await self._calls.call(queue, "move_slot", name, slot_ms, next_ms))

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        """As ``Storage.remove_scheduler``."""
        return bool(await self._calls.call(queue, "remove_scheduler", name))

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        """As ``Storage.fire``."""
        await self._meet(queue)
        try:
            reply: list[Any] = await self._calls.call(
                queue, "fire", name, slot_ms, next_ms, *encode_jobs([job])
            )
        except Refused as error:
            raise refusal(queue, error) from None
        if len(reply) > 2:
            self._courier.send_soon(queue)
        return Fired(True, self._answers(queue, [job], reply)[0]) if reply else Fired(False)


def _decode(name: str, record: bytes) -> Scheduler:
    """A record of lua/schedulers.lua."""
    *pairs, paused, length = _HEAD.unpack_from(record)
    numbers = [high << 32 | low for high, low in zip(pairs[::2], pairs[1::2], strict=True)]
    next_ms, awaits, fired, limit, end_ms, repeat = numbers
    spec_at = _HEAD.size + length
    return Scheduler(
        name=name,
        spec=record[spec_at:],
        next_ms=next_ms,
        paused=paused == 1,
        fired=fired,
        limit=limit,
        end_ms=end_ms,
        repeat_ms=repeat - 1 if repeat else None,
        last_id=record[_HEAD.size : spec_at].decode(),
        awaiting=awaits > 0,
    )


# The verbs of flows.


_POLICIES: Final[dict[str, Policy]] = {"f": "fail", "i": "ignore", "w": "wait"}
_STATES: Final[dict[str, DependencyState]] = {
    "": "pending",
    "c": "completed",
    "f": "failed",
    "x": "cancelled",
    "r": "removed",
}
_ATTACHED: Final[dict[bytes, AttachAnswer]] = {b"a": "attached", b"e": "ended", b"-": "not_found"}

_pack = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(tuple[int, str, str]).decode


class Flowing:
    """Mixed into the engine."""

    _calls: Calls
    _courier: Courier
    _register: Callable[[str], Awaitable[None]]

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
        """As ``Storage.enqueue_flows``."""
        await self._register(queue)
        layout = [[node.queue for node in flow] for flow in flows]
        nodes = [node for flow in flows for node in flow]
        to_come = [own for flow in flows for own in [_ids(flow)] * len(flow)]
        args = [_pack(layout), *encode_jobs([node.job for node in nodes], to_come=to_come)]
        try:
            answers, is_full = await self._calls.call_once(queue, "enqueue_flows", args, ticket=ticket)
        except Refused as error:
            raise refusal(queue, error) from None
        if is_full:
            await self._courier.send(queue)
        rows = zip(flows, answers[::3], answers[1::3], answers[2::3], strict=True)
        return [_enqueued(flow[0].job.id, letters, inc, result) for flow, letters, inc, result in rows]

    async def attach(
        self, queue: str, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
    ) -> AttachAnswer:
        """As ``Storage.attach``. If the job is in a flow already, the nodes are tied again, for that."""
        own = _ids(nodes)
        while True:
            into = Dependent(queue, id, flow)
            tied = woven(nodes, flow=flow, into=into, after=after)
            jobs = encode_jobs([node.job for node in tied], to_come=[own] * len(tied))
            head: list[Arg] = [
                id,
                flow,
                _pack(encode_after(after, own)),
                _pack([node.queue for node in tied]),
            ]
            try:
                answer, is_full = await self._calls.call_once(queue, "attach", [*head, *jobs])
            except Refused as error:
                raise refusal(queue, error) from None
            if is_full:
                await self._courier.send(queue)
            if not answer.startswith(b"f"):
                return _ATTACHED[answer]
            flow = answer[1:].decode()

    async def dependencies(
        self, queue: str, id: str, *, start: int = 0, limit: int = 1000
    ) -> list[DependencyRecord]:
        """As ``Storage.dependencies``."""
        rows = await self._calls.call(queue, "dependencies", id, start, limit)
        return [_record(*row) for row in zip(rows[::3], rows[1::3], rows[2::3], strict=True)]


def _ids(nodes: Sequence[Node]) -> frozenset[tuple[str, str]]:
    return frozenset((node.queue, node.job.id) for node in nodes)


def _enqueued(id: str, letters: bytes, incarnation: int, result: bytes) -> Enqueued:
    state = STATE_OF[letters[1]]
    shown = result if state is State.COMPLETED else None
    return Enqueued(id, ENQUEUED[letters[0]], state, incarnation, shown)


def _record(name: bytes, entry: bytes, value: bytes) -> DependencyRecord:
    queue, _, id = name.decode().partition("\0")
    _, policy, state = _decode_entry(entry)
    is_result = state == "c"
    failure = decode_failure(value) if value and not is_result else None
    result: Any = value if is_result else None
    return DependencyRecord(queue, id, _POLICIES[policy], _STATES[state], result, failure)


# The Valkey/Redis engine: every verb is one call of a function that runs inside the server.
#
# The functions are in ``lua/``, a file per verb; the keys they use are told at the top of
# ``lua/prelude.lua``.


T = TypeVar("T")

_NONSENSE: Final = (AttributeError, LookupError, TypeError, ValueError, msgspec.MsgspecError, struct.error)


def _answered(verb: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return ``verb``, with a ``StorageError`` in place of what Python raises for an answer of the wrong shape."""

    @wraps(verb)
    async def call(self: ValkeyStorage, *args: Any, **kwargs: Any) -> T:
        try:
            return await verb(self, *args, **kwargs)
        except PenstockError:
            # Some are a LookupError or a ValueError as well.
            raise
        except _NONSENSE as error:
            raise StorageError(
                f"{self.url} gave an answer to {verb.__name__} that makes no sense: {type(error).__name__}: "
                f"{error!s:.200}. See that the URL names a Valkey or Redis server, with no proxy in between that "
                "changes answers, and that all clients run compatible releases of Penstock."
            ) from error

    return call


class ValkeyStorage(Scheduling, Flowing, Operating, Limiting, Reading):
    """``Storage`` on Valkey, or Redis 7.0 and newer: standalone, Sentinel, Cluster.

    Made by ``from_url``, or with ``client``: an asyncio client of redis-py or valkey-py, which stays the
    caller's to close. ``replicas``, with such a client: as in a URL.
    """

    capabilities = frozenset({"shared", "processes"})

    def __init__(
        self,
        client: Any = None,
        *,
        endpoint: Endpoint | None = None,
        namespace: str = DEFAULT_NAMESPACE,
        url: str = "a client passed in",
        retry_for: float = 30.0,
        replicas: int = 0,
    ) -> None:
        replicas = endpoint.replicas if endpoint else replicas
        if type(replicas) is not int or replicas < 0:
            raise InvalidOption(f"replicas must be an integer >= 0, got {replicas!r}.")
        if replicas and client is not None and hasattr(client, "get_node_from_key"):
            raise InvalidOption(
                "replicas is not available with a cluster client, whose connections cannot be told apart. "
                "Give a URL (valkey+cluster://…?replicas=1), or a client of one server."
            )
        Running.__init__(self)
        Reading.__init__(self)
        self.url = url
        self.namespace = check_namespace(namespace)
        keys = Keys(self.namespace)
        identity = Identity(keys, library(), seen=self._seen)
        self._router: Router = (
            router_for(endpoint, on_connect=identity.prepare, retry_for=retry_for)
            if endpoint
            else ClientRouter(client, on_connect=identity.prepare, retry_for=retry_for)
        )
        self._calls = Calls(self._router, keys, identity=identity, replicas=replicas)
        self._courier = Courier(self._calls, meet=self._register)
        self._lives = Lives(self._calls)

    @classmethod
    def from_url(cls, url: str, *, namespace: str | None = None, retry_for: float = 30.0) -> Self:
        """An engine for a URL. ``retry_for``: how many seconds a call insists when the server is away.

        Raises InvalidOption or InvalidName; connects nowhere yet.
        """
        endpoint = Endpoint.parse(url)
        return cls(
            endpoint=endpoint,
            retry_for=retry_for,
            namespace=namespace or endpoint.namespace or DEFAULT_NAMESPACE,
            url=f"{url.partition('://')[0]}://{endpoint}",
        )

    def _seen(self, queue: str) -> tuple[int, int]:
        """Return the highest number and the highest event of a queue that this process was told of."""
        return self._seen_seq.get(queue, 0), self._seen_events.get(queue, 0)

    async def open(self) -> None:
        """Connect and load the function library, without retries: a wrong URL or password is told at once."""
        await self._router.connect()

    async def close(self) -> None:
        """Close the connections. Calls under way raise StorageError; a client passed in stays open."""
        await self._courier.close()
        await self._lives.withdraw()
        await self._router.close()

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        """As ``Storage.announce``."""
        await self._lives.announce(queue, worker, lost)

    async def lives(self, queue: str) -> dict[str, bool]:
        """As ``Storage.lives``."""
        return await self._lives.look(queue)

    async def workers(self, queue: str) -> list[WorkerRecord]:
        """As ``Storage.workers``."""
        return with_deaths(await self._workers(queue), await self._lives.look(queue))

    async def server_facts(self) -> list[dict[str, str]]:
        """What each server says of itself (INFO), and its clock as ``time_ms``: for whoever checks the set-up."""
        facts: list[dict[str, str]] = []
        times = await self._router.call_every_node("TIME")
        for info, (seconds, micros) in zip(await self._router.call_every_node("INFO"), times, strict=True):
            text = info.decode() if isinstance(info, bytes) else info
            lines = (line.partition(":") for line in text.splitlines())
            node = {name: value for name, colon, value in lines if colon}
            facts.append({**node, "time_ms": str(int(seconds) * 1000 + int(micros) // 1000)})
        try:
            told = [
                await self._router.call_every_node("CONFIG", "GET", name) for name in ("save", "appendfsync")
            ]
        except StorageRefused:
            return facts  # This user may not ask for the configuration.
        for name, replies in zip(("save", "appendfsync"), told, strict=True):
            for node, reply in zip(facts, replies, strict=True):
                [*_, value] = reply.values() if isinstance(reply, dict) else reply
                node[name] = value.decode() if isinstance(value, bytes) else str(value)
        return facts

    async def shift_clock(self, queue: str, ms: int, *, jump: bool = False) -> None:
        """As ``Storage.shift_clock``."""
        await self._calls.call(queue, "shift_clock", ms, "1" if jump else "")


for _name, _verb in inspect.getmembers(Storage, inspect.iscoroutinefunction):
    setattr(ValkeyStorage, _name, _answered(getattr(ValkeyStorage, _name)))
ValkeyStorage.server_facts = _answered(ValkeyStorage.server_facts)  # type: ignore[method-assign, assignment]
