"""``penstock schedule add`` and ``list``: in which zone, what runs, and what was there before."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.values import local_zone
from penstock.errors import InvalidOption
from tests.cli.conftest import Shell, until

BERLIN = {"TZ": "Europe/Berlin"}


def test_cron_goes_by_local_time_and_the_answer_names_the_zone(penstock: Shell) -> None:
    said = penstock.ok("schedule", "add", "nightly", "--cron", "0 9 * * *", "make report", env=BERLIN)
    assert said.startswith("nightly added: cron 0 9 * * * Europe/Berlin, next run ")
    assert said.endswith(" 09:00 Europe/Berlin\n")
    [row] = penstock.json("schedule", "list", env=BERLIN)
    assert row["when"] == "cron 0 9 * * * Europe/Berlin"
    said = penstock.ok("schedule", "add", "tokyo", "--cron", "@daily", "--tz", "Asia/Tokyo", "true")
    assert said.startswith("tokyo added: cron 0 0 * * * Asia/Tokyo, next run ")
    assert said.endswith(" 00:00 Asia/Tokyo\n")


def test_a_zone_without_a_name_is_asked_for(penstock: Shell) -> None:
    add = ("schedule", "add", "nightly", "--cron", "@daily", "true")
    said = penstock.refused(*add, code=2, env={"TZ": "CET-1"})
    assert "the local time zone 'CET-1' is not an IANA name. Give --tz" in said
    penstock.ok("schedule", "add", "often", "--every", "1h", "true", env={"TZ": "CET-1"})


def test_the_local_zone_is_that_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", ":America/New_York")
    assert local_zone() == "America/New_York"
    monkeypatch.setenv("TZ", "Moon/Base")
    with pytest.raises(InvalidOption, match="Moon/Base"):
        local_zone()


def test_adding_again_says_that_it_replaces_and_what_was_there(penstock: Shell) -> None:
    add = ("schedule", "add", "report")
    penstock.ok(*add, "--every", "1h", "make report")
    assert penstock.ok(*add, "--every", "1h", "make report").startswith("report unchanged: every 1h, ")
    said = penstock.ok(*add, "--every", "2h", "make other").splitlines()
    assert said[0].startswith("report replaced: every 2h, next run ")
    assert said[1] == "it was: every 1h, make report"
    assert penstock.json(*add, "--every", "2h", "make other")["answer"] == "unchanged"


def test_the_list_shows_what_runs(penstock: Shell) -> None:
    penstock.ok("schedule", "add", "report", "--every", "1h", "make report")
    penstock.ok("schedule", "add", "poll", "--every", "1h", "--task", "poll", '{"to": "ada"}')
    listed = penstock.ok("schedule", "list")
    assert "make report" in listed
    assert 'poll {"to":"ada"}' in listed
    assert [row["what"] for row in penstock.json("schedule", "list")] == ['poll {"to":"ada"}', "make report"]


def test_a_command_has_a_folder_and_variables(penstock: Shell, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    penstock.ok(
        "schedule",
        "add",
        "s",
        "--every",
        "1s",
        "--cwd",
        "sub",
        "--env",
        "A=3",
        "--limit",
        "1",
        "echo $A > out",
    )
    [row] = penstock.json("schedule", "list")
    assert (row["cwd"], row["env"]) == (f"{tmp_path}/sub", {"A": "3"})
    worker = penstock.start("worker", "--commands")
    try:
        until(lambda: (tmp_path / "sub" / "out").exists() and (tmp_path / "sub" / "out").read_text() == "3\n")
    finally:
        worker.terminate()
        worker.communicate(timeout=30)
    assert "There is: s." in penstock.refused("schedule", "pause", "ss", code=3)


def test_the_job_of_a_scheduler_is_run_now(on_both: Shell) -> None:
    on_both.ok("schedule", "add", "s", "--cron", "0 0 1 1 *", "--attempts", "7", "echo hello")
    id = on_both.ok("schedule", "run", "s").strip()
    on_both.ok("worker", "--commands", "--burst")
    job = on_both.json("show", id)
    assert (job["state"], job["attempts"]) == ("completed", 7)
    assert on_both.ok("logs", id) == "hello\n"
    [row] = on_both.json("schedule", "list")
    assert row["fired"] == 0
    assert "There is: s." in on_both.refused("schedule", "run", "nope", code=3)
