"""Type checkers find every planted mistake in a user's file, and nothing else."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock import App, TaskOptions, Worker, WorkerOptions
from penstock.client.options import DISPATCH, JOB_POLICY, PLACEMENT, TIMES, DispatchOptions
from penstock.worker.options import WorkerSettings

pytestmark = pytest.mark.timeout(400)

USER_FILE = Path(__file__).with_name("user_file.py")
SOURCE = Path(__file__).parents[2] / "src"
Checker = Callable[[Path], dict[int, str]]


def mypy(folder: Path) -> dict[int, str]:
    """Return the errors of ``mypy --strict`` by line."""
    options = ["--strict", "--config-file=", f"--cache-dir={folder / 'cache'}", "--follow-imports=silent"]
    checked = checker(folder, "mypy", *options, env={"MYPYPATH": str(SOURCE)})
    found = re.findall(r"^user_file\.py:(\d+): error: (.*)$", checked, flags=re.MULTILINE)
    assert found, checked
    return {int(line): message for line, message in found}


def pyright(folder: Path) -> dict[int, str]:
    """Return the errors of pyright in its strict mode by line. basedpyright is pyright with its own Node.js."""
    settings = {
        "include": [USER_FILE.name],
        "typeCheckingMode": "strict",
        "extraPaths": [str(SOURCE)],
        "pythonVersion": "3.11",
    }
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    checked = json.loads(checker(folder, "basedpyright", "--outputjson"))
    return {
        one["range"]["start"]["line"] + 1: one["message"]
        for one in checked["generalDiagnostics"]
        if one["severity"] == "error"
    }


def checker(folder: Path, name: str, *options: str, env: dict[str, str] | None = None) -> str:
    """Return the output of a type checker that runs in ``folder``, beside a copy of the user's file."""
    shutil.copy(USER_FILE, folder)
    command = [sys.executable, "-m", name, *options, USER_FILE.name]
    ours = {key: value for key, value in os.environ.items() if key not in ("MYPYPATH", "PYTHONPATH")}
    done = subprocess.run(
        command, cwd=folder, env={**ours, **(env or {})}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("check", [mypy, pyright], ids=lambda check: check.__name__)
def test_every_planted_mistake_is_found_and_nothing_else(check: Checker, tmp_path: Path) -> None:
    lines = USER_FILE.read_text().splitlines()
    planted = {number for number, line in enumerate(lines, 1) if "# wrong" in line}
    assert len(planted) >= 60

    found = check(tmp_path)

    missed = [f"{number}: {lines[number - 1].strip()}" for number in sorted(planted - found.keys())]
    assert missed == []
    surplus = [f"{number}: {found[number]}" for number in sorted(found.keys() - planted)]
    assert surplus == []


def test_the_lists_of_options_agree() -> None:
    assert (
        DISPATCH
        == JOB_POLICY | PLACEMENT | TIMES | {"wait", "queue", "unique"}
        == frozenset(DispatchOptions.__annotations__)
    )
    assert TaskOptions.__annotations__.keys() >= JOB_POLICY


def test_every_worker_option_is_in_the_one_list() -> None:
    names = set(WorkerOptions.__annotations__)
    assert _unpacked(App.worker) == _unpacked(Worker.__init__) == "Unpack[WorkerOptions]"
    assert set(inspect.signature(Worker).parameters) == {"app", "options"}
    # Settings are the options with their units; `id` is computed, and a probe's token is part of its address.
    settings = {name.removesuffix("_ms") for name in WorkerSettings.__struct_fields__}
    assert settings - {"id"} == names - {"probe_token"}


def _unpacked(method: Any) -> str:
    return str(method.__annotations__["options"])
