"""Names of jobs on the command line: short ids in tables, and the job that a typed id, ref or suffix means.

Generated ids begin with the time, so jobs that were enqueued together differ only at the end: a short id is the end.
Ids that people chose are shown whole.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.cli.connect import queues_of
from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.core.lifecycle import State
from penstock.core.names import check_id, ref_of, split_ref
from penstock.errors import InvalidName
from penstock.situation import listed

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.core.job import Job
    from penstock.info import JobInfo
    from penstock.storage.base import Storage

__all__ = ["SHORTEST", "find_job", "short_ids"]

SHORTEST: Final = 8
"""The fewest characters of an id's end that stand for the id."""
SCANNED_WHOLE: Final = 10_000
"""A queue of up to this many jobs is searched whole for an id's end."""
SCANNED_OF_STATE: Final = 500
"""In a larger queue, this many jobs at either end of each state."""
_MOST_NAMED: Final = 5

_GENERATED: Final = 32
_is_generated: Final = re.compile(rf"[0-9a-f]{{{_GENERATED}}}").fullmatch


def short_ids(ids: Iterable[str]) -> dict[str, str]:
    """Return the shortest end of each generated id that no other of these ids has; other ids as they are."""
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
    """Return the job that ``text`` names: by its id, its ref, or the end of its id.

    An end has 8 characters or more, and only one job's id may end with it. See ``SCANNED_WHOLE`` for the jobs
    that are looked at.
    """
    names = await queues_of(app, queue)
    found = await _by_name(app, check_id(text), names, is_ref=queue is None)
    if not found:
        found = await _by_end(app, text, names, is_ref=queue is None)
    if not found:
        raise NotFound(_not_found(text, queue))
    if len(found) > 1:
        raise CommandLineError(_ambiguous(text, found), ExitCode.USAGE)
    return found[0]


async def _by_name(app: App, text: str, names: Sequence[str], *, is_ref: bool) -> list[JobInfo]:
    """Return the jobs with this id, and the one with this ref."""
    places = [(name, text) for name in names]
    if is_ref and (place := _place(text)) is not None and place[0] in names:
        places.append(place)
    return [job for name, id in places if (job := await app.queue(name).get_or_none(id)) is not None]


async def _by_end(app: App, text: str, names: Sequence[str], *, is_ref: bool) -> list[JobInfo]:
    """Return the jobs whose id ends with ``text``, or with what stands behind the queue's name in it."""
    place = _place(text) if is_ref else None
    if place is not None and place[0] in names:
        names, text = [place[0]], place[1]
    if len(text) < SHORTEST:
        return []
    storage = await app.connect()
    found: dict[str, JobInfo | None] = {}
    for name in names:
        async for job in _scan(storage, name):
            if job.id.endswith(text) and (ref := ref_of(name, job.id)) not in found:
                found[ref] = await app.queue(name).get_or_none(job.id)
    return [job for job in found.values() if job is not None]


def _place(text: str) -> tuple[str, str] | None:
    try:
        return split_ref(text)
    except InvalidName:
        return None


async def _scan(storage: Storage, queue: str) -> AsyncIterator[Job]:
    """Yield the jobs of a small queue, or those at either end of each state. A job may come twice."""
    counts = await storage.counts(queue)
    if sum(getattr(counts, state.value) for state in State) <= SCANNED_WHOLE:
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


def _not_found(text: str, queue: str | None) -> str:
    where = "any queue" if queue is None else f"queue {queue!r}"
    if len(text) < SHORTEST:
        return (
            f"job {text!r} was not found in {where}. Give the whole id, the ref QUEUE/ID, or at least the last "
            f"{SHORTEST} characters of the id."
        )
    return (
        f"job {text!r} was not found in {where}: the id is wrong, or the job is no longer kept. In a queue of more "
        f"than {SCANNED_WHOLE:,} jobs, give the whole id, because only the first and last {SCANNED_OF_STATE} jobs of "
        "each state are searched for its end."
    )


def _ambiguous(text: str, found: Sequence[JobInfo]) -> str:
    named = listed([job.ref for job in found[:_MOST_NAMED]], len(found))
    return f"{text!r} is ambiguous: it names {named}. Give one of these refs, or the queue with --queue."
