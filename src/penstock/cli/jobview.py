"""Jobs on the command line: find one by its id, and show it in a row, in full or as a timeline.

A short id is the end of a generated id: these begin with the time, so jobs that were enqueued together differ only at
the end. Ids that users chose are shown whole.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from penstock.cli.connect import meant_queue, queues_of
from penstock.cli.errors import InvalidUsage, NotFound
from penstock.cli.output import ago, exact, in_one_line, json_text, span, when
from penstock.client.situation import counted, listed
from penstock.core.command import COMMAND_TASK
from penstock.core.job import EMPTY_EXTRAS
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.names import check_id, ref_of, split_ref
from penstock.core.text import visible_in_line
from penstock.core.units import describe
from penstock.errors import InvalidName, SerializationError

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.causes import Reason
    from penstock.client.handle import JobHandle
    from penstock.client.info import JobInfo
    from penstock.client.steps import StepInfo
    from penstock.core.event import Event
    from penstock.core.job import Job
    from penstock.storage.contract import Storage
    from penstock.storage.values import Counts


SHORTEST: Final = 8
"""Least number of characters in a short id."""
SCANNED_WHOLE: Final = 10_000
"""Number of jobs up to which a whole queue is searched for a short id."""
SCANNED_OF_STATE: Final = 500
"""Number of jobs at either end of each state that are searched in a larger queue."""
_MOST_NAMED: Final = 5
_HAND_BACK: Final = ["promoted", "claimed", "snoozed"]
"""The events of a run that its worker hands back because it does not know the task, or that snoozes itself."""

JOB_COLUMNS: Final = ("id", "queue", "state", "what", "runs", "when", "why")
SPARE_JOB_COLUMNS: Final = ("runs", "queue", "why", "when")
"""Columns that a narrow terminal leaves out."""
_LONGEST: Final = 48
_SHORT_KINDS: Final = {
    "children": "waits for jobs",
    "signal": "waits for signal",
    "staged": "write not complete",
}
_UNHINDERED: Final = ("ready", "active", "retry", "completed", "failed", "cancelled")

_GENERATED: Final = 32
_is_generated: Final = re.compile(rf"[0-9a-f]{{{_GENERATED}}}").fullmatch
_is_part_of_id: Final = re.compile(rf"[0-9a-f]{{,{_GENERATED - 1}}}").fullmatch


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Map each generated id to its shortest unique end, and other ids to themselves."""
    shorts = {id: id for id in ids}
    left = [id for id in shorts if _is_generated(id)]
    for length in range(SHORTEST, _GENERATED):
        if not left:
            break
        ends = Counter(id[-length:] for id in shorts)
        shorts.update({id: id[-length:] for id in left if ends[id[-length:]] == 1})
        left = [id for id in left if ends[id[-length:]] > 1]
    return shorts


async def find_job(app: App, text: str, queue: str | None) -> JobInfo:
    """Return the only job with the id, ref or short id ``text``. Raise ``NotFound`` or ``CommandLineError``."""
    names = await queues_of(app, queue)
    jobs = await _by_name(app, check_id(text), names, is_ref=queue is None)
    if not jobs:
        jobs = await _by_end(app, text, names, is_ref=queue is None)
    if not jobs:
        raise NotFound(await _not_found(app, text, queue, names))
    if len(jobs) > 1:
        raise InvalidUsage(_ambiguous(text, jobs))
    return jobs[0]


async def _by_name(app: App, text: str, names: Sequence[str], *, is_ref: bool) -> list[JobInfo]:
    """Return the jobs with this id, and the one with this ref."""
    places = [(name, text) for name in names]
    if is_ref and (place := _place(text)) is not None and place[0] in names:
        places.append(place)
    return [job for name, id in places if (job := await app.queue(name).get_or_none(id)) is not None]


