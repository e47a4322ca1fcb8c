"""Flows, jobs that wait for other jobs. A part of one is a job, the handle of an existing job, or another flow.

``Flow`` (a parent and its children), ``chain``, ``group``, ``chord`` and ``Dag`` can be nested, and
``app.enqueue_flow`` enqueues all of it. Parts only define which job waits for which; ``graph`` turns them into nodes.
The same ``job()`` may appear in several places: it is one job, and all of them wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar, cast, overload

from penstock import client
from penstock.client.handle import JobHandle
from penstock.client.hints import Hinting
from penstock.client.parsers import listed, policy
from penstock.client.task import JobSpec
from penstock.core.job import Policy
from penstock.core.text import shown
from penstock.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.flow.handle import FlowHandle


F = TypeVar("F", bound=Callable[..., Any])
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)

Passing: TypeAlias = Literal["", "one", "list"]


class Whole(Hinting, Generic[R_co]):
    """A flow that can be enqueued by itself and has a result."""

    __slots__ = ()
    hints_for = "flow"

    if not TYPE_CHECKING:

        def __or__(self, other: object) -> NoReturn:
            raise TypeError("flows cannot be joined with |. Use chain(first, next).")

        def __call__(self, *args: object, **kwargs: object) -> NoReturn:
            raise TypeError(
                "a flow cannot be called. Use flow.enqueue(); chord takes its body as an argument."
            )

    async def enqueue(self) -> FlowHandle[R_co]:
        """Enqueue the flow in the app of its jobs. See ``App.enqueue_flow``."""
        whole: Any = self
        return await app_of(whole).enqueue_flow(whole)

    @property
    def sync(self) -> client.SyncWhole[R_co]:
        """Return the same for synchronous code."""
        return client.SyncWhole(self)


class Flow(Whole[R_co]):
    """A parent that runs when its children have finished; children may be flows, in any queue.

    ``on_failure`` decides what happens to the parent if a child fails, is cancelled or removed: ``"fail"`` fails the
    parent with the reason, ``"ignore"`` runs it (``context.children()`` shows the failure), ``"wait"`` makes it wait
    until the child is retried and completes.
    """

    __slots__ = ("children", "on_failure", "parent")

    def __init__(
        self, parent: JobSpec[R_co], children: Iterable[Part], *, on_failure: Policy = "fail"
    ) -> None:
        self.parent = _checked_job(parent, "the parent of a Flow")
        self.children = _checked(children)
        self.on_failure = policy("on_failure", on_failure)


class Chain(Whole[R_co]):
    """Jobs that run one after the other; see ``chain``."""

    __slots__ = ("on_failure", "parts")

    def __init__(self, parts: Iterable[Part], *, on_failure: Policy) -> None:
        self.parts = _checked(parts)
        self.on_failure = policy("on_failure", on_failure)


class Group(Whole[list[R]], Generic[R]):
    """Jobs that run side by side; see ``group``."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = _checked(parts)


class Chord(Whole[R_co]):
    """A group and a body that receives its results; see ``chord``."""

    __slots__ = ("body", "header", "on_failure")

    def __init__(self, header: Group[Any], body: Body, *, on_failure: Policy) -> None:
        if not isinstance(body, JobSpec | Whole):
            raise InvalidInput(f"the body of a chord must be task.job(...) or a flow, got {shown(body)}.")
        self.header = header
        self.body = body
        self.on_failure = policy("on_failure", on_failure)


@overload
def chain(*parts: *tuple[*tuple[Part, ...], Ending[R]], on_failure: Policy = "fail") -> Chain[R]: ...
@overload
def chain(*parts: Part, on_failure: Policy = "fail") -> Chain[Any]: ...
def chain(*parts: Any, on_failure: Policy = "fail") -> Chain[Any]:  # type: ignore[misc]  # mypy and *tuple
    """Return jobs that run one after the other: ``chain(fetch.job(url), resize.partial(width=200), store.partial())``.

    The result of each job becomes the first argument of the next if that is a ``partial(...)``; a ``job(...)`` has all
    its arguments and only waits. The result of a group is the list of its results.
    """
    return Chain(parts, on_failure=on_failure)


@overload
def group(parts: Iterable[Ending[R]], /) -> Group[R]: ...
@overload
def group(*parts: Ending[R]) -> Group[R]: ...
def group(*parts: Any) -> Group[Any]:
    """Return jobs that run side by side: ``group([add.job(1, 2), add.job(3, 4)])``, or without the list.

    Alone, it works like ``enqueue_many`` over several queues.
    """
    is_listed = len(parts) == 1 and not isinstance(parts[0], JobSpec | JobHandle | Whole)
    return Group(parts[0] if is_listed else parts)


