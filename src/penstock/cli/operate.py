"""``penstock cancel``, ``retry``, ``remove``, ``promote``, ``reset``, ``reset-stale``, ``signal``: operate on jobs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, NotFound, WrongState
from penstock.cli.jobview import find_job
from penstock.cli.output import print_json
from penstock.cli.parameters import (
    OPEN,
    STATES,
    Flags,
    command,
    completes_ids,
    json_option,
    queue_option,
    queue_option_for,
)
from penstock.cli.settings import Settings
from penstock.cli.values import duration
from penstock.client.situation import counted
from penstock.errors import InvalidName
from penstock.worker.options import LONGEST_HEARTBEAT_MS

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.queue import Queue


_DONE: Final = {
    "cancelled": "cancelled",
    "rerun_cancelled": "does not run again after this run",
    "requested": f"asked to stop: its worker notices within {LONGEST_HEARTBEAT_MS // 1000} seconds",
    "retried": "waits again",
    "removed": "removed",
    "promoted": "waits now",
    "ended": "taken from its worker: it waits again",
}
_NOT_DONE: Final = {
    "completed": "has completed already",
    "failed": "has failed already",
    "already_cancelled": "was cancelled already",
    "no_rerun": "has no rerun that waits",
    "not_failed": "has neither failed nor been cancelled, so there is nothing to retry. To run a scheduled job now, "
    "use `penstock promote`",
    "not_scheduled": "is not scheduled, or staged by a write that has not committed; see `penstock why`",
    "active": "is active: cancel it first, or take it from its worker by `penstock reset`",
    "not_active": "is not active",
}


def said(answer: str) -> str:
    """Return an answer of the store in words that follow the id of the job."""
    return _DONE.get(answer) or _NOT_DONE.get(answer) or answer.replace("_", " ")


_SIGNALLED: Final = {
    "resumed": "goes on",
    "kept": "keeps the signal, because it does not wait for {name!r} yet",
}
_NOT_SIGNALLED: Final = {
    "not_found": "is no longer kept",
    "ended": "has ended, so it takes no signal",
    "full": "has too many signals that it has not taken yet",
}

_NOT_ACTIVE: Final = tuple(state for state in STATES if state != "active")

Verb = Callable[["Queue", str], Awaitable[Mapping[str, str]]]


class _Answer(NamedTuple):
    """The outcome for one job. ``refusal`` says why the text on the command line names no single job."""

    id: str
    answer: str
    ref: str | None = None
    refusal: str = ""


def done_by_id(flags: Flags, ids: tuple[str, ...], queue: str | None, verb: Verb, *, as_json: bool) -> int:
    """Do ``verb`` with each job; say what became of each. The exit code is that of the first that was not done."""

    async def act(app: App) -> list[_Answer]:
        # Nothing is done if the queue's name is wrong.
        await queues_of(app, queue)
        answers: dict[str, _Answer] = {}
        for text in ids:
            found = await _found(app, text, queue)
            # A job that is named twice is acted on once.
            if found.ref is None or found.ref not in answers:
                answers[found.ref or text] = await _done(app, found, verb)
        return list(answers.values())

    answers = run_with_app(Settings(flags), act)
    if as_json:
        print_json([{"id": _in_utf8(one.id), "ref": one.ref, "answer": one.answer} for one in answers])
    failed = [_say(one, silent=as_json) for one in answers]
    return next((code for code in failed if code), 0)


async def _found(app: App, text: str, queue: str | None) -> _Answer:
    try:
        job = await find_job(app, text, queue)
    except NotFound as error:
        return _Answer(text, "not_found", refusal=str(error))
    except CommandLineError as error:
        return _Answer(text, "ambiguous", refusal=str(error))
    except InvalidName as error:
        return _Answer(text, "not_allowed", refusal=str(error))
    return _Answer(job.id, "found", ref=job.ref)


async def _done(app: App, found: _Answer, verb: Verb) -> _Answer:
    if found.ref is None:
        return found
    handle = app.job(found.ref)
    return found._replace(answer=(await verb(app.queue(handle.queue), handle.id))[handle.id])


def _in_utf8(id: str) -> str:
    """As it is, unless it holds bytes that are no text: no job's does, but somebody may have typed it."""
    return id.encode(errors="backslashreplace").decode()


