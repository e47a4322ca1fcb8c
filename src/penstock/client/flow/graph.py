"""From the parts of a flow to its nodes: who waits for whom, in an order the store can take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias, assert_never

from msgspec.structs import replace

from penstock.client.flow.parts import Chain, Chord, Dag, Flow, Group, Part, Passing
from penstock.client.handle import JobHandle
from penstock.client.task import JobSpec
from penstock.core.flow import Node, woven
from penstock.core.job import EMPTY_EXTRAS, Dependency, NewJob, Options, Policy
from penstock.core.names import uuid7
from penstock.core.text import shown
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.client.codec import JobCodec


Key: TypeAlias = tuple[str, str]
"""Queue and id."""


class Before(NamedTuple):
    """What a job comes after, and how results reach it."""

    keys: tuple[Key, ...] = ()
    policy: Policy = "fail"
    passing: Passing = ""


_NOTHING = Before()
_SHORTEST_RETENTION_MS: Final = 60_000


class Draft:
    """A job of the graph while it is drawn."""

    __slots__ = ("after", "job", "name", "source", "spec")

    def __init__(self, spec: JobSpec[Any], name: str) -> None:
        self.job = spec.passing()
        self.spec = spec
        self.source = spec.source
        self.name = name
        self.after: dict[Key, Policy] = {one[:2]: one.policy for one in self.job.after}


def is_several(part: Part) -> bool:
    """Whether the result of ``part`` is a list: it ends in a group, or a graph with several ends, however deep."""
    match part:
        case Group():
            return True
        case Chain(parts=parts):
            return is_several(parts[-1])
        case Chord(body=body):
            return is_several(body)
        case Dag():
            return len(part.ends) > 1
        case JobSpec() | JobHandle() | Flow():
            return False
        case _ as never:
            assert_never(never)


class Weave(NamedTuple):
    """Nodes that hang together, tied, the root first. ``flow`` is its name."""

    flow: str
    nodes: list[Node]


class Graph:
    """Drawn by ``add``; ``weaves`` is what came of it."""

    def __init__(self) -> None:
        self.drafts: dict[Key, Draft] = {}
        self._sources: dict[Key, JobCodec] = {}

    def add(self, part: Part, before: Before = _NOTHING) -> list[Key]:
        """Draw ``part`` behind ``before``; gives the jobs that whoever comes after it has to wait for."""
        match part:
            case JobSpec():
                return [self._draw(part, before)]
            case JobHandle():
                return [self._point_at(part)]
            case Flow(parent=parent, children=children):
                ends = self._side_by_side(children, before)
                return [self._draw(parent, Before(tuple(ends), part.on_failure))]
            case Group(parts=parts):
                return self._side_by_side(parts, before)
            case Chain():
                return self._chain(part, before)
            case Chord(header=header, body=body):
                ends = self.add(header, before)
                return self.add(body, Before(tuple(ends), part.on_failure, "list"))
            case Dag():
                return self._dag(part, before)
            case _ as never:
                assert_never(never)

    def keep_outcomes(self, ends: Iterable[Key]) -> None:
        """Keep the last jobs of a flow for at least a minute: ``result()`` may be called after they have ended."""
        kept: dict[int, Options] = {}
        for key in ends:
            if (draft := self.drafts.get(key)) is not None:
                given = draft.job.options
                # Jobs that share their options go on sharing them, so that engines encode them once.
                options = kept.setdefault(id(given), _kept(given))
                if options is not given:
                    draft.job = replace(draft.job, options=options)

    def _side_by_side(self, parts: Iterable[Part], before: Before) -> list[Key]:
        return list(dict.fromkeys(key for part in parts for key in self.add(part, before)))

    def _chain(self, part: Chain[Any], before: Before) -> list[Key]:
        ends: list[Key] = []
        for one in part.parts:
            ends = self.add(one, before)
            passing: Passing = "list" if is_several(one) else "one"
            before = Before(tuple(ends), part.on_failure, passing)
        return ends

    def _dag(self, dag: Dag, before: Before) -> list[Key]:
        if not dag.names:
            raise InvalidInput("a Dag needs at least one job: dag.add(name, task.job(...)).")
        keys = {name: (spec.queue, spec.id) for name, (spec, *_) in dag.names.items()}
        followed: set[Key] = set()
        for name, (spec, after, policy) in dag.names.items():
            found = tuple(self._named(dag, keys, name, one) for one in after)
            followed.update(found)
            self._draw(spec, Before(found, policy, "list") if found else before, name=name)
        return [key for key in keys.values() if key not in followed] or list(keys.values())[:1]

    def _named(
        self, dag: Dag, keys: dict[str, Key], name: str, one: str | JobSpec[Any] | JobHandle[Any]
    ) -> Key:
        if isinstance(one, str):
            if one not in keys:
                known = ", ".join(map(repr, keys))
                raise InvalidInput(
                    f"{shown(name)} comes after {shown(one)}, which the graph has not. It has {known}."
                )
            self._sources[keys[one]] = dag.names[one][0].source
            return keys[one]
        if isinstance(one, JobHandle):
            return self._point_at(one)
        return self._draw(one, _NOTHING)

    def _point_at(self, handle: JobHandle[Any]) -> Key:
        key = (handle.queue, handle.id)
        self._sources[key] = handle.source
        return key

    def _draw(self, spec: JobSpec[Any], before: Before, *, name: str = "") -> Key:
        key = (spec.queue, spec.id)
        passes = bool(before.passing and before.keys and spec.takes_result)
        draft = self.drafts.get(key)
        if draft is None or passes:
            known = draft.after if draft else {}
            draft = Draft(spec, name)
            draft.after = {**known, **draft.after}
            self.drafts[key] = draft
        draft.name = draft.name or name
        self._sources[key] = spec.source
        if passes:
            extras = replace(draft.job.extras or EMPTY_EXTRAS, passes=self._passes(before))
            draft.job = replace(draft.job, extras=extras)
            draft.after = {**dict.fromkeys(before.keys, before.policy), **draft.after}
        for one in before.keys:
            draft.after.setdefault(one, before.policy)
        return key

    def _passes(self, before: Before) -> str:
        """How results become arguments, for the worker: one or a list, and what they are written in."""
        serdes = [self._sources[key].result_serde.name for key in before.keys]
        names = serdes[0] if len(set(serdes)) == 1 else ",".join(serdes)
        return f"{before.passing}:{len(serdes)}:{names}"

    def weaves(self, *, flow: Callable[[], str] = uuid7) -> list[Weave]:
        """What hangs together, each with a root. Raises ``InvalidInput`` if there is a cycle."""
        order = self._ordered()
        dependents: dict[Key, list[Key]] = {key: [] for key in self.drafts}
        for key, draft in self.drafts.items():
            for one in draft.after:
                if one in dependents:
                    dependents[one].append(key)
        pieces: dict[Key, int] = {}
        found: dict[int, list[Key]] = {}
        for key in order:
            if key not in pieces:
                for member in self._piece(key, dependents):
                    pieces[member] = len(found)
                found[len(found)] = []
            found[pieces[key]].append(key)
        return [self._woven(keys, flow()) for keys in found.values()]

    def nodes(self, keys: Sequence[Key]) -> list[Node]:
        """The nodes of these jobs, not tied."""
        return [Node(queue, self._job(self.drafts[queue, id])) for queue, id in keys]

    def ordered_nodes(self) -> list[Node]:
        """All nodes, not tied, dependents before dependencies."""
        nodes = self.nodes(self._ordered())
        self._refuse_dedup([*nodes, *nodes])
        return nodes

    def _woven(self, keys: list[Key], flow: str) -> Weave:
        nodes = self.nodes(keys)
        self._refuse_dedup(nodes)
        if len(nodes) == 1 and not nodes[0].job.after:
            return Weave(flow, nodes)
        return Weave(flow, woven(nodes, flow=flow))

    def _refuse_dedup(self, nodes: Sequence[Node]) -> None:
        """Who waits for a job knows it by its id, and a dedup key would put another in its place."""
        for queue, job in nodes if len(nodes) > 1 else ():
            if job.dedup is not None:
                raise InvalidInput(
                    f"{self._shown((queue, job.id))} has a dedup key, which a job of a flow cannot have. "
                    "Give it an id instead: a job whose id is known is not put in twice."
                )

    def _job(self, draft: Draft) -> NewJob:
        if not (draft.job.extras and draft.job.extras.passes):
            draft.spec.job  # noqa: B018 (raises if the first argument is missing)
        after = tuple(Dependency(*key, policy) for key, policy in draft.after.items())
        return replace(draft.job, after=after) if after else draft.job

    def _piece(self, start: Key, dependents: dict[Key, list[Key]]) -> set[Key]:
        """All jobs that hang together with this one."""
        found, todo = {start}, [start]
        while todo:
            key = todo.pop()
            for one in (*self.drafts[key].after, *dependents[key]):
                if one in self.drafts and one not in found:
                    found.add(one)
                    todo.append(one)
        return found

    def _ordered(self) -> list[Key]:
        """Dependents before dependencies. The first of those that nobody waits for leads."""
        waiting = dict.fromkeys(self.drafts, 0)
        for draft in self.drafts.values():
            for one in draft.after:
                if one in waiting:
                    waiting[one] += 1
        ready = [key for key, count in waiting.items() if not count][::-1]
        order: list[Key] = []
        while ready:
            key = ready.pop()
            order.append(key)
            for one in self.drafts[key].after:
                if one in waiting:
                    waiting[one] -= 1
                    if not waiting[one]:
                        ready.append(one)
        if len(order) < len(self.drafts):
            raise self._cycle({key for key, count in waiting.items() if count})
        return order

    def _cycle(self, tangled: set[Key]) -> InvalidInput:
        key = min(tangled)
        path: list[Key] = []
        while key not in path:
            path.append(key)
            key = next(one for one in self.drafts[key].after if one in tangled)
        shown = " -> ".join(self._shown(one) for one in (*path[path.index(key) :], key))
        return InvalidInput(
            f"the flow has a cycle, each of whose jobs waits for the next: {shown}. Nothing was written. "
            "Take one of these dependencies out."
        )

    def _shown(self, key: Key) -> str:
        return self.drafts[key].name or "/".join(key)


def _kept(options: Options) -> Options:
    shortest = _SHORTEST_RETENTION_MS
    if min(options.result_ttl_ms, options.failure_ttl_ms) >= shortest:
        return options
    return replace(
        options,
        result_ttl_ms=max(options.result_ttl_ms, shortest),
        failure_ttl_ms=max(options.failure_ttl_ms, shortest),
    )
