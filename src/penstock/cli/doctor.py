"""``penstock backup``, ``penstock restore`` and ``penstock doctor``: the care of a store."""

from __future__ import annotations

import platform
import sqlite3
import time
from collections.abc import AsyncIterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock import __version__
from penstock.cli.connect import is_local, open_app, queues_of, refuse_missing_file, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, InvalidUsage, WrongState
from penstock.cli.output import print_json, print_table, span
from penstock.cli.parameters import command, json_option, option, yes_option
from penstock.cli.queues import ask
from penstock.cli.settings import Settings
from penstock.cli.status import QueuePause, held_jobs, read_causes, read_counts, read_pauses
from penstock.cli.workers import read_workers
from penstock.client.causes import over_budget, ref_to
from penstock.client.session import shown_store
from penstock.client.situation import (
    at_second,
    command_line,
    counted,
    read_budgets,
    spent_budgets,
    worker_command,
)
from penstock.client.why import explain
from penstock.core.command import COMMAND_TASK
from penstock.core.lifecycle import State
from penstock.errors import StorageDamaged, StorageError, StorageRefused
from penstock.storage.values import Query

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.storage.contract import Storage
    from penstock.storage.values import QueueClock


_file_argument = click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))


@command("backup")
@_file_argument
@option("--force", "Overwrite FILE if it exists.")
def backup(settings: Settings, *, file: str, force: bool) -> None:
    """Write a copy of the store to FILE. Workers and producers can keep running.

    \b
      penstock backup "backups/$(date +%F).db"

    The copy is consistent and holds all namespaces. Only its owner can read it. This works for stores in a SQLite
    file; a server makes its own backups.
    """
    from penstock.storage.sqlite.backup import backup as write

    url = open_app(settings).url
    refuse_missing_file(url)
    if Path(file).exists() and not force and is_local(url):
        raise WrongState(f"{file} exists. Choose another name, or add --force.")
    if is_local(url) and not Path(file).parent.is_dir():
        raise InvalidUsage(f"the folder {Path(file).parent} does not exist. Create it first.")
    write(url, file, overwrite=force)
    click.echo(f"the backup is in {file}")


@command("restore")
@_file_argument
@yes_option
def restore(settings: Settings, *, file: str, yes: bool) -> None:
    """Replace the store with FILE, a backup that `penstock backup` has written. Stop all workers first. Asks first.

    All changes since the backup are lost, and jobs that finished since then may run again. Readers of events notice
    the change of history. No fencing token is used twice.
    """
    from penstock.storage.sqlite.backup import restore as replace_store

    url = open_app(settings).url
    if is_local(url):
        if not Path(file).is_file():
            raise InvalidUsage(f"{file} is not a file. Name a file that `penstock backup` has written.")
        question = f"Replace the store {url} with {file}? All changes since that backup are lost."
        ask(question, yes=yes, nothing="nothing was replaced")
    try:
        replace_store(url, file)
    except StorageError as error:
        if type(error) not in (StorageDamaged, StorageError):
            raise
        raise CommandLineError(
            f"the backup {file} is damaged; the store is unchanged. Use another backup.", ExitCode.STORE
        ) from error
    click.echo(f"the store {url} is restored from {file}")


# The doctor


_CLOCK_TOLERANCE_MS: Final = 2_000
_NEARLY_FULL: Final = 0.95
_JOBS_SEARCHED: Final = 10_000
_LIBRARIES: Final = ("msgspec", "cronsim", "redis", "hiredis", "click", "rich", "uvloop")


class Finding(NamedTuple):
    """The result of one check. ``verdict`` is ``ok``, ``note`` or ``problem``; ``advice`` is the remedy."""

    verdict: str
    what: str
    found: str
    advice: str = ""


@command("doctor")
@option("--repair", "Repair records and indexes that do not agree.")
@json_option
def doctor(settings: Settings, *, repair: bool, as_json: bool) -> int:
    """Check the server, its clock, the libraries and the records, and print advice. Exits with 1 if it finds a problem.

    It compares every record with every index, which takes a while if there are millions.
    """

    async def examine(app: App) -> list[Finding]:
        storage = await app.connect()
        findings = [*_libraries(), Finding("ok", "store", shown_store(app.url, app.namespace))]
        # Penstock checkpoints under the write lock, so the WAL-reset race of SQLite before 3.51.3 cannot happen.
        sqlite = Finding("ok", "sqlite", sqlite3.sqlite_version)
        findings += [sqlite] if is_local(app.url) else await _server(storage)
        queues = await queues_of(app, None)
        if not queues:
            advice = "check the URL and the namespace, unless the store is new"
            findings.append(Finding("note", "queues", "none: no job was ever enqueued here", advice))
        for queue in queues:
            findings += await _queue(app, storage, queue, repair=repair)
        return [*findings, *await _workers(app, queues)]

    findings = run_with_app(settings, examine)
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(Finding._fields, findings)
    return ExitCode.FAILED if any(finding.verdict == "problem" for finding in findings) else ExitCode.DONE


