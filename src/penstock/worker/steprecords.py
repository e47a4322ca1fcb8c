"""The records of a job's steps: those that came with the lease, and those that the run writes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final, cast

import msgspec

from penstock.client.loopthread import run as run_on_loop_thread
from penstock.core.job import EMPTY_EXTRAS, Lease
from penstock.core.lifecycle import StepAnswer
from penstock.core.outcome import Failure
from penstock.core.step import MOST_STEPS, NewStep, Step
from penstock.core.text import get_logger, shown
from penstock.errors import (
    LeaseLost,
    SerializationError,
    StepError,
    StepFailed,
    StorageUnavailable,
    Suspension,
)
from penstock.worker.stepcall import StepCall, StepPolicy, digest_of, facts_of, result_serde

if TYPE_CHECKING:
    from penstock.client.session import Session
    from penstock.worker.context import ContextLink

logger = get_logger("penstock.worker")

_RECORD_TRIES: Final = 6
_RETRY_S: Final = 0.1

current_step: Final[ContextVar[tuple[StepRecords, str] | None]] = ContextVar("penstock_step", default=None)
"""The step that is running here."""


class StepRecords:
    """The records of a job's steps, as the run knows them."""

    def __init__(self, lease: Lease, queue: str, link: ContextLink) -> None:
        self._lease = lease
        self._queue = queue
        self._link = link
        self._extras = lease.extras or EMPTY_EXTRAS
        self._records: dict[str, Step] = {step.name: step for step in lease.steps or ()}
        self._is_loaded = lease.steps is not None or not self._extras.has_steps
        self._size = sum(step.size for step in self._records.values())
        self._asked: set[str] = set()
        self._is_lost = False
        self._session: tuple[asyncio.AbstractEventLoop, Session] | None = None
        self._serde = result_serde(link.definition)
        self.suspension: Suspension | None = None
        """Set once the run has ended with a wait, whatever the handler makes of the exception."""
        self.refusal: StepError | None = None
        """Set if a wait was refused because the job is in a batch."""

    async def _load(self) -> None:
        """Read the records if they were too many to come with the lease."""
        if not self._is_loaded:
            storage = await self._link.app.connect()
            self._records = {step.name: step for step in await storage.steps(self._queue, self._lease.id)}
            self._size = sum(step.size for step in self._records.values())
            self._is_loaded = True

    def _call(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], policy: StepPolicy
    ) -> StepCall:
        if (outer := current_step.get()) is not None and outer[0] is self:
            raise StepError(
                f"step {shown(name)} was called inside step {shown(outer[1])}. Steps cannot contain steps: "
                "call both from the handler."
            )
        self._ask(name)
        return StepCall(name, function, args, digest_of(args), policy, facts_of(function))

    def _ask(self, name: str) -> None:
        """Note that the handler has asked for a step. Raise ``StepError`` the second time."""
        if name in self._asked:
            raise StepError(
                f"step {shown(name)} was called twice in one run. Give each call its own name, or in a loop "
                f"its own key: context.step({shown(name)}, ..., key=item.id)."
            )
        self._asked.add(name)
        if name not in self._records and len(self._records) >= MOST_STEPS:
            raise StepError(
                f"step {shown(name)} would be number {len(self._records) + 1:,} of job {shown(self._lease.id)}; the "
                f"limit is {MOST_STEPS:,}. Split the work into several jobs."
            )

    def _fits(self, call: StepCall, record: Step) -> bool:
        """Return whether the record stands for this call; false if the step must run again."""
        if call.digest == record.arguments or not call.digest or not record.arguments:
            return True
        text = f"step {shown(call.name)} was recorded with other arguments than it is called with now"
        if call.policy.on_divergence == "fail":
            raise StepError(
                f"{text}. Give the changed step another name, reset it (queue.reset_step), or choose "
                "on_divergence='warn' to use the recorded result or 'rerun' to run it again."
            )
        logger.warning("job %r: %s", self._lease.id, text)
        return call.policy.on_divergence == "warn"

    async def _whole(self, record: Step) -> Step:
        """Return the record with its result, even if that is large."""
        if record.result is not None:
            return record
        storage = await self._link.app.connect()
        [whole] = await storage.steps(self._queue, self._lease.id, names=[record.name])
        self._records[record.name] = whole
        return whole

    def _whole_sync(self, record: Step) -> Step:
        return record if record.result is not None else run_on_loop_thread(self._whole(record))

    def unused(self) -> list[NewStep]:
        """Return the recorded steps that this run has not asked for."""
        lease = self._lease
        return [
            NewStep(lease.id, lease.token, name, "unused")
            for name in self._records
            if name not in self._asked
        ]

    def _outcome(self, call: StepCall, record: Step, *, cause: Exception | None = None) -> Any:
        """Return the recorded result, or raise the recorded failure."""
        if record.status == "completed":
            assert record.result is not None
            try:
                return self._serde.decode(record.result, call.facts.result_type)
            except SerializationError as error:
                raise StepError(
                    f"the recorded result of step {shown(call.name)} cannot be read: {error} Correct the return "
                    "annotation of its function, or the returned value."
                ) from error
        failure = record.failure or Failure("", "")
        times = f"{record.failures} attempt{'' if record.failures == 1 else 's'}"
        raise StepFailed(
            f"step {shown(call.name)} failed after {times}: {failure.type}: {failure.message}",
            step=call.name,
            error_type=failure.type,
            failures=record.failures,
        ) from cause

    async def _save(self, new: NewStep, *, replaces: bool = False) -> Step:
        """Write a record, together with those of other jobs. Return it, or the one that was first."""
        if replaces:
            new = msgspec.structs.replace(new, replaces=True)
        answer = await self._sent(new)
        if answer == "lost":
            self._is_lost = True
            raise LeaseLost(f"job {self._lease.id!r} is no longer held by this run")
        if answer == "known":
            storage = await self._link.app.connect()
            [record] = await storage.steps(self._queue, self._lease.id, names=[new.name])
        else:
            until_ms = self._now_ms() + new.delay_ms if new.delay_ms else 0
            record = Step(
                new.name,
                cast("Any", new.status),
                0,
                0,
                until_ms,
                new.arguments,
                new.result,
                len(new.result),
                new.failures,
                new.failure,
            )
        self._size += record.size - self._size_of(new.name)
        self._records[new.name] = record
        return record

    def _size_of(self, name: str) -> int:
        """Return the size of the result that is recorded under a name."""
        record = self._records.get(name)
        return 0 if record is None else record.size

    async def _sent(self, new: NewStep) -> StepAnswer:
        """Send a record. A run that is stopped meanwhile does not lose it."""
        session = self._session
        if session is None or session[0] is not asyncio.get_running_loop():
            session = self._session = (asyncio.get_running_loop(), await self._link.app.session())
        sent = session[1].record_step(self._queue, new, lease_ms=self._link.lease_ms)
        sent.add_done_callback(_retrieve)
        try:
            return await asyncio.shield(sent)
        except StorageUnavailable:
            return await asyncio.shield(self._sent_again(new))

    async def _sent_again(self, new: NewStep) -> StepAnswer:
        """Send a record for a while until the store can be reached: the step has run."""
        session = await self._link.app.session()
        for number in range(_RECORD_TRIES):
            await asyncio.sleep(_RETRY_S * 2**number)
            try:
                return await session.record_step(self._queue, new, lease_ms=self._link.lease_ms)
            except StorageUnavailable:
                if number == _RECORD_TRIES - 1:
                    raise
        raise AssertionError("unreachable")

    def _now_ms(self) -> int:
        """Return the store's time, from that of the claim."""
        return self._lease.claimed_at_ms + round((time.monotonic() - self._link.claimed_at) * 1000)

    def _rest_ms(self, until_ms: int) -> int:
        return until_ms - self._now_ms()

    def _refuse_to_go_on(self) -> None:
        if self._is_lost:
            raise LeaseLost(f"job {self._lease.id!r} is no longer held by this run")
        if self.suspension is not None:
            raise self.suspension

    def _refuse_in_batch(self, name: str, *, wait: str) -> None:
        """Raise ``StepError`` if the job is in a batch, whose function runs for all its jobs or for none."""
        if self._link.is_batched:
            self.refusal = StepError(
                f"{wait} of job {shown(self._lease.id)} is a wait (step {shown(name)}), and a job in a batch cannot "
                "wait alone: its function runs for other jobs, too. Use a function that takes one job, without batch=."
            )
            raise self.refusal


def step_key(lease: Lease, queue: str) -> str:
    """Return the idempotency key of the running step: the same whenever this step of this job runs."""
    current = current_step.get()
    if current is None:
        raise LookupError(
            "no step is running here: use context.step_key in a function that context.step calls"
        )
    parts = (queue, lease.id, lease.incarnation, lease.enqueued_at_ms, current[1])
    return blake2b(msgspec.json.encode(parts), digest_size=16).hexdigest()


def _retrieve(sent: asyncio.Future[StepAnswer]) -> None:
    """Retrieve the error of a record whose run was stopped: nobody else does."""
    if not sent.cancelled():
        sent.exception()
