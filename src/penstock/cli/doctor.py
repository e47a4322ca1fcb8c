"""``penstock backup`` and ``penstock restore``: copies of a store in a file."""

from __future__ import annotations

import platform
import sqlite3
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock import __version__
from penstock.cli.connect import is_local, open_app, queues_of, refuse_missing_file, run_with_app
from penstock.cli.errors import ExitCode, WrongState
from penstock.cli.output import print_json, print_table, span
from penstock.cli.parameters import Flags, command, json_option, yes_option
from penstock.cli.queues import ask
from penstock.cli.settings import Settings
from penstock.cli.status import Halt, read_causes, read_counts, read_halts, read_workers
from penstock.client.situation import at_second, command_line, counted, worker_command
from penstock.core.command import COMMAND_TASK
from penstock.errors import StorageRefused

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.storage.contract import Storage
    from penstock.storage.values import QueueClock


_file_argument = click.argument("file", metavar="FILE", type=click.Path(dir_okay=False))


@command("backup")
@_file_argument
@click.option("--force", is_flag=True, help="Overwrite FILE if it exists.")
@click.pass_obj
def backup(flags: Flags, /, *, file: str, force: bool) -> None:
    """Write a copy of the store to FILE. Workers and producers go on meanwhile.

    \b
      penstock backup "backups/$(date +%F).db"

    The copy is consistent and holds all namespaces. Only its owner may read it. For stores in a SQLite file; a server
    makes its own backups.
    """
    from penstock.storage.sqlite.backup import backup as write

    url = open_app(Settings(flags)).url
    refuse_missing_file(url)
    if Path(file).exists() and not force and is_local(url):
        raise WrongState(f"{file} exists. Choose another name, or add --force.")
    write(url, file, overwrite=force)
    click.echo(f"the backup is in {file}")


@command("restore")
@_file_argument
@yes_option
@click.pass_obj
def restore(flags: Flags, /, *, file: str, yes: bool) -> None:
    """Replace the store by FILE, which `penstock backup` has written. Stop all workers first. Asks first.

    What happened since the backup is lost: jobs that ended since may run again. Readers of events notice that history
    has changed, and no fencing token comes back.
    """
    from penstock.storage.sqlite.backup import restore as put_back

    url = open_app(Settings(flags)).url
    if is_local(url):
        question = f"Replace the store {url} by {file}? What happened since that backup is lost."
        ask(question, yes=yes, nothing="nothing was replaced")
    put_back(url, file)
    click.echo(f"the store {url} is restored from {file}")


# ``penstock doctor``: is all as it should be?


_FURTHEST_CLOCK_MS: Final = 2_000
_OLD_LEASE_MS: Final = 60_000
_NEARLY_FULL: Final = 0.95
_LIBRARIES: Final = ("msgspec", "cronsim", "redis", "hiredis", "click", "rich", "uvloop")


class Finding(NamedTuple):
    """``verdict`` is ``ok``, ``note`` or ``problem``; ``advice`` is what to do."""

    verdict: str
    what: str
    found: str
    advice: str = ""


@command("doctor")
@click.option("--repair", is_flag=True, help="Mend records and indexes that do not agree.")
@json_option
@click.pass_obj
def doctor(flags: Flags, /, *, repair: bool, as_json: bool) -> int:
    """Check the server, the clock, the libraries and the records, and say what to do. Exits with 1 at a problem.

    Every record is compared with every index, which takes a while where there are millions.
    """

    settings = Settings(flags)

    async def examine(app: App) -> list[Finding]:
        storage = await app.connect()
        found = [*_libraries(), Finding("ok", "store", storage.url)]
        # Penstock checkpoints under the write lock, so the WAL-reset race of SQLite before 3.51.3 cannot happen.
        sqlite = Finding("ok", "sqlite", sqlite3.sqlite_version)
        found += [sqlite] if is_local(app.url) else await _server(storage)
        queues = await queues_of(app, None)
        if not queues:
            advice = "check the URL and the namespace, unless the store is new"
            found.append(Finding("note", "queues", "none: no job was ever enqueued here", advice))
        for queue in queues:
            found += await _queue(app, storage, queue, repair=repair)
        return [*found, *await _staff(app)]

    findings = run_with_app(settings, examine)
    if as_json:
        print_json([finding._asdict() for finding in findings])
    else:
        print_table(Finding._fields, findings)
    return ExitCode.FAILED if any(finding.verdict == "problem" for finding in findings) else ExitCode.DONE


def _libraries() -> list[Finding]:
    installed = [f"{name} {found}" for name in _LIBRARIES if (found := _version(name))]
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
        return [Finding("note", "server", "this engine tells nothing of its server")]
    findings: list[Finding] = []
    try:
        nodes = await facts()
    except StorageRefused as refused:
        return [Finding("note", "server", f"tells nothing to this user: {refused}", "allow it INFO and TIME")]
    for node in nodes:
        findings += [_server_version(node), _persistence(node), _eviction(node), *_memory(node), _clock(node)]
    return findings


def _server_version(node: dict[str, str]) -> Finding:
    valkey = node.get("valkey_version")
    shown = f"Valkey {valkey}" if valkey else f"Redis {node.get('redis_version', 'of an unknown version')}"
    return Finding("ok", "server", shown)


