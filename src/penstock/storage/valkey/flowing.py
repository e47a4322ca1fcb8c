"""The verbs of flows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec

from penstock.core.annex import Dependent
from penstock.core.flow import DependencyRecord, DependencyState, Node, woven
from penstock.core.job import Dependency, Enqueued, Policy
from penstock.core.lifecycle import State
from penstock.storage.valkey.calls import Calls, Refused
from penstock.storage.valkey.codec import encode_after, encode_jobs
from penstock.storage.valkey.command import Arg
from penstock.storage.valkey.courier import Courier
from penstock.storage.valkey.jobs import decode_failure
from penstock.storage.valkey.running import ENQUEUED, STATE_OF, refusal
from penstock.storage.values import AttachAnswer, Ticket

__all__ = ["Flowing"]

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
