"""``penstock cancel``, ``retry``, ``remove``, ``promote``, ``reset``, ``reset-stale``, ``signal``: operate on jobs."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click

from penstock.cli.commands import JOB_VERBS, JobVerb
from penstock.cli.completion import completes_ids
from penstock.cli.connect import queues_of, run_with_app
from penstock.cli.errors import CommandLineError, ExitCode, InvalidUsage, NotFound, WrongState
from penstock.cli.jobview import find_job
from penstock.cli.output import print_json
from penstock.cli.parameters import (
    OPEN,
    command,
    json_option,
    option,
    queue_of_id,
    queue_of_ids,
    queue_option,
)
from penstock.cli.settings import Settings
from penstock.client.situation import counted
from penstock.core.units import milliseconds
from penstock.errors import InvalidName
from penstock.worker.options import LONGEST_HEARTBEAT_MS

if TYPE_CHECKING:
    from penstock.client.app import App
    from penstock.client.queue import Queue


_DONE: Final = {
    "cancelled": "cancelled",
    "rerun_cancelled": "does not run again after this run",
    "requested": f"asked to stop: its worker notices within {LONGEST_HEARTBEAT_MS // 1000} seconds",
    "ended": "taken from its worker: it waits again",
    **{answer: words for verb in JOB_VERBS.values() for answer, words in verb.done.items()},
}
_NOT_DONE: Final = {
    "completed": "has completed already",
    "failed": "has failed already",
    "already_cancelled": "was cancelled already",
    "no_rerun": "has no waiting rerun",
    "not_active": "is not active",
    **{answer: words for verb in JOB_VERBS.values() for answer, words in verb.refused.items()},
}
_INSTEAD_OF_RETRY: Final = {
    "completed": ". To run it again, run `penstock remove {id}`, then enqueue it again",
    "scheduled": ". To run it now, run `penstock promote {id}`",
}
_SIGNALLED: Final = {
    "resumed": "goes on",
    "kept": "keeps the signal, because it does not wait for {name!r} yet",
}
_NOT_SIGNALLED: Final = {
    "not_found": "is no longer kept",
    "ended": "has ended, so it takes no signal",
    "full": "has too many signals that it has not taken yet",
}

Verb = Callable[["Queue", str], Awaitable[Mapping[str, str]]]


def in_words(answer: str) -> str:
    """Return an answer of the store in words that follow the id of the job."""
    return _DONE.get(answer) or _NOT_DONE.get(answer) or answer.replace("_", " ")


class _Answer(NamedTuple):
    """The outcome for one job. ``refusal`` is the error if the argument does not name exactly one job."""

    id: str
    answer: str
    ref: str | None = None
    state: str = ""
    refusal: str = ""


def done_by_id(
    settings: Settings, ids: tuple[str, ...], queue: str | None, verb: Verb, *, as_json: bool
) -> int:
    """Apply ``verb`` to each job and print the answers. Return the exit code of the first failure."""

    async def act(app: App) -> list[_Answer]:
        # An unknown queue is an error before anything is done.
        await queues_of(app, queue)
        answers: dict[str, _Answer] = {}
        for text in ids:
            job = await _find(app, text, queue)
            # Act once on a job that is named twice.
            if job.ref is None or job.ref not in answers:
                answers[job.ref or text] = await _apply(app, job, verb)
        return list(answers.values())

    answers = run_with_app(settings, act)
    if as_json:
        print_json(
            [{"id": _in_utf8(answer.id), "ref": answer.ref, "answer": answer.answer} for answer in answers]
        )
    codes = [_report(answer, silent=as_json) for answer in answers]
    return next((code for code in codes if code), 0)


async def _find(app: App, text: str, queue: str | None) -> _Answer:
    try:
        job = await find_job(app, text, queue)
    except NotFound as error:
        return _Answer(text, "not_found", refusal=str(error))
    except CommandLineError as error:
        return _Answer(text, "ambiguous", refusal=str(error))
    except InvalidName as error:
        return _Answer(text, "not_allowed", refusal=str(error))
    return _Answer(job.id, "found", ref=job.ref, state=job.state.value)


async def _apply(app: App, job: _Answer, verb: Verb) -> _Answer:
    if job.ref is None:
        return job
    handle = app.job(job.ref)
    return job._replace(answer=(await verb(app.queue(handle.queue), handle.id))[handle.id])


def _in_utf8(id: str) -> str:
    """Escape bytes that are not text: no job has such an id, but a user may have typed one."""
    return id.encode(errors="backslashreplace").decode()


def _report(job: _Answer, *, silent: bool) -> int:
    """Print an answer, and return its exit code."""
    if job.answer in _DONE:
        if not silent:
            click.echo(f"{job.id} {_DONE[job.answer]}")
        return 0
    is_unknown = job.answer == "not_found"
    # A job that was found may be gone by now.
    why = "is no longer kept" if is_unknown else _NOT_DONE.get(job.answer, "")
    if job.answer == "not_failed":
        why += _INSTEAD_OF_RETRY.get(job.state, "").format(id=job.id)
    if not silent:
        click.echo(f"penstock: {job.refusal or f'{job.id} {why}.'}", err=True)
    if is_unknown:
        return ExitCode.NOT_FOUND
    return ExitCode.USAGE if job.refusal else ExitCode.WRONG_STATE


@command("cancel")
@click.argument("ids", metavar="ID...", nargs=-1, shell_complete=completes_ids(*OPEN), required=True)
@queue_of_ids
@option("--rerun-only", "Drop the waiting reruns of active jobs, not the jobs.")
@json_option
def cancel(
    settings: Settings, *, ids: tuple[str, ...], queue: str | None, rerun_only: bool, as_json: bool
) -> int:
    """Cancel jobs. Jobs that have not started end immediately; active jobs are asked to stop.

    The worker of an active job notices within seconds, and kills a command with all its processes. `penstock wait ID`
    waits for the end, `penstock retry ID` runs a cancelled job again.
    """

    def act(named: Queue, id: str) -> Awaitable[Mapping[str, str]]:
        return named.cancel(id, rerun_only=rerun_only)

    return done_by_id(settings, ids, queue, act, as_json=as_json)


def _by_id(name: str, verb: JobVerb) -> click.Command:
    """Return the command of a verb that takes nothing but ids."""

    @command(name, help=verb.help)
    @click.argument(
        "ids", metavar="ID...", nargs=-1, shell_complete=completes_ids(*verb.states), required=True
    )
    @queue_of_ids
    @json_option
    def run(settings: Settings, *, ids: tuple[str, ...], queue: str | None, as_json: bool) -> int:
        return done_by_id(settings, ids, queue, lambda named, id: getattr(named, name)(id), as_json=as_json)

    return run


BY_ID: Final = {name: _by_id(name, verb) for name, verb in JOB_VERBS.items()}


@command("signal")
@click.argument("id", shell_complete=completes_ids("blocked", "scheduled", "waiting", "active"))
@click.argument("name")
@click.argument("data", metavar="[JSON]", required=False)
@queue_of_id
@json_option
def signal(
    settings: Settings, *, id: str, name: str, data: str | None, queue: str | None, as_json: bool
) -> None:
    """Send the signal NAME to a job, with JSON as its data.

    A job that waits for the signal goes on; any other job keeps it for later.

    \b
      penstock signal orders/order-7 paid
      penstock signal orders/order-7 paid '{"amount": 12}'
    """
    value = None if data is None else _decoded(data)

    async def act(app: App) -> tuple[str, str]:
        job = await find_job(app, id, queue)
        return job.ref, await app.job(job.ref).signal(name, value)

    ref, answer = run_with_app(settings, act)
    if answer not in _SIGNALLED:
        raise (NotFound if answer == "not_found" else WrongState)(f"{ref} {_NOT_SIGNALLED[answer]}.")
    if as_json:
        print_json({"ref": ref, "answer": answer})
    else:
        click.echo(f"{ref} {_SIGNALLED[answer].format(name=name)}")


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidUsage(f"the data is not valid JSON: {error}. Quote a text twice: '\"text\"'.") from None


@command("reset")
@click.argument("ids", metavar="[ID]...", nargs=-1, shell_complete=completes_ids("active"))
@option("--all-active", "Reset all active jobs.")
@queue_of_ids
@json_option
def reset(
    settings: Settings, *, ids: tuple[str, ...], all_active: bool, queue: str | None, as_json: bool
) -> int:
    """Take active jobs from their workers. The jobs wait again, at their old place in the queue.

    This counts as a stall. If the worker still runs the job, its result is rejected. Jobs of dead workers need no
    reset: they wait again when their lease expires.
    """
    if bool(ids) == all_active:
        raise InvalidUsage("give either ids or --all-active.")
    if ids:
        return done_by_id(settings, ids, queue, lambda named, id: named.end_leases(id), as_json=as_json)
    return _reset_active(settings, queue, older_than_ms=0, as_json=as_json)


@command("reset-stale")
@option(
    "--older-than DURATION",
    "Jobs that have been active for longer than this: 300s, 1h. [the configured stale_after]",
)
@queue_option
@json_option
def reset_stale(settings: Settings, *, older_than: str | None, queue: str | None, as_json: bool) -> int:
    """Reset jobs that have been active for too long, as `penstock reset` does.

    Jobs of dead workers need no reset: they wait again when their lease expires.
    """
    age = older_than or settings["stale_after"]
    if age is None:
        raise InvalidUsage("give an age: --older-than 300s, or: penstock config set stale_after 300s")
    older_than_ms = milliseconds(age, what="--older-than")
    return _reset_active(settings, queue, older_than_ms=older_than_ms, as_json=as_json)


def _reset_active(settings: Settings, queue: str | None, *, older_than_ms: int, as_json: bool) -> int:
    async def act(app: App) -> dict[str, Any]:
        answers: dict[str, Any] = {}
        storage = await app.connect()
        for name in await queues_of(app, queue):
            named = app.queue(name)
            # The clock of this machine may be wrong.
            now_ms = (await storage.clock(name)).now_ms
            ids = [
                job.id
                async for job in named.list_jobs("active")
                if now_ms - job.raw.claimed_at_ms >= older_than_ms
            ]
            answers |= await named.end_leases(*ids) if ids else {}
        return answers

    reset_ids = [id for id, answer in run_with_app(settings, act).items() if answer == "ended"]
    if as_json:
        print_json({"reset": reset_ids})
    else:
        click.echo(f"{counted(len(reset_ids), 'job')} {'waits' if len(reset_ids) == 1 else 'wait'} again")
    return 0
