"""``penstock`` as it is installed, run in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock import uuid7
from tests.preloaded import run_script

ROOT = Path(__file__).parents[2]


def script() -> list[str]:
    """The installed script beside this interpreter, or the same by ``-m`` where the source tree is used as it is."""
    installed = Path(sys.executable).with_name("penstock")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "penstock"]


class Shell:
    """Runs ``penstock`` in ``folder``, with nothing of the developer's own configuration."""

    def __init__(self, folder: Path, url: str | None = None) -> None:
        self.folder = folder
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        # A relative path would be another folder's in a process that runs elsewhere.
        source = [str(ROOT / "src"), self.environment.get("PYTHONPATH", "")]
        self.environment["PYTHONPATH"] = os.pathsep.join(filter(None, source))
        if url is not None:
            self.environment["PENSTOCK_URL"] = url

    def __call__(
        self,
        *arguments: str,
        input: str | None = None,
        env: Mapping[str, str] = {},
        timeout: float = 60,
        text: bool = True,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command to its end. With ``fresh`` its process is not a fork that has the imports already."""
        environment = self.environment | dict(env)
        if fresh:
            run = subprocess.run(
                [*script(), *arguments],
                cwd=self.folder,
                env=environment,
                input=(input or "").encode(),
                capture_output=True,
                timeout=timeout,
                check=False,
            )
        else:
            words = [word for word in script() if word != sys.executable]
            run = run_script(
                *words, *arguments, cwd=self.folder, env=environment, input=input or "", timeout=timeout
            )
        if not text:
            return run
        return subprocess.CompletedProcess(run.args, run.returncode, run.stdout.decode(), run.stderr.decode())

    def ok(self, *arguments: str, **options: Any) -> Any:
        """What it printed, as text unless ``text=False`` is given; fails if it failed."""
        run = self(*arguments, **options)
        assert run.returncode == 0, f"{arguments}: {run.returncode}\n{run.stdout}{run.stderr}"
        return run.stdout

    def json(self, *arguments: str, **options: Any) -> Any:
        return json.loads(self.ok(*arguments, "--json", **options))

    def refused(self, *arguments: str, code: int, **options: Any) -> str:
        """What it said on stderr: one line, and no traceback."""
        run = self(*arguments, **options)
        assert run.returncode == code, f"{arguments}: {run.returncode}\n{run.stdout}{run.stderr}"
        assert run.stderr.startswith("penstock: ")
        assert run.stderr.count("\n") == 1, run.stderr
        return str(run.stderr)

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*script(), *arguments],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )


def until(condition: Callable[[], Any], *, seconds: float = 30) -> Any:
    """Wait for ``condition`` to be true, looking often."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)
    return answer


@pytest.fixture
def penstock(tmp_path: Path) -> Shell:
    """On the embedded default: ``penstock.db`` in a new folder."""
    return Shell(tmp_path)


@pytest.fixture(params=["sqlite", "valkey"])
def on_both(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """On SQLite, then on a server."""
    if request.param == "sqlite":
        return Shell(tmp_path)
    return Shell(tmp_path, f"{request.getfixturevalue('valkey_url')}?namespace=cli-{uuid7()}")