async def _by_end(app: App, text: str, names: Sequence[str], *, is_ref: bool) -> list[JobInfo]:
    """Return the jobs whose id ends with ``text``, which may begin with ``QUEUE/``."""
    place = _place(text) if is_ref else None
    if place is not None and place[0] in names:
        names, text = [place[0]], place[1]
    if len(text) < SHORTEST:
        return []
    storage = await app.connect()
    jobs: dict[str, JobInfo | None] = {}
    for name in names:
        async for job in _scan(storage, name):
            if job.id.endswith(text) and (ref := ref_of(name, job.id)) not in jobs:
                jobs[ref] = await app.queue(name).get_or_none(job.id)
    return [job for job in jobs.values() if job is not None]


def _place(text: str) -> tuple[str, str] | None:
    try:
        return split_ref(text)
    except InvalidName:
        return None


async def _scan(storage: Storage, queue: str) -> AsyncIterator[Job]:
    """Yield the jobs of a small queue, or those at either end of each state. May yield a job twice."""
    counts = await storage.counts(queue)
    if _size(counts) <= SCANNED_WHOLE:
        cursor, seen = "", 0
        while seen <= SCANNED_WHOLE:
            page = await storage.scan_jobs(queue, cursor=cursor, limit=1000, light=True)
            for job in page.jobs:
                yield job
            cursor, seen = page.cursor, seen + len(page.jobs)
            if not cursor:
                return
        return
    for state in State:
        for reverse in (False, True):
            page = await storage.list_jobs(queue, state, limit=SCANNED_OF_STATE, reverse=reverse)
            for job in page.jobs:
                yield job


async def _not_found(app: App, text: str, queue: str | None, names: Sequence[str]) -> str:
    place = _place(text) if queue is None else None
    if place is not None and place[0] not in names:
        return f"the queue {place[0]!r} does not exist. {meant_queue(place[0], names)}"
    where = "any queue" if queue is None else f"queue {queue!r}"
    if place is None and len(text) < SHORTEST:
        return (
            f"job {text!r} was not found in {where}. Give the whole id, the ref QUEUE/ID, or at least the last "
            f"{SHORTEST} characters of the id."
        )
    message = f"job {text!r} was not found in {where}: the id is wrong, or the job is no longer kept."
    if place is not None:
        return message
    if not await _has_large_queue(app, names):
        hint = (
            f" Of an id, only the end can stand for the whole: give its last {SHORTEST} characters or more."
        )
        return message + hint * bool(_is_part_of_id(text))
    return (
        f"{message} In a queue of more than {SCANNED_WHOLE:,} jobs, give the whole id, because only the first and "
        f"last {SCANNED_OF_STATE} jobs of each state are searched for its end."
    )


async def _has_large_queue(app: App, names: Sequence[str]) -> bool:
    storage = await app.connect()
    return any([_size(await storage.counts(name)) > SCANNED_WHOLE for name in names])


def _size(counts: Counts) -> int:
    return sum(getattr(counts, state.value) for state in State)


def _ambiguous(text: str, jobs: Sequence[JobInfo]) -> str:
    refs = listed([job.ref for job in jobs[:_MOST_NAMED]], len(jobs))
    return f"{text!r} is ambiguous: it names {refs}. Give one of these refs, or the queue with --queue."


# Views of a job


def title(info: JobInfo) -> str:
    """Return the command of a job, or its task with the arguments."""
    payload = _payload(info)
    if info.task == COMMAND_TASK and isinstance(payload, dict):
        return str(payload.get("command", ""))
    return f"{info.task} {payload}" if info.task else str(payload)


def job_row(
    info: JobInfo, reason: Reason | None = None, *, shown_id: str | None = None, whole: bool = False
) -> tuple[Any, ...]:
    """Return the row of a job under ``JOB_COLUMNS``. ``shown_id`` replaces its id; ``whole`` keeps long texts."""
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
        in_one_line(title(info)) if whole else cut(title(info)),
        info.runs,
        ago(at_ms, time.time_ns() // 1_000_000),
        in_one_line(_why(info, reason, in_words=True)) if whole else cut(_why(info, reason, in_words=False)),
    )


