"""``penstock status`` and ``top``: the queues of a store, their jobs, and what keeps these from running."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import InvalidUsage, NotFound
from penstock.cli.jobview import reason_fields
from penstock.cli.output import (
    at_terminal,
    console,
    exact,
    fitted,
    print_json,
    print_sentences,
    print_table,
    rich_table,
    span,
    wrapped,
)
from penstock.cli.parameters import (
    command,
    every_option,
    json_option,
    one_queue,
    option,
    queue_argument,
    queue_option,
)
from penstock.cli.settings import Settings
from penstock.cli.workers import read_workers
from penstock.client.session import shown_store
from penstock.client.situation import SEEN_LATELY_MS, at_second, counted, group_of, listed, worker_command
from penstock.client.why import explain, explain_all
from penstock.core.command import COMMAND_TASK
from penstock.core.lifecycle import State
from penstock.core.text import visible_in_line
from penstock.errors import StorageError
from penstock.storage.bounds import MINUTE_MS
from penstock.storage.metrics import Minute

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.job import Job
    from penstock.storage.contract import Storage

_COLUMNS: Final = ("queue", *State, "oldest", "done/min", "failed/min", "")
# A narrow terminal drops empty columns first, then rates. It never drops a state that has jobs.
_RATES: Final = ("failed/min", "done/min", "oldest")
_EMPTY_FIRST: Final = ("cancelled", "completed", "scheduled", "blocked")
_RATE_MINUTES: Final = 5
_SHOWN_MINUTES: Final = 20
_NEEDS_NOTHING: Final = ("ready", "busy", "active", "completed", "failed", "cancelled")
_ENDS_BY_ITSELF: Final = ("not due", "retry", "children", "staged")
_JOBS_EXPLAINED: Final = 100
_CAUSES_SHOWN: Final = 10
_GROUPS_READ: Final = 1000
_NAMED: Final = 3
_UNATTENDED: Final = ("no worker", "worker died")
_OF_QUEUE: Final = ("paused", "budget", "queue limit", "rate limit", "not consuming")


async def read_status(app: App, queue: str | None, *, explained: bool = True) -> dict[str, Any]:
    """Return counts and rates of the queues, the number of workers, and, if ``explained``, why jobs do not run."""
    names = await queues_of(app, queue)
    rows = [await read_counts(app, name) for name in names]
    for row in rows if explained else ():
        row["causes"] = await read_causes(app, row)
    workers = await read_workers(app, queue)
    live = [worker for worker in workers if worker["state"] not in ("silent", "dead")]
    dead = [worker["worker"] for worker in workers if worker["state"] == "dead"]
    silent = [worker["worker"] for worker in workers if worker["state"] == "silent"]
    attended = {name for worker in live for name in worker["queues"]}
    slots = sum(worker["concurrency"] for worker in live)
    # The workers' own numbers are as old as their last heartbeat. Jobs of dead workers are still active.
    active = sum(row["active"] for row in rows if row["queue"] in attended and not dead and not silent)
    return {
        "store": shown_store(app.url, app.namespace),
        "queue": queue,
        "queues": rows,
        "workers": len(live),
        "running": max(sum(worker["active"] for worker in live), min(active, slots)),
        "slots": slots,
        "silent_workers": len(silent),
        "dead_workers": len(dead),
        "silent": silent,
        "dead": dead,
        "unattended": [queue] * (not live)
        if queue
        else [row["queue"] for row in rows if row["queue"] not in attended and _needs_worker(row)],
    }


def _needs_worker(row: dict[str, Any]) -> bool:
    kinds = {cause["kind"] for cause in row.get("causes", ())}
    return bool(row["waiting"] or row["due"] or not kinds.isdisjoint(_UNATTENDED))


async def read_counts(app: App, name: str) -> dict[str, Any]:
    """Return the counts and rates of a queue."""
    named = app.queue(name)
    counts = await named.counts()
    pauses = await read_pauses(await app.connect(), name, is_paused=counts.paused)
    whole = next((pause for pause in pauses if not pause.group), None)
    minutes = await named.metrics(last=f"{_SHOWN_MINUTES}m")
    completed, failed = (_by_minute(minutes, name) for name in ("completed", "failed"))
    return {
        "queue": name,
        **{state.value: getattr(counts, state.value) for state in State},
        "staged": counts.staged,
        "due": counts.due,
        "paused": whole is not None,
        "paused_until": exact(whole.until_ms) if whole is not None and whole.until_ms else None,
        "paused_until_ms": None if whole is None else whole.until_ms,
        "paused_groups": [
            {"group": pause.group, "until": exact(pause.until_ms) if pause.until_ms else None}
            for pause in pauses
            if pause.group
        ],
        "oldest_waiting_ms": counts.oldest_waiting_ms,
        "completed_per_minute": round(sum(completed[-_RATE_MINUTES:]) / _RATE_MINUTES, 1),
        "failed_per_minute": round(sum(failed[-_RATE_MINUTES:]) / _RATE_MINUTES, 1),
        "completed_by_minute": completed,
    }


class QueuePause(NamedTuple):
    """A pause of a queue or of a group in it. ``until_ms`` is ``None`` if it lasts until it is resumed."""

    queue: str
    group: str
    until_ms: int | None


async def read_pauses(storage: Storage, queue: str, *, is_paused: bool) -> list[QueuePause]:
    """Return the pauses of a queue and of the first of its groups, including those that end by themselves."""
    try:
        clock = await storage.clock(queue)
        states = [
            *(await storage.groups(queue, keys=[""])).groups,
            *(await storage.groups(queue, limit=_GROUPS_READ)).groups,
        ]
    except StorageError:
        # A read-only store, such as a replica, may refuse to read groups.
        return [QueuePause(queue, "", None)] if is_paused else []
    return [
        QueuePause(
            queue, group.key, None if group.paused or group.wait_ms is None else clock.now_ms + group.wait_ms
        )
        for group in states
        if group.paused or group.why in ("paused", "asked")
    ]


def pauses_in_words(row: dict[str, Any]) -> str:
    """Return the pauses of a queue as a short text."""
    until = f" until {at_second(row['paused_until_ms'])}" if row["paused_until_ms"] else ""
    groups = [paused["group"] for paused in row["paused_groups"]]
    pauses = [f"paused{until}"] if row["paused"] else []
    if groups:
        pauses.append(f"group {groups[0]} paused" if len(groups) == 1 else f"{len(groups)} groups paused")
    return ", ".join(pauses)


async def read_causes(app: App, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the causes that keep open jobs of a queue from running, each with its first job and a count.

    Only the first jobs of each state are explained. While jobs run, causes that go away by themselves are left out.
    """
    storage, queue = await app.connect(), row["queue"]
    jobs: list[Job] = []
    for state in (State.WAITING, State.BLOCKED, State.SCHEDULED, State.ACTIVE):
        if row[state.value] or (state is State.SCHEDULED and row["staged"]):
            jobs += (await storage.list_jobs(queue, state, limit=_JOBS_EXPLAINED)).jobs
    reasons = await explain_all(storage, jobs)
    held: dict[tuple[str, ...], list[Job]] = {}
    for job in jobs:
        held.setdefault(_cause_key(job, reasons[queue, job.id].kind), []).append(job)
    is_running = any(reason.kind == "active" for reason in reasons.values())
    hidden = (*_NEEDS_NOTHING, *_ENDS_BY_ITSELF) if is_running else _NEEDS_NOTHING
    causes = [members for (kind, *_), members in held.items() if kind not in hidden][:_CAUSES_SHOWN]
    return [await _cause(storage, members, row) for members in causes]


