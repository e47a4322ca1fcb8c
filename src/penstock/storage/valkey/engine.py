"""The Valkey and Redis engine: each verb calls one function that runs inside the server.

The functions are in ``lua/``, a file per verb. The top of ``lua/prelude.lua`` describes the keys they use.
"""

from __future__ import annotations

import asyncio
import inspect
import re
import struct
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import wraps
from typing import Any, Final, Self, TypeVar

import msgspec

from penstock.core.flow import DependencyRecord, DependencyState, Node, link_nodes
from penstock.core.job import Dependency, Dependent, Enqueued, Policy
from penstock.core.lifecycle import AttachAnswer, State
from penstock.core.names import check_namespace
from penstock.core.text import get_logger
from penstock.errors import InvalidOption, PenstockError, StorageError, StorageRefused
from penstock.storage.contract import Storage
from penstock.storage.valkey.calls import Calls, KnownServers, Refused
from penstock.storage.valkey.client import ClientRouter
from penstock.storage.valkey.commands import ReplyError, Router, run_id
from penstock.storage.valkey.endpoint import Endpoint
from penstock.storage.valkey.jobs import (
    ANSWERS,
    ENQUEUED,
    STATE_OF,
    decode_failure,
    encode_after,
    encode_jobs,
)
from penstock.storage.valkey.library import DEFAULT_NAMESPACE, Keys, library
from penstock.storage.valkey.operator_verbs import OperatorVerbs
from penstock.storage.valkey.outbox import OutboxSender
from penstock.storage.valkey.queries import Queries
from penstock.storage.valkey.routers import router_for
from penstock.storage.valkey.steps import Steps
from penstock.storage.valkey.worker_verbs import WorkerVerbs, refusal
from penstock.storage.values import Ticket, WorkerRecord, with_deaths

# Flows

_POLICIES: Final[dict[str, Policy]] = {"f": "fail", "i": "ignore", "w": "wait"}
_STATES: Final[dict[str, DependencyState]] = {
    "": "pending",
    "c": "completed",
    "f": "failed",
    "x": "cancelled",
    "r": "removed",
}

_pack = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(tuple[int, str, str]).decode


class FlowVerbs(WorkerVerbs):
    """Verbs on flows."""

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
            waits, layout = _pack(encode_after(after, own)), _pack([node.queue for node in linked])
            try:
                args = (id, flow, waits, layout, *jobs)
                answer, is_full = await self._calls.call_once(queue, "attach", args)
            except Refused as error:
                raise refusal(queue, error) from None
            if is_full:
                await self._outbox.send(queue)
            if not answer.startswith(b"f"):
                attached: AttachAnswer = ANSWERS["attach"][answer.decode()]
                return attached
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


# Liveness

logger = get_logger("penstock.storage")

CONFIRM_S: Final = 2.0
_DISTRUST_S: Final = 10.0
_WITHDRAW_S: Final = 1.0
_CLIENT: Final = re.compile(rb"^id=(\d+) ", re.MULTILINE)


