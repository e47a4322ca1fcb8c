"""Notes on stderr about a job that no worker would run: its task is served in another queue, or is not a program."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock import App
from tests.cli.conftest import Shell, until

NOTE = (
    "queue default: no worker knows the task 'send'; worker w serves it in queue mail: "
    "add -q mail, or --app MODULE:APP\n"
)


def alive(url: str, **worker: dict[str, Any]) -> None:
    """Have workers describe themselves, each by its name."""

    async def tell() -> None:
        async with App(url) as app:
            storage = await app.connect()
            for name, said in worker.items():
                info = msgspec.json.encode({"concurrency": 2, "consuming": True} | said)
                for queue in said["queues"]:
                    await storage.extend(queue, [], worker=name, lease_ms=60_000, info=info)

    asyncio.run(tell())


def url_of(shell: Shell) -> str:
    return shell.environment.get("PENSTOCK_URL") or f"sqlite:///{shell.folder}/penstock.db"


@pytest.mark.parametrize(
    "command",
    [("enqueue", "{}"), ("schedule", "add", "hourly", "{}", "--every", "1h")],
    ids=["enqueue", "schedule"],
)
def test_a_task_that_only_workers_of_another_queue_know_is_noted(
    on_both: Shell, command: tuple[str, ...]
) -> None:
    alive(
        url_of(on_both),
        w={"queues": ["mail"], "tasks": {"send": "mail"}},
        v={"queues": ["default"], "tasks": {}},
    )
    assert on_both(*command, "--task", "send").stderr == NOTE
    assert on_both(*command, "--task", "send", "-q", "mail").stderr == ""
    assert on_both(*command, "--task", "unheard").stderr == ""


@pytest.mark.parametrize(
    "other",
    [{"tasks": {"send": "default"}}, {"tasks": None}, {}],
    ids=["knows it", "has too many", "is older"],
)
def test_a_queue_whose_worker_may_know_the_task_is_not_noted(
    penstock: Shell, other: dict[str, object]
) -> None:
    alive(
        url_of(penstock),
        w={"queues": ["mail"], "tasks": {"send": "mail"}},
        v={"queues": ["default"], **other},
    )
    assert penstock("enqueue", "--task", "send", "{}").stderr == ""


def test_a_task_in_the_place_of_a_program_is_noted(penstock: Shell) -> None:
    note = "'send' is not a program on PATH here; for the task send: penstock enqueue --task send\n"
    assert penstock("enqueue", "send").stderr == ""
    alive(url_of(penstock), w={"queues": ["mail"], "tasks": {"send": "mail", "true": "mail"}})
    assert penstock("enqueue", "send", "--", "-x").stderr == note
    assert penstock("enqueue", "send").stderr == note
    assert penstock("enqueue", "./send").stderr == ""
    assert penstock("enqueue", "true").stderr == ""


def test_a_task_of_the_configured_app_in_the_place_of_a_program_is_noted(
    penstock: Shell, tmp_path: Path
) -> None:
    (tmp_path / "jobs.py").write_text(
        "from penstock import App\napp = App()\n@app.task\nasync def send() -> None: ...\nprint('hello')\n"
    )
    penstock.ok("config", "set", "app", "jobs:app")
    assert "for the task send: penstock enqueue --task send" in penstock("enqueue", "send").stderr
    assert "task" not in penstock("enqueue", "unheard").stderr


def test_a_worker_tells_its_tasks_with_their_queues(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        "from penstock import App\napp = App()\n@app.task(queue='mail')\nasync def send() -> None: ...\n"
    )
    worker = penstock.start("worker", "jobs:app", "--name", "w")
    try:
        until(lambda: penstock("workers", "--json").stdout.strip() not in ("", "[]"))
        said = penstock("enqueue", "--task", "send").stderr
        assert "no worker knows the task 'send'; worker w-" in said
        assert said.endswith("serves it in queue mail: add -q mail, or --app MODULE:APP\n")
    finally:
        worker.terminate()
        worker.communicate()