def _with_body(function: F) -> F:
    """Return ``function``, which says where the body goes if it is called as ``chord([...])(body)``."""

    @wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and "body" not in kwargs:
            raise TypeError("chord takes its body as an argument: chord([...], task.partial()).")
        return function(*args, **kwargs)

    return cast("F", checked)


@_with_body
def chord(
    header: Group[Any] | Iterable[Part], body: JobSpec[R] | Whole[R], *, on_failure: Policy = "fail"
) -> Chord[R]:
    """Return a job that runs after all jobs of a group: ``chord([add.job(1, 2), add.job(3, 4)], sum_up.partial())``.

    The first argument of a ``partial(...)`` is the list of their results, in order. The body may be a chain, a group or
    another flow: its first jobs receive the list.
    With ``on_failure="ignore"`` the list has ``None`` in place of a failed job's result.
    """
    parts: Group[Any] = header if isinstance(header, Group) else Group(header)
    return Chord(parts, cast("Body", body), on_failure=on_failure)


class Dag(Whole[Any]):
    """Any acyclic graph: jobs by name, each with the names of the jobs it comes after, in any order.

    ::

        dag = Dag()
        dag.add("load", load.job())
        dag.add("left", left.job(), after=["load"])
        dag.add("right", right.job(), after=["load"])
        dag.add("join", join.partial(), after=["left", "right"])

    The first argument of a ``partial(...)`` is the list of the results of the jobs in ``after``.
    Enqueueing a graph with a cycle raises ``InvalidInput``, which names the cycle; nothing is written.
    """

    __slots__ = ("names", "on_failure")

    def __init__(self, *, on_failure: Policy = "fail") -> None:
        self.names: dict[
            str, tuple[JobSpec[Any], tuple[str | JobSpec[Any] | JobHandle[Any], ...], Policy]
        ] = {}
        self.on_failure = policy("on_failure", on_failure)

    def add(
        self,
        name: str,
        job: JobSpec[Any],
        *,
        after: Sequence[str | JobSpec[Any] | JobHandle[Any]] = (),
        on_failure: Policy | None = None,
    ) -> Dag:
        """Add a job. Raise ``InvalidInput`` if the name is taken."""
        if name in self.names:
            raise InvalidInput(f"the graph already has a job named {shown(name)}. Use another name.")
        of_job = self.on_failure if on_failure is None else policy("on_failure", on_failure)
        spec = _checked_job(job, f"{shown(name)} of a Dag")
        self.names[name] = (spec, tuple(after), of_job)
        return self

    @property
    def ends(self) -> list[str]:
        """Return the names of the jobs that no other job comes after, in the order added."""
        followed = {
            job if isinstance(job, str) else id(job) for _, after, *_ in self.names.values() for job in after
        }
        return [name for name, (job, *_) in self.names.items() if not followed & {name, id(job)}]

    @classmethod
    def of(cls, jobs: Mapping[str, JobSpec[Any]], after: Mapping[str, Sequence[str]], **options: Any) -> Dag:
        """Return a graph from two dicts: jobs by name, and the names that each comes after."""
        dag = cls(**options)
        for name, job in jobs.items():
            dag.add(name, job, after=after.get(name, ()))
        return dag


Body: TypeAlias = "JobSpec[Any] | Flow[Any] | Chain[Any] | Group[Any] | Chord[Any] | Dag"
Part: TypeAlias = "JobHandle[Any] | Body"
Ending: TypeAlias = JobHandle[R] | JobSpec[R] | Whole[R]
"""A part by its result."""


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


def _checked_job(part: JobSpec[Any], what: str) -> JobSpec[Any]:
    if not isinstance(part, JobSpec):
        raise InvalidInput(f"{what} must be task.job(...), got {shown(part)}.")
    return part


def _checked(parts: Iterable[Part]) -> tuple[Part, ...]:
    checked = tuple(map(check_part, listed("parts", parts, of="jobs and flows")))
    if not checked:
        raise InvalidInput("a flow needs at least one job: task.job(...).")
    return checked


def check_part(part: Part) -> Part:
    """Return ``part`` if it can be part of a flow, or a flow. Raise ``InvalidInput`` otherwise."""
    if not isinstance(part, JobSpec | JobHandle | Whole):
        raise InvalidInput(
            f"{shown(part)} cannot be part of a flow. Give task.job(...), a handle, or a flow."
        )
    return part
