"""``penstock status`` and ``penstock workers``: how it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.jobview import reason_fields
from penstock.cli.output import at_terminal, console, exact, fitted, print_json, print_table, rich_table, span
from penstock.cli.parameters import Flags, command, every_option, json_option, queue_option
from penstock.cli.settings import Settings
from penstock.client.session import shown_store
from penstock.client.situation import SEEN_LATELY_MS, at_second, counted, group_of, listed, worker_command
from penstock.client.why import explain, explain_all
from penstock.core.command import COMMAND_TASK
from penstock.core.lifecycle import State
from penstock.core.text import visible_in_line
from penstock.errors import StorageError
from penstock.storage.metrics import MINUTE_MS, Minute

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.info import WorkerInfo
    from penstock.core.job import Job
    from penstock.storage.contract import Storage


_COLUMNS: Final = ("queue", *State, "oldest", "done/min", "failed/min", "")
# Those that say nothing go first anyway. What stands still is more urgent than what has ended.
_SPARE: Final = ("cancelled", "failed/min", "done/min", "oldest", "completed", "scheduled", "blocked")
_RATE_MINUTES: Final = 5
_SHOWN_MINUTES: Final = 20
_WORKER_COLUMNS: Final = ("worker", "host", "pid", "state", "queues", "running", "seen")
_MOVING: Final = ("ready", "busy", "active", "completed", "failed", "cancelled")
_PATIENT: Final = ("not due", "retry", "children", "staged")
_JOBS_EXPLAINED: Final = 100
_CAUSES_SHOWN: Final = 10
_GROUPS_READ: Final = 1000
_NAMED: Final = 3
_OF_QUEUE: Final = ("paused", "budget", "queue limit", "rate limit", "not consuming")


async def read_status(app: App, queue: str | None, *, explained: bool = True) -> dict[str, Any]:
    """Return counts and rates of the queues, the number of workers, and, if ``explained``, what holds jobs back."""
    names = await queues_of(app, queue)
    rows = [await read_counts(app, name) for name in names]
    for row in rows if explained else ():
        row["causes"] = await read_causes(app, row)
    workers = await read_workers(app, queue)
    live = [worker for worker in workers if worker["state"] not in ("silent", "dead")]
    dead = [worker["worker"] for worker in workers if worker["state"] == "dead"]
    silent = [worker["worker"] for worker in workers if worker["state"] == "silent"]
    attended = {name for worker in live for name in worker["queues"]}
    return {
        "store": shown_store(app.url, app.namespace),
        "queue": queue,
        "queues": rows,
        "workers": len(live),
        "running": sum(worker["active"] for worker in live),
        "slots": sum(worker["concurrency"] for worker in live),
        "silent_workers": len(silent),
        "dead_workers": len(dead),
        "silent": silent,
        "dead": dead,
        "unattended": [queue] * (not live)
        if queue
        else [
            row["queue"] for row in rows if (row["waiting"] or row["due"]) and row["queue"] not in attended
        ],
    }


async def read_counts(app: App, name: str) -> dict[str, Any]:
    """Return the counts and rates of a queue."""
    named = app.queue(name)
    counts = await named.counts()
    halts = await read_halts(await app.connect(), name, is_paused=counts.paused)
    whole = next((halt for halt in halts if not halt.group), None)
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
            {"group": halt.group, "until": exact(halt.until_ms) if halt.until_ms else None}
            for halt in halts
            if halt.group
        ],
        "oldest_waiting_ms": counts.oldest_waiting_ms,
        "completed_per_minute": round(sum(completed[-_RATE_MINUTES:]) / _RATE_MINUTES, 1),
        "failed_per_minute": round(sum(failed[-_RATE_MINUTES:]) / _RATE_MINUTES, 1),
        "completed_by_minute": completed,
    }


class Halt(NamedTuple):
    """A pause of a queue or of a group in it. ``until_ms`` is ``None`` if it lasts until it is resumed."""

    queue: str
    group: str
    until_ms: int | None


async def read_halts(storage: Storage, queue: str, *, is_paused: bool) -> list[Halt]:
    """Return the pauses of a queue and of the first of its groups, with those that end by themselves."""
    try:
        clock = await storage.clock(queue)
        states = [
            *(await storage.groups(queue, keys=[""])).groups,
            *(await storage.groups(queue, limit=_GROUPS_READ)).groups,
        ]
    except StorageError:
        # A store that only reads, such as a replica, may not tell about groups.
        return [Halt(queue, "", None)] if is_paused else []
    return [
        Halt(queue, one.key, None if one.paused or one.wait_ms is None else clock.now_ms + one.wait_ms)
        for one in states
        if one.paused or one.why in ("paused", "asked")
    ]


def halted(row: dict[str, Any]) -> str:
    """Return the pauses of a queue in a few words."""
    until = f" until {at_second(row['paused_until_ms'])}" if row["paused_until_ms"] else ""
    groups = [one["group"] for one in row["paused_groups"]]
    told = [f"paused{until}"] if row["paused"] else []
    if groups:
        told.append(f"group {groups[0]} paused" if len(groups) == 1 else f"{len(groups)} groups paused")
    return ", ".join(told)


async def read_causes(app: App, row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what keeps open jobs of a queue from running, by cause, each with the first job it holds and a count.

    The first jobs of each state are looked at. Causes that time or running jobs remove are left out while jobs run.
    """
    storage, queue = await app.connect(), row["queue"]
    held: dict[tuple[str, ...], list[Job]] = {}
    for state in (State.WAITING, State.BLOCKED, State.SCHEDULED):
        if not row[state.value] and not (state is State.SCHEDULED and row["staged"]):
            continue
        page = await storage.list_jobs(queue, state, limit=_JOBS_EXPLAINED)
        reasons = await explain_all(storage, page.jobs)
        for job in page.jobs:
            held.setdefault(_told_apart(job, reasons[queue, job.id].kind), []).append(job)
    hidden = (*_MOVING, *_PATIENT) if row["active"] else _MOVING
    shown = [jobs for (kind, *_), jobs in held.items() if kind not in hidden][:_CAUSES_SHOWN]
    return [await _cause(storage, jobs, row) for jobs in shown]