def _persistence(node: dict[str, str]) -> Finding:
    if node.get("aof_enabled") == "1":
        if node.get("aof_last_write_status", "ok") != "ok":
            return Finding(
                "problem", "persistence", "the append-only file cannot be written", "look at the disk"
            )
        return _flushing(node.get("appendfsync", ""))
    advice = (
        "accepted jobs are lost if the server dies: CONFIG SET appendonly yes, appendfsync everysec or always"
    )
    # INFO has a time of the last save even for a server that never saves.
    save = node.get("save")
    saved = "snapshots at most" if save is None else "snapshots only" if save else "no persistence"
    return Finding("problem", "persistence", saved, advice)


def _flushing(when: str) -> Finding:
    """Return how much an append-only file may lose; ``when`` is the setting ``appendfsync``, empty if unknown."""
    lost = {"everysec": "a second", "no": "half a minute"}.get(when)
    if lost is None:
        return Finding("ok", "persistence", "append-only file")
    advice = (
        f"a crash of the machine can lose the jobs of {lost}: CONFIG SET appendfsync always keeps every job"
    )
    return Finding("note", "persistence", f"append-only file, appendfsync {when}", advice)


def _memory(node: dict[str, str]) -> list[Finding]:
    """Return a problem if the server has no memory left for new jobs, or will soon have none."""
    used, most = int(node.get("used_memory", 0)), int(node.get("maxmemory", 0))
    if not most or used < _NEARLY_FULL * most:
        return []
    found = f"{used / most:.0%} of maxmemory ({most / 2**20:.0f} MiB) is used"
    advice = "the server refuses new jobs when it is full: raise maxmemory, or keep results for less long (result_ttl)"
    return [Finding("problem", "memory", found, advice)]


def _eviction(node: dict[str, str]) -> Finding:
    policy = node.get("maxmemory_policy", "")
    if policy == "noeviction" or not policy:
        return Finding("ok", "eviction", policy or "unknown")
    advice = "under memory pressure the server would delete jobs: CONFIG SET maxmemory-policy noeviction"
    return Finding("problem", "eviction", policy, advice)


def _clock(node: dict[str, str]) -> Finding:
    off_ms = int(node["time_ms"]) - time.time_ns() // 1_000_000
    if abs(off_ms) <= _FURTHEST_CLOCK_MS:
        return Finding("ok", "clock", f"{span(abs(off_ms))} from ours")
    advice = "the store's clock counts; instants given by run_at, and cron slots, are off by as much. Keep both by NTP"
    return Finding(
        "note", "clock", f"{span(abs(off_ms))} {'ahead of' if off_ms > 0 else 'behind'} ours", advice
    )


def _queue_clock(queue: str, clock: QueueClock) -> list[Finding]:
    if abs(clock.ahead_ms) <= _FURTHEST_CLOCK_MS:
        return []
    side = "ahead of" if clock.ahead_ms > 0 else "behind"
    found = f"its time is {span(abs(clock.ahead_ms))} {side} the store's clock"
    advice = (
        "the clock was wrong, and is or was put right; delays and leases keep their length. Keep it by NTP"
    )
    return [Finding("note", f"queue {queue}", found, advice)]


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
    return findings + [_paused(halt) for halt in await read_halts(storage, queue, is_paused=counts.paused)]


def _paused(halt: Halt) -> Finding:
    of_group = ("--group", halt.group) if halt.group else ()
    what = f"group {halt.group} is paused" if halt.group else "is paused"
    until = f" until {at_second(halt.until_ms)}" if halt.until_ms else ""
    advice = f"run {command_line('resume', '-q', halt.queue, *of_group)}"
    return Finding("note", f"queue {halt.queue}", what + until, advice)


async def _staff(app: App) -> list[Finding]:
    found = await read_workers(app, None)
    workers = [worker for worker in found if worker["state"] not in ("silent", "dead")]
    none = Finding("note", "workers", "none", f"nobody runs jobs: {worker_command()}")
    findings = [Finding("ok", "workers", str(len(workers))) if workers else none, *_unknown_tasks(workers)]
    told = {finding.what for finding in findings}
    for queue in await queues_of(app, None):
        for cause in await read_causes(app, await read_counts(app, queue)):
            if cause["kind"] in ("no worker", "not consuming"):
                findings.append(_unattended(queue, cause))
            elif cause["kind"] == "unknown task" and (what := f"task {cause['task']}") not in told:
                findings.append(Finding("problem", what, cause["text"], cause["remedy"]))
    return findings


def _unattended(queue: str, cause: dict[str, Any]) -> Finding:
    """Return a note about jobs that wait in a queue that no worker works on."""
    waiting = f"{'at least ' * cause['at_least']}{counted(cause['count'], 'job')}"
    return Finding("note", f"queue {queue}", f"holds back {waiting}: {cause['text']}", cause["remedy"])


def _unknown_tasks(workers: list[dict[str, Any]]) -> list[Finding]:
    """Return a problem for each task of which live workers have handed back jobs."""
    holders: dict[str, list[str]] = {}
    for worker in workers:
        for name in worker["unknown"]:
            holders.setdefault(name, []).append(worker["worker"])
    return [
        Finding("problem", f"task {name}", f"not known to {', '.join(ids)}", _unknown_advice(name))
        for name, ids in sorted(holders.items())
    ]


def _unknown_advice(task: str) -> str:
    if task == COMMAND_TASK:
        return f"these workers do not run commands: start one that does with {worker_command(target='--commands')}"
    return (
        "deploy the task to these workers, or give it a queue of its own; its jobs fail after unknown_after"
    )
