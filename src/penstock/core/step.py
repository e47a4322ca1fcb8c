"""Durable steps: the recorded parts of a job's runs.

A step has a name that is unique in its job: ``charge``, or ``ship[42]`` for the step ``ship`` with the key 42. Its
record says how it ended. A completed or failed record never changes, and the step never runs again.
"""

from __future__ import annotations

from typing import Final, Literal, get_args

import msgspec

from penstock.core.outcome import Failure

StepStatus = Literal["completed", "failed", "retrying", "waiting", "started"]
"""``completed`` and ``failed`` are final. ``retrying``: it failed and runs again. ``waiting``: for a time or a signal.
``started``: it is running, in a job whose worker has died before."""

STATUSES: Final[frozenset[str]] = frozenset(get_args(StepStatus))
FINAL: Final[frozenset[StepStatus]] = frozenset({"completed", "failed"})

MOST_STEPS: Final = 10_000
"""The most steps of a job."""
MOST_STEP_BYTES: Final = 1024 * 1024
"""The largest result of a step."""
MOST_JOB_BYTES: Final = 16 * 1024 * 1024
"""The most bytes that the results of a job's steps can have together."""

SENT_RESULT: Final = 1024
"""The largest result that is sent with a claim."""
SENT_STEPS: Final = 1000
"""The most steps of a job whose records are sent with a claim."""

_BEYOND: Final = 2**53


class NewStep(msgspec.Struct, frozen=True):
    """A step to record, with the lease of its job.

    ``arguments`` is a digest of the step's arguments. ``failures`` counts the failed attempts so far. ``delay_ms``
    is how long a ``waiting`` or ``retrying`` step waits (0: without a limit), ``run_ms`` how long the attempt took.
    ``replaces`` replaces even a final record. ``unused`` records nothing: the event says that the job has completed
    without asking for this step.
    """

    id: str
    token: int
    name: str
    status: StepStatus | Literal["unused"] = "completed"
    arguments: bytes = b""
    result: bytes = b""
    failures: int = 0
    failure: Failure | None = None
    delay_ms: int = 0
    run_ms: int = 0
    replaces: bool = False


class Step(msgspec.Struct, frozen=True):
    """A recorded step.

    ``number`` gives the order in which the steps of a job were first recorded, ``at_ms`` is when this record was
    written. ``until_ms`` is when the wait of a step is over (0: never). ``result`` is ``None`` if it is larger than
    ``SENT_RESULT`` and the caller did not ask for this step by name; ``size`` is its size.
    """

    name: str
    status: StepStatus
    number: int
    at_ms: int
    until_ms: int = 0
    arguments: bytes = b""
    result: bytes | None = b""
    size: int = 0
    failures: int = 0
    failure: Failure | None = None

    @property
    def is_final(self) -> bool:
        return self.status in FINAL


class StepBody(msgspec.Struct, frozen=True, array_like=True):
    """The fields of a stored record that engines do not look into. The order is a storage format: append."""

    arguments: bytes
    failures: int
    failure: Failure | None
    size: int
    result: bytes | None

    @classmethod
    def of(cls, step: NewStep) -> StepBody:
        """Return the body of a new record, without a result that is too large to be sent with a claim."""
        size = len(step.result)
        sent = step.result if size <= SENT_RESULT else None
        return cls(step.arguments, step.failures, step.failure, size, sent)

    def step(
        self,
        name: str,
        *,
        status: StepStatus,
        number: int,
        at_ms: int,
        until_ms: int,
        large: bytes | None = None,
    ) -> Step:
        """Return the step with this body. ``large`` is the result that is stored beside it.

        Raise ``ValueError`` if the record is damaged.
        """
        result = self.result if large is None else large
        if status not in STATUSES or (result is not None and len(result) != self.size):
            raise ValueError("the status is unknown, or the result is not whole")
        if not (0 <= number < _BEYOND and 0 <= at_ms < _BEYOND and 0 <= until_ms < _BEYOND):
            raise ValueError("a number is out of range")
        return Step(
            name,
            status,
            number,
            at_ms,
            until_ms,
            self.arguments,
            result,
            self.size,
            self.failures,
            self.failure,
        )


pack_body: Final = msgspec.msgpack.Encoder().encode
unpack_body: Final = msgspec.msgpack.Decoder(StepBody).decode
_encode_json: Final = msgspec.json.Encoder().encode


def event_data(step: NewStep) -> str:
    """Return the ``data`` of the event of a record."""
    data: dict[str, object] = {"step": step.name, "status": step.status}
    if step.failures:
        data["failures"] = step.failures
    return _encode_json(data).decode()