def _told_apart(job: Job, kind: str) -> tuple[str, ...]:
    """Return what distinguishes the cause of a job from others of the same kind: the task, or the group."""
    if kind == "unknown task":
        return kind, job.options.task
    return (kind, group_of(job)) if kind.startswith("group") else (kind,)


async def _cause(storage: Storage, jobs: list[Job], row: dict[str, Any]) -> dict[str, Any]:
    # The answer for one job says more than that for a list: since when, because of which jobs.
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
    """Return a count for each of the last minutes, the present one last."""
    known = {minute.at_ms // MINUTE_MS: getattr(minute, name) for minute in minutes}
    present = max([time.time_ns() // 1_000_000 // MINUTE_MS, *known])
    return [known.get(present - back, 0) for back in reversed(range(_SHOWN_MINUTES))]


async def read_workers(app: App, queue: str | None) -> list[dict[str, Any]]:
    """Return the workers of the queues, each once as it was seen last, those that were seen last first.

    Workers of queues that never had a job are among them: they wait for the first.
    """
    found: dict[str, dict[str, Any]] = {}
    attended = await (await app.connect()).attended() if queue is None else []
    for name in sorted({*await queues_of(app, queue), *attended}):
        for worker in await app.queue(name).workers():
            if worker.id in found and found[worker.id]["seen_ms_ago"] <= worker.raw.age_ms:
                continue
            info = worker.info
            found[worker.id] = {
                "worker": worker.id,
                "host": worker.host,
                "pid": worker.pid,
                "state": _state_of(worker),
                "queues": list(info.get("queues", ())),
                "active": info.get("active", 0),
                "concurrency": info.get("concurrency", 0),
                "running": info.get("running", []),
                "unknown": list(info.get("unknown", ())),
                "seen_ms_ago": worker.raw.age_ms,
            }
    return sorted(found.values(), key=lambda worker: worker["seen_ms_ago"])


def _state_of(worker: WorkerInfo) -> str:
    """Return what the worker said of itself, unless it is known or likely to be gone."""
    if worker.dead:
        return "dead"
    return str(worker.info.get("state", "")) if worker.raw.age_ms < SEEN_LATELY_MS else "silent"


@command("status")
@queue_option
@click.option("-w", "--watch", is_flag=True, help="Show it again and again, until Ctrl-C.")
@every_option
@json_option
@click.pass_obj
def status(flags: Flags, /, *, queue: str | None, watch: bool, every: float, as_json: bool) -> None:
    """How many jobs there are in each queue and state, how fast they go, who works on them.

    \b
      scheduled    not due yet: delayed, or resting before the next attempt
      waiting      ready for a worker
      blocked      waits for other jobs, or for room in its group
      active       runs
      completed, failed, cancelled    have ended, and are kept for a while
    """
    settings = Settings(flags)

    async def show(app: App) -> None:
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
            told = await read_status(app, queue)
            table = fitted(_COLUMNS, _rows(told), width=live.console.width, spare=_SPARE)
            title = "\n".join([*_standstill(told), workers_line(told)])
            live.update(rich_table(*table, title=title), refresh=True)
            await asyncio.sleep(every)


def _print(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    print_table(_COLUMNS, _rows(told), empty=f"no jobs yet in the store {told['store']}", spare=_SPARE)
    for line in _standstill(told):
        click.echo(line)
    click.echo(workers_line(told))


def _standstill(told: dict[str, Any]) -> Iterator[str]:
    """Return a line for each cause in each queue. That no worker runs is said below, for all queues at once."""
    for row in told["queues"]:
        for cause in row["causes"]:
            if cause["kind"] != "no worker":
                yield visible_in_line(f"{_held(row, cause)}: {cause['text']} {cause['remedy']}".rstrip())


def _held(row: dict[str, Any], cause: dict[str, Any]) -> str:
    """Return the jobs that a cause holds: the queue with their number, or the first of them."""
    least = "at least " if cause["at_least"] else ""
    if cause["kind"] in _OF_QUEUE:
        return f"{row['queue']}, {least}{counted(cause['count'], 'job')}"
    others = f" and {least}{cause['count'] - 1} more" if cause["count"] > 1 else ""
    return f"{row['queue']}/{cause['job']}{others}"


def workers_line(told: dict[str, Any]) -> str:
    """Return who works on the queues, and what to do about those that nobody works on."""
    count, silent, dead, unattended = told["workers"], told["silent"], told["dead"], told["unattended"]
    if not count:
        of_queue = f" for queue {told['queue']}" if told["queue"] else ""
        line = f"no worker runs{of_queue}: {worker_command(*unattended, target=_target(told))} starts one"
    else:
        line = f"{counted(count, 'worker')}, {told['running']} of {counted(told['slots'], 'slot')} busy"
        if unattended:
            line += f"; none works on {', '.join(unattended)}: {worker_command(*unattended, target=_target(told))}"
    line += f"; {len(dead)} died: {listed(dead[:_NAMED], len(dead))}" if dead else ""
    if silent:
        line += (
            f"; {len(silent)} not heard of for {span(SEEN_LATELY_MS)}: {listed(silent[:_NAMED], len(silent))}"
        )
    return visible_in_line(line)


def _target(told: dict[str, Any]) -> str:
    """Return what a worker needs to run the jobs that nobody runs: an app, unless they are all commands."""
    causes = [cause for row in told["queues"] for cause in row.get("causes", ())]
    return "--commands" if causes and all(one["task"] == COMMAND_TASK for one in causes) else "[MODULE:APP]"


def _rows(told: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            row["queue"],
            *(row[state.value] for state in State),
            span(row["oldest_waiting_ms"]) if row["waiting"] else "",
            row["completed_per_minute"],
            row["failed_per_minute"],
            ", ".join(filter(None, [halted(row), f"{row['staged']} staged" if row["staged"] else ""])),
        )
        for row in told["queues"]
    ]


@command("workers")
@queue_option
@json_option
@click.pass_obj
def workers(flags: Flags, /, *, queue: str | None, as_json: bool) -> None:
    """The workers of the store, wherever they run: what they say of themselves with every heartbeat."""
    settings = Settings(flags)
    found = run_with_app(settings, lambda app: read_workers(app, queue))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            worker["worker"],
            worker["host"],
            worker["pid"],
            worker["state"],
            " ".join(worker["queues"]),
            f"{worker['active']}/{worker['concurrency']}",
            f"{span(worker['seen_ms_ago'])} ago",
        )
        for worker in found
    ]
    empty = f"no worker runs: {worker_command()} starts one"
    print_table(_WORKER_COLUMNS, rows, empty=empty, spare=("host", "pid", "seen", "queues"))
