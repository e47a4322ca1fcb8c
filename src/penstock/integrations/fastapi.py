"""FastAPI: a lifespan that connects an app, and dependencies for its jobs, queues and tasks.

::

    web = FastAPI(lifespan=penstock_lifespan(app))


    @web.get("/jobs/{ref:path}")
    async def status(job: Job) -> dict[str, Any]:
        return {"state": job.state, "result": job.result}
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import Annotated, Any, TypeAlias

from fastapi import Depends, FastAPI, HTTPException
from fastapi.requests import HTTPConnection

from penstock.client.app import App
from penstock.client.handle import JobHandle
from penstock.client.info import JobInfo
from penstock.client.queue import Queue
from penstock.client.task import Task
from penstock.core.text import get_logger, shown
from penstock.errors import InvalidName, InvalidOption, JobNotFound, PenstockError
from penstock.worker.options import WorkerOptions

__all__ = [
    "CurrentApp",
    "Handle",
    "Job",
    "penstock_lifespan",
    "queue_named",
    "task_named",
]

Lifespan: TypeAlias = Callable[[FastAPI], AbstractAsyncContextManager[Any]]

_STATE = "penstock"

logger = get_logger("penstock.integrations")


def penstock_lifespan(
    app: App, *, lifespan: Lifespan | None = None, worker: bool | WorkerOptions = False
) -> Lifespan:
    """Return a lifespan that connects ``app`` before the first request, and closes it after the last one.

    A store that cannot be reached keeps the application from starting. ``lifespan`` is your own: it runs while the app
    is connected, and its state is kept. ``worker`` runs a worker in a thread of this process, for development: true,
    or the options of ``app.worker(...)``.
    """
    if not isinstance(app, App):
        raise InvalidOption(f"penstock_lifespan needs the App that has the tasks, got {shown(app)}.")

    @asynccontextmanager
    async def connected(web: FastAPI) -> AsyncGenerator[dict[str, Any]]:
        async with app:
            inner: AbstractAsyncContextManager[Any] = nullcontext() if lifespan is None else lifespan(web)
            async with inner as state, _working(app, worker):
                setattr(web.state, _STATE, app)
                yield {**(state or {}), _STATE: app}

    return connected


@asynccontextmanager
async def _working(app: App, options: bool | WorkerOptions) -> AsyncGenerator[None]:
    """Run a worker in a thread, where the signals of the server do not reach it."""
    if options is False:
        yield
        return
    worker = app.worker(**(options if isinstance(options, Mapping) else {}))
    here, ready = asyncio.get_running_loop(), asyncio.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    @worker.on("ready")
    def begin(event: object) -> None:
        loops.append(asyncio.get_running_loop())
        here.call_soon_threadsafe(ready.set)

    running = asyncio.create_task(asyncio.to_thread(worker.run_sync))
    running.add_done_callback(_log_end)
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait([running, waiting], return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()
    if running.done():
        running.result()
    try:
        yield
    finally:
        if not running.done():
            loops[0].call_soon_threadsafe(worker.stop)
        await asyncio.wait([running])


def _log_end(running: asyncio.Task[None]) -> None:
    if not running.cancelled() and (error := running.exception()) is not None:
        logger.error("the worker in this process has ended: %s", error, exc_info=error)


# Dependencies


def get_app(connection: HTTPConnection) -> App:
    """Return the app of ``penstock_lifespan``."""
    # Applications that are mounted have only the state of the lifespan.
    app = connection.scope.get("state", {}).get(_STATE) or getattr(connection.app.state, _STATE, None)
    if not isinstance(app, App):
        raise PenstockError(
            "this application has no Penstock app: its lifespan did not run, or it is another one. Write "
            "FastAPI(lifespan=penstock_lifespan(app)), and in tests `with TestClient(web) as client`."
        )
    return app


CurrentApp = Annotated[App, Depends(get_app)]
"""The app of ``penstock_lifespan``."""


def get_handle(ref: str, app: CurrentApp) -> JobHandle[Any]:
    """Return a handle for the job whose ``ref`` is a parameter of the path, without a request to the store."""
    try:
        return app.job(ref)
    except InvalidName:
        raise HTTPException(404, "unknown job") from None


Handle = Annotated[JobHandle[Any], Depends(get_handle)]
"""The handle of a job, for a path with ``{ref:path}``. Answer 404 if that is not a ref."""


async def get_job(handle: Handle) -> JobInfo:
    """Return the job whose ``ref`` is a parameter of the path, as it is now."""
    try:
        return await handle.get()
    except JobNotFound:
        raise HTTPException(404, "unknown job") from None


Job = Annotated[JobInfo, Depends(get_job)]
"""The job as it is now, for a path with ``{ref:path}``. Answer 404 if the store does not have it."""


def queue_named(name: str) -> Callable[..., Awaitable[Queue]]:
    """Return a dependency: ``mails: Annotated[Queue, Depends(queue_named("mail"))]``."""

    async def get_queue(app: CurrentApp) -> Queue:
        return app.queue(name)

    return get_queue


def task_named(name: str) -> Callable[..., Awaitable[Task[..., Any]]]:
    """Return a dependency: ``send: Annotated[Task, Depends(task_named("send"))]``.

    Tests replace it by ``web.dependency_overrides``. The modules of ``App(include=...)`` are imported at first use.
    """

    async def get_task(app: CurrentApp) -> Task[..., Any]:
        if name not in app.tasks:
            app.load()
        return app.task_named(name)

    return get_task
