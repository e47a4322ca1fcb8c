"""Tasks in several modules: ``App(include=[...])``, and a worker that has nothing to run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import App, InvalidOption, PenstockError

JOBS = """
from penstock import App

app = App("sqlite:///jobs.db", include={include})
"""
MAIL = """
from shop.jobs import app

@app.task(queue="mail", runner="{runner}")
def send(to: str) -> str:
    return f"sent to {{to}}, with {{sorted(app.tasks)}}"
"""
BILLS = """
from shop.jobs import app

@app.task(queue="bills")
def bill(id: int) -> int:
    return id
"""
RUN = """
import asyncio
from shop.jobs import app

async def main():
    job = await app.queue("mail").enqueue({"to": "ada"}, task="send")
    await app.worker(**OPTIONS).run()
    print(await job.result(timeout="30s"))

if __name__ == "__main__":
    asyncio.run(main())
"""


def write(folder: Path, *, include: list[str], runner: str = "thread") -> None:
    shop = folder / "shop"
    shop.mkdir()
    (shop / "__init__.py").touch()
    (shop / "jobs.py").write_text(JOBS.format(include=include))
    (shop / "mail.py").write_text(MAIL.format(runner=runner))
    (shop / "bills.py").write_text(BILLS)


def script(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    (folder / "run.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [sys.executable, "run.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.mark.parametrize(
    ("runner", "options"),
    [
        ("thread", {"burst": True}),
        ("process", {"burst": True}),
        ("sandbox", {"burst": True}),
        ("thread", {"burst": True, "processes": 2}),
    ],
    ids=["thread", "process", "sandbox", "pool"],
)
def test_a_worker_and_its_processes_import_the_modules_that_the_app_includes(
    tmp_path: Path, runner: str, options: dict[str, object]
) -> None:
    write(tmp_path, include=["shop.mail", "shop.bills"], runner=runner)

    ran = script(tmp_path, RUN.replace("OPTIONS", repr(options)))

    assert ran.stdout == "sent to ada, with ['bill', 'send']\n", ran.stderr


def test_modules_are_imported_when_a_worker_is_made_and_not_before(tmp_path: Path) -> None:
    write(tmp_path, include=["shop.mail"])

    ran = script(
        tmp_path,
        "from shop.jobs import app\n"
        "print(sorted(app.tasks))\n"
        "print(sorted(app.worker().options.queues), sorted(app.tasks))\n"
        "app.load('shop.bills')\n"
        "print(app.included, sorted(app.tasks))\n",
    )

    assert ran.stdout.splitlines() == [
        "[]",
        "['mail'] ['send']",
        "('shop.mail', 'shop.bills') ['bill', 'send']",
    ], ran.stderr


def test_a_module_that_is_missing_is_named() -> None:
    with pytest.raises(InvalidOption, match="module 'no_such_shop' is neither in"):
        App("memory://", include=["no_such_shop.mail"]).worker()


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("x = 1\nx / 0\n", r"ZeroDivisionError: division by zero \(.*broken_mail\.py, line 2\)"),
        ("import not_installed\n", r"ModuleNotFoundError: No module named 'not_installed' \(.*, line 1\)"),
        ("def send(:\n", r"SyntaxError: invalid syntax \(.*broken_mail\.py, line 1\)"),
        ("import sys\n\nsys.exit(3)\n", r"SystemExit: 3 \(.*broken_mail\.py, line 3\)"),
        ("import json\njson.loads('')\n", r"JSONDecodeError: .* \(.*broken_mail\.py, line 2\)"),
        ("import msgspec\nmsgspec.structs.replace(1)\n", r"TypeError: .* \(.*broken_mail\.py, line 2\)"),
        (
            "from penstock import App\n\napp = App(attempts=0)\n",
            r"InvalidOption: .* \(.*broken_mail\.py, line 3\)",
        ),
    ],
)
def test_a_module_that_raises_is_named_with_the_reason_and_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    (tmp_path / "broken_mail.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))

    with pytest.raises(InvalidOption, match=f"^module broken_mail cannot be imported: {reason}.$") as caught:
        App("memory://", include=["broken_mail"]).worker()

    assert "\n" not in str(caught.value)


def test_a_package_that_raises_is_named_by_the_line_that_imports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = tmp_path / "site-packages"
    installed.mkdir()
    (installed / "broken_package.py").write_text("import json\njson.loads('')\n")
    (tmp_path / "importing_mail.py").write_text("x = 1\nimport broken_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(installed))

    with pytest.raises(InvalidOption, match=r"JSONDecodeError: .* \(.*importing_mail\.py, line 2\)"):
        App("memory://", include=["importing_mail"]).worker()
    with pytest.raises(InvalidOption, match=r"JSONDecodeError: .* \(.*decoder\.py, line \d+\)"):
        App("memory://", include=["broken_package"]).worker()


@pytest.mark.parametrize("include", ["shop.mail", [".mail"], ["shop/mail.py"], [""], [7], [None], 7])
def test_what_cannot_be_a_list_of_modules_is_refused(include: object) -> None:
    with pytest.raises(
        InvalidOption, match=r"must be a list|is not the name of a module|is the path of a file"
    ):
        App("memory://", include=include)  # type: ignore[arg-type]


@pytest.mark.parametrize("processes", [1, 2])
async def test_a_worker_that_has_nothing_to_run_does_not_start(processes: int) -> None:
    with pytest.raises(InvalidOption, match=r"nothing to run: its app has no tasks.*App\(include=.*-i "):
        await App("memory://").worker(processes=processes).run()


async def test_an_included_module_that_registers_no_tasks_here_is_named() -> None:
    with pytest.raises(InvalidOption, match="has no tasks, although it includes json"):
        await App("memory://", include=["json"]).worker().run()


def test_an_app_in_the_script_whose_modules_import_it_again_is_explained(tmp_path: Path) -> None:
    (tmp_path / "mail.py").write_text("from run import app\n\n@app.task\ndef send() -> None: ...\n")

    ran = script(
        tmp_path,
        "from penstock import App\n\n"
        "app = App('memory://', include=['mail'])\n\n"
        "if __name__ == '__main__':\n"
        "    app.worker(burst=True).run_sync()\n",
    )

    assert "because the running script creates it" in ran.stderr


async def test_a_worker_may_have_handlers_commands_or_what_a_start_hook_registers_instead() -> None:
    app = App("memory://")
    with_handler, registering = (app.worker(queues=["raw"], burst=True) for _ in range(2))
    with_handler.handler("raw")(lambda job: None)
    registering.on_start(lambda worker: worker.handlers.add("raw", lambda job: None))
    with_commands = app.worker(queues=["raw"], burst=True, commands=True)
    async with app:
        for worker in (with_handler, registering, with_commands):
            await worker.run()
            await worker.ready()


async def test_a_worker_without_tasks_is_refused_even_with_a_start_hook() -> None:
    app = App("memory://")
    app.on_start(lambda: None)
    async with app:
        with pytest.raises(InvalidOption, match="nothing to run"):
            await app.worker().run()


async def test_a_worker_warns_of_a_queue_name_that_looks_misspelt(caplog: pytest.LogCaptureFixture) -> None:
    app = App("memory://")
    app.task(name="send", queue="mail")(lambda: None)
    async with app:
        await app.worker(queues=["maill", "other"], burst=True).run()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "no task of the app goes to queue 'maill'. Did you mean 'mail'?" in warning


async def test_run_sync_in_a_running_loop_says_to_use_await() -> None:
    with pytest.raises(PenstockError, match=r"Use `await worker\.run\(\)`"):
        App("memory://").worker(commands=True).run_sync()