def _why(info: JobInfo, reason: Reason | None, *, in_words: bool) -> str:
    """Return what keeps the job from running; else its last failure, unless the job has completed."""
    if reason is not None and reason.kind not in _UNHINDERED:
        return reason.text if in_words else _in_short(info, reason)
    if info.state == "completed":
        return ""
    failure = info.raw.failure
    if failure is None:
        return info.blocked_by
    # The message of an exception says little without its class; that of a failed command needs none.
    return failure.message if info.task == COMMAND_TASK else f"{failure.type}: {failure.message}"


def _in_short(info: JobInfo, reason: Reason) -> str:
    """Return a cause for a narrow column, the telling word first: ``queue limit: mail/1``, ``paused until 18:05``."""
    if reason.kind == "unknown task":
        return f"unknown task: {info.task}"
    kind = _SHORT_KINDS.get(reason.kind, reason.kind)
    if reason.until is not None:
        return f"{kind} until {_clock(reason.until)}"
    names = ", ".join(reason.jobs) or (info.raw.extras or EMPTY_EXTRAS).awaits
    return f"{kind}: {names}" if names else kind


def _clock(at: datetime) -> str:
    """Return the time of day of an instant, with its date unless that is today."""
    local = at.astimezone()
    return f"{local:%H:%M:%S}" if local.date() == datetime.now().date() else f"{local:%Y-%m-%d %H:%M}"


def job_fields(info: JobInfo, reason: Reason | None = None, *, traceback: bool = False) -> dict[str, Any]:
    """Return everything about a job, for JSON."""
    raw = info.raw
    return {
        **info.as_dict(traceback=traceback),
        "damaged": _damaged(raw.damaged),
        "timeout_ms": raw.options.timeout_ms,
        "why": None if reason is None else reason_fields(reason),
        "staged": raw.is_staged,
        "run_at": None if raw.is_staged else info.run_at,
    }


def identity(job: JobInfo | JobHandle[Any]) -> dict[str, str]:
    """Return which job it is, for JSON."""
    return {"id": job.id, "ref": job.ref, "queue": job.queue}


def reason_fields(reason: Reason) -> dict[str, Any]:
    """Return a reason for JSON."""
    return msgspec.structs.asdict(reason)


def facts(job: JobInfo, reason: Reason | None = None) -> list[tuple[str, Any]]:
    """Return the facts about a job as names and values, without empty ones."""
    raw, fields = job.raw, job_fields(job)
    facts = [
        ("id", job.id),
        ("queue", job.queue),
        (
            "state",
            f"{job.state.value}{' (asked to stop)' if job.cancelling and job.state == 'active' else ''}",
        ),
        ("why", "" if reason is None or job.state in TERMINAL else str(reason)),
        ("what", title(job)),
        ("folder", fields["payload"].get("cwd", "") if job.task == COMMAND_TASK else ""),
        (
            "runs",
            f"{counted(job.runs, 'run')}; {job.failures} of {job.attempts} attempts failed{_stalls(job)}",
        ),
        ("failure", f"{raw.failure.type}: {raw.failure.message}" if raw.failure else ""),
        ("result", json_text(fields["result"]) if job.state == "completed" else ""),
        ("progress", "" if job.progress is None else json_text(job.progress)),
        ("priority", job.priority or ""),
        ("timeout", describe(raw.options.timeout_ms) if raw.options.timeout_ms else ""),
        ("expires", when(raw.expires_at_ms) if raw.expires_at_ms and job.state not in TERMINAL else ""),
        ("cost", job.cost if job.cost != 1 else ""),
        ("group", job.group),
        ("blocked by", job.blocked_by),
        ("rerun", "waits for this run to end" if job.has_rerun else ""),
        ("worker", job.worker if job.state == "active" else ""),
        ("due", when(raw.run_at_ms) if job.state == "scheduled" and not raw.is_staged else ""),
        ("kept until", when(raw.kept_until_ms) if job.state in TERMINAL else ""),
    ]
    return [(name, value) for name, value in facts if value not in ("", None)]