def _libraries() -> list[Finding]:
    installed = [f"{name} {number}" for name in _LIBRARIES if (number := _version(name))]
    return [
        Finding(
            "ok", "penstock", f"{__version__}, Python {platform.python_version()}, {platform.platform()}"
        ),
        Finding("ok", "libraries", ", ".join(installed)),
    ]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


async def _server(storage: Storage) -> list[Finding]:
    facts: Any = getattr(storage, "server_facts", None)
    if facts is None:
        return [Finding("note", "server", "this engine has no facts about its server")]
    findings: list[Finding] = []
    try:
        nodes = await facts()
    except StorageRefused as refused:
        return [Finding("note", "server", f"refuses facts to this user: {refused}", "allow INFO and TIME")]
    for node in nodes:
        findings += [_server_version(node), _persistence(node), _eviction(node), *_memory(node), _clock(node)]
    return findings


def _server_version(node: dict[str, str]) -> Finding:
    valkey = node.get("valkey_version")
    server = f"Valkey {valkey}" if valkey else f"Redis {node.get('redis_version', 'of an unknown version')}"
    return Finding("ok", "server", server)


def _persistence(node: dict[str, str]) -> Finding:
    if node.get("aof_enabled") == "1":
        if node.get("aof_last_write_status", "ok") != "ok":
            return Finding(
                "problem", "persistence", "the append-only file cannot be written", "check the disk"
            )
        return _flushing(node.get("appendfsync", ""))
    advice = (
        "accepted jobs are lost if the server dies: CONFIG SET appendonly yes, appendfsync everysec or always"
    )
    # INFO has a time of the last save even for a server that never saves.
    save = node.get("save")
    persistence = "snapshots at most" if save is None else "snapshots only" if save else "no persistence"
    return Finding("problem", "persistence", persistence, advice)


def _flushing(when: str) -> Finding:
    """Return how much an append-only file can lose; ``when`` is the setting ``appendfsync``, empty if unknown."""
    loss = {"everysec": "a second", "no": "half a minute"}.get(when)
    if loss is None:
        return Finding("ok", "persistence", "append-only file")
    advice = (
        f"a crash of the machine can lose the jobs of {loss}: CONFIG SET appendfsync always keeps every job"
    )
    return Finding("note", "persistence", f"append-only file, appendfsync {when}", advice)


def _memory(node: dict[str, str]) -> list[Finding]:
    """Return a problem if the server has little or no memory left for new jobs."""
    used, most = int(node.get("used_memory", 0)), int(node.get("maxmemory", 0))
    if not most or used < _NEARLY_FULL * most:
        return []
    usage = f"{used / most:.0%} of maxmemory ({most / 2**20:.0f} MiB) is used"
    advice = (
        "a full server refuses new jobs: raise maxmemory, or keep results for a shorter time (result_ttl)"
    )
    return [Finding("problem", "memory", usage, advice)]


def _eviction(node: dict[str, str]) -> Finding:
    policy = node.get("maxmemory_policy", "")
    if policy == "noeviction" or not policy:
        return Finding("ok", "eviction", policy or "unknown")
    advice = "a server that is short of memory deletes jobs: CONFIG SET maxmemory-policy noeviction"
    return Finding("problem", "eviction", policy, advice)


def _clock(node: dict[str, str]) -> Finding:
    off_ms = int(node["time_ms"]) - time.time_ns() // 1_000_000
    if abs(off_ms) <= _CLOCK_TOLERANCE_MS:
        return Finding("ok", "clock", f"{span(abs(off_ms))} from this machine's")
    advice = (
        "run_at and cron follow the store's clock, so they are off by as much. Synchronize both clocks by NTP"
    )
    side = "ahead of" if off_ms > 0 else "behind"
    return Finding("note", "clock", f"{span(abs(off_ms))} {side} this machine's", advice)


def _queue_clock(queue: str, clock: QueueClock) -> list[Finding]:
    if abs(clock.ahead_ms) <= _CLOCK_TOLERANCE_MS:
        return []
    side = "ahead of" if clock.ahead_ms > 0 else "behind"
    difference = f"its time is {span(abs(clock.ahead_ms))} {side} the store's clock"
    advice = "the clock was wrong and has been corrected; delays and leases keep their length. Synchronize it by NTP"
    return [Finding("note", f"queue {queue}", difference, advice)]


