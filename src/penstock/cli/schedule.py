"""``penstock schedule``: recurring jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from zoneinfo import ZoneInfo

import click
import msgspec

from penstock.cli.connect import import_app, open_app, queues_of, run_app, run_with_app
from penstock.cli.enqueue import cwd_option, env_option, given_options
from penstock.cli.errors import InvalidUsage, NotFound
from penstock.cli.joboptions import job_flags
from penstock.cli.jobview import cut
from penstock.cli.newjobs import NewJobs
from penstock.cli.output import json_text, print_json, print_table
from penstock.cli.parameters import (
    command_of,
    family,
    json_option,
    option,
    queue_of_name,
    queue_option,
    queue_option_for,
)
from penstock.cli.settings import Settings
from penstock.cli.synonyms import did_you_mean
from penstock.cli.taskworkers import note_on_task
from penstock.cli.values import local_zone, read_time
from penstock.client.handle import enqueue_many
from penstock.core.command import COMMAND_TASK, command_text, decode_command
from penstock.core.names import uuid7
from penstock.core.schedule import Cron
from penstock.errors import InvalidInput, InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.queue import Queue
    from penstock.client.schedules import SchedulerInfo


_RULES: Final = ("cron", "every", "after_completion")
_TIMING: Final = (*_RULES, "tz", "start", "end", "limit", "missed")
_COLUMNS: Final = ("name", "queue", "when", "what", "next", "fired", "")


@family("schedule")
def schedule() -> None:
    """Recurring jobs: by cron, at an interval, or some time after the last one ended. Any worker fires them.

    \b
      penstock schedule add nightly --cron '0 3 * * *' --tz Europe/Berlin 'make report'
      penstock schedule add poll --every 10m --task poll '{}'
      penstock schedule add sale --every 1h --start 2026-12-01 --end 2026-12-24 'make prices'
      penstock schedule list
      penstock schedule run nightly
    """


@command_of(schedule, "add")
@click.argument("name")
@click.argument("job")
@option(
    "--cron EXPRESSION",
    "At these times: five fields, six with the seconds first, or @hourly, @daily, @weekly, @monthly, @yearly.",
)
@option("--tz ZONE", "Time zone of --cron, --start and --end, such as Europe/Berlin. [local; UTC in code]")
@option("--every DURATION", "At this interval: 30s, 10m, 1h.")
@option("--after-completion DURATION", "This long after the previous job ended.")
@option("--start TIME", "Not before: 2026-12-01, '2026-12-01 08:00'; in --tz, or local time.")
@option("--end TIME", "Not after.")
@option("--limit NUMBER", "Maximum number of jobs. [no limit]")
@option(
    "--missed WHAT",
    "What to do about times at which no worker ran: skip or catch_up. [skip]",
    click.Choice(["skip", "catch_up"]),
)
@option("-t, --task NAME", "Read JOB as the JSON arguments of this task.")
@queue_option_for("The queue of the jobs.")
@job_flags("attempts", "max_retries", "timeout", "priority")
@cwd_option
@env_option
@json_option
def add(
    settings: Settings,
    *,
    name: str,
    job: str,
    task: str | None,
    queue: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Add the scheduler NAME, which enqueues JOB repeatedly. Replaces a scheduler of that name.

    JOB is a command or a JSON object, as for `penstock enqueue`. Give one of --cron, --every and --after-completion.
    """
    given = given_options(options)
    timing = _timing({key: given.pop(key) for key in _TIMING if key in given})
    target = settings["app"] if task else None
    app = import_app(settings, target) if target else open_app(settings)
    jobs = NewJobs(app, queue=queue, task=task, given=given, default_queue=settings["queue"])

    async def store() -> tuple[SchedulerInfo | None, SchedulerInfo, str]:
        spec = jobs.spec(job)
        before = await app.queue(spec.queue).scheduler(name)
        info = await app.schedule(name, spec, **timing)
        return before, info, await note_on_task(app, info.queue, info.task)

    before, info, note = run_app(app, store)
    if note:
        click.echo(note, err=True)
    answer = "added" if before is None else "unchanged" if before.raw.spec == info.raw.spec else "replaced"
    if as_json:
        print_json({**_row(info), "answer": answer})
        return
    click.echo(f"{name} {answer}: {info.when}, next run {_next_run(info)}")
    if before is not None and answer == "replaced":
        click.echo(f"it was: {before.when}, {_what(before)}")


