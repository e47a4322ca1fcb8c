"""The lifespan for FastAPI, and its dependencies."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from fastapi import APIRouter, Depends, FastAPI, Request

from penstock import App, InvalidOption, JobContext, PenstockError, StorageUnavailable
from penstock.client.queue import Queue
from penstock.client.task import Task
from penstock.integrations.fastapi import (
    CurrentApp,
    Handle,
    Job,
    penstock_lifespan,
    queue_named,
    task_named,
)
from tests.worker.conftest import until

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it asks for httpx2
    from fastapi.testclient import TestClient

routes = APIRouter()
the_task = task_named("double")


@routes.post("/double/{n}")
async def double(n: int, task: Annotated[Task[..., Any], Depends(the_task)]) -> str:
    return (await task.enqueue(n)).ref


@routes.get("/jobs/{ref:path}")
async def state(job: Job) -> dict[str, Any]:
    return {"state": job.state, "result": job.result}


@routes.get("/results/{ref:path}")
async def result(job: Handle) -> Any:
    return await job.result("30s")


@routes.get("/open")
async def count(mails: Annotated[Queue, Depends(queue_named("numbers"))]) -> int:
    return await mails.open()


@routes.get("/app")
async def store(app: CurrentApp, request: Request) -> list[Any]:
    return [app.url, getattr(request.state, "pool", None)]


def app_at(url: str, **options: Any) -> App:
    app = App(url, attempts=1, **options)

    @app.task(queue="numbers")
    async def double(n: int) -> int:
        return 2 * n

    return app


def served(app: App, **options: Any) -> FastAPI:
    web = FastAPI(lifespan=penstock_lifespan(app, **options))
    web.include_router(routes)
    return web


def test_the_app_is_connected_while_the_application_runs(tmp_path: Path) -> None:
    app = app_at(f"sqlite:///{tmp_path}/jobs.db")
    with TestClient(served(app)) as client:
        assert (tmp_path / "jobs.db").exists()
        assert client.get("/app").json() == [app.url, None]
        ref = client.post("/double/2").json()
        assert client.get(f"/jobs/{ref}").json() == {"state": "waiting", "result": None}
        assert client.get("/open").json() == 1
    assert not app._sessions._ready


def test_a_worker_in_the_process_runs_the_jobs_of_a_view(tmp_path: Path) -> None:
    app = app_at(f"sqlite:///{tmp_path}/jobs.db")
    with TestClient(served(app, worker=True)) as client:
        ref = client.post("/double/21").json()
        assert client.get(f"/results/{ref}").json() == 42
        assert client.get(f"/jobs/{ref}").json() == {"state": "completed", "result": 42}


def test_the_worker_in_the_process_takes_options_and_finishes_its_job_before_the_server_ends() -> None:
    app = App("memory://")
    began: list[str] = []
    ended: list[str] = []

    @app.task
    async def slow(context: JobContext) -> None:
        began.append(context.id)
        await until(lambda: bool(stopping))
        ended.append(context.id)

    stopping: list[bool] = []

    @asynccontextmanager
    async def own(web: FastAPI) -> AsyncGenerator[None]:
        job = await slow.enqueue()
        yield
        assert began == [job.id]
        assert ended == [job.id], "our lifespan ends after the worker"

    web = FastAPI(lifespan=penstock_lifespan(app, lifespan=own, worker={"concurrency": 1, "name": "inside"}))

    @web.get("/begun")
    async def begun() -> None:
        await until(lambda: bool(began))

    with TestClient(web) as client:
        client.get("/begun")
        stopping.append(True)


def test_a_worker_that_cannot_start_keeps_the_application_from_starting() -> None:
    web = FastAPI(lifespan=penstock_lifespan(App("memory://"), worker=True))
    with pytest.raises(InvalidOption, match="nothing to run"), TestClient(web):
        pytest.fail("it started")


def test_a_store_that_cannot_be_reached_keeps_the_application_from_starting() -> None:
    web = served(app_at("valkey://127.0.0.1:1"))
    with pytest.raises(StorageUnavailable), TestClient(web):
        pytest.fail("it started")


def test_your_own_lifespan_runs_while_the_app_is_connected_and_its_state_is_kept() -> None:
    app = app_at("memory://")

    @asynccontextmanager
    async def own(web: FastAPI) -> AsyncGenerator[dict[str, str]]:
        assert await app.queues() == []
        yield {"pool": "open"}

    with TestClient(served(app, lifespan=own)) as client:
        assert client.get("/app").json() == [app.url, "open"]


def test_an_application_that_is_mounted_has_the_app_too() -> None:
    app, inner = app_at("memory://"), FastAPI()
    inner.include_router(routes)
    outer = FastAPI(lifespan=penstock_lifespan(app))
    outer.mount("/inner", inner)
    with TestClient(outer) as client:
        assert client.get("/inner/app").json()[0] == app.url


@pytest.mark.parametrize("path", ["/jobs/numbers/unknown", "/jobs/no-ref", "/jobs/a/b/c", "/results/no-ref"])
def test_an_unknown_job_is_not_found(path: str) -> None:
    with TestClient(served(app_at("memory://"))) as client:
        answer = client.get(path)
    assert (answer.status_code, answer.json()) == (404, {"detail": "unknown job"})


def test_a_task_is_replaced_by_an_override() -> None:
    class Recorder:
        async def enqueue(self, n: int) -> Any:
            return type("Job", (), {"ref": f"recorded/{n}"})

    web = served(app_at("memory://"))
    web.dependency_overrides[the_task] = Recorder
    with TestClient(web) as client:
        assert client.post("/double/3").json() == "recorded/3"


def test_without_the_lifespan_the_error_says_what_to_write() -> None:
    web = FastAPI()
    web.include_router(routes)
    with pytest.raises(PenstockError, match=r"FastAPI\(lifespan=penstock_lifespan\(app\)\)"):
        TestClient(web).get("/app")


def test_only_an_app_of_penstock_has_a_lifespan() -> None:
    with pytest.raises(InvalidOption, match="needs the App that has the tasks"):
        penstock_lifespan(FastAPI())  # type: ignore[arg-type]
