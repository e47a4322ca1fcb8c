"""``penstock status`` and ``penstock workers``: how it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.flags import Flags
from penstock.cli.jobview import reason_fields
from penstock.cli.output import at_terminal, console, fitted, print_json, print_table, rich_table, span
from penstock.cli.parameters import command, every_option, json_option, queue_option
from penstock.cli.settings import Settings
from penstock.core.display import visible_in_line
from penstock.core.lifecycle import State
from penstock.situation import SEEN_LATELY_MS
from penstock.storage.minutes import MINUTE_MS, Minute
from penstock.why import explain

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.info import WorkerInfo

__all__ = ["read_status", "read_workers", "status", "workers", "workers_line"]

_COLUMNS: Final = ("queue", *State, "oldest", "done/min", "failed/min", "")
# Those that say nothing go first anyway.
_SPARE: Final = ("cancelled", "blocked", "scheduled", "failed/min", "oldest", "done/min", "completed")
_RATE_MINUTES: Final = 5
_SHOWN_MINUTES: Final = 20
_WORKER_COLUMNS: Final = ("worker", "host", "pid", "state", "queues", "running", "seen")
_MOVING: Final = ("ready", "busy", "active", "completed", "failed", "cancelled")
_PATIENT: Final = ("not due", "retry", "children", "signal", "staged")
_OF_QUEUE: Final = ("paused", "budget", "queue limit", "rate limit", "not consuming")


async def read_status(
    app: App, queue: str | None, *, default_queue: str, explained: bool = True
) -> dict[str, Any]:
    """Return counts and rates of the queues, the number of workers, and, if ``explained``, why queues stand still."""
    names = await queues_of(app, queue)
    rows = [await _of_queue(app, name) for name in names]
    for row in rows if explained else ():
        row["why"] = await _why_still(app, row)
    workers = await read_workers(app, queue, default_queue=default_queue)
    live = [worker for worker in workers if worker["state"] not in ("silent", "dead")]
    dead = [worker for worker in workers if worker["state"] == "dead"]
    attended = {name for worker in live for name in worker["queues"]}
    return {
        "queues": rows,
        "workers": len(live),
        "silent_workers": len(workers) - len(live) - len(dead),
        "dead_workers": len(dead),
        "unattended": [row["queue"] for row in rows if row["waiting"] and row["queue"] not in attended],
    }


async def _of_queue(app: App, name: str) -> dict[str, Any]:
    named = app.queue(name)
    counts = await named.counts()
    minutes = await named.metrics(last=f"{_SHOWN_MINUTES}m")
    completed, failed = (_by_minute(minutes, name) for name in ("completed", "failed"))
    return {
        "queue": name,
        **{state.value: getattr(counts, state.value) for state in State},
        "staged": counts.staged,
        "due": counts.due,
        "paused": counts.paused,
        "oldest_waiting_ms": counts.oldest_waiting_ms,
        "completed_per_minute": round(sum(completed[-_RATE_MINUTES:]) / _RATE_MINUTES, 1),
        "failed_per_minute": round(sum(failed[-_RATE_MINUTES:]) / _RATE_MINUTES, 1),
        "completed_by_minute": completed,
    }


async def _why_still(app: App, row: dict[str, Any]) -> dict[str, Any] | None:
    """Return why the first job in line does not run; ``None`` if nothing keeps it, or jobs run and it has to wait."""
    states = [state for state in (State.WAITING, State.BLOCKED, State.SCHEDULED) if row[state.value]]
    if not states and not row["staged"]:
        return None
    storage = await app.connect()
    page = await storage.list_jobs(row["queue"], states[0] if states else State.SCHEDULED, limit=1)
    if not page.jobs:
        return None
    reason = await explain(storage, page.jobs[0])
    if reason.kind in _MOVING or (row["active"] and reason.kind in _PATIENT):
        return None
    return {"job": page.jobs[0].id, **reason_fields(reason)}


def _by_minute(minutes: Sequence[Minute], name: str) -> list[int]:
    """Return a count for each of the last minutes, the present one last."""
    known = {minute.at_ms // MINUTE_MS: getattr(minute, name) for minute in minutes}
    present = max([time.time_ns() // 1_000_000 // MINUTE_MS, *known])
    return [known.get(present - back, 0) for back in reversed(range(_SHOWN_MINUTES))]


async def read_workers(app: App, queue: str | None, *, default_queue: str) -> list[dict[str, Any]]:
    """The workers of the queues, each once, those that were seen last first.

    ``default_queue`` is looked at even if no job was ever put into it: workers may wait for the first.
    """
    found: dict[str, dict[str, Any]] = {}
    for name in {*await queues_of(app, queue), queue or default_queue}:
        for worker in await app.queue(name).workers():
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
            await _watch(app, queue, every, default_queue=settings["queue"])
            return
        while True:
            _print(await read_status(app, queue, default_queue=settings["queue"]), as_json=as_json)
            if not watch:
                return
            await asyncio.sleep(every)

    run_with_app(settings, show)


async def _watch(app: App, queue: str | None, every: float, *, default_queue: str) -> None:
    from rich.live import Live

    with Live(console=console(), auto_refresh=False, screen=False) as live:
        while True:
            told = await read_status(app, queue, default_queue=default_queue)
            table = fitted(_COLUMNS, _rows(told), width=live.console.width, spare=_SPARE)
            title = "\n".join([*_standstill(told), workers_line(told)])
            live.update(rich_table(*table, title=title), refresh=True)
            await asyncio.sleep(every)


def _print(told: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(told)
        return
    print_table(_COLUMNS, _rows(told), empty="no jobs were ever put in", spare=_SPARE)
    for line in _standstill(told):
        click.echo(line)
    click.echo(workers_line(told))


def _standstill(told: dict[str, Any]) -> Iterator[str]:
    """Return a line for each queue that stands still. That no worker runs is said below, for all queues at once."""
    for row in told["queues"]:
        why = row["why"]
        if why is None or why["kind"] == "no worker":
            continue
        who = row["queue"] if why["kind"] in _OF_QUEUE else f"{row['queue']}/{why['job']}"
        yield visible_in_line(f"{who}: {why['text']} {why['remedy']}".rstrip())


def workers_line(told: dict[str, Any]) -> str:
    """Return who works on the queues, and what to do about those that nobody works on."""
    count, silent, unattended = told["workers"], told["silent_workers"], told["unattended"]
    if not count:
        line = "no worker runs: `penstock worker [MODULE:APP]` starts one"
    else:
        line = f"{count} worker{'s' * (count != 1)}"
        if unattended:
            options = " ".join(f"-q {name}" for name in unattended)
            line += f"; none works on {', '.join(unattended)}: `penstock worker [MODULE:APP] {options}`"
    line = f"{line}; {told['dead_workers']} died" if told["dead_workers"] else line
    return f"{line}; {silent} not heard of for {span(SEEN_LATELY_MS)}" if silent else line


def _rows(told: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [
        (
            row["queue"],
            *(row[state.value] for state in State),
            span(row["oldest_waiting_ms"]) if row["waiting"] else "",
            row["completed_per_minute"],
            row["failed_per_minute"],
            "paused" if row["paused"] else "",
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
    found = run_with_app(settings, lambda app: read_workers(app, queue, default_queue=settings["queue"]))
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
    empty = "no worker runs: `penstock worker [MODULE:APP]` starts one"
    print_table(_WORKER_COLUMNS, rows, empty=empty, spare=("host", "pid", "seen", "queues"))
