"""URLs that lead nowhere, engines that are not installed: told at the first use, and no secret is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock import App, InvalidOption, StorageUnavailable
from tests.bad_input.conftest import assert_says
from tests.servers import HOST, free_port

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("valky://{}@host", ("No engine serves valky://", "Did you mean valkey://?")),
        ("sqlite3:///jobs.db", ("No engine serves sqlite3://", "Did you mean sqlite://?")),
        ("http://{}@host", ("No engine serves http://", "Known: memory", "valkey+cluster")),
        ("{}@host:6379", ("not a URL", "no scheme", "valkey://host")),
        ("valkey:/{}@host", ("not a URL", "no scheme")),
        ("/var/lib/jobs.db", ("not a URL", "sqlite:///")),
        ("", ("not a URL", "sqlite:///")),
        ("sqlite://jobs.db", ("names no file", "three slashes", "sqlite:///penstock.db")),
        ("sqlite:///", ("names no file", "four for an absolute one")),
        ("valkey://{}@host:99999", ("host or host:port", "Percent-encode")),
        ("valkey://{}@host:port", ("host or host:port", "Percent-encode")),
        ("valkey://{}@one,two", ("takes one host", "valkey+cluster://")),
        ("valkey://{}@host/zero", ("the database must be one number",)),
        ("valkey+sentinel://{}@host", ("no service name", "/service")),
        ("valkey+unix://host", ("unix socket", "valkey+unix:///path")),
        ("valkey://{}@host?namespce=a", ("unknown option 'namespce'", "did you mean 'namespace'?")),
        ("valkey://{}@host?ssl_ca_certs=a", ("needs TLS", "valkeys://")),
        ("valkey://{}@host?namespace=", ("'namespace'", "is empty")),
        ("sqlite:///jobs.db?namespce=a", ("unknown option 'namespce'", "Use namespace or timeout")),
        ("memory://?colour=red", ("unknown option 'colour'", "Use namespace")),
        ("valkey://{}@[::1", ("the host of the store's URL", "[::1]")),
        ("valkey://{}@[name]:6379", ("the host of the store's URL", "[::1]")),
        ("sqlite:///a%00b.db", ("names no file", "null character")),
        ("valkey://{}@a..b", ("not a valid address", "Check the URL")),
        ("valkey://{}@\udcff", ("not a valid address", "Check the URL")),
    ],
)
async def test_a_url_that_makes_no_sense_is_refused_at_the_first_use(
    url: str, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidOption) as caught:
        await App(url.format(f":{SECRET}")).connect()
    assert type(caught.value) is InvalidOption
    assert_says(caught.value, *words)
    assert SECRET not in str(caught.value)
    assert not list(tmp_path.iterdir()), "a refused URL makes no file"


async def test_a_missing_server_is_unavailable_and_named() -> None:
    port = free_port()
    with pytest.raises(StorageUnavailable) as caught:
        await App(f"valkey://:{SECRET}@{HOST}:{port}").connect()
    assert_says(caught.value, "cannot connect", f"{HOST}:{port}")
    assert SECRET not in str(caught.value)


async def test_a_missing_folder_is_unavailable_and_named(tmp_path: Path) -> None:
    with pytest.raises(StorageUnavailable) as caught:
        await App(f"sqlite:///{tmp_path}/missing/jobs.db").connect()
    assert_says(caught.value, "missing/jobs.db", "directory does not exist", "Create")
    assert not list(tmp_path.iterdir())


def test_without_the_extra_a_valkey_url_says_what_to_install() -> None:
    script = """
import asyncio, sys
sys.modules["redis"] = sys.modules["hiredis"] = None
from penstock import App, InvalidOption
try:
    asyncio.run(App("valkey://localhost").connect())
except InvalidOption as error:
    print(error)
"""
    told = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert told.returncode == 0, told.stderr
    assert "pip install 'penstock[valkey]'" in told.stdout
