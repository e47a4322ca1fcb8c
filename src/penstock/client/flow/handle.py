"""Enqueue flows, with one call per queue of their roots; the handle of a flow; and the children of jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

from penstock.client import parsers
from penstock.client.flow import Part, check_part
from penstock.client.flow.graph import Graph, Key, LinkedFlow, has_several_results
from penstock.client.handle import JobHandle
from penstock.client.hints import Hinting
from penstock.client.info import Field, JobInfo, read_dependencies, ref_field
from penstock.client.limits import budget_of, in_units
from penstock.client.parsers import listed
from penstock.core.flow import Node
from penstock.core.job import Dependency, Enqueued, EnqueueStatus, Policy
from penstock.core.lifecycle import State
from penstock.core.names import uuid7
from penstock.core.text import shown
from penstock.core.units import Duration
from penstock.errors import InvalidInput, InvalidOption, JobError, JobNotFound
from penstock.storage.coalesce import MAX_BYTES, MAX_COUNT

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.session import Session
    from penstock.core.lifecycle import AttachAnswer, CancelAnswer, RetryAnswer
    from penstock.storage.contract import Storage


_PAGE: Final = 1000
A = TypeVar("A")
R_co = TypeVar("R_co", covariant=True)


class FlowNode:
    """The current state of a job of a flow. ``children`` are the jobs it waits for, in the order added.

    ``info`` is ``None`` if the job is unknown: not delivered yet, or removed. ``policy`` is the effect of its failure
    on the job above it. A job that several others wait for is the same node under each. The top of a flow with several
    ends, such as a group, has no job: its ``id`` is empty, and its ``children`` are the ends.
    """

    __slots__ = ("children", "id", "info", "policy", "queue")

    def __init__(self, queue: str, id: str, policy: Policy | None) -> None:
        self.queue = queue
        self.id = id
        self.policy = policy
        self.info: JobInfo | None = None
        self.children: list[FlowNode] = []

    def __repr__(self) -> str:
        return f"<FlowNode {self._line()}, {len(self.children)} children>"

    ref = ref_field()
    """Queue and id as one string: ``app.job(ref)`` accepts it."""

    @property
    def state(self) -> State | None:
        return self.info.state if self.info else None

    def walk(self) -> Iterator[FlowNode]:
        """Yield the jobs of this node and all below it, each once, from the top down."""
        seen = {(self.queue, self.id)}
        level = [self] if self.id else self.children
        while level:
            yield from level
            below: list[FlowNode] = []
            for child in (child for node in level for child in node.children):
                if (child.queue, child.id) not in seen:
                    seen.add((child.queue, child.id))
                    below.append(child)
            level = below

    def describe(self, indent: str = "") -> str:
        """Return the tree as text, one line per job."""
        lines = [f"{indent}{self._line()}"]
        lines += [child.describe(indent + "  ") for child in self.children]
        return "\n".join(lines)

    def _line(self) -> str:
        return f"{self.ref} {self.state or 'unknown'}" if self.id else f"group of {len(self.children)}"


class FlowHandle(Hinting, Generic[R_co]):
    """The handle that ``app.enqueue_flow`` returns, and ``app.flow(ref)`` for an existing flow.

    ``root`` is the last job, or the first of several last jobs, which are ``ends``. ``jobs`` are all enqueued jobs, and
    ``names`` those of a ``Dag`` by name.
    """

    __slots__ = ("_app", "_is_group", "ends", "jobs", "names")
    hints_for = "flow handle"

    def __init__(
        self,
        app: App,
        ends: Sequence[JobHandle[Any]],
        *,
        jobs: Sequence[JobHandle[Any]] = (),
        names: Mapping[str, JobHandle[Any]] | None = None,
        is_group: bool = False,
    ) -> None:
        self._app = app
        self._is_group = is_group
        self.ends = list(ends)
        self.jobs = list(jobs) or self.ends
        self.names = dict(names or {})

    def __repr__(self) -> str:
        return f"<FlowHandle {self.root.ref}, {len(self.jobs)} jobs>"

    @property
    def root(self) -> JobHandle[Any]:
        return self.ends[0]

    @property
    def ref(self) -> str:
        """The ref of its root: ``app.flow(ref)`` accepts it. Raise ``InvalidInput`` for a flow with several ends."""
        if len(self.ends) > 1:
            raise InvalidInput(
                "a flow that ends in a group has no single ref, because no job comes after all of its jobs. "
                "Keep [job.ref for job in flow.ends], which app.flow(refs) accepts, or use a chord."
            )
        return self.root.ref

    status = Field[EnqueueStatus | None]("root.status")
    """The answer to the root's enqueue. Unless it is ``queued``, no job of the flow was enqueued."""

    async def usage(self) -> dict[str, float]:
        """Return the usage that the jobs of the flow reported, in all queues this handle knows."""
        sums: Counter[str] = Counter()
        flow, storage = await self._flow_id(), await self._app.connect()
        for queue in sorted({job.queue for job in self.jobs}):
            for usage in await storage.usage(queue):
                if (usage.kind, usage.key) == ("flow", flow):
                    sums[usage.name] += usage.micros
        return in_units(sums)

    async def set_budget(self, name: str, amount: float) -> None:
        """Fail further jobs of the flow with ``BudgetExceeded`` once it has used ``amount`` of ``name``.

        Active jobs continue, so the overshoot is at most what they use. Raise ``InvalidOption`` for a flow over several
        queues, because each queue has its own budgets.
        """
        queues = sorted({job.queue for job in self.jobs})
        if len(queues) > 1:
            raise InvalidOption(
                f"the flow has jobs in the queues {', '.join(queues)}, but a budget covers one queue. "
                "Use one queue for all its jobs, or set budgets on the queues."
            )
        budget = budget_of(name, amount, per=None, flow=await self._flow_id())
        await (await self._app.connect()).set_budget(queues[0], budget)

    async def _flow_id(self) -> str:
        return (await self.root.get()).flow

    async def result(self, timeout: Duration | None = None) -> R_co:
        """Return the result of the root; for a flow with several ends (a group), the list of their results.

        Raise the same errors as ``JobHandle.result``.
        """
        if not self._is_group:
            return cast(R_co, await self.root.result(timeout))
        results = list(await asyncio.gather(*(end.result(timeout) for end in self.ends)))
        return cast(R_co, results)

    async def tree(self) -> FlowNode:
        """Return the current state of the flow, from the root down; for a group, a node above all its ends."""
        if not self._is_group:
            [root] = await self._trees([self.root])
            return root
        top = FlowNode("", "", None)
        top.children = await self._trees(self.ends)
        return top

    async def cancel(self) -> dict[Key, CancelAnswer]:
        """Cancel all jobs of the flow, the root first; return the answers by queue and id. Safe to repeat."""
        return await _answers((await self._app.connect()).cancel, await self._nodes())

    async def retry(self) -> dict[Key, RetryAnswer]:
        """Retry all failed or cancelled jobs of the flow, the leaves first. Safe to repeat."""
        return await _answers((await self._app.connect()).retry, reversed(await self._nodes()))

    async def _nodes(self) -> list[FlowNode]:
        nodes = [node for tree in await self._trees(self.ends) for node in tree.walk()]
        return list({(node.queue, node.id): node for node in nodes}.values())

    async def _trees(self, roots: Sequence[JobHandle[Any]]) -> list[FlowNode]:
        storage = await self._app.connect()
        seen: dict[tuple[str, str], FlowNode] = {}
        tops = [FlowNode(root.queue, root.id, None) for root in roots]
        level = tops
        while level:
            seen.update({(node.queue, node.id): node for node in level})
            await self._read_infos(storage, level)
            level = [child for node in level for child in await self._add_children(storage, node, seen)]
        return tops

    async def _read_infos(self, storage: Storage, nodes: Sequence[FlowNode]) -> None:
        for queue, ids in _by_queue(nodes):
            jobs = {job.id: job for job in await storage.get(queue, ids) if job is not None}
            for node in nodes:
                if node.queue == queue and node.id in jobs:
                    node.info = JobInfo(self._app.job(node.ref).source, jobs[node.id])

    async def _add_children(
        self, storage: Storage, node: FlowNode, seen: dict[tuple[str, str], FlowNode]
    ) -> list[FlowNode]:
        """Add the children of a node; return those not seen before."""
        new: list[FlowNode] = []
        if node.info is None or not node.info.has_children:
            return new
        for record in await read_dependencies(storage, node.queue, node.id):
            key = (record.queue, record.id)
            if key not in seen:
                seen[key] = FlowNode(*key, record.policy)
                new.append(seen[key])
            node.children.append(seen[key])
        return new


