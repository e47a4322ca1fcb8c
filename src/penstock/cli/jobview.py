"""A job as the command line shows it: in a line, in full, as a timeline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cli.output import ago, exact, in_one_line, json_text, span, when
from penstock.core.command import COMMAND_TASK
from penstock.core.display import visible_in_line
from penstock.core.duration import describe
from penstock.core.lifecycle import TERMINAL
from penstock.errors import SerializationError

if TYPE_CHECKING:
    from penstock.core.event import Event
    from penstock.info import JobInfo
    from penstock.why import Reason

__all__ = [
    "BRIEF",
    "SPARE",
    "brief",
    "cut",
    "described",
    "facts",
    "happened",
    "reason_fields",
    "timeline_row",
    "title",
]

BRIEF: Final = ("id", "queue", "state", "what", "runs", "when", "why")
SPARE: Final = ("runs", "queue", "why", "when")
"""What a narrow terminal does without."""
_LONGEST: Final = 48
_UNHINDERED: Final = ("ready", "active", "retry", "completed", "failed", "cancelled")


def title(info: JobInfo) -> str:
    """What the job does: its command, or its task with the arguments."""
    payload = _payload(info)
    if info.task == COMMAND_TASK and isinstance(payload, dict):
        return str(payload.get("command", ""))
    return f"{info.task} {payload}" if info.task else str(payload)


def brief(
    info: JobInfo, reason: Reason | None = None, *, shown_id: str | None = None, whole: bool = False
) -> tuple[Any, ...]:
    """Return a row of ``BRIEF``, with ``shown_id`` for the id if it is given. Unless ``whole``, long texts are cut."""
    shorten = in_one_line if whole else cut
    raw = info.raw
    at_ms = (
        raw.finished_at_ms
        or raw.claimed_at_ms * (info.state == "active")
        or raw.run_at_ms * (not raw.is_staged)
        or raw.enqueued_at_ms
    )
    return (
        shown_id or info.id,
        info.queue,
        info.state.value,
        shorten(title(info)),
        info.runs,
        ago(at_ms, time.time_ns() // 1_000_000),
        shorten(_why(info, reason)),
    )


def _why(info: JobInfo, reason: Reason | None) -> str:
    """Return what is in the job's way, or its last failure unless it completed after that."""
    if reason is not None and reason.kind not in _UNHINDERED:
        return reason.text
    if info.state == "completed":
        return ""
    failure = info.raw.failure
    if failure is None:
        return info.blocked_by
    # The message of an exception often says little without its class; that of a command needs none.
    return failure.message if info.task == COMMAND_TASK else f"{failure.type}: {failure.message}"


def described(info: JobInfo, reason: Reason | None = None, *, traceback: bool = False) -> dict[str, Any]:
    """All there is to know, for JSON."""
    raw = info.raw
    return {
        **info.as_dict(traceback=traceback),
        "damaged": _damaged(raw.damaged),
        "timeout_ms": raw.options.timeout_ms,
        "why": None if reason is None else reason_fields(reason),
        "staged": raw.is_staged,
        "run_at": None if raw.is_staged else info.run_at,
    }


def reason_fields(reason: Reason) -> dict[str, Any]:
    """Return a reason for JSON."""
    return msgspec.structs.asdict(reason)


def facts(job: JobInfo, reason: Reason | None = None) -> list[tuple[str, Any]]:
    """Return what there is to say about a job, each with its name."""
    raw, told = job.raw, described(job)
    facts = [
        ("id", job.id),
        ("queue", job.queue),
        (
            "state",
            f"{job.state.value}{' (asked to stop)' if job.cancelling and job.state == 'active' else ''}",
        ),
        ("why", "" if reason is None or job.state in TERMINAL else str(reason)),
        ("what", title(job)),
        ("folder", told["payload"].get("cwd", "") if job.task == COMMAND_TASK else ""),
        (
            "runs",
            f"{_counted(job.runs, 'run')}; {job.failures} of {job.attempts} attempts failed{_stalls(job)}",
        ),
        ("failure", f"{raw.failure.type}: {raw.failure.message}" if raw.failure else ""),
        ("result", json_text(told["result"]) if job.state == "completed" else ""),
        ("progress", "" if job.progress is None else json_text(job.progress)),
        ("priority", job.priority or ""),
        ("timeout", describe(raw.options.timeout_ms) if raw.options.timeout_ms else ""),
        ("expires", when(raw.expires_at_ms) if raw.expires_at_ms and job.state not in TERMINAL else ""),
        ("cost", job.cost if job.cost != 1 else ""),
        ("group", job.group),
        ("blocked by", job.blocked_by),
        ("rerun", "waits for the end of this run" if job.has_rerun else ""),
        ("worker", job.worker if job.state == "active" else ""),
        ("due", when(raw.run_at_ms) if job.state == "scheduled" and not raw.is_staged else ""),
        ("kept until", when(raw.kept_until_ms) if job.state in TERMINAL else ""),
    ]
    return [(name, value) for name, value in facts if value not in ("", None)]


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _stalls(job: JobInfo) -> str:
    return f", {_counted(job.stalls, 'stall')}" if job.stalls else ""


def timeline_row(event: Event) -> dict[str, Any]:
    """One event of a job's life, for JSON."""
    return {
        "at": exact(event.at_ms),
        "at_ms": event.at_ms,
        "type": str(event.type),
        "state": event.state,
        "run": event.run,
        "worker": event.worker,
        "wait_ms": event.wait_ms,
        "run_ms": event.run_ms,
        "error_type": event.error_type,
        "error": event.error,
        "data": event.data,
    }


def happened(event: Event) -> str:
    """One event of a job's life, in a line."""
    parts = [when(event.at_ms), f"{event.type!s:10}"]
    if event.state and event.state != event.type:
        parts.append(f"-> {event.state}")
    if event.run and event.worker:
        parts.append(f"run {event.run} by {event.worker}")
    if event.type == "claimed":
        parts.append(f"after {span(event.wait_ms)} in line")
    if event.run_ms:
        parts.append(f"took {span(event.run_ms)}")
    if event.error_type:
        parts.append(f"{event.error_type}: {event.error}")
    if event.data:
        parts.append(event.data)
    return visible_in_line("  ".join(parts))


def _payload(info: JobInfo) -> Any:
    try:
        return info.payload
    except SerializationError:
        return f"<{len(info.raw.payload)} bytes>"


def _damaged(packed: bytes | None) -> dict[str, Any] | None:
    """The stored values of a record that could not be read: bytes in hex, numbers as they are."""
    if packed is None:
        return None
    parts = msgspec.msgpack.decode(packed)
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in parts.items()}


def cut(text: str) -> str:
    """Return ``text`` in one line, cut for a table."""
    line = in_one_line(text)
    return line if len(line) <= _LONGEST else line[: _LONGEST - 1] + "…"
