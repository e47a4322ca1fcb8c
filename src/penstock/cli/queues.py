"""``penstock pause``, ``resume``, ``drain``, ``clean``, ``clear``: operating queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import WrongState
from penstock.cli.flags import Flags
from penstock.cli.output import print_json
from penstock.cli.parameters import command, json_option, queue_option, yes_option
from penstock.cli.settings import Settings
from penstock.cli.values import duration, whole
from penstock.core.lifecycle import TERMINAL
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.queue import Queue

__all__ = ["ask", "clean", "clear", "done_by_queue", "drain", "pause", "resume"]

_group_option = click.option("--group", metavar="KEY", help="Only the jobs of this group.")


def ask(question: str, *, yes: bool, otherwise: str = "add --yes") -> None:
    """Ask before what cannot be taken back. Raises ``WrongState`` where nobody can answer."""
    if yes:
        return
    import sys

    if not sys.stdin.isatty():
        raise WrongState(f"{question} Nobody can be asked here: {otherwise}.")
    if not click.confirm(question, err=True):
        raise click.Abort


async def done_by_queue(queues: list[Queue], act: Callable[[Queue], Awaitable[int]]) -> dict[str, int]:
    """Do it with one after the other. An error of the store says for which it is done."""
    done: dict[str, int] = {}
    try:
        for queue in queues:
            done[queue.name] = await act(queue)
    except StorageError as error:
        if done:
            error.add_note(f"It is done for: {', '.join(done)}.")
        raise
    return done


def _each_queue(
    flags: Flags,
    queue: str | None,
    act: Callable[[Queue], Awaitable[int]],
    *,
    check: Callable[[list[Queue]], Awaitable[None]] | None = None,
) -> dict[str, int]:
    """Do it with all queues that are meant, if ``check`` raises nothing for them."""

    async def acted(app: App) -> dict[str, int]:
        queues = [app.queue(name) for name in await queues_of(app, queue)]
        if check is not None:
            await check(queues)
        return await done_by_queue(queues, act)

    return run_with_app(Settings(flags), acted)


def _tell(done: dict[str, int], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        click.echo(f"{sum(done.values())} jobs {what}")


@command("pause")
@queue_option
@_group_option
@click.pass_obj
def pause(flags: Flags, /, *, queue: str | None, group: str | None) -> None:
    """No worker gets a job from now on, of one queue or of all. Jobs that run go on; `penstock resume` ends it."""

    async def act(named: Queue) -> int:
        await named.pause(group=group)
        return 1

    click.echo(f"paused: {', '.join(_each_queue(flags, queue, act)) or 'nothing, there is no queue'}")


@command("resume")
@queue_option
@_group_option
@click.pass_obj
def resume(flags: Flags, /, *, queue: str | None, group: str | None) -> None:
    """Workers get jobs again, of one queue or of all: the end of `penstock pause`."""

    async def act(named: Queue) -> int:
        await named.resume(group=group)
        return 1

    click.echo(f"resumed: {', '.join(_each_queue(flags, queue, act)) or 'nothing, there is no queue'}")


@command("drain")
@queue_option
@click.option("--scheduled", is_flag=True, help="Scheduled jobs, too.")
@yes_option
@json_option
@click.pass_obj
def drain(flags: Flags, /, *, queue: str | None, scheduled: bool, yes: bool, as_json: bool) -> None:
    """Remove all jobs that wait, of one queue or of all. Asks first."""
    ask(f"Remove all waiting jobs of {queue or 'all queues'}?", yes=yes)
    _tell(
        _each_queue(flags, queue, lambda named: named.drain(scheduled=scheduled)), "removed", as_json=as_json
    )


@command("clean")
@click.argument("state", metavar="STATE", type=click.Choice(sorted(state.value for state in TERMINAL)))
@click.option(
    "--older-than",
    metavar="DURATION",
    type=duration,
    help="Only those that ended longer ago than this: 7d. Then it does not ask.",
)
@click.option("-n", "--limit", metavar="NUMBER", type=whole(1), help="At most so many of each queue. [all]")
@queue_option
@yes_option
@json_option
@click.pass_obj
def clean(
    flags: Flags,
    /,
    *,
    state: str,
    older_than: str | None,
    limit: int | None,
    queue: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove jobs that have ended as STATE: completed, failed or cancelled; except those that others wait for.

    \b
      penstock clean completed --older-than 1d

    Asks first if no age is given.
    """
    if older_than is None:
        question = f"Remove all {state} jobs of {queue or 'all queues'}?"
        ask(question, yes=yes, otherwise="add --yes, or give an age: --older-than 1d")
    age = older_than or "0s"
    done = _each_queue(flags, queue, lambda named: named.clean(state, older_than=age, limit=limit))
    _tell(done, "removed", as_json=as_json)


@command("clear")
@queue_option
@click.option("--force", is_flag=True, help="Active jobs, too: what their workers bring is not accepted.")
@yes_option
@json_option
@click.pass_obj
def clear(flags: Flags, /, *, queue: str | None, force: bool, yes: bool, as_json: bool) -> None:
    """Remove all jobs, whatever their state, of one queue or of all. Asks first."""
    ask(f"Remove ALL jobs of {queue or 'all queues'}, finished and failed ones included?", yes=yes)
    done = _each_queue(
        flags,
        queue,
        lambda named: named.obliterate(force=force),
        check=None if force else _refuse_active,
    )
    _tell(done, "removed", as_json=as_json)


async def _refuse_active(queues: list[Queue]) -> None:
    """Before any of them is cleared: the store refuses one by one."""
    active = [named.name for named in queues if (await named.counts()).active]
    if active:
        raise WrongState(
            f"nothing was removed: jobs are active in {', '.join(active)}. "
            "Stop the workers first, or remove these jobs, too, by --force."
        )
