"""Putting flows in: one call per queue of their roots, however many there are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.client.flow.graph import Graph, Key, Weave, is_several
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


class _Drawn(NamedTuple):
    graph: Graph
    ends: list[Key]
    weaves: list[Weave]
    is_group: bool


async def enqueue_flows(app: App, parts: Iterable[Part]) -> list[FlowHandle[Any]]:
    """What ``App.enqueue_flows`` does: all of them are checked before the first is written."""
    drawn = [_draw(check_part(part)) for part in listed("flows", parts, of="flows")]
    weaves = [weave for one in drawn for weave in one.weaves]
    session = await app.session()
    if session.enqueue_chain.layers and weaves:
        answers = await _put_through(session, weaves)
    else:
        answers = await _put_all(session.storage, weaves)
    return [_handle(app, one, answers) for one in drawn]


async def _put_through(session: Session, weaves: Sequence[Weave]) -> dict[Key, Enqueued]:
    """The answers to the roots. The layers are told for each job what was said to its root."""
    roots: dict[Key, Enqueued] = {}

    async def send(nodes: Sequence[Node]) -> list[Enqueued]:
        changed = _woven_again(weaves, nodes)
        roots.update(await _put_all(session.storage, changed))
        return [answer for weave in changed for answer in _said(weave, roots[_key(weave.nodes[0])])]

    await session.enqueue_chain.enqueue_nodes([node for weave in weaves for node in weave.nodes], send)
    return roots


def _woven_again(weaves: Sequence[Weave], nodes: Iterable[Node]) -> list[Weave]:
    """The weaves with these nodes in the place of theirs."""
    rest = iter(nodes)
    return [Weave(weave.flow, list(islice(rest, len(weave.nodes)))) for weave in weaves]


def _key(node: Node) -> Key:
    return node.queue, node.job.id


def _said(weave: Weave, root: Enqueued) -> list[Enqueued]:
    return [root, *(Enqueued(node.job.id, root.status, None, 0) for node in weave.nodes[1:])]


async def _put_all(storage: Storage, weaves: Sequence[Weave]) -> dict[Key, Enqueued]:
    """The answers to the roots."""
    by_queue: dict[str, list[Weave]] = {}
    for weave in weaves:
        by_queue.setdefault(weave.nodes[0].queue, []).append(weave)
    answers: dict[Key, Enqueued] = {}
    for queue, its_weaves in by_queue.items():
        for some in _chunks(its_weaves):
            for weave, answer in zip(some, await _put(storage, queue, some), strict=True):
                answers[_key(weave.nodes[0])] = answer
    return answers


def _draw(part: Part) -> _Drawn:
    graph = Graph()
    ends = graph.add(part)
    graph.keep_outcomes(ends)
    return _Drawn(graph, ends, graph.weaves(), is_several(part))


async def _put(storage: Storage, queue: str, weaves: Sequence[Weave]) -> list[Enqueued]:
    if all(len(weave.nodes) == 1 for weave in weaves):
        return await storage.enqueue(queue, [weave.nodes[0].job for weave in weaves])
    return await storage.enqueue_flows(queue, [weave.nodes for weave in weaves])


def _chunks(weaves: Sequence[Weave]) -> Iterator[list[Weave]]:
    """Bounded calls; a flow is never split."""
    some: list[Weave] = []
    count = size = 0
    for weave in weaves:
        length = len(weave.nodes)
        weight = sum(len(node.job.payload) for node in weave.nodes)
        if some and (count + length > MAX_COUNT or size + weight > MAX_BYTES):
            yield some
            some, count, size = [], 0, 0
        some.append(weave)
        count, size = count + length, size + weight
    if some:
        yield some


def _handle(app: App, drawn: _Drawn, answers: dict[Key, Enqueued]) -> FlowHandle[Any]:
    graph = drawn.graph
    jobs = {
        key: JobHandle[Any](draft.source, key[1], answers.get(key)) for key, draft in graph.drafts.items()
    }
    names = {draft.name: jobs[key] for key, draft in graph.drafts.items() if draft.name}
    ends = [jobs[key] for key in drawn.ends if key in jobs]
    return FlowHandle(app, ends, jobs=list(jobs.values()), names=names, is_group=drawn.is_group)


async def add_children(
    source: JobCodec, id: str, parts: Iterable[Part], *, on_failure: Policy
) -> list[JobHandle[Any]]:
    """Have an open job wait for further ones.

    Raises:
        JobNotFound: the job is not known.
        JobError: it has ended.
        InvalidInput: a cycle, or nothing to add.
    """
    graph = Graph()
    children = map(check_part, listed("children", parts, of="jobs and flows"))
    ends = list(dict.fromkeys(key for part in children for key in graph.add(part)))
    if not ends:
        raise InvalidInput("there are no children to add. Give at least one task.job(...).")
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
        raise JobNotFound.in_queue(
            queue, id, "Nothing was written: only a job that is kept can have children."
        )
    if answer == "ended":
        raise JobError(
            f"job {shown(id)} of queue {shown(queue)} has ended, so it cannot wait for children. Nothing was written.",
            job_id=id,
        )


def app_of(part: Any) -> App:
    """The app of the first job in ``part``."""
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