async def _answers(
    verb: Callable[[str, list[str]], Awaitable[Sequence[A]]], nodes: Iterable[FlowNode]
) -> dict[Key, A]:
    """Return the answers of a verb for these nodes, in their order."""
    answers: dict[Key, A] = {}
    for queue, ids in _by_queue(nodes):
        answers.update(zip(((queue, id) for id in ids), await verb(queue, ids), strict=True))
    return answers


def _by_queue(nodes: Iterable[FlowNode]) -> Iterator[tuple[str, list[str]]]:
    """Group adjacent nodes of the same queue, keeping their order."""
    queue, ids = "", list[str]()
    for node in nodes:
        if node.queue != queue or len(ids) == _PAGE:
            if ids:
                yield queue, ids
            queue, ids = node.queue, []
        ids.append(node.id)
    if ids:
        yield queue, ids


# Enqueueing


class _Prepared(NamedTuple):
    graph: Graph
    ends: list[Key]
    flows: list[LinkedFlow]
    is_group: bool


async def enqueue_flows(app: App, parts: Iterable[Part]) -> list[FlowHandle[Any]]:
    """Enqueue flows, hundreds per round trip. Check all of them before writing the first."""
    prepared = [_prepare(check_part(part)) for part in listed("flows", parts, of="flows")]
    flows = [flow for part in prepared for flow in part.flows]
    session = await app.session()
    if session.enqueue_chain.layers and flows:
        answers = await _enqueue_through(session, flows)
    else:
        answers = await _enqueue_all(session.storage, flows)
    return [_handle(app, part, answers) for part in prepared]