def _stalls(job: JobInfo) -> str:
    return f", {counted(job.stalls, 'stall')}" if job.stalls else ""


_STEPS_SHOWN: Final = 20


def step_row(step: StepInfo) -> dict[str, Any]:
    """Return a recorded step, for JSON."""
    fields: dict[str, Any] = msgspec.to_builtins(step)
    return fields | {"recorded_at_ms": round(step.recorded_at.timestamp() * 1000)}


def step_facts(steps: Sequence[StepInfo]) -> list[tuple[str, str]]:
    """Return the newest recorded steps as one fact, a step per line."""
    if not steps:
        return []
    lines = [_step_line(step) for step in steps[-_STEPS_SHOWN:]]
    if len(steps) > _STEPS_SHOWN:
        lines.insert(0, f"... and {counted(len(steps) - _STEPS_SHOWN, 'earlier step')}")
    return [("steps", "\n".join(lines))]


def _step_line(step: StepInfo) -> str:
    parts = [visible_in_line(step.name), step.status]
    if step.until is not None and step.status in ("waiting", "retrying"):
        parts.append(f"until {when(round(step.until.timestamp() * 1000))}")
    if step.failures:
        parts.append(f"after {counted(step.failures, 'failed attempt')}")
    if step.error_type:
        parts.append(f"({visible_in_line(step.error_type)}: {visible_in_line(step.error)})")
    return " ".join(parts)


def timeline_row(event: Event) -> dict[str, Any]:
    """Return an event of a job, for JSON."""
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


def event_line(event: Event) -> str:
    """Return an event of a job in one line."""
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
        parts.append(_recorded(event.data) if event.type == "recorded" else event.data)
    return visible_in_line("  ".join(parts))


def _recorded(data: str) -> str:
    """Return the data of a recorded step in words."""
    try:
        fields = msgspec.json.decode(data, type=dict[str, Any])
        return f"step {fields['step']} {fields['status']}"
    except (msgspec.MsgspecError, KeyError):
        return data


def timeline(events: Sequence[Event], job: Job) -> list[str]:
    """Return the events of a job in lines. The repeats of a hand-back share one line."""
    unknown_run = (job.extras or EMPTY_EXTRAS).unknown_run
    types = [event.type for event in events]
    lines: list[str] = []
    at = 0
    while at < len(events):
        end = at
        while types[end : end + 3] == _HAND_BACK:
            end += 3
        repeats = (end - at) // 3 - 1
        if repeats > 1:
            lines += map(event_line, events[at : at + 3])
            last = f"{'':21}snoozed {repeats} more times, last at {when(events[end - 1].at_ms)}"
            lines.append(last + _cause(events[end - 1], unknown_run))
            at = end
        else:
            lines.append(event_line(events[at]) + _cause(events[at], unknown_run))
            at += 1
    return lines


def _cause(event: Event, unknown_run: int) -> str:
    """Return why a run was snoozed if its worker handed it back."""
    is_handed_back = event.type == "snoozed" and unknown_run and event.run == unknown_run
    return "  handed back: the worker does not know its task" if is_handed_back else ""


def _payload(info: JobInfo) -> Any:
    try:
        return info.payload
    except SerializationError:
        return f"<{len(info.raw.payload)} bytes>"


def _damaged(packed: bytes | None) -> dict[str, Any] | None:
    """Return the stored values of an unreadable record: bytes in hex, numbers as they are."""
    if packed is None:
        return None
    parts = msgspec.msgpack.decode(packed)
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in parts.items()}


def cut(text: str, most: int = _LONGEST) -> str:
    """Return ``text`` in one line, cut for a table."""
    line = in_one_line(text)
    return line if len(line) <= most else line[: most - 1] + "…"
