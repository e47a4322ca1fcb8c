"""Searches for jobs, and operations on all jobs that match."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

import msgspec

from penstock.client.hints import SAME_STATE
from penstock.client.info import JobInfo
from penstock.client.job_verbs import QueuePart
from penstock.client.options import refuse_unknown
from penstock.client.parsers import epoch_ms, whole_number
from penstock.core.lifecycle import TERMINAL, State
from penstock.core.names import check_task
from penstock.core.text import check_text, shown
from penstock.errors import InvalidOption, SerializationError
from penstock.storage.values import Query

if TYPE_CHECKING:
    from penstock.storage.values import Bulk


_AT_ONCE: Final = 500
_MOST_SCANNED: Final = 1_000_000
_STATES: Final = frozenset(State)
_MISSING: Final = object()

Where = Mapping[str, Any] | Callable[[Any], bool]
"""Fields of the payload and their values, ``{"user.id": 7}``; or a predicate of the payload."""


class Filters(TypedDict, total=False):
    """The filters of a search.

    - ``task``: the name of the task. ``error_type``: the class name of a failed job's error. Both match exactly.
    - ``enqueued_after``, ``enqueued_before``, ``finished_after``, ``finished_before``: times with a zone.
      ``after`` is inclusive, ``before`` is exclusive.
    - ``where``: a condition on the payload, which the client decodes for every job.
    """

    task: str
    error_type: str
    enqueued_after: datetime
    enqueued_before: datetime
    finished_after: datetime
    finished_before: datetime
    where: Where


_TIMES: Final = {
    "enqueued_after": "enqueued_from_ms",
    "enqueued_before": "enqueued_to_ms",
    "finished_after": "finished_from_ms",
    "finished_before": "finished_to_ms",
}


class SearchPage(msgspec.Struct, frozen=True):
    """The jobs that match, the number of scanned jobs, and the cursor of the next page (empty: no more)."""

    jobs: list[JobInfo]
    scanned: int
    cursor: str = ""


class Searching(QueuePart):
    """The searches of a queue."""

    async def search(
        self,
        state: State | str,
        *,
        limit: int = 100,
        scan: int = 10_000,
        cursor: str = "",
        **filters: Unpack[Filters],
    ) -> SearchPage:
        """Return up to ``limit`` matching jobs of a state, among the next ``scan`` jobs.

        They have the order of ``list_jobs``; with ``error_type``, which is indexed, the order in which they failed.
        Call again with the ``cursor`` of the page to continue.
        """
        whole_number("limit", limit, least=1, most=10_000)
        whole_number("scan", scan, least=1, most=_MOST_SCANNED)
        cursor = check_text(cursor, what="cursor")
        query, fits = _parsed(as_state(state), filters)
        found: list[JobInfo] = []
        scanned = 0
        while True:
            page = await self._look(query, fits, cursor, wanted=limit - len(found), scan=scan - scanned)
            found += page.jobs
            scanned, cursor = scanned + page.scanned, page.cursor
            if not cursor or len(found) >= limit or scanned >= scan:
                return SearchPage(found, scanned, cursor)

    async def _look(
        self, query: Query, fits: Callable[[JobInfo], bool], cursor: str, *, wanted: int, scan: int
    ) -> SearchPage:
        """Return at most ``wanted`` of the next jobs that match."""
        storage, at_once = await self._storage(), max(wanted, _AT_ONCE)
        while True:
            page = await storage.search(self.name, query, cursor=cursor, limit=at_once, scan=scan)
            places = [at for at, job in enumerate(page.jobs) if fits(JobInfo(self._source, job))]
            if len(places) <= wanted:
                jobs = [JobInfo(self._source, page.jobs[at]) for at in places]
                return SearchPage(jobs, page.scanned, page.cursor)
            # Read fewer, so that the cursor does not skip the jobs that are left out.
            at_once = places[wanted - 1] + 1

    async def errors(self) -> dict[str, int]:
        """Return the number of failed jobs by error class, the most frequent first."""
        counts = await (await self._storage()).errors(self.name)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    async def retry_all(self, *, limit: int | None = None, **filters: Unpack[Filters]) -> int:
        """Retry the failed jobs that match, at most ``limit``, and return their number.

        A job that fails again in the meantime is not retried twice.
        """
        storage, queue = await self._storage(), self.name
        if not filters:
            return await to_the_end(
                lambda cursor, most: storage.retry_all(queue, limit=most, cursor=cursor), limit=limit
            )

        async def retry(ids: list[str]) -> int:
            return (await storage.retry(queue, ids)).count("retried")

        return await self._each_matching(State.FAILED, filters, retry, limit=limit)

    async def remove_all(
        self, state: State | str, *, limit: int | None = None, **filters: Unpack[Filters]
    ) -> int:
        """Remove the jobs of a state that match, at most ``limit``, and return their number. Held jobs go, too.

        Raises ``InvalidOption`` for active jobs, which cannot be removed.
        """
        checked = as_state(state)
        if checked is State.ACTIVE:
            raise InvalidOption(
                "active jobs cannot be removed. Cancel them, and remove them when they have finished."
            )
        storage, queue = await self._storage(), self.name

        async def remove(ids: list[str]) -> int:
            return (await storage.remove(queue, ids)).count("removed")

        return await self._each_matching(checked, filters, remove, limit=limit)

    async def _each_matching(
        self, state: State, filters: Filters, act: Callable[[list[str]], Awaitable[int]], *, limit: int | None
    ) -> int:
        done, most = 0, at_most(limit)
        async for ids in self._matching(state, filters):
            done += await act(ids[: most - done])
            if done >= most:
                break
        return done

    async def _matching(self, state: State, filters: Filters) -> AsyncGenerator[list[str], None]:
        """Yield the ids of matching jobs in chunks, without jobs that were added after the start."""
        query, fits = _parsed(state, filters)
        storage, cursor, began_ms = await self._storage(), "", 0
        while True:
            page = await storage.search(self.name, query, cursor=cursor, limit=_AT_ONCE)
            began_ms = began_ms or page.now_ms
            jobs = [job for job in page.jobs if max(job.finished_at_ms, job.enqueued_at_ms) <= began_ms]
            ids = [job.id for job in jobs if fits(JobInfo(self._source, job))]
            if ids:
                yield ids
            if not page.cursor:
                return
            cursor = page.cursor


def as_state(state: Any) -> State:
    """Return the state with that name. Raise ``InvalidOption`` if there is none."""
    if not isinstance(state, str) or state not in _STATES:
        same = SAME_STATE.get(state.lower()) if isinstance(state, str) else None
        remedy = f"Did you mean {same!r}?" if same else f"Give {', '.join(State)}."
        raise InvalidOption(f"state={shown(state)} is unknown. {remedy}")
    return State(state)


async def to_the_end(step: Callable[[str, int], Awaitable[Bulk]], *, limit: int | None = None) -> int:
    """Call ``step`` with a cursor and a maximum until it is finished or has processed ``limit`` jobs."""
    done, cursor, most = 0, "", at_most(limit)
    while done < most:
        bulk = await step(cursor, min(most - done, _AT_ONCE))
        done, cursor = done + bulk.done, bulk.cursor
        if not cursor:
            break
    return done


def at_most(limit: int | None) -> int:
    """Return ``limit``; ``None`` means unlimited. Raise ``InvalidOption`` if it is not valid."""
    return 2**53 if limit is None else whole_number("limit", limit, least=1)


def _parsed(state: State, filters: Filters) -> tuple[Query, Callable[[JobInfo], bool]]:
    refuse_unknown(filters, Filters.__annotations__, where="a search")
    task = filters.get("task")
    error_type = check_text(filters.get("error_type") or "", what="error_type")
    if error_type and state is not State.FAILED:
        raise InvalidOption(
            f"error_type={shown(error_type)} applies only to failed jobs, not to {state} ones."
        )
    has_ended = "finished_after" in filters or "finished_before" in filters
    if has_ended and state not in TERMINAL:
        raise InvalidOption(
            f"{state} jobs have not finished. Give a time of their enqueue, or another state."
        )
    given: Mapping[str, Any] = filters
    times = {field: epoch_ms(name, given[name]) for name, field in _TIMES.items() if given.get(name)}
    query = Query(state=state, task=check_task(task) if task else "", error_type=error_type, **times)
    return query, _predicate(filters.get("where"))


def _predicate(where: Where | None) -> Callable[[JobInfo], bool]:
    if where is None:
        return lambda info: True
    if callable(where):
        test = where
    elif isinstance(where, Mapping):
        fields = [
            (check_text(path, what="where: the field").split("."), value) for path, value in where.items()
        ]

        def test(payload: Any) -> bool:
            return all(_at(payload, path) == value for path, value in fields)

    else:
        raise InvalidOption(
            f'where must be fields, such as {{"user.id": 7}}, or a function, got {shown(where)}.'
        )

    def fits(info: JobInfo) -> bool:
        try:
            return bool(test(info.payload))
        except SerializationError:  # It has other fields.
            return False

    return fits


def _at(value: Any, path: list[str]) -> Any:
    for name in path:
        if isinstance(value, Mapping):
            value = value.get(name, _MISSING)
        elif isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = getattr(value, name, _MISSING)
    return value
