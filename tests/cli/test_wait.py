"""``penstock wait``: the exit code says how jobs ended. And what ``logs`` and ``cancel`` say meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Shell, until

pytestmark = pytest.mark.timeout(180)


def test_it_waits_for_jobs_and_says_how_they_ended(on_both: Shell, tmp_path: Path) -> None:
    on_both.ok("enqueue", "--id", "good", f"while [ ! -e {tmp_path}/go ]; do sleep 0.05; done")
    on_both.ok("enqueue", "--id", "bad", "--attempts", "1", "exit 3")
    worker = on_both.start("worker", "--commands")
    waiting = on_both.start("wait", "good", "bad")
    try:
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == (
            "job 'bad' of queue 'default' failed: CommandFailed: exit code 3\n"
        )
        (tmp_path / "go").touch()
        assert waiting.stdout.read() == "job 'good' completed\n"
        assert waiting.wait(30) == 1
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
        waiting.kill()
        waiting.communicate()
    assert on_both.ok("wait", "good", "default/good") == "job 'good' completed\n"
    [end] = on_both.json("wait", "good")
    assert (end["id"], end["state"], end["error"]) == ("good", "completed", "")
    assert "'nobody' was not found" in on_both.refused("wait", "good", "nobody", code=3)


def test_a_wait_has_a_timeout_and_a_cancelled_job_counts_as_failed(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "late", "true")
    said = penstock.refused("wait", "late", "--timeout", "100ms", code=6)
    assert "timed out after 100ms. Not ended: late." in said
    penstock.ok("cancel", "late")
    run = penstock("wait", "late")
    assert (run.returncode, run.stdout) == (1, "job 'late' of queue 'default' was cancelled.\n")


def test_the_log_of_a_job_that_has_not_run_is_explained(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "quiet", "true")
    run = penstock("logs", "quiet")
    assert (run.returncode, run.stdout) == (0, "")
    assert run.stderr.startswith("quiet has not run. No worker runs for queue default.")
    penstock.ok("worker", "--burst")
    assert penstock("logs", "quiet").stderr == "quiet has printed nothing\n"


def test_every_line_is_printed_once_even_if_they_are_all_alike(on_both: Shell, tmp_path: Path) -> None:
    """The follower has seen the first lines when more arrive than the store keeps."""
    alike = "i=0; while [ $i -lt 900 ]; do echo same; i=$((i+1)); done"
    held = f"{alike}; while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; {alike}; echo end"
    worker = on_both.start("worker", "--commands")
    waiting = on_both.start("enqueue", "-w", "--id", "x", held)
    try:
        assert waiting.stdout is not None
        assert [waiting.stdout.readline() for _ in range(900)] == ["same\n"] * 900
        (tmp_path / "go").touch()
        assert waiting.stdout.read() == "same\n" * 900 + "end\n"
        assert waiting.wait(30) == 0
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
        waiting.kill()
        waiting.communicate()
    shown = on_both("logs", "x")
    assert (shown.stdout, shown.stderr) == ("same\n" * 999 + "end\n", "… 801 lines were not kept\n")
    last = on_both("logs", "x", "-n", "2")
    assert (last.stdout, last.stderr) == ("same\nend\n", "")


def test_lines_that_came_too_fast_are_counted(on_both: Shell) -> None:
    on_both.ok("enqueue", "--id", "x", "seq 5000; sleep 0.5; seq 5001 5100")
    on_both.ok("worker", "--commands", "--burst")
    shown = on_both("logs", "x", "--json")
    assert shown.stdout.splitlines() == [f'"{n}"' for n in range(4101, 5101)]
    assert shown.stderr == "… 4100 lines were not kept\n"


def test_cancel_says_how_long_it_takes_and_show_says_cancelled(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "long", "sleep 60")
    worker = penstock.start("worker", "--grace", "0s", "--lease", "1s")
    try:
        until(lambda: penstock.json("show", "long")["state"] == "active")
        said = penstock.ok("cancel", "long")
        assert said == "long asked to stop: its worker notices within 5 seconds\n"
        assert penstock("wait", "long", "--timeout", "30s").returncode == 1
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    shown = penstock.ok("show", "long").splitlines()
    assert [line.split() for line in shown if line.startswith("state")] == [["state", "cancelled"]]


def test_a_failed_command_is_one_line_in_the_log(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "bad", "--attempts", "1", "echo no luck; exit 3")
    said = penstock("worker", "--burst").stderr
    assert said.count("no luck") == 1
    assert (
        "job 'bad' of queue 'default' (task 'penstock.command') failed for good in run 1: CommandFailed"
        in said
    )


def test_a_cut_line_is_reported(on_both: Shell) -> None:
    on_both.ok("enqueue", "--id", "x", "printf '%3000s\\n' | tr ' ' a; echo short")
    on_both.ok("worker", "--commands", "--burst")
    shown = on_both("logs", "x")
    assert shown.stdout.splitlines() == ["a" * 2000 + " …", "short"]
    assert shown.stderr == "… 1 line was cut after 2000 characters\n"
    assert on_both("logs", "x", "-n", "1").stderr == ""


def test_a_wait_without_a_worker_says_why_it_does_not_end(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "late", "true")
    refused = penstock.refused("wait", "late", "--timeout", "100ms", code=6)
    assert "Not ended: late. No worker runs for queue default." in refused


def test_following_a_log_without_a_worker_says_why_nothing_comes(penstock: Shell) -> None:
    penstock.ok("enqueue", "--id", "late", "true")
    follower = penstock.start("logs", "late", "--follow")
    try:
        assert follower.stdout is not None
        assert follower.stdout.readline().startswith("late waits. No worker runs for queue default.")
    finally:
        follower.kill()
        follower.communicate()
