"""Waiting for a job: its output as it comes, then how it ended, as an exit code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final

import click

from penstock.cli.errors import ExitCode
from penstock.cli.output import print_json
from penstock.core.command import COMMAND_TASK
from penstock.errors import JobCancelled, JobError, JobNotFound

if TYPE_CHECKING:
    from penstock.handle import JobHandle

__all__ = ["LogFollower", "wait_for"]

_LOOK_EVERY_S: Final = 0.2
_PATIENT_S: Final = 2.0
_MOST_KEPT: Final = 1000


class LogFollower:
    """Gives the lines of a job's log that are new since the last look; the store keeps the newest thousand."""

    def __init__(self, handle: JobHandle[Any]) -> None:
        self._handle = handle
        self._seen: list[str] = []

    async def new_lines(self) -> list[str]:
        kept = await self._handle.logs(limit=_MOST_KEPT)
        seen, self._seen = self._seen, kept
        if len(kept) < _MOST_KEPT:
            return kept[len(seen) :]
        # The oldest may be gone: what was seen and is still there is an end of the one and a beginning of the other.
        overlap = next(
            n for n in range(min(len(seen), len(kept)), -1, -1) if seen[len(seen) - n :] == kept[:n]
        )
        return kept[overlap:]


async def wait_for(handle: JobHandle[Any], *, timeout: str | None, as_json: bool) -> int:
    """Wait for the end of a job, print its output or result, and give the exit code that says how it ended."""
    follower = LogFollower(handle)
    following = asyncio.create_task(_print_lines(follower, silent=as_json))
    hinting = asyncio.create_task(_hint_at_missing_worker(handle))
    error: JobError | None = None
    result: Any = None
    try:
        result = await handle.result(timeout)
    except JobNotFound:
        raise
    except JobError as caught:
        error = caught
    finally:
        for task in (following, hinting):
            task.cancel()
        await asyncio.gather(following, hinting, return_exceptions=True)
    return await _told(handle, follower, error, result, as_json=as_json)


async def _told(
    handle: JobHandle[Any], follower: LogFollower, error: JobError | None, result: Any, *, as_json: bool
) -> int:
    info = await handle.get_or_none()
    is_command = info is not None and info.task == COMMAND_TASK
    code = _exit_code(error, info.progress if info is not None else None)
    if as_json:
        state = info.state if info is not None else None
        failure = None if error is None else str(error)
        print_json(
            {
                "id": handle.id,
                "ref": handle.ref,
                "queue": handle.queue,
                "state": state,
                "exit_code": code,
                "result": result,
                "error": failure,
            }
        )
        return code
    for line in await follower.new_lines():
        click.echo(line)
    if error is not None:
        click.echo(f"penstock: {error}", err=True)
    elif not is_command and result is not None:
        print_json(result)
    return code


def _exit_code(error: JobError | None, progress: Any) -> int:
    if error is None:
        return 0
    told = progress.get("exit_code") if isinstance(progress, dict) else None
    if isinstance(told, int) and told and not isinstance(error, JobCancelled):
        return told
    return int(ExitCode.FAILED)


async def _print_lines(follower: LogFollower, *, silent: bool) -> None:
    while not silent:
        for line in await follower.new_lines():
            click.echo(line)
        await asyncio.sleep(_LOOK_EVERY_S)


async def _hint_at_missing_worker(handle: JobHandle[Any]) -> None:
    await asyncio.sleep(_PATIENT_S)
    if not await handle.source.app.queue(handle.queue).workers():
        click.echo(
            f"no worker works on queue {handle.queue!r} yet: `penstock worker [MODULE:APP]` starts one",
            err=True,
        )
