"""``penstock pause``, ``resume``, ``drain``, ``clean``, ``clear``: operating queues."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.connect import run_with_app
from penstock.cli.errors import NotFound, WrongState
from penstock.cli.flags import Flags
from penstock.cli.output import print_json
from penstock.cli.parameters import (
    StateName,
    command,
    completes_queues,
    json_option,
    queue_option,
    yes_option,
)
from penstock.cli.settings import Settings
from penstock.cli.values import duration, whole
from penstock.core.lifecycle import TERMINAL
from penstock.core.names import check_queue
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.queue import Queue

__all__ = ["ask", "clean", "clear", "done_by_queue", "drain", "pause", "resume"]

_MOST_NAMES: Final = 10
_group_option = click.option("--group", metavar="KEY", help="Only the jobs of this group.")


_queues_argument = click.argument("queues", metavar="[QUEUE]...", nargs=-1, shell_complete=completes_queues)


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


def _named(*names: str | None) -> tuple[str, ...]:
    """Return the queues that were named; none stands for all queues."""
    return tuple(name for name in names if name is not None)


def _each_queue(
    flags: Flags,
    named: tuple[str, ...],
    act: Callable[[Queue], Awaitable[int]],
    *,
    create: bool = False,
    check: Callable[[list[Queue]], Awaitable[None]] | None = None,
) -> dict[str, int]:
    """Do it with the queues that were named, or with all, if ``check`` raises nothing for them."""

    async def acted(app: App) -> dict[str, int]:
        known = await app.queues()
        for name in named if not create else ():
            # A queue can be paused, or have a paused group, before its first job.
            if check_queue(name) not in known and not await _has_pause(app.queue(name)):
                raise _unknown(name, known)
        queues = [app.queue(check_queue(name)) for name in dict.fromkeys(named or known)]
        if check is not None:
            await check(queues)
        return await done_by_queue(queues, act)

    return run_with_app(Settings(flags), acted, create=create)


async def _has_pause(queue: Queue) -> bool:
    if (await queue.counts()).paused:
        return True
    return any([group.paused async for group in queue.groups()])


def _unknown(name: str, known: list[str]) -> NotFound:
    """Return the error with the names that may have been meant."""
    from difflib import get_close_matches

    close = get_close_matches(name, known) or known[:_MOST_NAMES]
    meant = f"Did you mean {' or '.join(map(repr, close))}?" if close else "No job was ever enqueued."
    return NotFound(f"the queue {name!r} does not exist. {meant}")


def _tell(done: dict[str, int], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        click.echo(f"{sum(done.values())} jobs {what}")


@command("pause")
@_queues_argument
@queue_option
@_group_option
@click.option("--create", is_flag=True, help="Also pause a queue that has no jobs yet.")
@click.pass_obj
def pause(
    flags: Flags, /, *, queues: tuple[str, ...], queue: str | None, group: str | None, create: bool
) -> None:
    """Give workers no further jobs, of these queues or of all. Jobs that run go on; `penstock resume` ends it.

    \b
      penstock pause mail reports
      penstock pause new --create     before its first job
    """

    async def act(one: Queue) -> int:
        await one.pause(group=group)
        return 1

    named = _named(queue, *queues)
    try:
        paused = _each_queue(flags, named, act, create=create and bool(named))
    except NotFound as error:
        raise NotFound(f"{error} Add --create to pause a queue before its first job.") from None
    click.echo(f"paused: {', '.join(paused) or 'nothing, because no queue exists'}")


@command("resume")
@_queues_argument
@queue_option
@_group_option
@click.pass_obj
def resume(flags: Flags, /, *, queues: tuple[str, ...], queue: str | None, group: str | None) -> None:
    """Give workers jobs again, of these queues or of all: the end of `penstock pause`."""

    async def act(named: Queue) -> int:
        await named.resume(group=group)
        return 1

    resumed = _each_queue(flags, _named(queue, *queues), act)
    click.echo(f"resumed: {', '.join(resumed) or 'nothing, because no queue exists'}")


@command("drain")
@_queues_argument
@queue_option
@click.option("--scheduled", is_flag=True, help="Scheduled jobs, too.")
@yes_option
@json_option
@click.pass_obj
def drain(
    flags: Flags,
    /,
    *,
    queues: tuple[str, ...],
    queue: str | None,
    scheduled: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove all jobs that wait, of these queues or of all. Asks first."""
    named = _named(queue, *queues)
    ask(f"Remove all waiting jobs of {', '.join(named) or 'all queues'}?", yes=yes)
    done = _each_queue(flags, named, lambda one: one.drain(scheduled=scheduled))
    _tell(done, "removed", as_json=as_json)


@command("clean")
@click.argument("state", metavar="STATE", type=StateName(sorted(state.value for state in TERMINAL)))
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
    done = _each_queue(flags, _named(queue), lambda one: one.clean(state, older_than=age, limit=limit))
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
        _named(queue),
        lambda one: one.obliterate(force=force),
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
