"""``penstock pause``, ``resume``, ``drain``, ``clean``, ``clear``: operate on queues."""

from __future__ import annotations

import sys
import time
from collections.abc import Awaitable, Callable, Collection
from datetime import datetime
from typing import TYPE_CHECKING, Final

import click

from penstock.cli.completion import completes_queues
from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import InvalidUsage, NotFound, WrongState
from penstock.cli.output import print_json, when
from penstock.cli.parameters import StateName, command, json_option, option, queue_option, yes_option
from penstock.cli.settings import Settings
from penstock.cli.synonyms import did_you_mean
from penstock.cli.values import instant_or, whole
from penstock.client.situation import counted
from penstock.core.lifecycle import TERMINAL
from penstock.core.limits import EVERY_GROUP
from penstock.core.names import check_queue
from penstock.core.units import milliseconds
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.queue import Queue
    from penstock.core.limits import GroupState


_ROUND_TRIP_MS: Final = 2_000
_group_option = option("--group KEY", "Only the jobs of this group.")
_queues_argument = click.argument("queues", metavar="[QUEUE]...", nargs=-1, shell_complete=completes_queues)


def ask(
    question: str, *, yes: bool, otherwise: str = "add --yes", nothing: str = "nothing was removed"
) -> None:
    """Ask for confirmation. Raise ``WrongState`` after a no, or without a terminal.

    ``nothing`` is the message after a no.
    """
    if yes:
        return

    if not sys.stdin.isatty():
        raise WrongState(f"{question} Cannot ask without a terminal: {otherwise}.")
    if not click.confirm(question, err=True):
        raise WrongState(f"{nothing}.")


def refuse_unknown_queues(settings: Settings, *queues: str | None) -> None:
    """Raise ``NotFound`` for a queue that does not exist, before the user is asked about it."""
    if any(queues):
        run_with_app(settings, lambda app: queues_of(app, *queues))


async def done_by_queue(queues: list[Queue], act: Callable[[Queue], Awaitable[int]]) -> dict[str, int]:
    """Act on one queue after the other. If the store fails, its error names the queues that are done."""
    done: dict[str, int] = {}
    try:
        for queue in queues:
            done[queue.name] = await act(queue)
    except StorageError as error:
        if done:
            error.add_note(f"It is done for: {', '.join(done)}.")
        raise
    return done


def _names(*names: str | None) -> tuple[str, ...]:
    """Return the names that were given. An empty tuple stands for all queues."""
    return tuple(name for name in names if name is not None)


def _each_queue(
    settings: Settings,
    names: tuple[str, ...],
    act: Callable[[Queue], Awaitable[int]],
    *,
    create: bool = False,
    group: str | None = None,
    before: Callable[[App, list[Queue]], Awaitable[None]] | None = None,
) -> dict[str, int]:
    """Act on these queues, or on all, unless ``before`` raises.

    With ``group``, act only on the queues that have it. Refuse what does not exist, unless ``create`` is given.
    """

    async def act_on_queues(app: App) -> dict[str, int]:
        known = list(dict.fromkeys(map(check_queue, names))) if create else await queues_of(app, *names)
        queues = [app.queue(name) for name in known]
        if group is not None and not create:
            queues = await _queues_with_group(queues, group)
        if before is not None:
            await before(app, queues)
        return await done_by_queue(queues, act)

    return run_with_app(settings, act_on_queues, create=create)


async def _queues_with_group(queues: list[Queue], group: str) -> list[Queue]:
    """Return the queues with a job, a pause or a limit of the group. Raise ``NotFound`` if there are none."""
    matching: list[Queue] = []
    known: set[str] = set()
    for queue in queues:
        keys = {*await queue.limits(), *[state.key async for state in queue.groups()]} - {"", EVERY_GROUP}
        known |= keys
        if group in keys:
            matching.append(queue)
    if not matching:
        meant = did_you_mean(group, sorted(known))
        where = f" in {', '.join(queue.name for queue in queues)}" if len(queues) < 3 else ""
        raise NotFound(f"the group {group!r} does not exist{where}. {meant}".rstrip())
    return matching


def _print_removed(counts: dict[str, int], *, as_json: bool) -> None:
    if as_json:
        print_json(counts)
    else:
        click.echo(f"{counted(sum(counts.values()), 'job')} removed")


@command("pause")
@_queues_argument
@queue_option
@_group_option
@option("--for DURATION", "Resume automatically after this: 10min.", name="duration")
@option(
    "--until TIME",
    "Resume automatically at this time: 18:00, 'tomorrow 9:00'; local unless it has a zone.",
    instant_or("--for"),
)
@option("--create", "Also pause a queue or a group that has no jobs yet.")
def pause(
    settings: Settings,
    *,
    queues: tuple[str, ...],
    queue: str | None,
    group: str | None,
    duration: str | None,
    until: datetime | None,
    create: bool,
) -> None:
    """Stop workers from starting jobs of these queues, or of all. Running jobs keep going.

    \b
      penstock pause mail reports
      penstock pause mail --for 10min
      penstock pause mail --until 18:00
      penstock pause new --create     before its first job

    `penstock resume` ends the pause. Without a QUEUE, queues that get their first job later are not paused.
    """
    names, for_ms = _names(queue, *queues), _pause_ms(duration, until)

    async def act(queue: Queue) -> int:
        await queue.pause(for_ms / 1000 if for_ms else None, group=group)
        return 1

    try:
        paused = _each_queue(settings, names, act, create=create and bool(names), group=group)
    except NotFound as error:
        what = "queue" if group is None else "group"
        raise NotFound(f"{error} Add --create to pause a {what} before its first job.") from None
    if not for_ms:
        click.echo(f"paused: {_targets(paused, group)}")
        return

    async def read(app: App) -> list[tuple[str, str]]:
        return [(name, await _end_of_pause(app, name, group, for_ms)) for name in paused]

    for name, end in run_with_app(settings, read):
        click.echo(f"paused {end}: {_targets([name], group)}")


