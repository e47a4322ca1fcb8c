"""``penstock budget``: how much the jobs of a queue may use in all."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import queues_of, queues_with_rules, refuse_unknown_queue, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, NotFound
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import Flags, command_of, family, json_option, queue_option, queue_option_for
from penstock.cli.settings import Settings
from penstock.cli.values import duration_or
from penstock.core.limits import MILLION, Rate, parse_rate
from penstock.core.units import describe
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.limits import Limit
    from penstock.storage.values import Budget


BUDGET_COLUMNS: Final = ("queue", "budget", "spent", "amount", "per", "renews", "flow")
_flow_option = click.option("--flow", metavar="ID", default="", help="Of this flow, not of the whole queue.")


@family("budget")
def budget() -> None:
    """Budgets of queues and flows. Once one is spent, no further job begins until it is raised or renewed.

    \b
      penstock budget set usd 5 -q reports --per 1d
      penstock budget show
    """


@command_of(budget, "set")
@click.argument("name")
@click.argument("amount", type=float)
@queue_option_for("Which queue. [the key queue]")
@click.option(
    "--per",
    metavar="DURATION",
    type=duration_or("none"),
    help="Begin from zero after each such period: 1d. [as before; none: never]",
)
@_flow_option
@click.option("--create", is_flag=True, help="Also set it for a queue that has no jobs yet.")
@click.pass_obj
def set_budget(
    flags: Flags,
    /,
    *,
    name: str,
    amount: float,
    queue: str | None,
    per: str | None,
    flow: str,
    create: bool,
) -> None:
    """Set or raise the budget NAME to AMOUNT, in the units that jobs report with context.use(...).

    A budget with a period begins a new period.
    """
    settings = Settings(flags)
    place = queue or settings["queue"]

    async def act(app: App) -> dict[str, Any]:
        if not create:
            await refuse_unknown_queue(app, queue, to="give a budget to")
        period = None if per == "none" else per or await _period(app, place, name, flow)
        await app.queue(place).set_budget(name, amount, per=period, flow=flow)
        return next(
            row for row in await budgets_of(app, place) if (row["budget"], row["flow"]) == (name, flow)
        )

    click.echo(_said(run_with_app(settings, act, create=True)))


async def _period(app: App, queue: str, name: str, flow: str) -> str | None:
    known = await (await app.connect()).budgets(queue)
    per_ms = next((one.per_ms for one in known if (one.name, one.flow) == (name, flow)), 0)
    return describe(per_ms) if per_ms else None


@command_of(budget, "show")
@queue_option
@json_option
@click.pass_obj
def show_budget(flags: Flags, /, *, queue: str | None, as_json: bool) -> None:
    """Show the budgets, and how much of each is spent."""
    settings = Settings(flags)

    async def read(app: App) -> list[dict[str, Any]]:
        names = await queues_with_rules(app, queue, settings)
        return [row for name in names for row in await budgets_of(app, name)]

    rows = run_with_app(settings, read)
    if as_json:
        print_json(rows)
        return
    print_table(BUDGET_COLUMNS, [[row[name] for name in BUDGET_COLUMNS] for row in rows], empty="no budgets")


@command_of(budget, "remove")
@click.argument("name")
@queue_option_for("Which queue. [the key queue]")
@_flow_option
@click.pass_obj
def remove(flags: Flags, /, *, name: str, queue: str | None, flow: str) -> None:
    """Remove the budget NAME, so that it stops no job."""
    settings = Settings(flags)
    place = queue or settings["queue"]

    async def act(app: App) -> bool:
        await queues_of(app, queue)
        return await app.queue(place).remove_budget(name, flow=flow)

    if not run_with_app(settings, act):
        raise NotFound(f"queue {place} has no budget {name!r}{f' of flow {flow}' * bool(flow)}.")
    click.echo(f"{place}: budget {name} removed")


async def budgets_of(app: App, queue: str) -> list[dict[str, Any]]:
    """Return the budgets of a queue and of the flows in it, as rows."""
    return [_row(queue, one) for one in await (await app.connect()).budgets(queue)]


def _row(queue: str, one: Budget) -> dict[str, Any]:
    return {
        "queue": queue,
        "budget": one.name,
        "spent": one.spent / MILLION,
        "amount": one.micros / MILLION,
        "per": describe(one.per_ms) if one.per_ms else "",
        "renews": when(one.until_ms) if one.until_ms else "",
        "flow": one.flow,
    }


def _said(row: dict[str, Any]) -> str:
    per = f" per {row['per']}" if row["per"] else ""
    flow = f" flow {row['flow']}" if row["flow"] else ""
    return f"{row['queue']}{flow}: budget {row['budget']}, {row['spent']:g} of {row['amount']:g} spent{per}"


# ``penstock limit``: how many at a time, how many in a stretch of time.


@family("limit")
def limit() -> None:
    """Limits of queues, and of groups of jobs in them; they hold for all workers, from the next claim on.

    \b
      penstock limit set -q mail --rate 100/s
      penstock limit set -q mail --group '*' --concurrency 1      every group strictly in order
      penstock limit show
    """


@command_of(limit, "set")
@queue_option_for("Which queue. [the key queue]")
@click.option("--group", metavar="KEY", help="A group of it; '*' is every group without a limit of its own.")
@click.option("--concurrency", metavar="NUMBER", help="Number of jobs that may be active at a time.")
@click.option("--rate", metavar="RATE", help='Number of starts in any stretch of time: "100/s", "5/2m".')
@click.option(
    "--bucket", metavar="CAPACITY:RATE", help='Jobs of the group take their cost from it: "100:10/s".'
)
@click.option("--none", "nothing", is_flag=True, help="Remove the limit.")
@click.option("--create", is_flag=True, help="Also limit a queue that has no jobs yet.")
@click.pass_obj
def set_(
    flags: Flags,
    /,
    *,
    queue: str | None,
    group: str | None,
    nothing: bool,
    create: bool,
    **options: Any,
) -> None:
    """Limit a queue or a group; what is not given stays as it is.

    Give "none" to remove one bound: --rate none. --none removes the whole limit.
    """
    settings = Settings(flags)
    name = queue or settings["queue"]
    given = {
        key: None if value == "none" else _PARSERS[key](value)
        for key, value in options.items()
        if value is not None
    }
    if nothing == bool(given):
        raise CommandLineError("give --concurrency, --rate or --bucket, or --none.", ExitCode.USAGE)

    async def act(app: App) -> Limit | None:
        if not create:
            await refuse_unknown_queue(app, queue, to="limit")
        if nothing:
            await app.queue(name).unlimit(group=group)
            return None
        return await app.queue(name).limit(group=group, **given)

    holds = {key: value for key, value in _shown(run_with_app(settings, act, create=True)).items() if value}
    click.echo(f"{name}{f' group {group}' if group else ''}: {_limit_said(holds) or 'no limit'}")


def _parse_concurrency(text: str) -> int:
    if not text.isdigit():
        raise CommandLineError(f"--concurrency {text}: give a whole number, or none.", ExitCode.USAGE)
    return int(text)


def _parse_rate(text: str) -> Rate:
    try:
        return parse_rate(text)
    except InvalidOption:
        raise CommandLineError(
            f"--rate {text}: give a count and a period, such as 100/s, 5/2m or 1/500ms, or none.",
            ExitCode.USAGE,
        ) from None


def _parse_bucket(text: str) -> tuple[int, Rate]:
    capacity, _, rate = text.partition(":")
    try:
        return int(capacity), parse_rate(rate)
    except (ValueError, InvalidOption):
        raise CommandLineError(
            f"--bucket {text}: give a capacity and a rate, such as 100:10/s, or none.", ExitCode.USAGE
        ) from None


_PARSERS: Final[dict[str, Callable[[str], Any]]] = {
    "concurrency": _parse_concurrency,
    "rate": _parse_rate,
    "bucket": _parse_bucket,
}


@command_of(limit, "show")
@queue_option
@json_option
@click.pass_obj
def show(flags: Flags, /, *, queue: str | None, as_json: bool) -> None:
    """Show the limits that were set, the groups that wait because of one, and the budgets."""

    settings = Settings(flags)

    async def read(app: App) -> list[dict[str, Any]]:
        names = await queues_with_rules(app, queue, settings)
        limits = [row for name in names for row in await _of_queue(app, name)]
        return limits + [row for name in names for row in await budgets_of(app, name)]

    found = run_with_app(settings, read)
    if as_json:
        print_json(found)
        return
    rows = [row for row in found if "group" in row]
    budgets = [[row[name] for name in BUDGET_COLUMNS] for row in found if "budget" in row]
    columns = ("queue", "group", "concurrency", "rate", "bucket", "waiting", "active", "blocked", "why")
    print_table(
        columns,
        [[row.get(name, "") for name in columns] for row in rows],
        empty="no limits",
        spare=("bucket", "rate", "waiting", "active", "blocked", "why"),
    )
    if budgets:
        click.echo()
        print_table(BUDGET_COLUMNS, budgets)


async def _of_queue(app: App, name: str) -> list[dict[str, Any]]:
    limits = await app.queue(name).limits()
    groups = {group.key: group async for group in app.queue(name).groups()}
    keys = list(
        dict.fromkeys([*limits, *(key for key, group in groups.items() if group.blocked or group.paused)])
    )
    rows = []
    for key in keys:
        row = {"queue": name, "group": key, **_shown(limits.get(key))}
        if (group := groups.get(key)) is not None:
            row |= {
                "waiting": group.waiting,
                "active": group.active,
                "blocked": group.blocked,
                "why": group.why,
            }
        rows.append(row)
    return rows


def _shown(set_limit: Limit | None) -> dict[str, Any]:
    if set_limit is None:
        return {}
    bucket = set_limit.bucket
    return {
        "concurrency": set_limit.concurrency,
        "rate": None if set_limit.rate is None else str(set_limit.rate),
        "bucket": None if bucket is None else str(bucket),
    }


def _limit_said(given: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in given.items())
