"""The durable steps of one run: what ``context.step``, ``context.sleep`` and ``context.wait_for`` do.

The records came with the lease. A step that has a final record returns it; any other runs, and its record is written
before the handler goes on. A wait is a record too: the run ends with a ``Suspension``, and the next run finds out
whether the time or the signal has come.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

import msgspec

from penstock.client.codec import Json
from penstock.client.loopthread import run as run_on_loop_thread
from penstock.core.job import Lease
from penstock.core.names import check_signal
from penstock.core.outcome import Failure, chance, failure_of, own_delay_ms, retry_delay_ms, retry_rule
from penstock.core.retry import EVERY_ERROR, delay_ms
from penstock.core.step import MOST_JOB_BYTES, MOST_STEP_BYTES, NewStep, Step, StepStatus
from penstock.core.text import get_logger, shown
from penstock.errors import (
    Directive,
    LeaseLost,
    Retry,
    SerializationError,
    Snooze,
    StepError,
    Suspend,
    Suspension,
    Unrecoverable,
)
from penstock.worker.stepcall import StepCall, StepPolicy, called_in_thread
from penstock.worker.steprecords import StepRecords, current_step

if TYPE_CHECKING:
    from penstock.worker.context import ContextLink

logger = get_logger("penstock.worker")

_SHORT_MS: Final = 100
"""A wait up to this long keeps its worker."""
_TURNS: Final = 10
"""The turns of the loop in which a suspension lets the handler begin further steps."""

_json: Final = Json()


class _Wait(NamedTuple):
    """A step that waits until a time of the store (0: without a limit), or for a signal."""

    name: str
    until_ms: int
    signal: str = ""


class JobSteps(StepRecords):
    """The steps of one run. Async handlers use it on their loop, sync ones (``*_sync``) in their thread."""

    def __init__(self, lease: Lease, queue: str, link: ContextLink) -> None:
        super().__init__(lease, queue, link)
        self._under_way = 0
        self._idle = asyncio.Event()
        self._waits: list[_Wait] = []

    # Steps

    async def step(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], policy: StepPolicy
    ) -> Any:
        """Return the recorded result of a step, or run it and record its result."""
        if not self._is_loaded:
            await self._load()
        call = self._call(name, function, args, policy)
        record = self._records.get(name)
        is_again = False
        if record is not None and record.is_final:
            if self._fits(call, record):
                return self._outcome(call, await self._whole(record))
            record, is_again = None, True
        while True:
            if record is not None and (rest_ms := self._rest_ms(record.until_ms)) > 0:
                await self._pause(_Wait(name, record.until_ms), rest_ms)
            self._begin()
            try:
                if self._lease.stalls and not is_again:
                    record = await self._save(self._start(call, record))
                new, error = await self._attempt(call, record)
                record = await self._save(new, replaces=is_again)
            finally:
                self._end()
            if record.is_final:
                return self._outcome(call, record, cause=error)

    def step_sync(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], policy: StepPolicy
    ) -> Any:
        """Return the recorded result of a step, or run it in this thread and record its result."""
        if not self._is_loaded:
            run_on_loop_thread(self._load())
        call = self._call(name, function, args, policy)
        record = self._records.get(name)
        is_again = False
        if record is not None and record.is_final:
            if self._fits(call, record):
                return self._outcome(call, self._whole_sync(record))
            record, is_again = None, True
        while True:
            if record is not None and (rest_ms := self._rest_ms(record.until_ms)) > 0:
                self._pause_sync(_Wait(name, record.until_ms), rest_ms)
            self._refuse_to_go_on()
            if self._lease.stalls and not is_again:
                record = run_on_loop_thread(self._save(self._start(call, record)))
            new, error = self._attempt_sync(call, record)
            record = run_on_loop_thread(self._save(new, replaces=is_again))
            if record.is_final:
                return self._outcome(call, record, cause=error)

    # Waits

    async def sleep(self, name: str, ms: int) -> None:
        """Wait for a time, without a worker if it is long."""
        record = await self._slept(name, ms)
        if not record.is_final and (rest_ms := self._rest_ms(record.until_ms)) > 0:
            await self._pause(_Wait(name, record.until_ms), rest_ms)

    def sleep_sync(self, name: str, ms: int) -> None:
        """Wait for a time in a thread."""
        record = run_on_loop_thread(self._slept(name, ms))
        if not record.is_final and (rest_ms := self._rest_ms(record.until_ms)) > 0:
            self._pause_sync(_Wait(name, record.until_ms), rest_ms)

    async def wait_for(self, name: str, signal: str, timeout_ms: int, kind: Any) -> Any:
        """Wait for a signal and return its data. Raise ``TimeoutError``."""
        record = await self._received(name, signal, timeout_ms)
        if record is None:
            await self._suspend(_Wait(name, self._records[name].until_ms, check_signal(signal)))
        return self._signal_data(record, kind)

    def wait_for_sync(self, name: str, signal: str, timeout_ms: int, kind: Any) -> Any:
        """Wait for a signal in a thread."""
        record = run_on_loop_thread(self._received(name, signal, timeout_ms))
        if record is None:
            self._waits.append(_Wait(name, self._records[name].until_ms, check_signal(signal)))
            self._raise_suspension()
        return self._signal_data(record, kind)

    async def _slept(self, name: str, ms: int) -> Step:
        if ms > _SHORT_MS:
            self._refuse_in_batch(name, wait="sleep")
        return await self._waiting(name, ms, digest=b"")

    async def _waiting(self, name: str, ms: int, *, digest: bytes) -> Step:
        """Return the record of a wait; the first run makes it."""
        await self._load()
        self._ask(name)
        record = self._records.get(name)
        if record is None:
            self._refuse_to_go_on()
            status: StepStatus = "waiting" if ms or digest else "completed"
            new = NewStep(self._lease.id, self._lease.token, name, status, digest, delay_ms=ms)
            record = await self._save(new)
        return record

    async def _received(self, name: str, signal: str, timeout_ms: int) -> Step | None:
        """Return the final record of a wait for a signal; ``None`` while it has to wait."""
        self._refuse_in_batch(name, wait="wait_for")
        record = await self._waiting(name, timeout_ms, digest=signal.encode())
        if record.is_final:
            return await self._whole(record)
        lease = self._lease
        new = NewStep(lease.id, lease.token, name, arguments=signal.encode())
        # The stage names the wait that the suspension was for: an earlier signal of the same name is not for this one.
        if lease.signal is not None and (self._extras.received, self._extras.stage) == (signal, name):
            return await self._save(msgspec.structs.replace(new, result=lease.signal))
        if record.until_ms and self._rest_ms(record.until_ms) <= 0:
            failure = Failure("TimeoutError", f"the signal {shown(signal)} did not come in time")
            return await self._save(msgspec.structs.replace(new, status="failed", failure=failure))
        return None

    def _signal_data(self, record: Step, kind: Any) -> Any:
        if record.status == "failed":
            raise TimeoutError(
                record.failure.message if record.failure else "the signal did not come in time"
            )
        return _json.decode(record.result, kind) if record.result else None

    # Attempts

    async def _attempt(self, call: StepCall, record: Step | None) -> tuple[NewStep, Exception | None]:
        """Run the function once. Return the record to write, and the error if it failed."""
        began = time.monotonic()
        token = current_step.set((self, call.name))
        try:
            if call.policy.timeout_ms is None:
                value = await self._called(call)
            else:
                async with asyncio.timeout(call.policy.timeout_ms / 1000):
                    value = await self._called(call)
        except Exception as error:
            return self._failed(call, record, error, began), error
        finally:
            current_step.reset(token)
        return self._completed(call, record, value, began), None

    def _called(self, call: StepCall) -> Awaitable[Any]:
        if call.facts.is_async:
            awaitable: Awaitable[Any] = call.function(*call.args)
            return awaitable
        return called_in_thread(call.function, call.args, self._link.app.sync_middlewares)

    def _attempt_sync(self, call: StepCall, record: Step | None) -> tuple[NewStep, Exception | None]:
        began = time.monotonic()
        token = current_step.set((self, call.name))
        try:
            value = call.function(*call.args)
            if inspect.iscoroutine(value):
                value.close()
                raise StepError(
                    f"step {shown(call.name)} is a coroutine function. Use it in an async handler: "
                    "await context.step(...)."
                )
        except Exception as error:
            return self._failed(call, record, error, began), error
        finally:
            current_step.reset(token)
        return self._completed(call, record, value, began), None

    def _completed(self, call: StepCall, record: Step | None, value: Any, began: float) -> NewStep:
        try:
            result = self._serde.encode(value)
        except SerializationError as error:
            raise StepError(
                f"step {shown(call.name)} ran, but its result cannot be recorded: {error}"
            ) from error
        if len(result) > MOST_STEP_BYTES:
            raise StepError(
                f"the result of step {shown(call.name)} has {len(result):,} bytes; the limit is "
                f"{MOST_STEP_BYTES:,}. Store it elsewhere and return a reference to it."
            )
        size = self._size - self._size_of(call.name) + len(result)
        if size > MOST_JOB_BYTES:
            raise StepError(
                f"with step {shown(call.name)}, the results of job {shown(self._lease.id)} have "
                f"{size:,} bytes; the limit is {MOST_JOB_BYTES:,}. Store large "
                "results elsewhere and return references to them."
            )
        return self._new(call, record, began, result=result)

    def _failed(self, call: StepCall, record: Step | None, error: Exception, began: float) -> NewStep:
        """Return the record of a failed attempt. Raise what is meant for the job instead."""
        is_for_job = isinstance(error, Directive) and not isinstance(error, Unrecoverable | Retry)
        if is_for_job or isinstance(error, LeaseLost | StepError):
            raise error
        failures = (0 if record is None else record.failures) + 1
        policy, options = call.policy, self._lease.options
        attempts = options.attempts if policy.attempts is None else policy.attempts
        retries = policy.retries
        if retries is None and self._link.definition is not None:
            retries = self._link.definition.retries
        rule = EVERY_ERROR if retries is None else retry_rule(error, retries)
        is_last = failures >= attempts or isinstance(error, Unrecoverable) or rule is None
        new = self._new(call, record, began)
        if is_last:
            return msgspec.structs.replace(new, status="failed", failures=failures, failure=failure_of(error))
        rest_ms = retry_delay_ms(error)
        if rest_ms is None and rule is not None and rule.backoff is not None and policy.backoff is None:
            rest_ms = own_delay_ms(rule.backoff, failures, error)
        elif rest_ms is None:
            custom = {**self._link.app.backoffs, **(policy.custom or {})}
            rest_ms = delay_ms(
                policy.backoff or options.backoff, failures, random=chance.get(), custom=custom, error=error
            )
        return msgspec.structs.replace(
            new, status="retrying", failures=failures, failure=failure_of(error), delay_ms=rest_ms
        )

    def _start(self, call: StepCall, record: Step | None) -> NewStep:
        """Return the record of a step that is about to run, for a job whose worker has died: it may be to blame."""
        return msgspec.structs.replace(self._new(call, record, time.monotonic()), status="started")

    def _new(self, call: StepCall, record: Step | None, began: float, *, result: bytes = b"") -> NewStep:
        lease = self._lease
        return NewStep(
            lease.id,
            lease.token,
            call.name,
            arguments=call.digest,
            result=result,
            failures=0 if record is None else record.failures,
            run_ms=round((time.monotonic() - began) * 1000),
        )

    # Suspension

    def _begin(self) -> None:
        self._refuse_to_go_on()
        self._under_way += 1

    def _end(self) -> None:
        self._under_way -= 1
        if not self._under_way:
            self._idle.set()

    async def _pause(self, wait: _Wait, rest_ms: int) -> None:
        if rest_ms <= _SHORT_MS:
            await asyncio.sleep(rest_ms / 1000)
        else:
            self._refuse_in_batch(wait.name, wait="the backoff")
            await self._suspend(wait)

    def _pause_sync(self, wait: _Wait, rest_ms: int) -> None:
        if rest_ms <= _SHORT_MS:
            time.sleep(rest_ms / 1000)
        else:
            self._refuse_in_batch(wait.name, wait="the backoff")
            self._waits.append(wait)
            self._raise_suspension()

    async def _suspend(self, wait: _Wait) -> NoReturn:
        """End the run, once the steps that are under way have been recorded."""
        self._waits.append(wait)
        try:
            turns = 0
            while turns < _TURNS and self.suspension is None:
                if self._under_way:
                    self._idle.clear()
                    await self._idle.wait()
                    turns = 0
                else:
                    await asyncio.sleep(0)
                    turns += 1
        except asyncio.CancelledError:
            self._waits.remove(wait)
            raise
        self._raise_suspension()

    def _raise_suspension(self) -> NoReturn:
        if self.suspension is None:
            self.suspension = Suspension(self._directive())
        raise self.suspension

    def _directive(self) -> Snooze | Suspend:
        """Return what wakes the job at the first thing that it waits for."""
        rests_ms = [max(self._rest_ms(wait.until_ms), 1) for wait in self._waits if wait.until_ms]
        for wait in self._waits:
            if wait.signal:
                timeout = min(rests_ms) / 1000 if rests_ms else None
                return Suspend(wait.signal, timeout=timeout, stage=wait.name)
        return Snooze(min(rests_ms) / 1000)