async def _queue(app: App, storage: Storage, queue: str, *, repair: bool) -> list[Finding]:
    checked = await storage.check(queue, repair=repair)
    counts = await app.queue(queue).counts()
    findings = []
    if checked.problems:
        what = ", ".join(f"{count} {kind}" for kind, count in checked.problems.items())
        advice = "" if checked.repaired else f"run {command_line('doctor', '--repair')}"
        findings.append(Finding("note" if checked.repaired else "problem", f"queue {queue}", what, advice))
    else:
        findings.append(
            Finding("ok", f"queue {queue}", f"{counted(checked.records, 'record')}, all indexes agree")
        )
    findings += _queue_clock(queue, await storage.clock(queue))
    findings += [_paused(pause) for pause in await read_pauses(storage, queue, is_paused=counts.paused)]
    findings += [finding async for finding in _spent_budgets(storage, queue)]
    return findings + ([await _staged(storage, queue, counts.staged)] if counts.staged else [])


def _paused(pause: QueuePause) -> Finding:
    of_group = ("--group", pause.group) if pause.group else ()
    what = f"group {pause.group} is paused" if pause.group else "is paused"
    until = f" until {at_second(pause.until_ms)}" if pause.until_ms else ""
    advice = f"run {command_line('resume', '-q', pause.queue, *of_group)}"
    return Finding("note", f"queue {pause.queue}", what + until, advice)


async def _spent_budgets(storage: Storage, queue: str) -> AsyncIterator[Finding]:
    """Yield a note for each spent budget that does not renew by itself."""
    for budget in spent_budgets(await read_budgets(storage, queue)):
        if not budget.per_ms:
            reason = over_budget(budget, queue)
            yield Finding("note", f"queue {queue}", reason.text, reason.remedy)


async def _staged(storage: Storage, queue: str, count: int) -> Finding:
    """Return a note about the jobs of writes that are not complete."""
    text, advice = counted(count, "staged job"), ""
    # Staged jobs come after all that have a time.
    for job in (await storage.list_jobs(queue, State.SCHEDULED, limit=1, reverse=True)).jobs:
        reason = await explain(storage, job)
        text, advice = f"{text}, such as {ref_to(job)}: {reason.text}", reason.remedy
    return Finding("note", f"queue {queue}", text, advice)


async def _workers(app: App, queues: Sequence[str]) -> list[Finding]:
    records = await read_workers(app, None)
    workers = [worker for worker in records if worker["state"] not in ("silent", "dead")]
    causes = [(queue, c) for queue in queues for c in await read_causes(app, await read_counts(app, queue))]
    # The remedies for the jobs that wait say which workers they need.
    start = "" if any(cause["kind"] == "no worker" for _, cause in causes) else worker_command()
    none = Finding("note", "workers", "none", f"start one with {start}" * bool(start))
    findings = [Finding("ok", "workers", str(len(workers))) if workers else none]
    findings += await _unknown_tasks(app, queues, workers)
    reported = {finding.what for finding in findings}
    for queue, cause in causes:
        if cause["kind"] in ("no worker", "not consuming"):
            findings.append(_unattended(queue, cause))
        elif cause["kind"] == "worker died":
            text = f"{held_jobs(queue, cause)}: {cause['text']}"
            findings.append(Finding("note", f"queue {queue}", text, cause["remedy"]))
        elif cause["kind"] == "unknown task" and (what := f"task {cause['task']}") not in reported:
            findings.append(Finding("problem", what, cause["text"], cause["remedy"]))
    return findings


def _unattended(queue: str, cause: dict[str, Any]) -> Finding:
    """Return a note about jobs in a queue without a worker."""
    jobs = f"{'at least ' * cause['at_least']}{counted(cause['count'], 'job')}"
    return Finding("note", f"queue {queue}", f"holds back {jobs}: {cause['text']}", cause["remedy"])


async def _unknown_tasks(app: App, queues: Sequence[str], workers: list[dict[str, Any]]) -> list[Finding]:
    """Return a finding for each task of which live workers have handed back jobs: a problem if a job is still open."""
    ids_by_task: dict[str, list[str]] = {}
    for worker in workers:
        for name in worker["unknown"]:
            ids_by_task.setdefault(name, []).append(worker["worker"])
    findings = []
    for name, ids in sorted(ids_by_task.items()):
        text = f"not known to {', '.join(ids)}"
        if await _has_open_job(app, queues, name):
            findings.append(Finding("problem", f"task {name}", text, _unknown_advice(name)))
        else:
            findings.append(Finding("note", f"task {name}", f"{text}; no open job needs it"))
    return findings


async def _has_open_job(app: App, queues: Sequence[str], task: str) -> bool:
    """Return whether a job of the task is open. Only the first jobs of each state are searched."""
    storage = await app.connect()
    for queue in queues:
        for state in (State.WAITING, State.SCHEDULED, State.BLOCKED):
            query = Query(state=state, task="" if task.startswith("(") else task)
            page = await storage.search(queue, query, cursor="", limit=1, scan=_JOBS_SEARCHED)
            if page.jobs:
                return True
    return False


def _unknown_advice(task: str) -> str:
    if task == COMMAND_TASK:
        return f"these workers do not run commands: start one that does with {worker_command(target='--commands')}"
    return "deploy the task to these workers, or give it its own queue; its jobs fail after unknown_after"