def _pause_ms(duration: str | None, until: datetime | None) -> int:
    """Return how long to pause; 0 means until it is resumed."""
    if duration is not None and until is not None:
        raise InvalidUsage("--for and --until both set the end of the pause. Give one.")
    if until is not None:
        ms = round((until - datetime.now(until.tzinfo)).total_seconds() * 1000)
        if ms < 1:
            raise InvalidUsage(f"--until {until:%Y-%m-%d %H:%M} is in the past.")
        return ms
    return 0 if duration is None else max(milliseconds(duration, what="--for"), 1)


async def _group_state(app: App, queue: str, group: str | None) -> GroupState:
    """Return the state of a group, or of the queue itself."""
    [state] = (await (await app.connect()).groups(queue, keys=[group or ""])).groups
    return state


async def _end_of_pause(app: App, queue: str, group: str | None, for_ms: int) -> str:
    """Return when the pause ends: an earlier pause may last longer."""
    state = await _group_state(app, queue, group)
    if state.paused:
        return "until it is resumed, as it was before"
    left_ms = max(for_ms, state.wait_ms or 0)
    longer = (
        ", as it was before (resume it first for a shorter pause)"
        if left_ms > for_ms + _ROUND_TRIP_MS
        else ""
    )
    return f"until {when(time.time_ns() // 1_000_000 + left_ms)}{longer}"


def _targets(queues: Collection[str], group: str | None) -> str:
    """Return the names of the queues, or of their group."""
    if not queues:
        return "nothing, because no queue exists"
    return ", ".join(queues) if group is None else f"group {group} of {', '.join(queues)}"


@command("resume")
@_queues_argument
@queue_option
@_group_option
def resume(settings: Settings, *, queues: tuple[str, ...], queue: str | None, group: str | None) -> None:
    """Let workers start jobs of these queues, or of all, again: end a `penstock pause`."""
    running: list[str] = []

    async def find_running(app: App, queues: list[Queue]) -> None:
        states = {queue.name: await _group_state(app, queue.name, group) for queue in queues}
        running.extend(name for name, state in states.items() if not (state.paused or state.why == "asked"))

    async def act(queue: Queue) -> int:
        await queue.resume(group=group)
        return 1

    names = _each_queue(settings, _names(queue, *queues), act, group=group, before=find_running)
    resumed = [name for name in names if name not in running]
    if resumed or not running:
        click.echo(f"resumed: {_targets(resumed, group)}")
    if running:
        click.echo(f"not paused: {_targets(running, group)}")


@command("drain")
@_queues_argument
@queue_option
@option("--scheduled", "Also remove scheduled jobs.")
@yes_option
@json_option
def drain(
    settings: Settings,
    *,
    queues: tuple[str, ...],
    queue: str | None,
    scheduled: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove all waiting jobs of these queues, or of all. Asks for confirmation."""
    names = _names(queue, *queues)
    refuse_unknown_queues(settings, *names)
    ask(f"Remove all waiting jobs of {', '.join(names) or 'all queues'}?", yes=yes)
    removed = _each_queue(settings, names, lambda queue: queue.drain(scheduled=scheduled))
    _print_removed(removed, as_json=as_json)


@command("clean")
@click.argument("state", metavar="STATE", type=StateName(sorted(state.value for state in TERMINAL)))
@option("--older-than DURATION", "Only jobs that ended longer ago than this: 7d. Skips the confirmation.")
@option("-n, --limit NUMBER", "Maximum number per queue. [all]", whole(1))
@queue_option
@yes_option
@json_option
def clean(
    settings: Settings,
    *,
    state: str,
    older_than: str | None,
    limit: int | None,
    queue: str | None,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove completed, failed or cancelled jobs, except those that other jobs wait for.

    \b
      penstock clean completed --older-than 1d

    Asks for confirmation unless an age is given.
    """
    refuse_unknown_queues(settings, queue)
    if older_than is None:
        question = f"Remove all {state} jobs of {queue or 'all queues'}?"
        ask(question, yes=yes, otherwise="add --yes, or give an age: --older-than 1d")
    age = older_than or "0s"
    removed = _each_queue(
        settings, _names(queue), lambda queue: queue.clean(state, older_than=age, limit=limit)
    )
    _print_removed(removed, as_json=as_json)


@command("clear")
@_queues_argument
@queue_option
@option("--force", "Also remove active jobs. The results of their workers are rejected.")
@yes_option
@json_option
def clear(
    settings: Settings, *, queues: tuple[str, ...], queue: str | None, force: bool, yes: bool, as_json: bool
) -> None:
    """Remove all jobs in every state, of these queues or of all. Asks for confirmation."""
    names = _names(queue, *queues)
    refuse_unknown_queues(settings, *names)
    ask(f"Remove ALL jobs of {', '.join(names) or 'all queues'}, finished and failed ones included?", yes=yes)
    removed = _each_queue(
        settings, names, lambda queue: queue.obliterate(force=force), before=None if force else _refuse_active
    )
    _print_removed(removed, as_json=as_json)


async def _refuse_active(app: App, queues: list[Queue]) -> None:
    """Raise ``WrongState`` for active jobs in any queue, before one is cleared: the store checks one at a time."""
    active = [queue.name for queue in queues if (await queue.counts()).active]
    if active:
        raise WrongState(
            f"nothing was removed: jobs are active in {', '.join(active)}. "
            "Stop the workers first, or add --force to remove these jobs, too."
        )
