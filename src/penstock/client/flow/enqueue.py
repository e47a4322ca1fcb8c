"""Enqueue flows, with one call per queue of their roots, and add children to jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.client.flow.graph import Graph, Key, LinkedFlow, has_several_results
from penstock.client.flow.handle import FlowHandle
from penstock.client.flow.parts import Chain, Chord, Dag, Flow, Group, Part, check_part, check_policy
from penstock.client.handle import JobHandle
from penstock.client.optionvalues import listed
from penstock.client.task import JobSpec
from penstock.core.flow import Node
from penstock.core.job import Dependency, Enqueued, Policy
from penstock.core.names import uuid7
from penstock.core.text import shown
from penstock.errors import InvalidInput, JobError, JobNotFound
from penstock.storage.coalesce import MAX_BYTES, MAX_COUNT

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.codec import JobCodec
    from penstock.client.session import Session
    from penstock.storage.contract import Storage
    from penstock.storage.values import AttachAnswer


class _Prepared(NamedTuple):
    graph: Graph
    ends: list[Key]
    flows: list[LinkedFlow]
    is_group: bool


async def enqueue_flows(app: App, parts: Iterable[Part]) -> list[FlowHandle[Any]]:
    """Enqueue flows for ``App.enqueue_flows``. Check all of them before writing the first."""
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
    policy = check_policy(on_failure)
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


def app_of(part: Any) -> App:
    """Return the app of the first job in ``part``."""
    match part:
        case JobSpec() | JobHandle():
            return part.source.app
        case Flow():
            return part.parent.source.app
        case Chain() | Group():
            return app_of(part.parts[0])
        case Chord():
            return app_of(part.header)
        case Dag(names=names) if names:
            return next(iter(names.values()))[0].source.app
        case Dag():
            raise InvalidInput("a Dag needs at least one job: dag.add(name, task.job(...)).")
        case _:
            raise InvalidInput(f"{shown(part)} is not a flow.")
