from __future__ import annotations

import termios

import pytest

from tests.cli.conftest import Shell, until
from tests.cli.terminal import Terminal

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


def test_all_is_on_one_screen_and_keys_act(on_both: Shell) -> None:
    on_both.ok("enqueue", "exit 3", "--id", "failed-one", "--attempts", "1")
    on_both.ok("worker", "--burst", "--commands")
    with Terminal(on_both, "top", "--every", "0.2") as terminal:
        screen = terminal.read_until("failed-one")
        assert "queues" in screen
        assert "exit code 3" in terminal.read_until("exit code 3")
        terminal.press("r")
        terminal.read_until("failed-one: retried")
        assert on_both.json("show", "failed-one")["state"] == "waiting"
        terminal.press("c")
        terminal.read_until("failed-one: cancelled")
        terminal.press("p")
        terminal.read_until("there is no job to choose")
        on_both.ok("enqueue", "true", "--id", "other-one")
        terminal.read_until("other-one")
        terminal.press("p")
        terminal.read_until("default paused")
        assert on_both.json("status")["queues"][0]["paused"]
        terminal.press("p")
        terminal.read_until("default resumed")
        terminal.press("P")
        terminal.read_until("all queues paused")
        terminal.press("P")
        terminal.read_until("all queues resumed")
        terminal.press("x")
        terminal.read_until("other-one: removed")
        terminal.press("\x1b[B")
        terminal.press("q")
        assert terminal.wait() == 0


def test_keys_act_on_the_job_that_was_chosen_wherever_it_is(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "chosen-one")
    with Terminal(penstock, "top", "--every", "0.2") as terminal:
        terminal.read_until("▶  chosen-one")
        penstock.ok("enqueue", "true", "--id", "urgent-one", "--priority", "-5")
        terminal.read_until("urgent-one")
        terminal.press("x")
        terminal.read_until("chosen-one: removed")
        assert [job["id"] for job in penstock.json("list")] == ["urgent-one"]
        terminal.press("q")
        assert terminal.wait() == 0


def test_keys_do_not_act_on_another_job_when_the_chosen_one_is_gone(penstock: Shell) -> None:
    penstock.ok(
        "enqueue", "-", input='{"command": "true", "id": "a-job"}\n{"command": "true", "id": "b-job"}\n'
    )
    with Terminal(penstock, "top", "--every", "0.2") as terminal:
        terminal.read_until("▶  a-job")
        penstock.ok("remove", "a-job")
        terminal.read_until("default        1 ")
        assert "▶" not in terminal.read_until("b-job")
        terminal.press("x")
        terminal.read_until("a-job is no longer here")
        terminal.read_until("▶  b-job")
        assert [job["id"] for job in penstock.json("list")] == ["b-job"]
        terminal.press("x")
        terminal.read_until("b-job: removed")
        penstock.ok("enqueue", "true", "--id", "c-job")
        terminal.read_until("c-job")
        terminal.press("\x1b[B")
        terminal.read_until("▶  c-job")
        terminal.press("x")
        terminal.read_until("c-job: removed")
        terminal.press("q")
        assert terminal.wait() == 0


def test_a_small_screen_shows_the_chosen_job_in_a_line(penstock: Shell) -> None:
    penstock.ok(
        "enqueue", "-", input="".join(f'{{"command": "true", "id": "job-{n:03}"}}\n' for n in range(100))
    )
    with Terminal(penstock, "top", columns=60, lines=24) as terminal:
        screen = terminal.read_until("job-001")
        assert "▶  job-000" in screen
        assert "waiting" in screen
        # The last row the screen has room for: nothing is drawn beyond its end.
        assert "job-030" not in screen
        terminal.press("q")
        assert terminal.wait() == 0


def test_ctrl_c_leaves_the_terminal_as_it_was(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "waiting-one")
    with Terminal(penstock, "top") as terminal:
        before = termios.tcgetattr(terminal.descriptor)
        terminal.read_until("waiting-one")
        assert not termios.tcgetattr(terminal.descriptor)[3] & termios.ECHO
        terminal.press("\x03")
        assert terminal.wait() == 130
        assert terminal.raw.endswith("interrupted\r\n")
        assert "\x1b[?1049l" in terminal.raw
        assert until(lambda: termios.tcgetattr(terminal.descriptor)[3] & termios.ECHO)
        assert termios.tcgetattr(terminal.descriptor)[3] == before[3] | termios.ECHO


def test_without_a_terminal_it_is_said_what_there_is_instead(penstock: Shell) -> None:
    assert "penstock status --watch" in penstock.refused("top", code=2)
