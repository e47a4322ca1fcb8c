"""Jobs from pipes and terminals: they go in as they come, and Ctrl-C ends it at once."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock import App
from penstock.cli.connect import run_app
from tests.cli.conftest import Shell, script, until
from tests.cli.terminal import Terminal

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


def waiting(shell: Shell) -> int:
    queues = shell.json("status")["queues"] if (shell.folder / "penstock.db").exists() else []
    return sum(row["waiting"] for row in queues)


def test_lines_are_enqueued_as_they_come_and_ctrl_c_reports_the_count(penstock: Shell) -> None:
    with subprocess.Popen(
        [*script(), "enqueue", "-"],
        cwd=penstock.folder,
        env=penstock.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as enqueueing:
        try:
            assert enqueueing.stdin is not None
            enqueueing.stdin.write("true\ntrue\nhalf a line")
            enqueueing.stdin.flush()
            until(lambda: waiting(penstock) == 2)
            enqueueing.send_signal(signal.SIGINT)
            assert enqueueing.wait(30) == 130
        finally:
            enqueueing.kill()
        _, said = enqueueing.communicate()
    assert said.split("\n") == ["2 jobs enqueued", "", "penstock: interrupted", ""]
    assert waiting(penstock) == 2


def test_one_ctrl_d_ends_typed_input(penstock: Shell) -> None:
    with Terminal(penstock, "enqueue", "-") as terminal:
        terminal.read_until("Ctrl-D ends")
        terminal.press("echo typed\n")
        until(lambda: waiting(penstock) == 1)
        terminal.press("\x04")
        terminal.read_until("1 job: 1 queued")
        assert terminal.wait() == 0


def test_ctrl_c_leaves_typed_input(penstock: Shell) -> None:
    with Terminal(penstock, "enqueue", "-") as terminal:
        terminal.read_until("Ctrl-D ends")
        terminal.press("\x03")
        terminal.read_until("interrupted")
        assert terminal.wait() == 130


def test_a_ctrl_c_before_the_event_loop_runs_is_not_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """asyncio sets its count of Ctrl-Cs to 0 after it has begun to listen for them."""
    install = signal.signal

    def install_and_interrupt(number: int, handler: Any) -> Any:
        before = install(number, handler)
        if number == signal.SIGINT and handler is not signal.default_int_handler:
            monkeypatch.undo()
            signal.raise_signal(signal.SIGINT)
        return before

    async def nothing() -> None: ...

    monkeypatch.setattr(signal, "signal", install_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_app(App(f"sqlite:///{tmp_path}/penstock.db"), nothing)


def test_lines_that_are_not_jobs_are_named_and_skipped(on_both: Shell) -> None:
    lines = ['{"command": "true"}'] * 2000 + ["{", '{"id": "x"}'] + ["true"] * 2000
    run = on_both("enqueue", "-", "--keep-going", input="\n".join(lines))

    assert run.returncode == 2
    assert run.stdout == "4000 jobs: 4000 queued; 2 lines are not jobs\n"
    first, second = run.stderr.splitlines()
    assert first.startswith("penstock: line 2001: that is not valid JSON")
    assert second == 'penstock: line 2002: a job needs a "command" or a "task". Give one of them.'
    assert on_both.json("status")["queues"][0]["waiting"] == 4000


def test_the_last_line_needs_no_end_and_a_line_may_be_long(penstock: Shell) -> None:
    long = f"echo {'x' * 100_000}"
    penstock.ok("enqueue", "-", input=f"{long}\n\n\ntrue")

    commands = {job["payload"]["command"] for job in penstock.json("list", "waiting")}
    assert commands == {long, "true"}
    refused = penstock.refused("enqueue", "-", input="x" * 3_000_000, code=2)
    assert "longer than 128 KiB" in refused


def test_a_bare_number_is_a_number_of_seconds(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "x", "--timeout", "90", "--delay", "3600")
    told = penstock.json("show", "x")
    assert (told["timeout_ms"], told["state"]) == (90_000, "scheduled")
    penstock.ok("config", "set", "timeout", "1.5")
    assert penstock.ok("config", "get", "timeout") == "1s500ms\n"
    assert penstock.ok("reset-stale", "--older-than", "300") == "0 jobs wait again\n"


def test_waiting_for_an_existing_job_is_reported(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "x", "echo once")
    penstock.ok("worker", "--burst")
    run = penstock("enqueue", "--id", "x", "--wait", "echo twice")

    assert (run.returncode, run.stdout) == (0, "once\n")
    assert run.stderr == (
        "nothing was enqueued: x is there already, completed, and is another job: echo once\n"
    )
    timed = penstock("enqueue", "--id", "y", "--wait-timeout", "50ms", "--json", "true")
    assert timed.returncode == 6, json.dumps(timed.stdout)
