"""The children of a job, as the job sees them: what became of each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from penstock.core.flow import DependencyRecord, DependencyState
from penstock.core.job import Policy
from penstock.core.names import ref_of

if TYPE_CHECKING:
    from penstock.core.outcome import Failure
    from penstock.flow.parts import Part
    from penstock.handle import JobHandle
    from penstock.source import Source

__all__ = ["Child", "add_children", "read_children"]


class Child:
    """One job that another waits, or waited, for. ``raw`` is what the store said."""

    __slots__ = ("_source", "raw")

    def __init__(self, source: Source, raw: DependencyRecord) -> None:
        self._source = source
        self.raw = raw

    def __repr__(self) -> str:
        return f"<Child {self.ref} {self.state}>"

    @property
    def queue(self) -> str:
        return self.raw.queue

    @property
    def id(self) -> str:
        return self.raw.id

    @property
    def ref(self) -> str:
        """Return queue and id as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)

    @property
    def state(self) -> DependencyState:
        """``pending``, ``completed``, ``failed``, ``cancelled`` or ``removed``."""
        return self.raw.state

    @property
    def policy(self) -> Policy:
        """What its failure does to the job that waits."""
        return self.raw.policy

    @property
    def result(self) -> Any:
        """What it returned, read with the app's serde for results; ``None`` unless it completed."""
        return None if self.raw.result is None else self._source.decode_result(self.raw.result)

    @property
    def failure(self) -> Failure | None:
        """Why it failed."""
        return self.raw.failure


async def read_children(source: Source, id: str) -> list[Child]:
    """The children of a job of the source's queue, in the order they were given."""
    from penstock.flow.handle import read_dependencies

    plain = source.app.queue(source.queue).job(id).source
    storage = await source.app.connect()
    return [Child(plain, record) for record in await read_dependencies(storage, source.queue, id)]


async def add_children(
    source: Source, id: str, parts: Iterable[Part], *, on_failure: Policy
) -> list[JobHandle[Any]]:
    """See ``flow.enqueue.add_children``, which is imported by those who need it only."""
    from penstock.flow.enqueue import add_children

    return await add_children(source, id, parts, on_failure=on_failure)
