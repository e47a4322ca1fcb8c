"""Which store commands use: a flag, the code of the app, the environment, the files, the default, in this order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.client.session import DEFAULT_URL, StoreName, chosen_store
from tests.cli.conftest import Shell

pytestmark = pytest.mark.timeout(300)

CODE = """
from penstock import App

print("imported")
app = App({})

@app.task(queue="mail")
def send() -> None: ...
"""
PLACES = ("flag", "code", "environment", "saved", ".env", "penstock.toml", "pyproject.toml", "default")


@pytest.mark.parametrize("highest", PLACES)
def test_the_highest_place_that_names_a_store_counts_for_every_kind_of_command(
    penstock: Shell, tmp_path: Path, highest: str
) -> None:
    url = {place: f"sqlite:///{place.replace('.', '-')}.db" for place in PLACES} | {"default": DEFAULT_URL}
    below = PLACES[PLACES.index(highest) : -1]
    (tmp_path / "jobs.py").write_text(CODE.format(repr(url["code"]) if "code" in below else ""))
    penstock.ok("config", "set", "app", "jobs:app")
    if "saved" in below:
        penstock.ok("config", "set", "url", url["saved"])
    if ".env" in below:
        (tmp_path / ".env").write_text(f"PENSTOCK_URL={url['.env']}\n")
    if "penstock.toml" in below:
        (tmp_path / "penstock.toml").write_text(f'url = "{url["penstock.toml"]}"\n')
    if "pyproject.toml" in below:
        (tmp_path / "pyproject.toml").write_text(f'[tool.penstock]\nurl = "{url["pyproject.toml"]}"\n')
    flags = ("--url", url["flag"]) if "flag" in below else ()
    env = {"PENSTOCK_URL": url["environment"]} if "environment" in below else {}

    penstock.ok("enqueue", "--task", "send", "--id", "a", *flags, env=env)
    penstock.ok("enqueue", "true", "--id", "b", "-q", "mail", *flags, env=env)
    assert {job["id"] for job in penstock.json("list", *flags, env=env)} == {"a", "b"}
    assert penstock.json("config", "get", "url", *flags, env=env)["value"] == url[highest]
    worker = penstock("worker", "--burst", "--no-commands", *flags, env=env)
    ignored = "PENSTOCK_URL is ignored" if env and highest == "code" else "worker "
    assert ignored in worker.stderr.splitlines()[0]
    first = next(line for line in worker.stderr.splitlines() if "starts: store" in line)
    named = f"sqlite:///{tmp_path / url[highest].removeprefix('sqlite:///')}"
    assert f"starts: store {named}, namespace default, queues mail" in first, worker.stderr
    assert penstock.json("show", "a", *flags, env=env)["state"] == "completed"

    made = {path.name for path in tmp_path.glob("*.db")}
    assert made == {url[highest].removeprefix("sqlite:///")}


@pytest.mark.parametrize(
    ("names", "counts"),
    [
        ([], (DEFAULT_URL, None)),
        ([StoreName(), StoreName("valkey://a")], ("valkey://a", None)),
        ([StoreName("valkey://a"), StoreName("valkey://b", "n")], ("valkey://a", "n")),
        ([StoreName(None, "n"), StoreName("valkey://b?namespace=m")], ("valkey://b?namespace=m", "n")),
        # A namespace in the URL that counts has the rank of that URL.
        ([StoreName("valkey://a?namespace=m"), StoreName(None, "n")], ("valkey://a?namespace=m", None)),
        ([StoreName("valkey://a?namespace=m", "n")], ("valkey://a?namespace=m", "n")),
        # A namespace in a URL that does not count belongs to another store.
        ([StoreName("valkey://a"), StoreName("valkey://b?namespace=m")], ("valkey://a", None)),
        ([StoreName("", ""), StoreName("valkey://b", "n")], ("valkey://b", "n")),
    ],
)
def test_url_and_namespace_are_chosen_by_one_rule(
    names: list[StoreName], counts: tuple[str, str | None]
) -> None:
    assert chosen_store(names) == counts


@pytest.mark.parametrize(
    ("code", "flags", "env", "namespace"),
    [
        ("namespace='code'", ("--namespace", "flag"), {"PENSTOCK_NAMESPACE": "env"}, "flag"),
        ("namespace='code'", ("--url", "sqlite:///jobs.db?namespace=url"), {}, "url"),
        ("namespace='code'", ("--url", "sqlite:///jobs.db"), {"PENSTOCK_NAMESPACE": "env"}, "code"),
        ("'sqlite:///jobs.db?namespace=code'", (), {"PENSTOCK_NAMESPACE": "env"}, "code"),
        ("'sqlite:///jobs.db'", (), {"PENSTOCK_NAMESPACE": "env"}, "env"),
    ],
)
def test_a_namespace_has_the_same_ranks(
    penstock: Shell, tmp_path: Path, code: str, flags: tuple[str, ...], env: dict[str, str], namespace: str
) -> None:
    (tmp_path / "jobs.py").write_text(CODE.format(code))
    penstock.ok("config", "set", "app", "jobs:app")
    flags = flags if code.startswith("'") or "--url" in flags else (*flags, "--url", "sqlite:///jobs.db")

    penstock.ok("enqueue", "--task", "send", "--id", "a", *flags, env=env)
    worker = penstock("worker", "--burst", *flags, env=env)

    assert f"namespace {namespace}, queues mail" in worker.stderr.splitlines()[0]
    assert penstock.json("show", "a", *flags, env=env)["state"] == "completed"
    where = ("--url", "sqlite:///jobs.db", "--namespace", namespace)
    assert penstock.json("show", "a", *where)["state"] == "completed"


def test_code_and_commands_agree_on_the_environment(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(CODE.format(""))
    environment = {"PENSTOCK_URL": "sqlite:///shared.db", "PENSTOCK_NAMESPACE": "shop"}
    subprocess.run(
        [sys.executable, "-c", "import jobs; jobs.send.sync.enqueue()"],
        cwd=tmp_path,
        env=os.environ | environment,
        timeout=60,
        check=True,
    )

    assert [job["task"] for job in penstock.json("list", env=environment)] == ["send"]


def test_the_app_can_be_named_by_a_flag_of_every_command(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(CODE.format("'sqlite:///own.db'"))
    penstock.ok("enqueue", "--app", "jobs:app", "--task", "send", "--id", "a")

    said = penstock.refused("show", "a", code=3)
    assert "penstock.db does not exist" in said
    assert "--app myproject.jobs:app" in said
    assert penstock.json("show", "a", "--app", "jobs:app")["state"] == "waiting"
    assert penstock.json("--app", "jobs:app", "status")["queues"]


def test_a_command_below_the_project_finds_its_app(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(CODE.format(f"'sqlite:///{tmp_path}/own.db'"))
    (tmp_path / "penstock.toml").write_text('app = "jobs:app"\n')
    penstock.ok("enqueue", "--task", "send", "--id", "a")
    (tmp_path / "below").mkdir()

    assert Shell(tmp_path / "below").json("show", "a")["state"] == "waiting"


def test_an_app_that_cannot_be_imported_is_reported_and_can_be_skipped(
    penstock: Shell, tmp_path: Path
) -> None:
    penstock.ok("enqueue", "true")
    (tmp_path / "jobs.py").write_text("1 / 0\n")
    penstock.ok("config", "set", "app", "jobs:app")

    for flags in ((), ("--url", "sqlite:///penstock.db")):
        said = penstock.refused("status", *flags, code=1)
        assert "module jobs cannot be imported: ZeroDivisionError" in said
        assert "To go without it, give --url and --namespace." in said
    assert penstock.json("config", "get", "url")["value"] == DEFAULT_URL
    assert penstock.json("list", "--url", DEFAULT_URL, "--namespace", "default")


def test_the_first_line_of_a_worker_names_its_store_without_the_password(penstock: Shell) -> None:
    url = "valkey://ada:secret@127.0.0.1:1/0?namespace=shop&sentinel_password=hidden"
    worker = penstock.start("worker", "--commands", "--url", url)
    assert worker.stdout is not None
    try:
        first = worker.stdout.readline()
    finally:
        worker.kill()
        rest, _ = worker.communicate(timeout=30)

    assert "starts: store valkey://ada:***@127.0.0.1:1/0?" in first
    assert "namespace shop, queues default" in first
    assert "secret" not in first + rest
    assert "hidden" not in first + rest


def test_a_wrong_name_is_answered_with_the_one_that_is_there(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text("from penstock import App\n\napp = App()\n")
    (tmp_path / "empty.py").touch()

    said = penstock.refused("status", "--app", "jobs:ap", code=3)
    assert "module jobs has no app 'ap'. Did you mean jobs:app?" in said
    assert "Name the variable that App(...) is assigned to" in penstock.refused("worker", "empty:app", code=3)
    assert "such as jobs:app" in penstock.refused("worker", "jobs", code=2)


@pytest.mark.parametrize("place", ["saved", ".env", "penstock.toml"])
def test_a_relative_store_of_a_project_is_the_same_in_every_folder_of_it(
    penstock: Shell, tmp_path: Path, place: str
) -> None:
    if place == "saved":
        penstock.ok("config", "set", "url", "sqlite:///own.db")
    else:
        line = 'url = "sqlite:///own.db"' if place == "penstock.toml" else "PENSTOCK_URL=sqlite:///own.db"
        (tmp_path / place).write_text(f"{line}\n")
    penstock.ok("enqueue", "true", "--id", "a")
    below = tmp_path / "some" / "folder"
    below.mkdir(parents=True)
    assert [job["id"] for job in Shell(below).json("list")] == ["a"]
    assert not list(below.iterdir())


def test_an_ignored_url_is_named_once(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs.py").write_text(
        f"from penstock import App\n\napp = App('sqlite:///{tmp_path}/own.db')\n"
    )
    env = {"PENSTOCK_APP": "jobs:app", "PENSTOCK_URL": f"sqlite:///{tmp_path}/other.db"}
    said = penstock("enqueue", "true", env=env).stderr
    assert said == (
        "PENSTOCK_URL is ignored: the app jobs:app names another store. Give --url for that of PENSTOCK_URL\n"
    )
    assert "is ignored" not in penstock("status", "--url", env["PENSTOCK_URL"], env=env).stderr
    env["PENSTOCK_URL"] = f"sqlite:///{tmp_path}/own.db"
    assert penstock("status", env=env).stderr == ""
