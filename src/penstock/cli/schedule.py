"""``penstock schedule``: jobs that come again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from penstock.cli.connect import import_app, open_app, queues_of, run_app, run_with_app
from penstock.cli.errors import NotFound
from penstock.cli.flags import Flags
from penstock.cli.newjobs import NewJobs
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import command_of, json_option, queue_option
from penstock.cli.settings import Settings

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.queue import Queue
    from penstock.scheduler import SchedulerInfo

__all__ = ["schedule"]


@click.group("schedule", context_settings={"help_option_names": ["-h", "--help"]})
def schedule() -> None:
    """Jobs that come again: by cron, at an interval, or a while after the last one ended. Any worker fires them.

    \b
      penstock schedule add nightly --cron '0 3 * * *' --tz Europe/Berlin 'make report'
      penstock schedule add poll --every 10m --task poll '{}'
      penstock schedule list
    """


@command_of(schedule, "add")
@click.argument("name")
@click.argument("job")
@click.option("--cron", metavar="EXPRESSION", help="Five fields, or six with the seconds first.")
@click.option("--tz", metavar="ZONE", help="The time zone of --cron. [UTC]")
@click.option("--every", metavar="DURATION", help="An interval.")
@click.option("--after-completion", metavar="DURATION", help="That long after the end of the job before.")
@click.option("--limit", type=int, help="How many times in all.")
@click.option(
    "--missed", type=click.Choice(["skip", "catch_up"]), help="Slots nobody was there to fire. [skip]"
)
@click.option("-t", "--task", metavar="NAME", help="JOB is the JSON arguments of this task, not a command.")
@click.option("-q", "--queue", metavar="NAME", help="Where its jobs go.")
@click.option("--attempts", type=int, help="How often a job is run if it fails.")
@click.option("--timeout", metavar="DURATION", help="How long a run may take.")
@click.option("--priority", type=int, help="Smaller runs first.")
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
    """Have JOB come again, under NAME; one of that name is changed. JOB is what `penstock enqueue` takes."""
    settings = Settings(flags)
    given = {key: value for key, value in options.items() if value is not None}
    timing = {
        key: given.pop(key)
        for key in ("cron", "tz", "every", "after_completion", "limit", "missed")
        if key in given
    }
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
            "paused" if info.paused else "",
        )
        for info in found
    ]
    print_table(("name", "queue", "when", "next", "fired", ""), rows, empty="no schedulers")


@command_of(schedule, "remove")
@click.argument("name")
@queue_option
@click.pass_obj
def remove(flags: Flags, /, *, name: str, queue: str | None) -> None:
    """Forget a scheduler; its jobs stay."""
    _change(flags, name, queue, lambda named: named.remove_scheduler(name))
    click.echo(f"{name} removed")


@command_of(schedule, "pause")
@click.argument("name")
@queue_option
@click.pass_obj
def pause(flags: Flags, /, *, name: str, queue: str | None) -> None:
    """Fire no slot until it is resumed."""
    _change(flags, name, queue, lambda named: named.pause_scheduler(name))
    click.echo(f"{name} paused")


@command_of(schedule, "resume")
@click.argument("name")
@queue_option
@click.pass_obj
def resume(flags: Flags, /, *, name: str, queue: str | None) -> None:
    """The end of a pause; slots of the time between are left out."""
    _change(flags, name, queue, lambda named: named.resume_scheduler(name))
    click.echo(f"{name} resumed")


def _change(flags: Flags, name: str, queue: str | None, verb: Any) -> None:
    async def act(app: App) -> bool:
        queues: list[Queue] = [app.queue(each) for each in await queues_of(app, queue)]
        return any([await verb(named) for named in queues])

    if not run_with_app(Settings(flags), act):
        raise NotFound(f"there is no scheduler {name!r}. See: penstock schedule list")


def _row(info: SchedulerInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "queue": info.queue,
        "when": info.when,
        "task": info.task,
        "next": info.next,
        "fired": info.fired,
        "paused": info.paused,
        "ended": info.ended,
        "last_job": info.last_job,
    }
