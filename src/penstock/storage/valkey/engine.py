"""The Valkey and Redis engine: each verb calls one function that runs inside the server.

The functions are in ``lua/``, a file per verb. The top of ``lua/prelude.lua`` describes the keys they use.
"""

from __future__ import annotations

import inspect
import struct
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Final, Self, TypeVar

import msgspec

from penstock.core.flow import DependencyRecord, DependencyState, Node, link_nodes
from penstock.core.job import Dependency, Dependent, Enqueued, NewJob, Policy
from penstock.core.lifecycle import State
from penstock.core.names import check_namespace
from penstock.errors import InvalidOption, PenstockError, StorageError, StorageRefused
from penstock.storage.contract import Storage
from penstock.storage.valkey.calls import Calls, KnownServers, Refused
from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.codec import encode_after, encode_jobs
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.jobs import decode_failure
from penstock.storage.valkey.library import DEFAULT_NAMESPACE, Keys, library
from penstock.storage.valkey.liveness import Liveness
from penstock.storage.valkey.operating import Limiting, Operating
from penstock.storage.valkey.outbox import OutboxSender
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
    """Verbs on schedulers. A repeated ``fire`` finds that its slot has passed."""

    async def put_scheduler(self, queue: str, scheduler: NewScheduler) -> SchedulerAnswer:
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
        only = () if names is None else ("1", *names)
        now_ms, rows = await self._calls.call(queue, "schedulers", *only)
        schedulers = (
            _decode_scheduler(name.decode(), record)
            for name, record in zip(rows[::2], rows[1::2], strict=True)
        )
        return Schedulers(int(now_ms), sorted(schedulers, key=lambda scheduler: scheduler.name))

    async def pause_scheduler(self, queue: str, name: str) -> bool:
        return bool(await self._calls.call(queue, "pause_scheduler", name))

    async def resume_scheduler(self, queue: str, name: str, *, next_ms: int | None = None) -> bool:
        new_ms = "" if next_ms is None else next_ms
        return bool(await self._calls.call(queue, "resume_scheduler", name, new_ms))

    async def move_slot(self, queue: str, name: str, *, slot_ms: int, next_ms: int) -> bool:
        return bool(await self._calls.call(queue, "move_slot", name, slot_ms, next_ms))

    async def remove_scheduler(self, queue: str, name: str) -> bool:
        return bool(await self._calls.call(queue, "remove_scheduler", name))

    async def fire(self, queue: str, name: str, *, slot_ms: int, next_ms: int, job: NewJob) -> Fired:
        await self._check_rights(queue)
        try:
            reply: list[Any] = await self._calls.call(
                queue, "fire", name, slot_ms, next_ms, *encode_jobs([job])
            )
        except Refused as error:
            raise refusal(queue, error) from None
        if len(reply) > 2:
            self._outbox.send_soon(queue)
        return Fired(True, self._answers(queue, [job], reply)[0]) if reply else Fired(False)


def _decode_scheduler(name: str, record: bytes) -> Scheduler:
    """Return a scheduler from its record (lua/schedulers.lua)."""
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


# Flows

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
    """Verbs on flows."""

    _calls: Calls
    _outbox: OutboxSender
    _register: Callable[[str], Awaitable[None]]

    async def enqueue_flows(
        self, queue: str, flows: Sequence[Sequence[Node]], *, ticket: Ticket | None = None
    ) -> list[Enqueued]:
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
            await self._outbox.send(queue)
        rows = zip(flows, answers[::3], answers[1::3], answers[2::3], strict=True)
        return [_enqueued(flow[0].job.id, letters, inc, result) for flow, letters, inc, result in rows]

    async def attach(
        self, queue: str, id: str, after: Sequence[Dependency], *, nodes: Sequence[Node] = (), flow: str
    ) -> AttachAnswer:
        """Attach dependencies. If the job turns out to be in another flow, link the nodes again, for that flow."""
        own = _ids(nodes)
        while True:
            into = Dependent(queue, id, flow)
            linked = link_nodes(nodes, flow=flow, into=into, after=after)
            jobs = encode_jobs([node.job for node in linked], to_come=[own] * len(linked))
            head: list[Arg] = [
                id,
                flow,
                _pack(encode_after(after, own)),
                _pack([node.queue for node in linked]),
            ]
            try:
                answer, is_full = await self._calls.call_once(queue, "attach", [*head, *jobs])
            except Refused as error:
                raise refusal(queue, error) from None
            if is_full:
                await self._outbox.send(queue)
            if not answer.startswith(b"f"):
                return _ATTACHED[answer]
            flow = answer[1:].decode()

    async def dependencies(
        self, queue: str, id: str, *, start: int = 0, limit: int = 1000
    ) -> list[DependencyRecord]:
        rows = await self._calls.call(queue, "dependencies", id, start, limit)
        return [_decode_dependency(*row) for row in zip(rows[::3], rows[1::3], rows[2::3], strict=True)]


def _ids(nodes: Sequence[Node]) -> frozenset[tuple[str, str]]:
    return frozenset((node.queue, node.job.id) for node in nodes)


def _enqueued(id: str, letters: bytes, incarnation: int, result: bytes) -> Enqueued:
    state = STATE_OF[letters[1]]
    cached = result if state is State.COMPLETED else None
    return Enqueued(id, ENQUEUED[letters[0]], state, incarnation, cached)


