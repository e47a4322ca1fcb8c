"""Times and the options of ``enqueue`` that say when and how often a job runs."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest

from penstock.cli import values
from penstock.cli.values import read_time
from penstock.errors import InvalidOption
from tests.cli.conftest import Shell

BERLIN = ZoneInfo("Europe/Berlin")
NOON = datetime(2026, 3, 28, 12, 0, 0)  # the day before clocks change there


class _Noon(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOON.replace(tzinfo=tz)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2026-12-01", "2026-12-01T00:00:00+01:00"),
        ("2026-12-01 08:00", "2026-12-01T08:00:00+01:00"),
        (" 2026-12-01T08:00:30 ", "2026-12-01T08:00:30+01:00"),
        ("2026-12-01T08:00Z", "2026-12-01T08:00:00+00:00"),
        ("2026-12-01 08:00-05:00", "2026-12-01T08:00:00-05:00"),
        ("18:30", "2026-03-28T18:30:00+01:00"),
        ("9:05", "2026-03-29T09:05:00+02:00"),
        ("12:00", "2026-03-29T12:00:00+02:00"),
        ("today 18:00:30", "2026-03-28T18:00:30+01:00"),
        ("tomorrow", "2026-03-29T00:00:00+01:00"),
        ("tomorrow 9:00", "2026-03-29T09:00:00+02:00"),
        ("Tomorrow  09:00", "2026-03-29T09:00:00+02:00"),
    ],
)
def test_a_time_is_read_as_people_write_it(monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.setattr(values, "datetime", _Noon)
    assert read_time(text, BERLIN) == datetime.fromisoformat(expected)


def test_a_time_without_a_zone_is_local() -> None:
    assert read_time("2099-12-01 08:00") == datetime(2099, 12, 1, 8).astimezone()


@pytest.mark.parametrize(
    "text", ["", "soon", "25:00", "9", "tomorrow noon", "2026-13-01", "9999-99-99", "9:5"]
)
def test_an_invalid_time_is_refused_with_examples(text: str) -> None:
    with pytest.raises(InvalidOption, match=r"is not a time\. Give one such as 18:30, 'tomorrow 9:00'"):
        read_time(text)


def test_a_job_is_due_at_the_time_that_was_given(on_both: Shell) -> None:
    at = (datetime.now(UTC) + timedelta(days=3)).replace(microsecond=0)
    on_both.ok("enqueue", "true", "--id", "flag", "--at", at.isoformat())
    on_both.ok("enqueue", f'{{"command": "true", "id": "json", "at": "{at.isoformat()}"}}')
    for id in ("flag", "json"):
        job = on_both.json("show", id)
        assert job["state"] == "scheduled"
        assert datetime.fromisoformat(job["run_at"]) == at


def test_a_line_replaces_what_is_given_for_all(penstock: Shell) -> None:
    lines = '{"command": "true", "id": "a", "delay": "1h", "attempts": 7}\n{"command": "true", "id": "b"}\n'
    penstock.ok("enqueue", "-f", "-", "--at", "2099-01-01", "--max-retries", "1", input=lines)
    a, b = penstock.json("show", "a"), penstock.json("show", "b")
    assert (a["attempts"], b["attempts"]) == (7, 2)
    assert a["run_at"] < b["run_at"]


def test_options_that_exclude_each_other_are_refused(penstock: Shell) -> None:
    said = penstock.refused("enqueue", "true", "--at", "18:00", "--delay", "5min", code=2)
    assert "give either --delay or --at, not both" in said
    said = penstock.refused("enqueue", "true", "--attempts", "3", "--max-retries", "2", code=2)
    assert "attempts is max_retries + 1" in said
    assert "'soon' is not a time" in penstock.refused("enqueue", "true", "--at", "soon", code=2)


def test_cost_and_retention_are_options(penstock: Shell) -> None:
    given = ("--group", "g", "--cost", "5", "--result-ttl", "2 days", "--failure-ttl", "1w")
    penstock.ok("enqueue", "true", "--id", "a", *given)
    penstock.ok("cancel", "a")  # a cancelled job is kept as long as a completed one
    job = penstock.json("show", "a")
    assert job["cost"] == 5
    kept = datetime.fromisoformat(job["kept_until"]) - datetime.fromisoformat(job["finished_at"])
    assert kept == timedelta(days=2)
    assert "got -1." in penstock.refused("enqueue", "true", "--cost", "-1", code=2)
