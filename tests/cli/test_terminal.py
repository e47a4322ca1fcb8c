"""At a terminal: tables, progress, questions. And in a pipe that closes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import Shell, script
from tests.cli.terminal import Terminal

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


def test_listings_are_tables_with_colours(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "one", "--delay", "1h")
    with Terminal(penstock, "list") as terminal:
        assert terminal.wait() == 0
        assert "━" in terminal.text or "─" in terminal.text
        assert "\x1b[35mscheduled" in terminal.raw


def test_a_narrow_terminal_has_whole_ids_and_states_and_does_without_the_rest(penstock: Shell) -> None:
    id = penstock.ok("enqueue", "echo a command that is rather long; exit 3", "--attempts", "1").strip()
    penstock.ok("worker", "--burst")
    with Terminal(penstock, "list", columns=60) as terminal:
        assert terminal.wait() == 0
        head, _, row, *_ = terminal.text.splitlines()
        assert head.split() == ["id", "state", "what", "when", "why"]
        assert row.split()[:3] == [id[-8:], "failed", "echo"]
    with Terminal(penstock, "status", columns=60) as terminal:
        assert terminal.wait() == 0
        store, *lines = terminal.text.splitlines()
        head, _, row, *_ = lines
        assert store.startswith("store sqlite:")
        assert {"queue", "waiting", "active", "failed"} <= set(head.split())
        assert "cancelled" not in head
        assert row.split()[0] == "default"
        # The URL of a store is copied, so it is not cut.
        assert all(len(line) <= 60 for line in lines)


def test_no_color_is_heeded(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    penstock.environment["NO_COLOR"] = "1"
    with Terminal(penstock, "list") as terminal:
        assert terminal.wait() == 0
        assert "waiting" in terminal.text
        assert "\x1b[34m" not in terminal.raw


def test_80_columns_show_jobs_that_are_blocked(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "first", "-q", "reports-of-the-night")
    penstock.ok("enqueue", "true", "--after", "first", "-q", "reports-of-the-night")
    with Terminal(penstock, "status", columns=80) as terminal:
        assert "blocked" in terminal.read_until("no worker runs").splitlines()[1]


def test_jobs_from_a_file_are_counted(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "jobs").write_text("true\n" * 2000)
    with Terminal(penstock, "enqueue", "-f", "jobs") as terminal:
        terminal.read_until("2000 jobs: 2000 queued")
        assert terminal.wait() == 0


def test_what_cannot_be_taken_back_is_asked_for(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "one")
    with Terminal(penstock, "clear") as terminal:
        terminal.read_until("Remove ALL jobs of all queues")
        terminal.press("n\n")
        assert terminal.wait() == 4
    assert penstock.json("show", "one")["state"] == "waiting"
    with Terminal(penstock, "clear") as terminal:
        terminal.read_until("[y/N]")
        terminal.press("y\n")
        terminal.read_until("1 job removed")
        assert terminal.wait() == 0


def test_a_status_that_is_watched_goes_on_until_ctrl_c(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    with Terminal(penstock, "status", "--watch", "--every", "0.1") as terminal:
        terminal.read_until("default")
        penstock.ok("enqueue", "true", "-q", "second")
        terminal.read_until("second")
        terminal.press("\x03")
        assert terminal.wait() == 130


def test_a_reader_that_closes_the_pipe_is_not_an_error(penstock: Shell) -> None:
    penstock.ok("enqueue", "-", input="true\n" * 3000)
    listing = subprocess.Popen(
        [*script(), "list", "-n", "3000"],
        cwd=penstock.folder,
        env=penstock.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert listing.stdout is not None
    assert listing.stderr is not None
    assert listing.stdout.readline().startswith("id")
    listing.stdout.close()
    assert listing.stderr.read() == ""
    listing.stderr.close()
    assert listing.wait(30) == 141


def test_ctrl_c_while_waiting_leaves_the_job_alone(penstock: Shell) -> None:
    with Terminal(penstock, "enqueue", "--id", "one", "--wait", "true") as terminal:
        terminal.read_until("job one")
        terminal.read_until("No worker runs for queue default.")
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert "Traceback" not in terminal.text
    assert penstock.json("show", "one")["state"] == "waiting"