def _cause_key(job: Job, kind: str) -> tuple[str, ...]:
    """Return the kind of a cause. Causes of different tasks or groups are different causes."""
    if kind == "unknown task":
        return kind, job.options.task
    if kind in _UNATTENDED:
        return kind, _target_of(job.options.task)
    return (kind, group_of(job)) if kind.startswith("group") else (kind,)


async def _cause(storage: Storage, jobs: list[Job], row: dict[str, Any]) -> dict[str, Any]:
    # The answer for a single job has more details: the start of a pause, the children.
    reason = await explain(storage, jobs[0])
    more = row[jobs[0].state.value] > _JOBS_EXPLAINED
    return {
        "job": jobs[0].id,
        "count": len(jobs),
        "at_least": more,
        "task": jobs[0].options.task,
        **reason_fields(reason),
    }


def _by_minute(minutes: Sequence[Minute], name: str) -> list[int]:
    """Return a count for each of the last minutes, the current one last."""
    counts = {minute.at_ms // MINUTE_MS: getattr(minute, name) for minute in minutes}
    current = max([time.time_ns() // 1_000_000 // MINUTE_MS, *counts])
    return [counts.get(current - back, 0) for back in reversed(range(_SHOWN_MINUTES))]


@command("status")
@queue_argument
@queue_option
@option("-w, --watch", "Refresh until Ctrl-C.")
@every_option
@json_option
def status(
    settings: Settings, *, name: str | None, queue: str | None, watch: bool, every: float, as_json: bool
) -> None:
    """Show the number of jobs in each queue and state, their rates, the workers, and why jobs do not run.

    \b
      scheduled    not due yet: delayed, or waiting for the next attempt
      waiting      ready for a worker
      blocked      waits for other jobs, for room in its group, or for a signal
      active       runs
      completed, failed, cancelled    finished, and kept for a while
    """
    queue = one_queue(name, queue)

    async def show(app: App) -> None:
        try:
            await queues_of(app, name)
        except NotFound as error:
            raise NotFound(f"{error} For a job, run: penstock show {name}") from None
        if watch and at_terminal() and not as_json:
            await _watch(app, queue, every)
            return
        while True:
            _print(await read_status(app, queue), as_json=as_json)
            if not watch:
                return
            await asyncio.sleep(every)

    run_with_app(settings, show)


async def _watch(app: App, queue: str | None, every: float) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            status = await read_status(app, queue)
            table = fitted(_COLUMNS, _rows(status), width=live.console.width, spare=_spare(status))
            lines = [_store_line(status), *_cause_lines(status), workers_line(status)]
            title = "\n".join(wrapped(line, live.console.width) for line in lines)
            live.update(rich_table(*table, title=title), refresh=True)
            await asyncio.sleep(every)


def _print(status: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(status)
        return
    empty = f"no jobs yet in the store {status['store']}"
    if status["queues"]:
        click.echo(_store_line(status))
    print_table(_COLUMNS, _rows(status), empty=empty, spare=_spare(status))
    for line in (*_cause_lines(status), workers_line(status)):
        print_sentences(line)


def _store_line(status: dict[str, Any]) -> str:
    return f"store {status['store']}"


def _spare(status: dict[str, Any]) -> list[str]:
    """Return the columns that a narrow terminal may drop."""
    empty = [name for name in _EMPTY_FIRST if not any(row[name] for row in status["queues"])]
    return [*empty, *_RATES]


def _cause_lines(status: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each cause in each queue, except what ``workers_line`` says about all queues."""
    hidden = "no worker" if _target(status) else ""
    for row in status["queues"]:
        for cause in row["causes"]:
            if cause["kind"] != hidden:
                yield visible_in_line(
                    f"{held_jobs(row['queue'], cause)}: {cause['text']} {cause['remedy']}".rstrip()
                )


def held_jobs(queue: str, cause: dict[str, Any]) -> str:
    """Return the jobs that a cause holds back: the queue with their number, or the first of them."""
    least = "at least " if cause["at_least"] else ""
    if cause["kind"] in _OF_QUEUE:
        return f"{queue}, {least}{counted(cause['count'], 'job')}"
    others = f" and {least}{cause['count'] - 1} more" if cause["count"] > 1 else ""
    return f"{queue}/{cause['job']}{others}"


def workers_line(status: dict[str, Any]) -> str:
    """Return the number of workers, with the command that starts one for the queues without a worker."""
    silent, dead, unattended = status["silent"], status["dead"], status["unattended"]
    target = _target(status)
    served = _served(status)
    is_helpful = target and (served or not unattended)
    start = f": {worker_command(*served, target=target)}" if is_helpful else ""
    if not status["workers"]:
        of_queue = f" for queue {status['queue']}" if status["queue"] else ""
        line = f"no worker runs{of_queue}{f'{start} starts one' * bool(start)}"
    else:
        line = f"{counted(status['workers'], 'worker')}, {status['running']} of {counted(status['slots'], 'slot')} busy"
        if unattended:
            line += f"; none works on {', '.join(unattended)}{start}"
    line += f"; {len(dead)} died: {listed(dead[:_NAMED], len(dead))}" if dead else ""
    if silent:
        line += f"; {len(silent)} silent for {span(SEEN_LATELY_MS)}: {listed(silent[:_NAMED], len(silent))}"
    return visible_in_line(line)


def _target(status: dict[str, Any]) -> str:
    """Return the argument of a worker for all jobs without one.

    Empty if they need different workers, or if their causes were not read, as in ``top``.
    """
    if any("causes" not in row for row in status["queues"]):
        return ""
    causes = [cause for row in status["queues"] for cause in row.get("causes", ())]
    unattended = [cause for cause in causes if cause["kind"] == "no worker"]
    targets = {_target_of(cause["task"]) for cause in unattended or causes}
    if len(targets) == 1:
        return targets.pop()
    return "" if unattended else "MODULE:APP"


def _served(status: dict[str, Any]) -> list[str]:
    """Return the queues without a worker that a worker for ``_target`` helps, and whose causes do not name another."""
    causes = {row["queue"]: row.get("causes", ()) for row in status["queues"]}
    needing = {queue for queue, of in causes.items() if any(cause["kind"] == "no worker" for cause in of)}
    if needing:
        return [queue for queue in status["unattended"] if queue in needing]
    return [
        queue
        for queue in status["unattended"]
        if not any("`penstock worker " in cause["remedy"] for cause in causes.get(queue, ()))
    ]


def _target_of(task: str) -> str:
    """Return the argument of a worker for a task; empty for a job without a task, which needs its own handler."""
    return "--commands" if task == COMMAND_TASK else "MODULE:APP" if task else ""


def _rows(status: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            row["queue"],
            *(row[state.value] for state in State),
            span(row["oldest_waiting_ms"]) if row["waiting"] else "",
            row["completed_per_minute"],
            row["failed_per_minute"],
            ", ".join(
                filter(None, [pauses_in_words(row), f"{row['staged']} staged" if row["staged"] else ""])
            ),
        )
        for row in status["queues"]
    ]


_SUMMARY: Final = "Show queues, workers and jobs on one screen, with keys to act on them."
KEYS: Final = """\
up, down       choose a job
left, right    show the jobs of another state
enter          show the job: its facts, timeline and log
r              retry it
c              cancel it
x              remove it
p              pause or resume its queue
P              pause or resume all queues
tab            move to the queues; enter shows one of them
esc            go back to all jobs
?              show these keys
q              quit"""


@command("top", help=f"{_SUMMARY}\n\n\b\n{KEYS}")
@every_option
def top(settings: Settings, *, every: float) -> None:
    """Open the screen until the user quits."""
    if not at_terminal() or not sys.stdin.isatty():
        raise InvalidUsage("top needs a terminal. In a pipe, use: penstock status --watch")

    # Imported here, so that other commands start without textual.
    from penstock.cli.topscreen import TopScreen

    run_with_app(settings, lambda app: TopScreen(app, every=every).run_async())
