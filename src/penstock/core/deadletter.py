"""Dead letters: the jobs that report permanent failures to a queue's ``dead_letter`` queue."""

from __future__ import annotations

import base64
import hashlib
from typing import Any, Final

import msgspec

from penstock.core.job import Conflict, NewJob, Options
from penstock.core.names import ref_of
from penstock.core.outcome import Failure

_LONGEST_ID: Final = 200
_AGAIN: Final = Conflict(mode="redispatch")
_encode = msgspec.json.Encoder().encode
_decode_options = msgspec.json.Decoder(Options).decode


class DeadLetter(msgspec.Struct, frozen=True, kw_only=True):
    """A job that failed for good, as the handler of its dead letter receives it.

    ``payload`` is the parsed JSON, or base64 text if the bytes are not JSON. ``error`` has the keys ``type`` and
    ``message``. ``failed_at`` is the store's time in epoch milliseconds.
    """

    queue: str
    id: str
    task: str
    payload: Any
    error: dict[str, str]
    failures: int
    failed_at: int

    @property
    def ref(self) -> str:
        """Return queue and id of the failed job as one string: ``app.job(ref)`` accepts it."""
        return ref_of(self.queue, self.id)


def dead_letter_job(
    *,
    queue: str,
    id: str,
    incarnation: int,
    task: str,
    payload: bytes,
    failure: Failure | None,
    failures: int,
    failed_at_ms: int,
    handled_by: str,
) -> NewJob:
    """Return the job that carries the dead letter. ``handled_by`` is the name of its task, or the encoded options.

    The id derives from the failed job's, so one life of a job has one letter. A job that is retried and fails again
    renews its letter.
    """
    cause = failure or Failure("", "")
    letter = DeadLetter(
        queue=queue,
        id=id,
        task=task,
        payload=_readable(payload),
        error={"type": cause.type, "message": cause.message},
        failures=failures,
        failed_at=failed_at_ms,
    )
    options = _decode_options(handled_by) if handled_by.startswith("[") else Options(task=handled_by)
    return NewJob(_letter_id(queue, id, incarnation), _encode(letter), options, conflict=_AGAIN)


def encode_options(options: Options) -> str:
    """Return the options of a letter's task as queue settings store them. A task name never begins with ``[``."""
    return _encode(options).decode()


def _readable(payload: bytes) -> Any:
    try:
        msgspec.json.decode(payload)
        return msgspec.Raw(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return base64.b64encode(payload).decode()


def _letter_id(queue: str, id: str, incarnation: int) -> str:
    plain = f"{queue}:{id}:{incarnation}"
    return plain if len(plain) <= _LONGEST_ID else f"{queue}:{hashlib.sha256(plain.encode()).hexdigest()}"