def _say(one: _Answer, *, silent: bool) -> int:
    if one.answer in _DONE:
        if not silent:
            click.echo(f"{one.id} {_DONE[one.answer]}")
        return 0
    is_unknown = one.answer == "not_found"
    # The job may have gone after it was found.
    why = "is no longer kept" if is_unknown else _NOT_DONE.get(one.answer, "")
    if not silent:
        click.echo(f"penstock: {one.refusal or f'{one.id} {why}.'}", err=True)
    if is_unknown:
        return ExitCode.NOT_FOUND
    return ExitCode.USAGE if one.refusal else ExitCode.WRONG_STATE


@command("cancel")
@click.argument(
    "ids",
    metavar="ID...",
    nargs=-1,
    shell_complete=completes_ids(*OPEN),
    required=True,
)
@queue_option_for("Which queue they are in, if several have these ids.")
@click.option(
    "--rerun-only", is_flag=True, help="Leave active jobs alone; drop the reruns that wait behind them."
)
@json_option
@click.pass_obj
def cancel(
    flags: Flags, /, *, ids: tuple[str, ...], queue: str | None, rerun_only: bool, as_json: bool
) -> int:
    """Cancel jobs: those that have not begun end at once, active ones are told to stop.

    Its worker notices within seconds and kills a command with all that it has started. `penstock wait ID` waits for
    the end, `penstock retry ID` runs a cancelled job after all.
    """

    def act(named: Queue, id: str) -> Awaitable[Mapping[str, str]]:
        return named.cancel(id, rerun_only=rerun_only)

    return done_by_id(flags, ids, queue, act, as_json=as_json)


@command("retry")
@click.argument(
    "ids", metavar="ID...", nargs=-1, shell_complete=completes_ids("failed", "cancelled"), required=True
)
@queue_option_for("Which queue they are in, if several have these ids.")
@json_option
@click.pass_obj
def retry(flags: Flags, /, *, ids: tuple[str, ...], queue: str | None, as_json: bool) -> int:
    """Have failed or cancelled jobs run again, with all their attempts before them."""
    return done_by_id(flags, ids, queue, lambda named, id: named.retry(id), as_json=as_json)


@command("remove")
@click.argument(
    "ids",
    metavar="ID...",
    nargs=-1,
    shell_complete=completes_ids(*_NOT_ACTIVE),
    required=True,
)
@queue_option_for("Which queue they are in, if several have these ids.")
@json_option
@click.pass_obj
def remove(flags: Flags, /, *, ids: tuple[str, ...], queue: str | None, as_json: bool) -> int:
    """Delete jobs and all that is known of them, except active ones: cancel those first."""
    return done_by_id(flags, ids, queue, lambda named, id: named.remove(id), as_json=as_json)


@command("promote")
@click.argument("ids", metavar="ID...", nargs=-1, shell_complete=completes_ids("scheduled"), required=True)
@queue_option_for("Which queue they are in, if several have these ids.")
@json_option
@click.pass_obj
def promote(flags: Flags, /, *, ids: tuple[str, ...], queue: str | None, as_json: bool) -> int:
    """Have scheduled jobs run now, or as soon as a worker is free, instead of when they are due."""
    return done_by_id(flags, ids, queue, lambda named, id: named.promote(id), as_json=as_json)


