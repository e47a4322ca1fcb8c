"""``penstock limit`` and ``penstock budget``: bounds on how many jobs run, and on how much they use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import queues_of, queues_with_rules, refuse_unknown_queue, run_with_app
from penstock.cli.errors import InvalidUsage, NotFound
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import (
    command_of,
    family,
    json_option,
    one_queue,
    option,
    queue_argument,
    queue_option,
    queue_or_default,
)
from penstock.cli.settings import Settings
from penstock.cli.values import duration_or
from penstock.core.limits import EVERY_GROUP, MILLION, Rate, parse_rate
from penstock.core.units import describe
from penstock.errors import InvalidOption

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.core.limits import Limit
    from penstock.storage.values import Budget


_LIMIT_COLUMNS: Final = (
    "queue",
    "group",
    "concurrency",
    "rate",
    "bucket",
    "waiting",
    "active",
    "blocked",
    "why",
)
_BUDGET_COLUMNS: Final = ("queue", "budget", "spent", "amount", "per", "renews", "flow")
_flow_option = option("--flow ID", "The budget of this flow, not of the whole queue.", default="")


@family("budget")
def budget() -> None:
    """Budgets of queues and flows. Once a budget is spent, no job starts until you raise it or it renews.

    \b
      penstock budget set usd 5 -q reports --per 1d
      penstock budget show
    """


@command_of(budget, "set")
@click.argument("name")
@click.argument("amount", type=float)
@queue_or_default
@option(
    "--per DURATION",
    "Start again from zero after each period: 1d; 'none' for never. [unchanged]",
    duration_or("none"),
)
@_flow_option
@option("--create", "Also accept a queue that has no jobs yet.")
def set_budget(
    settings: Settings,
    *,
    name: str,
    amount: float,
    queue: str | None,
    per: str | None,
    flow: str,
    create: bool,
) -> None:
    """Set the budget NAME to AMOUNT, in the units that jobs report with context.use(...).

    A budget that has a period keeps it, and what was spent in it. Another period (--per) begins now, at zero.
    """
    queue_name = queue or settings["queue"]

    async def act(app: App) -> dict[str, Any]:
        if not create:
            await refuse_unknown_queue(app, queue, to="give a budget to")
        period = None if per == "none" else per or await _period(app, queue_name, name, flow)
        await app.queue(queue_name).set_budget(name, amount, per=period, flow=flow)
        rows = await _budget_rows(app, queue_name)
        return next(row for row in rows if (row["budget"], row["flow"]) == (name, flow))

    click.echo(_budget_line(run_with_app(settings, act, create=True)))


async def _period(app: App, queue: str, name: str, flow: str) -> str | None:
    """Return the current period of a budget; ``None`` if it has none."""
    budgets = await (await app.connect()).budgets(queue)
    per_ms = next((budget.per_ms for budget in budgets if (budget.name, budget.flow) == (name, flow)), 0)
    return describe(per_ms) if per_ms else None


@command_of(budget, "show")
@queue_argument
@queue_option
@json_option
def show_budget(settings: Settings, *, name: str | None, queue: str | None, as_json: bool) -> None:
    """Show the budgets, and how much of each is spent."""
    queue = one_queue(name, queue)

    async def read(app: App) -> list[dict[str, Any]]:
        names = await queues_with_rules(app, queue, settings)
        return [row for name in names for row in await _budget_rows(app, name)]

    rows = run_with_app(settings, read)
    if as_json:
        print_json(rows)
        return
    print_table(
        _BUDGET_COLUMNS, [[row[name] for name in _BUDGET_COLUMNS] for row in rows], empty="no budgets"
    )


@command_of(budget, "remove")
@click.argument("name")
@queue_or_default
@_flow_option
def remove_budget(settings: Settings, *, name: str, queue: str | None, flow: str) -> None:
    """Remove the budget NAME."""
    queue_name = queue or settings["queue"]

    async def act(app: App) -> bool:
        await queues_of(app, queue)
        return await app.queue(queue_name).remove_budget(name, flow=flow)

    if not run_with_app(settings, act):
        raise NotFound(f"queue {queue_name} has no budget {name!r}{f' of flow {flow}' * bool(flow)}.")
    click.echo(f"{queue_name}: budget {name} removed")


async def _budget_rows(app: App, queue: str) -> list[dict[str, Any]]:
    """Return the budgets of a queue and of its flows."""
    return [_budget_row(queue, budget) for budget in await (await app.connect()).budgets(queue)]


def _budget_row(queue: str, budget: Budget) -> dict[str, Any]:
    return {
        "queue": queue,
        "budget": budget.name,
        "spent": budget.spent / MILLION,
        "amount": budget.micros / MILLION,
        "per": describe(budget.per_ms) if budget.per_ms else "",
        "renews": when(budget.until_ms) if budget.until_ms else "",
        "flow": budget.flow,
    }


def _budget_line(row: dict[str, Any]) -> str:
    per = f" per {row['per']}" if row["per"] else ""
    flow = f" flow {row['flow']}" if row["flow"] else ""
    return f"{row['queue']}{flow}: budget {row['budget']}, {row['spent']:g} of {row['amount']:g} spent{per}"


@family("limit")
def limit() -> None:
    """Limits of queues and of groups of jobs. They apply to all workers, from the next claim on.

    \b
      penstock limit set mail --rate 100/s
      penstock limit set mail --group '*' --concurrency 1      every group strictly in order
      penstock limit show mail
    """


@command_of(limit, "set")
@queue_argument
@queue_or_default
@option("--group KEY", "A group; '*' is every group without its own limit.")
@option("--concurrency NUMBER", "Number of jobs that may be active at a time.", str)
@option("--rate RATE", 'Number of starts in any period of time: "100/s", "5/2m".')
@option("--bucket CAPACITY:RATE", 'Token bucket of a group, from which jobs take their cost: "100:10/s".')
@option("--none", "Remove the limit.", name="remove")
@option("--create", "Also accept a queue that has no jobs yet.")
def set_limit(
    settings: Settings,
    *,
    name: str | None,
    queue: str | None,
    group: str | None,
    remove: bool,
    create: bool,
    **options: Any,
) -> None:
    """Limit a queue or a group. Bounds that are not given stay unchanged.

    "none" removes one bound: --rate none. --none removes the whole limit.
    """
    queue = one_queue(name, queue)
    name = queue or settings["queue"]
    bounds = {key: _bound(key, value) for key, value in options.items() if value is not None}
    if remove == bool(bounds):
        raise InvalidUsage("give --concurrency, --rate or --bucket, or else --none.")

    async def act(app: App) -> Limit | None:
        if not create:
            await refuse_unknown_queue(app, queue, to="limit")
        if remove:
            await app.queue(name).unlimit(group=group)
            return None
        return await app.queue(name).limit(group=group, **bounds)

    now = _bounds_of(run_with_app(settings, act, create=True))
    text = ", ".join(f"{key} {value}" for key, value in now.items() if value)
    click.echo(f"{name}{f' group {group}' if group else ''}: {text or 'no limit'}")


def _bucket(text: str) -> tuple[int, Rate]:
    capacity, _, rate = text.partition(":")
    return int(capacity), parse_rate(rate)


_BOUNDS: Final[dict[str, tuple[Callable[[str], Any], str]]] = {
    "concurrency": (int, "an integer"),
    "rate": (parse_rate, "a count and a period, such as 100/s, 5/2m or 1/500ms"),
    "bucket": (_bucket, "a capacity and a rate, such as 100:10/s"),
}


def _bound(name: str, text: str) -> Any:
    """Return the value of an option; ``None`` for "none", which removes the bound."""
    read, form = _BOUNDS[name]
    try:
        return None if text == "none" else read(text)
    except (ValueError, InvalidOption):
        raise InvalidUsage(f"--{name} {text}: give {form}, or none.") from None


@command_of(limit, "show")
@queue_argument
@queue_option
@json_option
def show_limit(settings: Settings, *, name: str | None, queue: str | None, as_json: bool) -> None:
    """Show the limits, the groups that wait because of a limit or a pause, and the budgets."""
    queue = one_queue(name, queue)

    async def read(app: App) -> list[dict[str, Any]]:
        names = await queues_with_rules(app, queue, settings)
        limits = [row for name in names for row in await _limit_rows(app, name)]
        return limits + [row for name in names for row in await _budget_rows(app, name)]

    rows = run_with_app(settings, read)
    if as_json:
        print_json(rows)
        return
    limits = [[row.get(name, "") for name in _LIMIT_COLUMNS] for row in rows if "group" in row]
    budgets = [[row[name] for name in _BUDGET_COLUMNS] for row in rows if "budget" in row]
    print_table(
        _LIMIT_COLUMNS,
        limits,
        empty="no limits",
        spare=("bucket", "rate", "waiting", "active", "blocked", "why"),
    )
    if budgets:
        click.echo()
        print_table(_BUDGET_COLUMNS, budgets)


async def _limit_rows(app: App, name: str) -> list[dict[str, Any]]:
    """Return the limits of a queue, and its groups that wait."""
    limits = await app.queue(name).limits()
    limited = await (await app.connect()).groups(name, keys=[key for key in limits if key != EVERY_GROUP])
    groups = {group.key: group async for group in app.queue(name).groups()}
    keys = dict.fromkeys([*limits, *(key for key, group in groups.items() if group.blocked or group.paused)])
    groups |= {group.key: group for group in limited.groups}
    rows = []
    for key in keys:
        row = {"queue": name, "group": key, **_bounds_of(limits.get(key))}
        if (group := groups.get(key)) is not None:
            row |= {
                "waiting": group.waiting,
                "active": group.active,
                "blocked": group.blocked,
                "why": group.why,
            }
        rows.append(row)
    return rows


def _bounds_of(bounds: Limit | None) -> dict[str, Any]:
    if bounds is None:
        return {}
    return {
        "concurrency": bounds.concurrency,
        "rate": None if bounds.rate is None else str(bounds.rate),
        "bucket": None if bounds.bucket is None else str(bounds.bucket),
    }
