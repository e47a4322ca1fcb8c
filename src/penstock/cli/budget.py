"""``penstock budget``: how much the jobs of a queue may use in all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.connect import queues_of, queues_with_rules, refuse_unknown_queue, run_with_app
from penstock.cli.errors import NotFound
from penstock.cli.flags import Flags
from penstock.cli.output import print_json, print_table, when
from penstock.cli.parameters import command_of, family, json_option, queue_option, queue_option_for
from penstock.cli.settings import Settings
from penstock.cli.values import duration_or
from penstock.core.duration import describe
from penstock.core.usage import MILLION

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.storage.values import Budget

__all__ = ["BUDGET_COLUMNS", "budget", "budgets_of"]

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
def set_(
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
def show(flags: Flags, /, *, queue: str | None, as_json: bool) -> None:
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