async def _enqueue_through(session: Session, flows: Sequence[LinkedFlow]) -> dict[Key, Enqueued]:
    """Enqueue through the middleware and return the answers for the roots. Each job gets the answer of its root."""
    roots: dict[Key, Enqueued] = {}

    async def send(nodes: Sequence[Node]) -> list[Enqueued]:
        changed = _with_nodes(flows, nodes)
        roots.update(await _enqueue_all(session.storage, changed))
        return [answer for flow in changed for answer in _answers_of(flow, roots[_key(flow.nodes[0])])]

    await session.enqueue_chain.enqueue_nodes([node for flow in flows for node in flow.nodes], send)
    return roots


def _with_nodes(flows: Sequence[LinkedFlow], nodes: Iterable[Node]) -> list[LinkedFlow]:
    """Return the flows with their nodes replaced by ``nodes``."""
    rest = iter(nodes)
    return [LinkedFlow(flow.id, list(islice(rest, len(flow.nodes)))) for flow in flows]


def _key(node: Node) -> Key:
    return node.queue, node.job.id


def _answers_of(flow: LinkedFlow, root: Enqueued) -> list[Enqueued]:
    return [root, *(Enqueued(node.job.id, root.status, None, 0) for node in flow.nodes[1:])]


async def _enqueue_all(storage: Storage, flows: Sequence[LinkedFlow]) -> dict[Key, Enqueued]:
    """Enqueue the flows and return the answers for the roots."""
    by_queue: dict[str, list[LinkedFlow]] = {}
    for flow in flows:
        by_queue.setdefault(flow.nodes[0].queue, []).append(flow)
    answers: dict[Key, Enqueued] = {}
    for queue, flows_of_queue in by_queue.items():
        for chunk in _chunks(flows_of_queue):
            for flow, answer in zip(chunk, await _enqueue(storage, queue, chunk), strict=True):
                answers[_key(flow.nodes[0])] = answer
    return answers


