"""What people read: local times, runs, and what `doctor` and `clean` say."""

from __future__ import annotations

import re

import pytest

from penstock.cli import doctor
from penstock.cli.output import when
from tests.cli.conftest import Shell
from tests.cli.terminal import Terminal

pytestmark = pytest.mark.timeout(300)

AT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?![.\d])")


def test_an_instant_is_local_and_has_no_milliseconds() -> None:
    assert AT.fullmatch(when(1_700_000_000_123))


def test_show_counts_runs_and_json_has_exact_times(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "a", "--attempts", "3")
    penstock.ok("worker", "--burst", "--commands")

    text = penstock.ok("show", "a")
    assert re.search(r"^runs +1 run; 0 of 3 attempts failed$", text, re.MULTILINE)
    assert AT.search(text)
    told = penstock.json("show", "a")
    assert (told["runs"], told["failures"]) == (1, 0)
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}", event["at"]) for event in told["timeline"])
    header, row = (line.split() for line in penstock.ok("list").splitlines())
    assert row[header.index("runs")] == "1"


def test_clean_asks_unless_an_age_is_given(penstock: Shell) -> None:
    penstock.ok("enqueue", "true", "--id", "a")
    penstock.ok("worker", "--burst", "--commands")

    refused = penstock.refused("clean", "completed", code=4)
    assert "Remove all completed jobs of all queues?" in refused
    assert "--older-than" in refused
    assert penstock.ok("clean", "completed", "--older-than", "1h") == "0 jobs removed\n"
    assert penstock.ok("clean", "completed", "--yes") == "1 job removed\n"


@pytest.mark.parametrize(
    ("facts", "verdict", "found"),
    [
        ({"aof_enabled": "0", "save": "", "rdb_last_save_time": "1700000000"}, "problem", "no persistence"),
        ({"aof_enabled": "0", "save": "3600 1"}, "problem", "snapshots only"),
        ({"aof_enabled": "0"}, "problem", "snapshots at most"),
        ({"aof_enabled": "1", "save": ""}, "ok", "append-only file"),
        ({"aof_enabled": "1", "appendfsync": "always"}, "ok", "append-only file"),
        ({"aof_enabled": "1", "appendfsync": "everysec"}, "note", "append-only file, appendfsync everysec"),
        ({"aof_enabled": "1", "appendfsync": "no"}, "note", "append-only file, appendfsync no"),
    ],
)
def test_doctor_says_how_the_server_persists(facts: dict[str, str], verdict: str, found: str) -> None:
    finding = doctor._persistence(facts)
    assert (finding.verdict, finding.found) == (verdict, found)


def test_doctor_says_that_the_server_is_full() -> None:
    [finding] = doctor._memory({"used_memory": "99000000", "maxmemory": "100000000"})
    assert (finding.verdict, finding.found) == ("problem", "99% of maxmemory (95 MiB) is used")
    assert "raise maxmemory" in finding.advice
    assert doctor._memory({"used_memory": "99000000", "maxmemory": "0"}) == []
    assert doctor._memory({"used_memory": "9", "maxmemory": "100"}) == []


def test_doctor_warns_of_no_race_in_sqlite(penstock: Shell) -> None:
    penstock.ok("enqueue", "true")
    found = {finding["what"]: finding for finding in penstock.json("doctor")}
    assert (found["sqlite"]["verdict"], found["sqlite"]["advice"]) == ("ok", "")


@pytest.mark.parametrize("options", [(), ("--processes", "2")], ids=["one", "pool"])
def test_the_live_view_of_a_worker_shows_the_command(penstock: Shell, options: tuple[str, ...]) -> None:
    penstock.ok("enqueue", "--", "sleep", "54.321")

    with Terminal(penstock, "worker", "--commands", *options) as terminal:
        shown = terminal.read_until("sleep 54.321")
        assert "penstock.command" not in shown
        terminal.press("\x03")
        terminal.read_until("stopping")
        terminal.press("\x03")
        terminal.wait()
