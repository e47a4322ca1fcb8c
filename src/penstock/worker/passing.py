"""Results on their way from one job of a flow to the next: they become its first argument."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from penstock.core.flow import DependencyRecord
from penstock.core.job import Lease
from penstock.errors import SerializationError
from penstock.flow.handle import read_dependencies
from penstock.serde import Serde, resolve_serde
from penstock.worker.run import Undecodable

if TYPE_CHECKING:
    from penstock.storage.base import Storage
    from penstock.task import Task

__all__ = ["name_the_result", "with_results"]


async def with_results(storage: Storage, queue: str, lease: Lease, task: Task[..., Any]) -> Lease:
    """The lease with a payload that has the results of the jobs it waited for as its first argument.

    Raises ``SerializationError`` if they cannot be read: no run of the job can succeed.
    """
    assert lease.annex is not None
    mode, count, names = lease.annex.passes.split(":")
    serdes = [resolve_serde(name) for name in names.split(",")]
    records = (await read_dependencies(storage, queue, lease.id))[: int(count)]
    values = [_result(record, serdes[n % len(serdes)]) for n, record in enumerate(records)]
    arguments = task.serde.decode(lease.payload)
    if not isinstance(arguments, dict):
        raise SerializationError(f"the payload of job {lease.id!r} has no place for results.")
    first = task.signature.parameters[0]
    value = values if mode == "list" else values[0]
    return replace(lease, payload=task.serde.encode({first: value, **arguments}))


def name_the_result(lease: Lease, task: Task[..., Any], error: Undecodable) -> None:
    """Have ``error`` name the result that was passed, if that is what the function cannot take."""
    assert lease.annex is not None
    first = task.signature.parameters[0]
    is_list = lease.annex.passes.startswith("list:")
    what = "the list of results of the jobs" if is_list else "the result of the job"
    with suppress(SerializationError):
        arguments = task.serde.decode(lease.payload)
        origin = f"It is {what} before it in the flow. "
        if first in arguments and (
            misfit := task.signature.misfit(first, arguments[first], task.serde, origin=origin)
        ):
            error.__cause__ = SerializationError(misfit)


def _result(record: DependencyRecord, serde: Serde) -> Any:
    return serde.decode(record.result) if record.result else None
