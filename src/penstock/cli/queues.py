"""``penstock pause``, ``resume``, ``drain``, ``clean``, ``clear``: operating queues."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, NotFound, WrongState
from penstock.cli.output import print_json, when
from penstock.cli.parameters import (
    Flags,
    StateName,
    command,
    completes_queues,
    json_option,
    queue_option,
    yes_option,
)
from penstock.cli.settings import Settings
from penstock.cli.synonyms import did_you_mean
from penstock.cli.values import duration, instant_or, whole
from penstock.client.situation import counted
from penstock.core.lifecycle import TERMINAL
from penstock.core.limits import EVERY_GROUP
from penstock.core.names import check_queue
from penstock.core.units import milliseconds
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.queue import Queue


_ROUND_TRIP_MS: Final = 2_000
_group_option = click.option("--group", metavar="KEY", help="Only the jobs of this group.")


_queues_argument = click.argument("queues", metavar="[QUEUE]...", nargs=-1, shell_complete=completes_queues)


def ask(
    question: str, *, yes: bool, otherwise: str = "add --yes", nothing: str = "nothing was removed"
) -> None:
    """Ask before what cannot be undone. Raises ``WrongState`` if the answer is no, or nobody can answer.

    ``nothing`` is what the command says after a no.
    """
    if yes:
        return
    import sys

    if not sys.stdin.isatty():
        raise WrongState(f"{question} Nobody can be asked here: {otherwise}.")
    if not click.confirm(question, err=True):
        raise WrongState(f"{nothing}.")


def refuse_unknown_queues(flags: Flags, *named: str | None) -> None:
    """Raise ``NotFound`` for a queue that does not exist, before the user is asked about it."""
    if any(named):
        run_with_app(Settings(flags), lambda app: queues_of(app, *named))


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
    group: str | None = None,
    check: Callable[[list[Queue]], Awaitable[None]] | None = None,
) -> dict[str, int]:
    """Do it with the queues that were named, or with all, if ``check`` raises nothing for them.

    With a ``group``, only those of the queues count that have it. Unless ``create`` is given, what does not exist is
    refused.
    """

    async def acted(app: App) -> dict[str, int]:
        names = list(dict.fromkeys(map(check_queue, named))) if create else await queues_of(app, *named)
        queues = [app.queue(name) for name in names]
        if group is not None and not create:
            queues = await _having_group(queues, group)
        if check is not None:
            await check(queues)
        return await done_by_queue(queues, act)

    return run_with_app(Settings(flags), acted, create=create)


async def _having_group(queues: list[Queue], group: str) -> list[Queue]:
    """Return the queues that have jobs, a pause or a limit of the group. Raises ``NotFound`` if none has."""
    having: list[Queue] = []
    known: set[str] = set()
    for queue in queues:
        keys = {*await queue.limits(), *[state.key async for state in queue.groups()]} - {"", EVERY_GROUP}
        known |= keys
        if group in keys:
            having.append(queue)
    if not having:
        meant = did_you_mean(group, sorted(known))
        where = f" in {', '.join(queue.name for queue in queues)}" if len(queues) < 3 else ""
        raise NotFound(f"the group {group!r} does not exist{where}. {meant}".rstrip())
    return having


def _tell(done: dict[str, int], what: str, *, as_json: bool) -> None:
    if as_json:
        print_json(done)
    else:
        click.echo(f"{counted(sum(done.values()), 'job')} {what}")


@command("pause")
@_queues_argument
@queue_option
@_group_option
@click.option(
    "--for", "duration", metavar="DURATION", type=duration, help="Resume by itself after this: 10min."
)
@click.option(
    "--until",
    metavar="TIME",
    type=instant_or("--for"),
    help="Resume by itself at this time: 18:00, 'tomorrow 9:00'; local unless it has a zone.",
)
@click.option("--create", is_flag=True, help="Also pause a queue or a group that has no jobs yet.")
@click.pass_obj
def pause(
    flags: Flags,
    /,
    *,
    queues: tuple[str, ...],
    queue: str | None,
    group: str | None,
    duration: str | None,
    until: datetime | None,
    create: bool,
) -> None:
    """Give workers no further jobs, of these queues or of all. Jobs that run go on; `penstock resume` ends it.

    \b
      penstock pause mail reports
      penstock pause mail --for 10min
      penstock pause mail --until 18:00
      penstock pause new --create     before its first job

    Without a queue, queues that get their first job later are not paused.
    """
    named, for_ms = _named(queue, *queues), _pause_ms(duration, until)

    async def act(one: Queue) -> int:
        await one.pause(for_ms / 1000 if for_ms else None, group=group)
        return 1

    try:
        paused = _each_queue(flags, named, act, create=create and bool(named), group=group)
    except NotFound as error:
        what = "queue" if group is None else "group"
        raise NotFound(f"{error} Add --create to pause a {what} before its first job.") from None
    if not for_ms:
        click.echo(f"paused: {_said(paused, group)}")
        return

    async def read(app: App) -> list[tuple[str, str]]:
        return [(name, await _end_of_pause(app, name, group, for_ms)) for name in paused]

    for name, end in run_with_app(Settings(flags), read):
        click.echo(f"paused {end}: {_said([name], group)}")


def _pause_ms(duration: str | None, until: datetime | None) -> int:
    """Return for how long to pause; 0 is until it is resumed."""
    if duration is not None and until is not None:
        raise CommandLineError("--for and --until both say when the pause ends. Give one.", ExitCode.USAGE)
    if until is not None:
        ms = round((until - datetime.now(until.tzinfo)).total_seconds() * 1000)
        if ms < 1:
            raise CommandLineError(f"--until {until:%Y-%m-%d %H:%M} is over already.", ExitCode.USAGE)
        return ms
    return 0 if duration is None else max(milliseconds(duration, what="--for"), 1)


async def _end_of_pause(app: App, queue: str, group: str | None, for_ms: int) -> str:
    """Return until when the queue or the group is paused now: an earlier pause may last longer."""
    [held] = (await (await app.connect()).groups(queue, keys=[group or ""])).groups
    if held.paused:
        return "until it is resumed, as it was before"
    left_ms = max(for_ms, held.wait_ms or 0)
    longer = (
        ", as it was before (resume it first for a shorter pause)"
        if left_ms > for_ms + _ROUND_TRIP_MS
        else ""
    )
    return f"until {when(time.time_ns() // 1_000_000 + left_ms)}{longer}"


def _said(queues: Collection[str], group: str | None) -> str:
    if not queues:
        return "nothing, because no queue exists"
    return ", ".join(queues) if group is None else f"group {group} of {', '.join(queues)}"


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

    resumed = _each_queue(flags, _named(queue, *queues), act, group=group)
    click.echo(f"resumed: {_said(resumed, group)}")


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
    refuse_unknown_queues(flags, *named)
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
@click.option("-n", "--limit", metavar="NUMBER", type=whole(1), help="Maximum number per queue. [all]")
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
    refuse_unknown_queues(flags, queue)
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
    refuse_unknown_queues(flags, queue)
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
