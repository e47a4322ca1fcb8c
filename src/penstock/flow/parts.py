"""What flows are made of. A part is a job, a handle of one that is there, or a flow of its own.

Parts say only who waits for whom; ``graph`` makes nodes of them. The same ``job()`` may stand in several places:
it is one job, and all of them wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from penstock.core.display import shown
from penstock.core.job import Policy
from penstock.errors import InvalidInput, InvalidOption
from penstock.handle import JobHandle
from penstock.optionvalues import listed
from penstock.task import JobSpec

if TYPE_CHECKING:
    from penstock.flow.handle import FlowHandle
    from penstock.flow.sync import SyncFlowHandle

__all__ = [
    "Body",
    "Chain",
    "Chord",
    "Dag",
    "Flow",
    "Group",
    "Part",
    "chain",
    "check_policy",
    "chord",
    "group",
]

Passing: TypeAlias = Literal["", "one", "list"]

_POLICIES: Final = ("fail", "ignore", "wait")


class _Whole:
    """What can be put in by itself."""

    __slots__ = ()

    async def enqueue(self) -> FlowHandle:
        """Put it in, by the app its jobs are of. See ``App.enqueue_flow``."""
        from penstock.flow.enqueue import app_of

        whole: Any = self
        return await app_of(whole).enqueue_flow(whole)

    def enqueue_sync(self) -> SyncFlowHandle:
        """The same for synchronous code."""
        from penstock.flow.enqueue import app_of

        whole: Any = self
        return app_of(whole).sync.enqueue_flow(whole)


class Flow(_Whole):
    """A parent that runs when its children have ended; children may be flows themselves, in any queue.

    ``on_failure`` says what a child that fails, is cancelled or removed does to the parent: ``"fail"`` fails it
    with the reason, ``"ignore"`` lets it run (``context.children()`` shows the failure), ``"wait"`` has it wait until
    the child was retried and completed.
    """

    __slots__ = ("children", "on_failure", "parent")

    def __init__(self, parent: JobSpec, children: Iterable[Part], *, on_failure: Policy = "fail") -> None:
        self.parent = _checked_job(parent, "the parent of a Flow")
        self.children = _checked(children)
        self.on_failure = check_policy(on_failure)


class Chain(_Whole):
    """One after the other; see ``chain``."""

    __slots__ = ("on_failure", "parts", "pass_result")

    def __init__(self, parts: Iterable[Part], *, pass_result: bool, on_failure: Policy) -> None:
        self.parts = _checked(parts)
        self.pass_result = pass_result
        self.on_failure = check_policy(on_failure)


class Group(_Whole):
    """Side by side; see ``group``."""

    __slots__ = ("parts",)

    def __init__(self, parts: Iterable[Part]) -> None:
        self.parts = _checked(parts)


class Chord(_Whole):
    """A group, and what gets its results; see ``chord``."""

    __slots__ = ("body", "header", "on_failure", "pass_result")

    def __init__(self, header: Group, body: Body, *, pass_result: bool, on_failure: Policy) -> None:
        if not isinstance(body, JobSpec | _Whole):
            raise InvalidInput(
                f"the body of a chord is {shown(body)}, which is nothing to be put in. Give task.job(...), or a flow."
            )
        self.header = header
        self.body = body
        self.pass_result = pass_result
        self.on_failure = check_policy(on_failure)


def chain(*parts: Part, pass_result: bool = True, on_failure: Policy = "fail") -> Chain:
    """Jobs that run one after the other: ``chain(a.job(1), b.job(), c.job())``.

    The result of each is the first argument of the next, before those given to ``job()``; with
    ``pass_result=False`` nothing is passed. After a group it is the list of its results.
    """
    return Chain(parts, pass_result=pass_result, on_failure=on_failure)


def group(parts: Iterable[Part]) -> Group:
    """Jobs that run side by side. By itself it is as good as ``enqueue_many``, over several queues."""
    return Group(parts)


def chord(
    header: Group | Iterable[Part], body: Body, *, pass_result: bool = True, on_failure: Policy = "fail"
) -> Chord:
    """A job that runs when all of a group have ended; its first argument is the list of their results, in order.

    The body may be a chain, a group or another flow: those of it that begin get the list.
    Under ``on_failure="ignore"`` the place of one that failed holds ``None``.
    """
    parts = header if isinstance(header, Group) else Group(header)
    return Chord(parts, body, pass_result=pass_result, on_failure=on_failure)


class Dag(_Whole):
    """Any graph: jobs by name, each with the names of those it comes after, in any order.

    ::

        dag = Dag()
        dag.add("load", load.job())
        dag.add("left", left.job(), after=["load"])
        dag.add("right", right.job(), after=["load"])
        dag.add("join", join.job(), after=["left", "right"])

    A cycle is an ``InvalidInput`` that names it, when the graph is enqueued; nothing is written then.
    """

    __slots__ = ("names", "on_failure")

    def __init__(self, *, on_failure: Policy = "fail") -> None:
        self.names: dict[
            str, tuple[JobSpec, tuple[str | JobSpec | JobHandle[Any], ...], Policy, Passing]
        ] = {}
        self.on_failure = check_policy(on_failure)

    def add(
        self,
        name: str,
        job: JobSpec,
        *,
        after: Sequence[str | JobSpec | JobHandle[Any]] = (),
        pass_results: bool = False,
        on_failure: Policy | None = None,
    ) -> Dag:
        """Add a job. With ``pass_results`` its first argument is the list of the results of ``after``.

        Raises ``InvalidInput`` for a name that is taken.
        """
        if name in self.names:
            raise InvalidInput(
                f"the graph has a job named {shown(name)} already. Give this one another name."
            )
        policy = self.on_failure if on_failure is None else check_policy(on_failure)
        spec = _checked_job(job, f"{shown(name)} of a Dag")
        self.names[name] = (spec, tuple(after), policy, "list" if pass_results else "")
        return self

    @property
    def ends(self) -> list[str]:
        """The names of those that nobody comes after, in the order they were added."""
        followed = {
            one if isinstance(one, str) else id(one) for _, after, *_ in self.names.values() for one in after
        }
        return [name for name, (job, *_) in self.names.items() if not followed & {name, id(job)}]

    @classmethod
    def of(cls, jobs: Mapping[str, JobSpec], after: Mapping[str, Sequence[str]], **options: Any) -> Dag:
        """The same from two dicts: jobs by name, and who comes after whom."""
        dag = cls(**options)
        for name, job in jobs.items():
            dag.add(name, job, after=after.get(name, ()))
        return dag


Body: TypeAlias = "JobSpec | Flow | Chain | Group | Chord | Dag"
Part: TypeAlias = "JobHandle[Any] | Body"


def check_policy(value: str) -> Policy:
    """``value`` if it can be what a failure does to a dependent. Raises ``InvalidOption``."""
    match value:
        case "fail" | "ignore" | "wait":
            return value
        case _:
            raise InvalidOption(
                f"on_failure={shown(value)} is not usable. Give {', '.join(map(repr, _POLICIES))}."
            )


def _checked_job(part: JobSpec, what: str) -> JobSpec:
    if not isinstance(part, JobSpec):
        raise InvalidInput(f"{what} is {shown(part)}, which is no job to be put in. Give task.job(...).")
    return part


def _checked(parts: Iterable[Part]) -> tuple[Part, ...]:
    found = tuple(map(check_part, listed("parts", parts, of="jobs and flows")))
    if not found:
        raise InvalidInput("a flow without jobs is none. Give at least one task.job(...).")
    return found


def check_part(part: Part) -> Part:
    """Return ``part`` if it can be part of a flow, or a flow. Raise ``InvalidInput`` otherwise."""
    if not isinstance(part, JobSpec | JobHandle | _Whole):
        raise InvalidInput(
            f"{shown(part)} cannot be part of a flow. Give task.job(...), a handle, or a flow."
        )
    return part
