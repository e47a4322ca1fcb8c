"""The graph of a flow: turns its parts into linked nodes, in an order that the store accepts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, assert_never

from msgspec.structs import replace

from penstock.client.flow import Chain, Chord, Dag, Flow, Group, Part, Passing
from penstock.client.handle import JobHandle
from penstock.client.task import JobSpec
from penstock.core.flow import Node, link_nodes
from penstock.core.job import EMPTY_EXTRAS, Dependency, NewJob, Options, Policy
from penstock.core.names import uuid7
from penstock.core.text import shown
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec


Key: TypeAlias = tuple[str, str]
"""Queue and id."""


class Upstream(NamedTuple):
    """The jobs that a job comes after, and how their results reach it."""

    keys: tuple[Key, ...] = ()
    policy: Policy = "fail"
    passing: Passing = ""


_NOTHING = Upstream()
_SHORTEST_RETENTION_MS: Final = 60_000


class Draft:
    """A job of the graph under construction."""

    __slots__ = ("after", "job", "name", "source", "spec")

    def __init__(self, spec: JobSpec[Any], name: str) -> None:
        self.job = spec.passing()
        self.spec = spec
        self.source = spec.source
        self.name = name
        self.after: dict[Key, Policy] = {dependency[:2]: dependency.policy for dependency in self.job.after}


def has_several_results(part: Part) -> bool:
    """Return whether the result of ``part`` is a list: it ends in a group or a graph with several ends."""
    match part:
        case Group():
            return True
        case Chain(parts=parts):
            return has_several_results(parts[-1])
        case Chord(body=body):
            return has_several_results(body)
        case Dag():
            return len(part.ends) > 1
        case JobSpec() | JobHandle() | Flow():
            return False
        case _ as never:
            assert_never(never)


class LinkedFlow(NamedTuple):
    """The linked nodes of a connected flow, the root first."""

    id: str
    nodes: list[Node]


class Graph:
    """Built by ``add``; ``linked_flows`` returns the result."""

    def __init__(self) -> None:
        self.drafts: dict[Key, Draft] = {}
        self._sources: dict[Key, JobCodec] = {}

    def add(self, part: Part, upstream: Upstream = _NOTHING) -> list[Key]:
        """Add ``part`` after ``upstream``; return the keys of its last jobs."""
        match part:
            case JobSpec():
                return [self._add_job(part, upstream)]
            case JobHandle():
                return [self._refer_to(part)]
            case Flow(parent=parent, children=children):
                ends = self._side_by_side(children, upstream)
                return [self._add_job(parent, Upstream(tuple(ends), part.on_failure))]
            case Group(parts=parts):
                return self._side_by_side(parts, upstream)
            case Chain():
                return self._chain(part, upstream)
            case Chord(header=header, body=body):
                ends = self.add(header, upstream)
                return self.add(body, Upstream(tuple(ends), part.on_failure, "list"))
            case Dag():
                return self._dag(part, upstream)
            case _ as never:
                assert_never(never)

    def keep_outcomes(self, ends: Iterable[Key]) -> None:
        """Keep the last jobs of a flow for at least a minute, because ``result()`` may be called after they finish."""
        extended: dict[int, Options] = {}
        for key in ends:
            if (draft := self.drafts.get(key)) is not None:
                before = draft.job.options
                # Jobs that share options keep sharing them, so that engines encode them once.
                options = extended.setdefault(id(before), _with_retention(before))
                if options is not before:
                    draft.job = replace(draft.job, options=options)

    def _side_by_side(self, parts: Iterable[Part], upstream: Upstream) -> list[Key]:
        return list(dict.fromkeys(key for part in parts for key in self.add(part, upstream)))

    def _chain(self, part: Chain[Any], upstream: Upstream) -> list[Key]:
        ends: list[Key] = []
        for step in part.parts:
            ends = self.add(step, upstream)
            passing: Passing = "list" if has_several_results(step) else "one"
            upstream = Upstream(tuple(ends), part.on_failure, passing)
        return ends

    def _dag(self, dag: Dag, upstream: Upstream) -> list[Key]:
        if not dag.names:
            raise InvalidInput("a Dag needs at least one job: dag.add(name, task.job(...)).")
        keys = {name: (spec.queue, spec.id) for name, (spec, *_) in dag.names.items()}
        followed: set[Key] = set()
        for name, (spec, after, policy) in dag.names.items():
            predecessors = tuple(self._predecessor(dag, keys, name, job) for job in after)
            followed.update(predecessors)
            own_upstream = Upstream(predecessors, policy, "list") if predecessors else upstream
            self._add_job(spec, own_upstream, name=name)
        return [key for key in keys.values() if key not in followed] or list(keys.values())[:1]

    def _predecessor(
        self, dag: Dag, keys: dict[str, Key], name: str, job: str | JobSpec[Any] | JobHandle[Any]
    ) -> Key:
        if isinstance(job, str):
            if job not in keys:
                known = ", ".join(map(repr, keys))
                raise InvalidInput(
                    f"{shown(name)} comes after {shown(job)}, which is not in the graph. It has: {known}."
                )
            self._sources[keys[job]] = dag.names[job][0].source
            return keys[job]
        if isinstance(job, JobHandle):
            return self._refer_to(job)
        return self._add_job(job, _NOTHING)

    def _refer_to(self, handle: JobHandle[Any]) -> Key:
        key = (handle.queue, handle.id)
        self._sources[key] = handle.source
        return key

    def _add_job(self, spec: JobSpec[Any], upstream: Upstream, *, name: str = "") -> Key:
        key = (spec.queue, spec.id)
        passes = bool(upstream.passing and upstream.keys and spec.takes_result)
        draft = self.drafts.get(key)
        if draft is None or passes:
            known = draft.after if draft else {}
            draft = Draft(spec, name)
            draft.after = {**known, **draft.after}
            self.drafts[key] = draft
        draft.name = draft.name or name
        self._sources[key] = spec.source
        if passes:
            extras = replace(draft.job.extras or EMPTY_EXTRAS, passes=self._passes(upstream))
            draft.job = replace(draft.job, extras=extras)
            draft.after = {**dict.fromkeys(upstream.keys, upstream.policy), **draft.after}
        for predecessor in upstream.keys:
            draft.after.setdefault(predecessor, upstream.policy)
        return key

    def _passes(self, upstream: Upstream) -> str:
        """Return how the worker turns results into arguments: one or a list, their number and serdes."""
        serdes = [self._sources[key].result_serde.name for key in upstream.keys]
        names = serdes[0] if len(set(serdes)) == 1 else ",".join(serdes)
        return f"{upstream.passing}:{len(serdes)}:{names}"

    def linked_flows(self, *, flow: Callable[[], str] = uuid7) -> list[LinkedFlow]:
        """Return the connected flows, each with a root. Raise ``InvalidInput`` if there is a cycle."""
        order = self._ordered()
        dependents: dict[Key, list[Key]] = {key: [] for key in self.drafts}
        for key, draft in self.drafts.items():
            for dependency in draft.after:
                if dependency in dependents:
                    dependents[dependency].append(key)
        component_of: dict[Key, int] = {}
        components: list[list[Key]] = []
        for key in order:
            if key not in component_of:
                for member in self._component(key, dependents):
                    component_of[member] = len(components)
                components.append([])
            components[component_of[key]].append(key)
        return [self._link(keys, flow()) for keys in components]

    def nodes(self, keys: Sequence[Key]) -> list[Node]:
        """Return the nodes of these jobs, not linked."""
        return [Node(queue, self._job(self.drafts[queue, id])) for queue, id in keys]

    def ordered_nodes(self) -> list[Node]:
        """Return all nodes, not linked, dependents before dependencies."""
        nodes = self.nodes(self._ordered())
        self._refuse_dedup([*nodes, *nodes])
        return nodes

    def _link(self, keys: list[Key], flow: str) -> LinkedFlow:
        nodes = self.nodes(keys)
        self._refuse_dedup(nodes)
        if len(nodes) == 1 and not nodes[0].job.after:
            return LinkedFlow(flow, nodes)
        return LinkedFlow(flow, link_nodes(nodes, flow=flow))

    def _refuse_dedup(self, nodes: Sequence[Node]) -> None:
        """Refuse dedup keys: dependents know a job by its id, and a dedup key could replace it by another job."""
        for queue, job in nodes if len(nodes) > 1 else ():
            if job.dedup is not None:
                raise InvalidInput(
                    f"{self._shown((queue, job.id))} has a dedup key, which a job of a flow cannot have. "
                    "Give it an id instead: a job with a known id is not enqueued again. If its task declares the key, "
                    f"turn that off: {job.options.task or 'task'}.options(unique=False).job(...)."
                )

    def _job(self, draft: Draft) -> NewJob:
        if not (draft.job.extras and draft.job.extras.passes):
            draft.spec.job  # noqa: B018 (raises if the first argument is missing)
        after = tuple(Dependency(*key, policy) for key, policy in draft.after.items())
        return replace(draft.job, after=after) if after else draft.job

    def _component(self, start: Key, dependents: dict[Key, list[Key]]) -> set[Key]:
        """Return all jobs connected to this one."""
        component, todo = {start}, [start]
        while todo:
            key = todo.pop()
            for neighbour in (*self.drafts[key].after, *dependents[key]):
                if neighbour in self.drafts and neighbour not in component:
                    component.add(neighbour)
                    todo.append(neighbour)
        return component

    def _ordered(self) -> list[Key]:
        """Return the keys, dependents before dependencies, starting with the first job without dependents."""
        dependents = dict.fromkeys(self.drafts, 0)
        for draft in self.drafts.values():
            for dependency in draft.after:
                if dependency in dependents:
                    dependents[dependency] += 1
        ready = [key for key, count in dependents.items() if not count][::-1]
        order: list[Key] = []
        while ready:
            key = ready.pop()
            order.append(key)
            for dependency in self.drafts[key].after:
                if dependency in dependents:
                    dependents[dependency] -= 1
                    if not dependents[dependency]:
                        ready.append(dependency)
        if len(order) < len(self.drafts):
            raise self._cycle({key for key, count in dependents.items() if count})
        return order

    def _cycle(self, keys: set[Key]) -> InvalidInput:
        key = min(keys)
        path: list[Key] = []
        while key not in path:
            path.append(key)
            key = next(dependency for dependency in self.drafts[key].after if dependency in keys)
        cycle = " -> ".join(self._shown(key) for key in (*path[path.index(key) :], key))
        return InvalidInput(
            f"the flow has a cycle, in which each job waits for the next: {cycle}. Nothing was written. "
            "Remove one of these dependencies."
        )

    def _shown(self, key: Key) -> str:
        return self.drafts[key].name or "/".join(key)


def _with_retention(options: Options) -> Options:
    shortest = _SHORTEST_RETENTION_MS
    if min(options.result_ttl_ms, options.failure_ttl_ms) >= shortest:
        return options
    return replace(
        options,
        result_ttl_ms=max(options.result_ttl_ms, shortest),
        failure_ttl_ms=max(options.failure_ttl_ms, shortest),
    )
