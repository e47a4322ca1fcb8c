"""The handle of an enqueued flow: its result, its tree, and operations on all of its jobs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, cast

from penstock.client.hints import Hinting
from penstock.client.info import Field, JobInfo, ref_field
from penstock.client.limits import budget_of, in_units
from penstock.core.job import EnqueueStatus
from penstock.core.lifecycle import State
from penstock.core.units import Duration
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.handle import JobHandle
    from penstock.core.flow import DependencyRecord
    from penstock.core.job import Policy
    from penstock.storage.contract import Storage
    from penstock.storage.values import CancelAnswer, RetryAnswer


_PAGE: Final = 1000
R_co = TypeVar("R_co", covariant=True)


class FlowNode:
    """The current state of a job of a flow. ``children`` are the jobs it waits for, in the order added.

    ``info`` is ``None`` if the job is unknown: not delivered yet, or removed. ``policy`` is the effect of its failure
    on the job above it. A job that several others wait for is the same node under each.
    """

    __slots__ = ("children", "id", "info", "policy", "queue")

    def __init__(self, queue: str, id: str, policy: Policy | None) -> None:
        self.queue = queue
        self.id = id
        self.policy = policy
        self.info: JobInfo | None = None
        self.children: list[FlowNode] = []

    def __repr__(self) -> str:
        return f"<FlowNode {self.ref} {self.state or 'unknown'}, {len(self.children)} children>"

    ref = ref_field()
    """Queue and id as one string: ``app.job(ref)`` accepts it."""

    @property
    def state(self) -> State | None:
        return self.info.state if self.info else None

    def walk(self) -> Iterator[FlowNode]:
        """Yield this node and all below it, each once, from the top down."""
        seen = {(self.queue, self.id)}
        level = [self]
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
        lines = [f"{indent}{self.ref} {self.state or 'unknown'}"]
        lines += [child.describe(indent + "  ") for child in self.children]
        return "\n".join(lines)


class FlowHandle(Hinting, Generic[R_co]):
    """The handle that ``app.enqueue_flow`` returns, and ``app.flow(ref)`` for an existing root.

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
        return f"<FlowHandle {self.ref}, {len(self.jobs)} jobs>"

    @property
    def root(self) -> JobHandle[Any]:
        return self.ends[0]

    ref = Field[str]("root.ref")
    """The ref of its root: ``app.flow(ref)`` accepts it."""
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
        """Return the current state of the flow, from the root down."""
        [root] = await self._trees([self.root])
        return root

    async def cancel(self) -> dict[tuple[str, str], CancelAnswer]:
        """Cancel all jobs of the flow, the root first; return the answers by queue and id. Safe to repeat."""
        storage = await self._app.connect()
        answers: dict[tuple[str, str], CancelAnswer] = {}
        for queue, ids in _by_queue(await self._nodes()):
            answers.update(zip(((queue, id) for id in ids), await storage.cancel(queue, ids), strict=True))
        return answers

    async def retry(self) -> dict[tuple[str, str], RetryAnswer]:
        """Retry all failed or cancelled jobs of the flow, the leaves first. Safe to repeat."""
        storage = await self._app.connect()
        answers: dict[tuple[str, str], RetryAnswer] = {}
        for queue, ids in _by_queue(reversed(await self._nodes())):
            answers.update(zip(((queue, id) for id in ids), await storage.retry(queue, ids), strict=True))
        return answers

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


async def read_dependencies(storage: Storage, queue: str, id: str) -> list[DependencyRecord]:
    """Return all dependencies of a job, read page by page."""
    records: list[DependencyRecord] = []
    while page := await storage.dependencies(queue, id, start=len(records), limit=_PAGE):
        records += page
        if len(page) < _PAGE:
            break
    return records


def _by_queue(nodes: Iterator[FlowNode] | Sequence[FlowNode]) -> Iterator[tuple[str, list[str]]]:
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