def _prepare(part: Part) -> _Prepared:
    graph = Graph()
    ends = graph.add(part)
    graph.keep_outcomes(ends)
    return _Prepared(graph, ends, graph.linked_flows(), has_several_results(part))


async def _enqueue(storage: Storage, queue: str, flows: Sequence[LinkedFlow]) -> list[Enqueued]:
    if all(len(flow.nodes) == 1 for flow in flows):
        return await storage.enqueue(queue, [flow.nodes[0].job for flow in flows])
    return await storage.enqueue_flows(queue, [flow.nodes for flow in flows])


def _chunks(flows: Sequence[LinkedFlow]) -> Iterator[list[LinkedFlow]]:
    """Split flows into bounded calls. A flow is never split."""
    chunk: list[LinkedFlow] = []
    count = size = 0
    for flow in flows:
        length = len(flow.nodes)
        weight = sum(len(node.job.payload) for node in flow.nodes)
        if chunk and (count + length > MAX_COUNT or size + weight > MAX_BYTES):
            yield chunk
            chunk, count, size = [], 0, 0
        chunk.append(flow)
        count, size = count + length, size + weight
    if chunk:
        yield chunk


def _handle(app: App, prepared: _Prepared, answers: dict[Key, Enqueued]) -> FlowHandle[Any]:
    graph = prepared.graph
    jobs = {
        key: JobHandle[Any](draft.source, key[1], answers.get(key)) for key, draft in graph.drafts.items()
    }
    names = {draft.name: jobs[key] for key, draft in graph.drafts.items() if draft.name}
    ends = [jobs[key] for key in prepared.ends if key in jobs]
    return FlowHandle(app, ends, jobs=list(jobs.values()), names=names, is_group=prepared.is_group)


async def add_children(
    source: JobCodec, id: str, parts: Iterable[Part], *, on_failure: Policy
) -> list[JobHandle[Any]]:
    """Add children to an open job: it waits for them.

    Raises:
        JobNotFound: the job does not exist.
        JobError: the job has finished.
        InvalidInput: the children have a cycle, or are missing.
    """
    graph = Graph()
    children = map(check_part, listed("children", parts, of="jobs and flows"))
    ends = list(dict.fromkeys(key for part in children for key in graph.add(part)))
    if not ends:
        raise InvalidInput("add_children needs at least one job: task.job(...).")
    if (source.queue, id) in ends:
        raise InvalidInput(f"job {source.queue}/{id} cannot be its own child.")
    policy = parsers.policy("on_failure", on_failure)
    session = await source.app.session()

    async def send(nodes: Sequence[Node]) -> list[Enqueued]:
        after = [Dependency(*key, policy) for key in ends]
        answer = await session.storage.attach(source.queue, id, after, nodes=nodes, flow=uuid7())
        _refuse_unattached(source.queue, id, answer)
        return [Enqueued(node.job.id, "queued", None, 0) for node in nodes]

    nodes = graph.ordered_nodes()
    if session.enqueue_chain.layers and nodes:
        await session.enqueue_chain.enqueue_nodes(nodes, send)
    else:
        await send(nodes)
    drafts = graph.drafts
    return [JobHandle(drafts[key].source, key[1]) for key in ends if key in drafts]


def _refuse_unattached(queue: str, id: str, answer: AttachAnswer) -> None:
    if answer == "not_found":
        raise JobNotFound.in_queue(queue, id, "Nothing was written: only an existing job can have children.")
    if answer == "ended":
        raise JobError(
            f"job {shown(id)} of queue {shown(queue)} has finished, so it cannot wait for children. Nothing was "
            "written.",
            job_id=id,
        )