def _timing(given: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``app.schedule``. Raise ``InvalidUsage`` unless ``given`` has one rule."""
    timing = dict(given)
    rules = [key for key in _RULES if key in timing]
    if not rules:
        raise InvalidUsage("give the times with --cron '0 3 * * *', --every 10m or --after-completion 10m.")
    if len(rules) > 1:
        names = " and ".join(f"--{key.replace('_', '-')}" for key in rules)
        raise InvalidUsage(f"{names} exclude each other. Give only one of them.")
    sides = timing.keys() & {"start", "end"}
    for side in sides:
        timing[side] = _instant(timing[side], f"--{side}", timing.get("tz"))
    if sides and "cron" not in timing:
        # Intervals have no zone: --tz was for --start and --end.
        timing.pop("tz", None)
    if "cron" in timing:
        timing.setdefault("tz", local_zone())
    return timing


def _next_run(info: SchedulerInfo) -> str:
    """Return the next time in the zone of the cron expression, or in local time."""
    if info.next is None:
        return "after the previous job has ended"
    timing = info.spec.schedule.timing
    zone = timing.tz if isinstance(timing, Cron) else ""
    at = info.next.astimezone(ZoneInfo(zone) if zone else None)
    return f"{at:%a %d %b %Y %H:%M}{f':{at:%S}' if at.second else ''} {zone or at.tzname()}"


def _what(info: SchedulerInfo) -> str:
    """Return the command of its jobs, or their task with its arguments."""
    job = info.spec.job
    if info.task == COMMAND_TASK:
        return command_text(job.payload)
    try:
        payload = json_text(msgspec.json.decode(job.payload))
    except msgspec.DecodeError:
        payload = f"<{len(job.payload)} bytes>"
    return f"{info.task} {payload}".strip()


def _instant(text: str, what: str, zone: str | None) -> datetime:
    try:
        zone_info = None if zone is None else ZoneInfo(zone)
    except (KeyError, ValueError):
        raise InvalidUsage(
            f"--tz {zone} is not a time zone. Give an IANA name, such as Europe/Berlin."
        ) from None
    try:
        return read_time(text, zone_info)
    except InvalidOption as error:
        raise InvalidUsage(f"{what}: {error}") from None


@command_of(schedule, "list")
@queue_option
@json_option
def list_(settings: Settings, *, queue: str | None, as_json: bool) -> None:
    """List the schedulers, their next times, and how often they have fired."""

    async def read(app: App) -> list[SchedulerInfo]:
        return [info for name in await queues_of(app, queue) for info in await app.queue(name).schedulers()]

    schedulers = run_with_app(settings, read)
    if as_json:
        print_json([_row(info) for info in schedulers])
        return
    rows = [
        (
            info.name,
            info.queue,
            info.when,
            cut(_what(info)),
            "" if info.next is None else _next_run(info),
            info.fired,
            "paused" if info.paused else "ended" if info.ended else "",
        )
        for info in schedulers
    ]
    print_table(_COLUMNS, rows, empty="no schedulers", spare=("fired", "queue"))


def _add_change(verb: str, done: str, help: str) -> None:
    """Add the command that applies ``verb`` to a scheduler by its name."""

    @command_of(schedule, verb, help=help)
    @click.argument("name")
    @queue_of_name
    def change(settings: Settings, *, name: str, queue: str | None) -> None:
        _change(settings, name, queue, lambda named: getattr(named, f"{verb}_scheduler")(name))
        click.echo(f"{name} {done}")


_add_change("remove", "removed", "Remove a scheduler. Jobs that it has enqueued stay.")
_add_change("pause", "paused", "Pause a scheduler: it enqueues no jobs until you resume it.")
_add_change("resume", "resumed", "Resume a paused scheduler. Times that passed during the pause are skipped.")


@command_of(schedule, "run")
@click.argument("name")
@queue_of_name
def run(settings: Settings, *, name: str, queue: str | None) -> None:
    """Enqueue the job of a scheduler now, in addition to its times, and print its id."""

    async def enqueue(named: Queue) -> bool:
        info = await named.scheduler(name)
        if info is None:
            return False
        handle = named.job(uuid7())
        await enqueue_many(handle.source, [msgspec.structs.replace(info.spec.job, id=handle.id)])
        click.echo(handle.id)
        return True

    _change(settings, name, queue, enqueue)


def _change(
    settings: Settings, name: str, queue: str | None, verb: Callable[[Queue], Awaitable[bool]]
) -> None:
    """Apply ``verb`` to the queue that has the scheduler ``name``."""

    async def act(app: App) -> bool:
        queues = [app.queue(each) for each in await queues_of(app, queue)]
        known = {named: [info.name for info in await named.schedulers()] for named in queues}
        owners = [named for named, names in known.items() if name in names]
        if not owners:
            meant = did_you_mean(
                name, sorted({known_name for names in known.values() for known_name in names})
            )
            raise NotFound(f"unknown scheduler {name!r}. {meant or 'See: penstock schedule list'}")
        if len(owners) > 1:
            several = ", ".join(named.name for named in owners)
            raise InvalidUsage(
                f"several queues have a scheduler {name!r}: {several}. Choose one with --queue."
            )
        return await verb(owners[0])

    if not run_with_app(settings, act):
        raise NotFound(f"unknown scheduler {name!r}. See: penstock schedule list")


def _row(info: SchedulerInfo) -> dict[str, Any]:
    command = None
    if info.task == COMMAND_TASK:
        with suppress(InvalidInput):
            command = decode_command(info.spec.job.payload)
    return {
        "name": info.name,
        "queue": info.queue,
        "when": info.when,
        "task": info.task,
        "what": _what(info),
        "cwd": command.cwd if command else None,
        "env": command.env if command else None,
        "next": info.next,
        "start": info.start,
        "end": info.end,
        "fired": info.fired,
        "paused": info.paused,
        "ended": info.ended,
        "last_job": info.last_job,
    }