def _decode_dependency(name: bytes, entry: bytes, value: bytes) -> DependencyRecord:
    queue, _, id = name.decode().partition("\0")
    _, policy, state = _decode_entry(entry)
    is_result = state == "c"
    failure = decode_failure(value) if value and not is_result else None
    result: Any = value if is_result else None
    return DependencyRecord(queue, id, _POLICIES[policy], _STATES[state], result, failure)


# The engine

T = TypeVar("T")

_MALFORMED: Final = (AttributeError, LookupError, TypeError, ValueError, msgspec.MsgspecError, struct.error)


def _checked(verb: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return ``verb``, raising ``StorageError`` for a malformed reply instead of whatever Python raises."""

    @wraps(verb)
    async def call(self: ValkeyStorage, *args: Any, **kwargs: Any) -> T:
        try:
            return await verb(self, *args, **kwargs)
        except PenstockError:
            # Some of these are also a LookupError or a ValueError.
            raise
        except _MALFORMED as error:
            raise StorageError(
                f"{self.url} gave a malformed reply to {verb.__name__}: {type(error).__name__}: {error!s:.200}. Check "
                "that the URL names a Valkey or Redis server, that no proxy in between changes replies, and that all "
                "clients run compatible releases of Penstock."
            ) from error

    return call


class ValkeyStorage(Scheduling, Flowing, Operating, Limiting, Reading):
    """``Storage`` on Valkey, or Redis 7.0 and newer: standalone, Sentinel, Cluster.

    Create it with ``from_url``, or with ``client``: an asyncio client of redis-py or valkey-py, which the caller
    closes. ``replicas``, with a client: as in a URL. ``Storage`` documents the verbs.
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
        servers = KnownServers(keys, library(), seen=self._seen)
        self._router: Router = (
            router_for(endpoint, on_connect=servers.prepare, retry_for=retry_for)
            if endpoint
            else ClientRouter(client, on_connect=servers.prepare, retry_for=retry_for)
        )
        self._calls = Calls(self._router, keys, servers=servers, replicas=replicas)
        self._outbox = OutboxSender(self._calls, register=self._register)
        self._liveness = Liveness(self._calls)

    @classmethod
    def from_url(cls, url: str, *, namespace: str | None = None, retry_for: float = 30.0) -> Self:
        """Return an engine for a URL, not yet connected. Raises InvalidOption or InvalidName.

        ``retry_for``: how many seconds a call keeps trying while the server is away.
        """
        endpoint = Endpoint.parse(url)
        return cls(
            endpoint=endpoint,
            retry_for=retry_for,
            namespace=namespace or endpoint.namespace or DEFAULT_NAMESPACE,
            url=f"{url.partition('://')[0]}://{endpoint}",
        )

    def _seen(self, queue: str) -> tuple[int, int]:
        """Return the highest number and the highest event of a queue that this process has seen."""
        return self._seen_seq.get(queue, 0), self._seen_events.get(queue, 0)

    async def open(self) -> None:
        """Connect and load the function library, without retries: a wrong URL or password fails immediately."""
        await self._router.connect()

    async def close(self) -> None:
        """Close the connections. Calls under way raise StorageError. A client passed in stays open."""
        await self._outbox.close()
        await self._liveness.withdraw()
        await self._router.close()

    async def announce(self, queue: str, worker: str, *, lost: Callable[[], None]) -> None:
        await self._liveness.announce(queue, worker, lost)

    async def lives(self, queue: str) -> dict[str, bool]:
        return await self._liveness.check(queue)

    async def workers(self, queue: str) -> list[WorkerRecord]:
        return with_deaths(await self._workers(queue), await self._liveness.check(queue))

    async def server_facts(self) -> list[dict[str, str]]:
        """Return what each server reports about itself (INFO), and its clock as ``time_ms``."""
        facts: list[dict[str, str]] = []
        times = await self._router.call_every_node("TIME")
        for info, (seconds, micros) in zip(await self._router.call_every_node("INFO"), times, strict=True):
            text = info.decode() if isinstance(info, bytes) else info
            lines = (line.partition(":") for line in text.splitlines())
            node = {name: value for name, colon, value in lines if colon}
            facts.append({**node, "time_ms": str(int(seconds) * 1000 + int(micros) // 1000)})
        try:
            settings = [
                await self._router.call_every_node("CONFIG", "GET", name) for name in ("save", "appendfsync")
            ]
        except StorageRefused:
            return facts  # This user may not read the configuration.
        for name, replies in zip(("save", "appendfsync"), settings, strict=True):
            for node, reply in zip(facts, replies, strict=True):
                [*_, value] = reply.values() if isinstance(reply, dict) else reply
                node[name] = value.decode() if isinstance(value, bytes) else str(value)
        return facts

    async def shift_clock(self, queue: str, ms: int, *, jump: bool = False) -> None:
        await self._calls.call(queue, "shift_clock", ms, "1" if jump else "")


for _name, _verb in inspect.getmembers(Storage, inspect.iscoroutinefunction):
    setattr(ValkeyStorage, _name, _checked(getattr(ValkeyStorage, _name)))
ValkeyStorage.server_facts = _checked(ValkeyStorage.server_facts)  # type: ignore[method-assign, assignment]
