"""The extension for Flask: configuration, contexts of jobs, and ``flask penstock``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from flask import Flask, current_app, g

from penstock import App, InvalidOption, PenstockError, uuid7
from penstock.integrations.flask import Penstock

SHOP = """
from flask import Flask, current_app
from penstock.integrations.flask import Penstock

penstock = Penstock(attempts=1)


@penstock.task(queue="mail")
def send(to: str) -> str:
    return f"{current_app.config['SENDER']} to {to}"


@penstock.task(queue="mail", runner="process")
def render(to: str) -> str:
    return f"{current_app.config['SENDER']} for {to}"


@penstock.task(queue="mail")
async def call(to: str) -> str:
    return f"{current_app.config['SENDER']} calls {to}"


def create_app(sender: str = "shop") -> Flask:
    web = Flask("shop")
    web.config.from_prefixed_env()
    web.config["SENDER"] = sender
    penstock.init_app(web)

    @web.post("/<task>/<to>")
    def create(task: str, to: str) -> str:
        return penstock.task_named(task).sync.enqueue(to).ref

    return web
"""
VISIT = """
from shop import create_app, penstock

client = create_app().test_client()
for path in ("/send/ada", "/render/bob", "/call/cy"):
    print(client.post(path).text)
"""


@pytest.mark.parametrize("processes", ["1", "2"])
@pytest.mark.parametrize("engine", ["sqlite", "valkey"])
def test_a_worker_process_runs_the_jobs_of_views_inside_the_application(
    engine: str, processes: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if engine == "sqlite":
        url = f"sqlite:///{tmp_path}/jobs.db"
    else:
        url = f"{request.getfixturevalue('valkey_url')}?namespace=flask-{uuid7()}"
    (tmp_path / "shop.py").write_text(SHOP)

    refs = _run(["-c", VISIT], tmp_path, url).split()
    flask = ["-m", "flask", "--app", "shop:create_app('our shop')", "penstock"]
    _run([*flask, "worker", "--burst", "--no-live", "--processes", processes], tmp_path, url)

    results = [App(url).sync.job(ref).result("10s") for ref in refs]
    assert results == ["our shop to ada", "our shop for bob", "our shop calls cy"]
    assert "mail" in _run([*flask, "status"], tmp_path, url)


def _run(arguments: list[str], folder: Path, url: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    run = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        cwd=folder,
        env={**environment, "FLASK_PENSTOCK_URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_worker_passes_on_its_options_and_the_exit_code(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    run = subprocess.run(
        [sys.executable, "-m", "flask", "--app", "shop", "penstock", "show", "mail/unknown", "--debug"],
        cwd=tmp_path,
        env={**os.environ, "FLASK_PENSTOCK_URL": f"sqlite:///{tmp_path}/jobs.db"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 3
    assert "does not exist" in run.stderr


def test_an_application_without_the_extension_is_reported(tmp_path: Path) -> None:
    (tmp_path / "bare.py").write_text("from flask import Flask\napp = Flask('bare')\n")
    run = subprocess.run(
        [sys.executable, "-c", "import penstock.integrations.flask.project"],
        cwd=tmp_path,
        env={**os.environ, "FLASK_APP": "bare"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "the Flask application 'bare' has no Penstock: call Penstock().init_app(app)" in run.stderr


class Contexts:
    """An application that notes in which threads its contexts end."""

    def __init__(self, penstock: Penstock) -> None:
        self.web = Flask("web")
        self.ended: list[tuple[str, int]] = []
        self.web.config["PENSTOCK_URL"] = f"memory://{uuid7()}"
        penstock.init_app(self.web)

        @self.web.teardown_appcontext
        def end(error: BaseException | None) -> None:
            self.ended.append((g.get("job", ""), threading.get_ident()))


async def test_a_context_begins_and_ends_in_the_thread_of_the_job_and_no_two_jobs_share_one() -> None:
    penstock = Penstock(attempts=1)
    contexts = Contexts(penstock)

    @penstock.task(queue="mail")
    def send(to: str) -> list[Any]:
        assert "job" not in g
        g.job = to
        return [current_app.name, threading.get_ident()]

    @penstock.task(queue="mail")
    async def call(to: str) -> list[Any]:
        assert "job" not in g
        g.job = to
        return [current_app.name, threading.get_ident()]

    jobs = [await send.enqueue("ada"), await send.enqueue("bob"), await call.enqueue("cy")]
    await penstock.worker(burst=True, threads=1).run()

    results = [await job.result() for job in jobs]
    assert [name for name, _ in results] == ["web", "web", "web"]
    assert sorted(contexts.ended) == [
        (to, thread) for to, (_, thread) in zip(["ada", "bob", "cy"], results, strict=True)
    ]
    assert results[2][1] == threading.get_ident() != results[0][1]
    await penstock.close()


async def test_a_context_ends_with_the_error_of_its_job() -> None:
    penstock = Penstock(attempts=1)
    web = Flask("web")
    web.config["PENSTOCK_URL"] = "memory://"
    penstock.init_app(web)
    errors: list[BaseException | None] = []
    web.teardown_appcontext(errors.append)

    @penstock.task
    def fail() -> None:
        raise ValueError("no")

    await fail.enqueue()
    await penstock.worker(burst=True).run()
    assert [type(error) for error in errors] == [ValueError]
    await penstock.close()


def test_the_configuration_names_the_store_and_the_namespace(tmp_path: Path) -> None:
    web = Flask("web")
    web.config.update(PENSTOCK_URL=f"sqlite:///{tmp_path}/shop.db", PENSTOCK_NAMESPACE="shop")
    penstock = Penstock(web)
    assert (penstock.url, penstock.namespace) == (f"sqlite:///{tmp_path}/shop.db", "shop")
    assert penstock.flask is web
    assert web.extensions["penstock"] is penstock


def test_without_configuration_the_store_is_that_of_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_URL", f"sqlite:///{tmp_path}/from-environment.db")
    assert Penstock(Flask("web")).url.endswith("from-environment.db")


def test_the_last_application_of_a_factory_counts() -> None:
    penstock = Penstock()
    first, second = Contexts(penstock), Contexts(penstock)
    assert penstock.flask is second.web is not first.web
    assert penstock.url == second.web.config["PENSTOCK_URL"]


def test_a_url_that_is_not_valid_is_reported_with_the_application() -> None:
    web = Flask("shop")
    web.config["PENSTOCK_URL"] = "postgres://localhost"
    with pytest.raises(InvalidOption, match=r"the configuration of shop is not valid: .*postgres"):
        Penstock(web)


@pytest.mark.parametrize("option", ["url", "namespace"])
def test_the_store_belongs_into_the_configuration(option: str) -> None:
    with pytest.raises(InvalidOption, match=rf'app\.config\["PENSTOCK_{option.upper()}"\]'):
        Penstock(None, **{option: "x"})  # type: ignore[arg-type]


def test_without_an_application_a_job_fails_with_what_to_do() -> None:
    with pytest.raises(PenstockError, match=r"call init_app\(app\)"):
        _ = Penstock().flask