@command("signal")
@click.argument("id", shell_complete=completes_ids("blocked", "scheduled", "waiting", "active"))
@click.argument("name")
@click.argument("data", metavar="[JSON]", required=False)
@queue_option_for("Which queue it is in, if several have that id.")
@json_option
@click.pass_obj
def signal(
    flags: Flags, /, *, id: str, name: str, data: str | None, queue: str | None, as_json: bool
) -> None:
    """Send the signal NAME to a job, with JSON as its data. A job that waits for it goes on; others keep it for later.

    \b
      penstock signal orders/order-7 paid
      penstock signal orders/order-7 paid '{"amount": 12}'
    """
    value = None if data is None else _decoded(data)

    async def act(app: App) -> tuple[str, str]:
        job = await find_job(app, id, queue)
        return job.ref, await app.job(job.ref).signal(name, value)

    ref, answer = run_with_app(Settings(flags), act)
    if answer not in _SIGNALLED:
        raise (NotFound if answer == "not_found" else WrongState)(f"{ref} {_NOT_SIGNALLED[answer]}.")
    if as_json:
        print_json({"ref": ref, "answer": answer})
    else:
        click.echo(f"{ref} {_SIGNALLED[answer].format(name=name)}")


def _decoded(text: str) -> Any:
    import json

    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandLineError(
            f"the data is not valid JSON: {error}. Quote a text twice: '\"text\"'.", ExitCode.USAGE
        ) from None


@command("reset")
@click.argument("ids", metavar="[ID]...", nargs=-1, shell_complete=completes_ids("active"))
@click.option("--all-active", is_flag=True, help="All active jobs.")
@queue_option_for("Which queue they are in, if several have these ids.")
@json_option
@click.pass_obj
def reset(
    flags: Flags, /, *, ids: tuple[str, ...], all_active: bool, queue: str | None, as_json: bool
) -> int:
    """Take active jobs from their workers: they wait again, at their old place.

    A stall is counted, and a worker that is still at it is fenced off: what it brings is not accepted. Jobs of workers
    that died come back by themselves when their lease is over.
    """
    if bool(ids) == all_active:
        raise CommandLineError("give ids, or --all-active.", ExitCode.USAGE)
    if ids:
        return done_by_id(flags, ids, queue, lambda named, id: named.end_leases(id), as_json=as_json)
    return _reset_active(flags, queue, older_than_ms=0, as_json=as_json)


@command("reset-stale")
@click.option(
    "--older-than",
    metavar="DURATION",
    type=duration,
    help="Active for longer than that: 300s, 1h. [the key stale_after]",
)
@queue_option
@json_option
@click.pass_obj
def reset_stale(flags: Flags, /, *, older_than: str | None, queue: str | None, as_json: bool) -> int:
    """Take jobs that have been active for long from their workers, as `penstock reset` does.

    Jobs of a worker that died need no help: they come back by themselves when their lease is over.
    """
    from penstock.core.units import milliseconds

    given = older_than or Settings(flags)["stale_after"]
    if given is None:
        raise CommandLineError(
            "how long is too long? Give --older-than 300s, or: penstock config set stale_after 300s",
            ExitCode.USAGE,
        )
    older_than_ms = milliseconds(given, what="--older-than")
    return _reset_active(flags, queue, older_than_ms=older_than_ms, as_json=as_json)


def _reset_active(flags: Flags, queue: str | None, *, older_than_ms: int, as_json: bool) -> int:
    async def act(app: App) -> dict[str, Any]:
        ended: dict[str, Any] = {}
        storage = await app.connect()
        for name in await queues_of(app, queue):
            named = app.queue(name)
            # The store's time, not ours.
            now_ms = (await storage.clock(name)).now_ms
            ids = [
                job.id
                async for job in named.list_jobs("active")
                if now_ms - job.raw.claimed_at_ms >= older_than_ms
            ]
            ended |= await named.end_leases(*ids) if ids else {}
        return ended

    ended = [id for id, answer in run_with_app(Settings(flags), act).items() if answer == "ended"]
    if as_json:
        print_json({"reset": ended})
    else:
        click.echo(f"{counted(len(ended), 'job')} {'waits' if len(ended) == 1 else 'wait'} again")
    return 0
