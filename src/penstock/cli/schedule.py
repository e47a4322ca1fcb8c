"""``penstock schedule``: jobs that come again."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import import_app, open_app, queues_of, run_app, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.cli.flags import Flags
from penstock.cli.newjobs import NewJobs
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import command_of, family, json_option, queue_option, queue_option_for
from penstock.cli.settings import Settings
from penstock.cli.values import duration, read_time
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.queue import Queue
    from penstock.scheduler import SchedulerInfo

__all__ = ["schedule"]

_TIMING: Final = ("cron", "tz", "every", "after_completion", "start", "end", "limit", "missed")
_COLUMNS: Final = ("name", "queue", "when", "next", "fired", "")


@family("schedule")
def schedule() -> None:
    """Jobs that come again: by cron, at an interval, or a while after the last one ended. Any worker fires them.

    \b
      penstock schedule add nightly --cron '0 3 * * *' --tz Europe/Berlin 'make report'
      penstock schedule add poll --every 10m --task poll '{}'
      penstock schedule add sale --every 1h --start 2026-12-01 --end 2026-12-24 'make prices'
      penstock schedule list
    """


@command_of(schedule, "add")
@click.argument("name")
@click.argument("job")
@click.option(
    "--cron", metavar="EXPRESSION", help="At these times: five fields, or six with the seconds first."
)
@click.option(
    "--tz", metavar="ZONE", help="The time zone of --cron, --start and --end, such as Europe/Berlin. [UTC]"
)
@click.option("--every", metavar="DURATION", type=duration, help="At this interval: 30s, 10m, 1h.")
@click.option(
    "--after-completion",
    metavar="DURATION",
    type=duration,
    help="That long after the end of the job before.",
)
@click.option(
    "--start", metavar="TIME", help="Not before: 2026-12-01, '2026-12-01 08:00'; in --tz, or local time."
)
@click.option("--end", metavar="TIME", help="Not after.")
@click.option("--limit", metavar="NUMBER", type=int, help="How many times in all. [for ever]")
@click.option(
    "--missed",
    metavar="WHAT",
    type=click.Choice(["skip", "catch_up"]),
    help="What becomes of times at which no worker ran: skip, or catch_up. [skip]",
)
@click.option("-t", "--task", metavar="NAME", help="JOB is the JSON arguments of this task, not a command.")
@queue_option_for("Where its jobs go.")
@click.option("--attempts", metavar="NUMBER", type=int, help="How often a job is run at most, if it fails.")
@click.option(
    "--max-retries", metavar="NUMBER", type=int, help="Another way to give --attempts, which is one more."
)
@click.option("--timeout", metavar="DURATION", type=duration, help="Kill a run that takes longer.")
@click.option("--priority", metavar="NUMBER", type=int, help="Smaller runs first.")
@json_option
@click.pass_obj
def add(
    flags: Flags,
    /,
    *,
    name: str,
    job: str,
    task: str | None,
    queue: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Have JOB come again, under NAME; if there is one of that name, it is changed.

    JOB is what `penstock enqueue` takes: a command, or a JSON object. Give one of --cron, --every, --after-completion.
    """
    settings = Settings(flags)
    given = {key: value for key, value in options.items() if value is not None}
    timing = {key: given.pop(key) for key in _TIMING if key in given}
    if len(timing.keys() & {"cron", "every", "after_completion"}) != 1:
        raise CommandLineError("give one of --cron, --every and --after-completion.", ExitCode.USAGE)
    sides = timing.keys() & {"start", "end"}
    for side in sides:
        timing[side] = _instant(timing[side], f"--{side}", timing.get("tz"))
    if sides and "cron" not in timing:
        # It was for these: intervals are the same in every zone.
        timing.pop("tz", None)
    target = settings["app"] if task else None
    app = import_app(settings, target) if target else open_app(settings)
    jobs = NewJobs(app, queue=queue, task=task, given=given, default_queue=settings["queue"])

    async def put() -> SchedulerInfo:
        return await app.schedule(name, jobs.spec(job), **timing)

    info = run_app(app, put)
    if as_json:
        print_json(_row(info))
    else:
        click.echo(f"{name}: {info.when}, next {when(info.raw.next_ms)}")


def _instant(text: str, what: str, zone: str | None) -> datetime:
    from zoneinfo import ZoneInfo

    try:
        given = None if zone is None else ZoneInfo(zone)
    except (KeyError, ValueError):
        raise CommandLineError(f"--tz {zone}: there is no such time zone.", ExitCode.USAGE) from None
    try:
        return read_time(text, given)
    except InvalidOption as error:
        raise CommandLineError(f"{what}: {error}", ExitCode.USAGE) from None


@command_of(schedule, "list")
@queue_option
@json_option
@click.pass_obj
def list_(flags: Flags, /, *, queue: str | None, as_json: bool) -> None:
    """All schedulers: when they fire next, and how often they did."""

    async def read(app: App) -> list[SchedulerInfo]:
        return [info for name in await queues_of(app, queue) for info in await app.queue(name).schedulers()]

    found = run_with_app(Settings(flags), read)
    if as_json:
        print_json([_row(info) for info in found])
        return
    rows = [
        (
            info.name,
            info.queue,
            info.when,
            when(info.raw.next_ms),
            info.fired,
            "paused" if info.paused else "ended" if info.ended else "",
        )
        for info in found
    ]
    print_table(_COLUMNS, rows, empty="no schedulers", spare=("fired", "queue"))


@command_of(schedule, "remove")
@click.argument("name")
@queue_option_for("Which queue it is in, if several have that name.")
@click.pass_obj
def remove(flags: Flags, /, *, name: str, queue: str | None) -> None:
    """Forget a scheduler; jobs it has put in stay."""
    _change(flags, name, queue, lambda named: named.remove_scheduler(name))
    click.echo(f"{name} removed")


@command_of(schedule, "pause")
@click.argument("name")
@queue_option_for("Which queue it is in, if several have that name.")
@click.pass_obj
def pause(flags: Flags, /, *, name: str, queue: str | None) -> None:
    """Put in no job until it is resumed."""
    _change(flags, name, queue, lambda named: named.pause_scheduler(name))
    click.echo(f"{name} paused")


@command_of(schedule, "resume")
@click.argument("name")
@queue_option_for("Which queue it is in, if several have that name.")
@click.pass_obj
def resume(flags: Flags, /, *, name: str, queue: str | None) -> None:
    """The end of a pause; the times between are left out."""
    _change(flags, name, queue, lambda named: named.resume_scheduler(name))
    click.echo(f"{name} resumed")


def _change(flags: Flags, name: str, queue: str | None, verb: Any) -> None:
    async def act(app: App) -> bool:
        having = [named for each in await queues_of(app, queue) if await _has(named := app.queue(each), name)]
        if len(having) > 1:
            several = ", ".join(named.name for named in having)
            raise CommandLineError(
                f"several queues have a scheduler {name!r}: {several}. Say which by --queue.", ExitCode.USAGE
            )
        return any([await verb(named) for named in having])

    if not run_with_app(Settings(flags), act):
        raise NotFound(f"there is no scheduler {name!r}. See: penstock schedule list")


async def _has(queue: Queue, name: str) -> bool:
    return any(info.name == name for info in await queue.schedulers())


def _row(info: SchedulerInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "queue": info.queue,
        "when": info.when,
        "task": info.task,
        "next": info.next,
        "start": info.start,
        "end": info.end,
        "fired": info.fired,
        "paused": info.paused,
        "ended": info.ended,
        "last_job": info.last_job,
    }
