"""What is known of a job while somebody holds its lease."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

import msgspec

from penstock.core.annex import EMPTY_ANNEX, Annex
from penstock.core.job import Lease
from penstock.core.text import storable_value
from penstock.errors import SerializationError

__all__ = ["LeasedJob", "Signal", "encode_progress"]


class Signal(NamedTuple):
    """What ended a job's suspension. ``raw`` is JSON."""

    name: str
    raw: bytes

    @property
    def data(self) -> Any:
        """What was sent along; ``None`` if nothing was."""
        return msgspec.json.decode(self.raw) if self.raw else None


class LeasedJob:
    """The part that a worker's ``JobContext`` and a ``ClaimedJob`` of one's own loop have in common."""

    __slots__ = ("_lease",)

    def __init__(self, lease: Lease) -> None:
        self._lease = lease

    @property
    def id(self) -> str:
        return self._lease.id

    @property
    def task(self) -> str:
        """The task's name; empty for a payload without a task."""
        return self._lease.options.task

    @property
    def run(self) -> int:
        """Which run of the job this is, from 1. Counts runs that were snoozed or handed back, too."""
        return self._lease.run

    @property
    def failures(self) -> int:
        """How many runs have failed before."""
        return self._lease.failures

    @property
    def attempts(self) -> int:
        """How many failures end the job."""
        return self._lease.options.attempts

    @property
    def token(self) -> int:
        """The fencing token of this run: rises from claim to claim of a queue, for stores of one's own."""
        return self._lease.token

    @property
    def headers(self) -> Mapping[str, str]:
        """What was sent along for middleware and handlers."""
        return self._annex.headers or {}

    @property
    def group(self) -> str:
        """The key of the jobs it shares a limit with; empty if there is none."""
        return self._annex.group

    @property
    def cost(self) -> int:
        """What it takes from its group's bucket."""
        return self._annex.cost

    @property
    def step(self) -> str:
        """Where the job goes on: what it was snoozed or suspended with; empty at its beginning."""
        return self._annex.step

    @property
    def signal(self) -> Signal | None:
        """The signal that ended its last suspension; the same in every run until the next one."""
        data = self._lease.signal
        return None if data is None else Signal(self._annex.received, data)

    @property
    def timed_out(self) -> bool:
        """Whether its last suspension ended by the timeout, without the signal."""
        return self._annex.timed_out

    @property
    def _annex(self) -> Annex:
        return self._lease.annex or EMPTY_ANNEX

    @property
    def scheduler(self) -> str:
        """The scheduler it comes from; empty if there is none."""
        return self._lease.annex.scheduler if self._lease.annex else ""

    @property
    def scheduled_for(self) -> datetime | None:
        """The slot of its scheduler that it stands for, however late it runs."""
        slot_ms = self._lease.annex.slot_ms if self._lease.annex else 0
        return datetime.fromtimestamp(slot_ms / 1000, UTC) if slot_ms else None

    @property
    def enqueued_at(self) -> datetime:
        return datetime.fromtimestamp(self._lease.enqueued_at_ms / 1000, UTC)


def encode_progress(value: Any) -> bytes:
    """Return ``value`` as JSON, its texts made storable. Raise ``SerializationError`` if JSON cannot hold it."""
    try:
        try:
            return msgspec.json.encode(value)
        except UnicodeEncodeError:
            return msgspec.json.encode(storable_value(msgspec.to_builtins(value)))
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise SerializationError(
            f"Progress of type {type(value).__qualname__} cannot be encoded as JSON: {error}. "
            "Pass a number, a string or a dict."
        ) from error
