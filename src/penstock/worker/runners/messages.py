"""The messages between the worker and the processes that run jobs: tagged bytes, never pickled objects."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import cache
from typing import Final, Literal

import msgspec

from penstock import errors
from penstock.core.command import SandboxLimits
from penstock.core.job import Lease
from penstock.core.text import storable
from penstock.core.units import milliseconds
from penstock.core.verdict import RemoteError, kind_and_message, traceback_of
from penstock.worker.context import JobUpdate

_OWN: Final = frozenset(
    {
        errors.Unrecoverable,
        errors.Retry,
        errors.WaitForChildren,
        errors.Snooze,
        errors.Suspend,
        errors.RateLimited,
        errors.MemoryLimitExceeded,
    }
)
"""The errors that keep their class; see ``Raised.to_exception``."""


class Request(msgspec.Struct, frozen=True):
    """Run the task at ``module``, ``name`` on this lease. ``moved_to`` is the store that its app has moved to.
    ``included`` are the modules with the other tasks of that app. Only a sandbox uses ``limits``."""

    module: str
    name: str
    queue: str
    lease: Lease
    moved_to: tuple[str, str | None] | None = None
    included: tuple[str, ...] = ()
    limits: SandboxLimits = SandboxLimits()


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The process has started and can take a request."""


class Done(msgspec.Struct, frozen=True, tag=True):
    """The function returned; ``result`` is encoded for the store."""

    result: bytes


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The function raised. ``own`` names one of Penstock's own errors, with its ``delay_s`` or ``at``, its ``signal``
    (whose timeout is ``delay_s``), ``stage`` and ``scope``."""

    error_type: str
    message: str
    traceback: str
    undecodable: bool = False
    own: str = ""
    delay_s: float | None = None
    at: datetime | None = None
    signal: str = ""
    stage: str | None = None
    scope: Literal["group", "queue"] = "group"

    def to_exception(self) -> Exception:
        """Return the error of Penstock that was raised, or an exception with the same class name and message."""
        match self.own:
            case "Unrecoverable":
                return _with_trace(errors.Unrecoverable(self._reason()), self.traceback)
            case "Retry":
                retry = errors.Retry(self._reason(), delay=self.delay_s, at=self.at)
                return _with_trace(retry, self.traceback)
            case "WaitForChildren":
                return errors.WaitForChildren()
            case "Snooze":
                return errors.Snooze(self.delay_s, at=self.at, stage=self.stage)
            case "Suspend":
                return errors.Suspend(self.signal, timeout=self.delay_s, stage=self.stage)
            case "RateLimited":
                return errors.RateLimited(self.delay_s or 0, scope=self.scope)
            case "MemoryLimitExceeded":
                return _with_trace(errors.MemoryLimitExceeded(self.message), self.traceback)
            case _:
                return _with_trace(_remote_class(self.error_type)(self.message), self.traceback)

    def _reason(self) -> str | Exception:
        """Return the message of the directive, or the error that it wraps."""
        return self.message if self.error_type == self.own else _remote_class(self.error_type)(self.message)


class Discarded(msgspec.Struct, frozen=True, tag=True):
    """A failure of this run is final."""


Message = Ready | Done | Raised | JobUpdate | Discarded

encode = msgspec.msgpack.Encoder().encode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_message = msgspec.msgpack.Decoder(Message).decode


def raised(error: BaseException, *, undecodable: bool = False) -> Raised:
    """Return ``error`` as a message."""
    # A subclass counts as the error of Penstock that it is derived from.
    own = next((kind.__name__ for kind in type(error).__mro__ if kind in _OWN), "")
    delays = (getattr(error, name, None) for name in ("delay", "timeout", "retry_in"))
    delay = next((delay for delay in delays if delay is not None), None) if own else None
    at = getattr(error, "at", None) if own else None
    kind, message = kind_and_message(error)
    return Raised(
        storable(kind),
        storable(message),
        storable(traceback_of(error)),
        undecodable=undecodable,
        own=own,
        delay_s=None if delay is None else milliseconds(delay) / 1000,
        at=None if at is None else at.astimezone(UTC),
        signal=getattr(error, "signal", "") if own else "",
        stage=getattr(error, "stage", None) if own else None,
        scope=getattr(error, "scope", "group") if own else "group",
    )


def _with_trace(error: Exception, remote: str) -> Exception:
    error.add_note(f"\nIn the process that ran the job:\n{remote}")
    return error


@cache
def _remote_class(name: str) -> type[RemoteError]:
    return type(name, (RemoteError,), {})