class Liveness:
    """Announces the workers of one client, and proves that those of others died.

    The proof: the server no longer has the connection that showed that the worker's process was alive. A worker
    announces the server's run id and the client id of a connection that it keeps open (``Node.lifeline``). The kernel
    closes it when the process ends, however it ends; a process that is suspended, or too busy to send heartbeats, keeps
    it. A worker whose connection was cut announces another one within moments. So one look is not enough: the
    announcement must be unchanged, and its connection gone, ``CONFIRM_S`` later. A client that was itself cut off a
    moment ago proves nothing, because others may have been cut off too.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._announced: dict[tuple[str, str], str] = {}
        # Proven for good: within one run of a server, no client id is used twice.
        self._proven: dict[tuple[str, str], str] = {}
        self._is_refused = False

    async def announce(self, queue: str, worker: str, lost: Callable[[], None]) -> None:
        if self._is_refused:
            return
        try:
            life = await self._calls.router.lifeline(self._calls.keys.part(queue, "lifeline"), lost=lost)
            await self._write(queue, worker, life)
        except (ReplyError, StorageRefused) as error:
            self._refused(error)
        except StorageError as error:
            logger.debug("worker %s is not announced for queue %s: %s", worker, queue, error)

    async def withdraw(self) -> None:
        """Delete this client's announcements: it closes, although its process may live on."""
        # The leases that are left come back when the connection closes.
        with suppress(StorageError, TimeoutError):
            async with asyncio.timeout(_WITHDRAW_S):
                for queue, worker in list(self._announced):
                    await self._write(queue, worker, "")

    async def check(self, queue: str) -> dict[str, bool]:
        """Return whether each announced worker is alive, as far as this client can tell."""
        announced = await self._read(queue)
        alive = await self._alive(queue, announced)
        gone = {worker for worker, is_alive in alive.items() if not is_alive}
        if any(self._proven.get((queue, worker)) != announced[worker] for worker in gone):
            await asyncio.sleep(CONFIRM_S)
            now = await self._read(queue)
            again = await self._alive(queue, {w: now[w] for w in gone if now.get(w) == announced[w]})
            alive = {worker: again.get(worker, True) if worker in gone else True for worker in alive}
            self._proven |= {(queue, w): announced[w] for w, is_alive in alive.items() if not is_alive}
        return alive

    async def _write(self, queue: str, worker: str, life: str) -> None:
        if self._announced.get((queue, worker), "") == life:
            return
        key = self._calls.keys.part(queue, "lives")
        command = ("HSET", key, worker, life) if life else ("HDEL", key, worker)
        await self._calls.plain(key, *command)
        self._announced[queue, worker] = life

    async def _read(self, queue: str) -> dict[str, str]:
        key = self._calls.keys.part(queue, "lives")
        rows = [text.decode() for text in await self._calls.plain(key, "HGETALL", key)]
        return dict(zip(rows[::2], rows[1::2], strict=True))

    async def _alive(self, queue: str, announced: Mapping[str, str]) -> dict[str, bool]:
        """Return which of the announced connections to this run of the server it still has."""
        own = {w for w, life in announced.items() if self._announced.get((queue, w)) == life}
        gone = {w for w, life in announced.items() if self._proven.get((queue, w)) == life}
        alive = dict.fromkeys(own, True) | dict.fromkeys(gone, False)
        unknown = {w: life.partition(" ")[::2] for w, life in announced.items() if w not in alive}
        if not unknown or self._is_refused or self._was_cut_off(queue):
            return alive
        try:
            clients = await self._clients(queue, [client for _, client in unknown.values()])
            if all(client in clients for _, client in unknown.values()):  # nearly always
                return alive | dict.fromkeys(unknown, True)
            return alive | await self._examine(queue, unknown)
        except (ReplyError, StorageRefused) as error:
            self._refused(error)
            return alive

    async def _examine(self, queue: str, announced: Mapping[str, tuple[str, ...]]) -> dict[str, bool]:
        """Return which workers have a connection here, of those that announced one to this run of this server."""
        before = await self._run_id(queue)
        here = {worker: client for worker, (server, client) in announced.items() if server == before}
        clients = await self._clients(queue, here.values()) if here else set()
        # If the run id is the same before and after, the list in between is that server's.
        if await self._run_id(queue) != before:
            return {}
        return {worker: client in clients for worker, client in here.items()}

    def _was_cut_off(self, queue: str) -> bool:
        cut_at = self._calls.router.cut_at(self._calls.keys.of(queue))
        return asyncio.get_running_loop().time() - cut_at < _DISTRUST_S

    async def _run_id(self, queue: str) -> str:
        return run_id(await self._calls.plain(self._calls.keys.of(queue), "INFO", "server"))

    async def _clients(self, queue: str, ids: Collection[str]) -> set[str]:
        listed: bytes = await self._calls.plain(
            self._calls.keys.of(queue), "CLIENT", "LIST", "ID", *sorted(ids)
        )
        return {client.decode() for client in _CLIENT.findall(listed)}

    def _refused(self, error: StorageError) -> None:
        self._is_refused = True
        logger.info("the death of a worker is noticed only when its leases run out: %s", error)


# The engine

T = TypeVar("T")

_MALFORMED: Final = (AttributeError, LookupError, TypeError, ValueError, msgspec.MsgspecError, struct.error)


def _checked(verb: Callable[..., Awaitable[T]]) -> Callable[..., Awaitable[T]]:
    """Return ``verb``, so that it raises ``StorageError`` for a malformed reply instead of an error of Python."""

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


class ValkeyStorage(OperatorVerbs, FlowVerbs, Queries, Steps):
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
        WorkerVerbs.__init__(self)
        Queries.__init__(self)
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
