"""When slots come: cron with time zones and changes of the clock, intervals, bounds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.job import Dedup, Extras, NewJob, Options
from penstock.core.retry import Fixed
from penstock.core.schedule import (
    AfterCompletion,
    Cron,
    Every,
    Schedule,
    ScheduleSpec,
    Timing,
    pack_spec,
    unpack_spec,
)
from penstock.errors import InvalidOption

BERLIN = ZoneInfo("Europe/Berlin")
# On 29 March 2026 02:00 becomes 03:00; on 25 October 2026 03:00 becomes 02:00.


def ms(*at: int, zone: Any = BERLIN, fold: int = 0) -> int:
    return round(datetime(*at, tzinfo=zone, fold=fold).timestamp() * 1000)  # type: ignore[misc,arg-type]


def slots(timing: Cron | Every, after_ms: int) -> Iterator[str]:
    """Slots after an instant, as the clock on Berlin's walls shows them, with the offset."""
    at: int | None = after_ms
    while at is not None and (at := timing.next_after(at)) is not None:
        yield datetime.fromtimestamp(at / 1000, BERLIN).strftime("%d %H:%M:%S %z")


def some(count: int, timing: Cron | Every, after_ms: int) -> list[str]:
    found = slots(timing, after_ms)
    return [next(found) for _ in range(count)]


def berlin(expression: str) -> Cron:
    return Cron.of(expression, "Europe/Berlin")


@pytest.mark.parametrize(
    ("expression", "first", "second"),
    [
        ("*/15 * * * *", "2026-01-01 00:15:00", "2026-01-01 00:30:00"),
        ("0 3 * * *", "2026-01-01 03:00:00", "2026-01-02 03:00:00"),
        ("0 9 * * mon-fri", "2026-01-01 09:00:00", "2026-01-02 09:00:00"),
        ("0 9 * * MON", "2026-01-05 09:00:00", "2026-01-12 09:00:00"),
        ("0 0 1 jan,jul *", "2026-07-01 00:00:00", "2027-01-01 00:00:00"),
        ("0 0 29 2 *", "2028-02-29 00:00:00", "2032-02-29 00:00:00"),
        ("0 12 l * *", "2026-01-31 12:00:00", "2026-02-28 12:00:00"),
        ("0 12 * * fri#1", "2026-01-02 12:00:00", "2026-02-06 12:00:00"),
        ("*/20 * * * * *", "2026-01-01 00:00:20", "2026-01-01 00:00:40"),
        ("30 0 12 * * sun", "2026-01-04 12:00:30", "2026-01-11 12:00:30"),
        ("@hourly", "2026-01-01 01:00:00", "2026-01-01 02:00:00"),
        ("@daily", "2026-01-02 00:00:00", "2026-01-03 00:00:00"),
        (" @Weekly ", "2026-01-04 00:00:00", "2026-01-11 00:00:00"),
        ("@yearly", "2027-01-01 00:00:00", "2028-01-01 00:00:00"),
    ],
)
def test_expressions_of_five_and_six_fields_with_names(expression: str, first: str, second: str) -> None:
    cron = Cron.of(expression)
    found = cron.next_after(ms(2026, 1, 1, zone=UTC))
    assert found is not None
    following = cron.next_after(found)
    assert following is not None
    shown = [
        datetime.fromtimestamp(at / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S") for at in (found, following)
    ]
    assert shown == [first, second]


def test_the_same_hour_is_another_instant_in_another_zone() -> None:
    after = ms(2026, 1, 1, zone=UTC)
    in_utc, in_berlin = Cron.of("0 3 * * *"), berlin("0 3 * * *")
    assert in_utc.next_after(after) == ms(2026, 1, 1, 3, zone=UTC)
    assert in_berlin.next_after(after) == ms(2026, 1, 1, 2, zone=UTC)
    assert in_berlin.next_after(ms(2026, 7, 1, zone=UTC)) == ms(2026, 7, 1, 1, zone=UTC)


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
def test_a_time_that_is_skipped_comes_when_the_clock_has_jumped(expression: str) -> None:
    assert some(3, berlin(expression), ms(2026, 3, 28, 0)) == [
        "28 02:30:00 +0100",
        "29 03:00:00 +0200",
        "30 02:30:00 +0200",
    ]


@pytest.mark.parametrize("expression", ["30 2 * * *", "0 30 2 * * *"])
def test_a_time_that_comes_twice_is_taken_the_first_time(expression: str) -> None:
    assert some(3, berlin(expression), ms(2026, 10, 24, 0)) == [
        "24 02:30:00 +0200",
        "25 02:30:00 +0200",
        "26 02:30:00 +0100",
    ]
    in_the_second_hour = ms(2026, 10, 25, 2, 15, fold=1)
    assert some(1, berlin(expression), in_the_second_hour) == ["26 02:30:00 +0100"]


def test_several_times_in_the_skipped_hour_are_one_slot() -> None:
    assert some(2, berlin("15,45 2 * * *"), ms(2026, 3, 29, 0)) == ["29 03:00:00 +0200", "30 02:15:00 +0200"]


def test_expressions_with_a_star_go_by_elapsed_time() -> None:
    half_hours = berlin("*/30 * * * *")
    assert some(4, half_hours, ms(2026, 3, 29, 1, 15)) == [
        "29 01:30:00 +0100",
        "29 03:00:00 +0200",
        "29 03:30:00 +0200",
        "29 04:00:00 +0200",
    ]
    assert some(5, half_hours, ms(2026, 10, 25, 1, 45)) == [
        "25 02:00:00 +0200",
        "25 02:30:00 +0200",
        "25 02:00:00 +0100",
        "25 02:30:00 +0100",
        "25 03:00:00 +0100",
    ]


def test_intervals_do_not_know_of_clocks() -> None:
    assert some(3, Every(3_600_000), ms(2026, 3, 29, 0, 30)) == [
        "29 01:00:00 +0100",
        "29 03:00:00 +0200",
        "29 04:00:00 +0200",
    ]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("61 * * * *", "bad minute"),
        ("* 24 * * *", "bad hour"),
        ("* * 0 * *", "bad day-of-month"),
        ("* * * 13 *", "bad month"),
        ("* * * * noday", "bad day-of-week"),
        ("60 * * * * *", "bad second"),
        ("* * * *", "wrong number of fields"),
        ("@reboot", "there is no such name"),
        ("", "wrong number of fields"),
        (None, "cron must be a text"),
        ("0 0 31 feb *", "bad day-of-month"),
        ("0 0 * 4 mon#9", "bad day-of-week"),
        ("* * */20 * 1L,2#0", "bad day-of-week"),
    ],
)
def test_an_invalid_expression_is_refused_with_the_reason(expression: Any, reason: str) -> None:
    with pytest.raises(InvalidOption, match=reason):
        Cron.of(expression)


def test_an_expression_that_never_comes_is_refused() -> None:
    with pytest.raises(InvalidOption, match="never occurs"):
        Cron.of("* * */20 * 1L")


@pytest.mark.parametrize("zone", ["Berlin/Europe", "", "../etc/passwd", "Europe", 3])
def test_an_unknown_zone_is_refused(zone: Any) -> None:
    with pytest.raises(InvalidOption, match=r"not a known time zone|tz must be an IANA name"):
        Cron.of("0 3 * * *", zone)


def test_an_interval_counts_from_its_anchor() -> None:
    assert Every(1000).next_after(5000) == 6000
    assert Every(1000).next_after(5001) == 6000
    assert Every(1000, 300).next_after(5001) == 5300
    assert Every(1000, 300).next_after(10) == 300


def test_slots_lie_from_the_start_to_the_end() -> None:
    schedule = Schedule(Every(1000), start_ms=2000, end_ms=3000)
    assert schedule.first(100) == 2000
    assert schedule.next_after(2000) == 3000
    assert schedule.next_after(3000) is None
    assert schedule.first(5000) is None


def test_a_schedule_after_completion_starts_immediately_and_then_follows_the_store() -> None:
    schedule = Schedule(AfterCompletion(5000), start_ms=2000)
    assert (schedule.first(100), schedule.first(3000)) == (2000, 3000)
    assert schedule.next_after(3000) is None
    assert schedule.repeat_ms == 5000
    assert Schedule(Every(1)).repeat_ms is None


timings: st.SearchStrategy[Timing] = st.one_of(
    st.builds(Every, st.integers(1, 10**8), st.integers(0, 10**9)),
    st.sampled_from(["* * * * * *", "*/7 * * * *", "0 3 * * *", "30 2 * * sun", "0 12 1 * *"]).map(berlin),
)


@given(timing=timings, after_ms=st.integers(ms(2026, 1, 1), ms(2026, 12, 31)), late_ms=st.integers(0, 10**8))
def test_the_newest_due_slot_is_the_last_before_now(timing: Timing, after_ms: int, late_ms: int) -> None:
    schedule = Schedule(timing)
    slot = schedule.next_after(after_ms)
    assert slot is not None
    newest = schedule.newest_due(slot, slot + late_ms)
    following = schedule.next_after(newest)
    assert slot <= newest <= slot + late_ms
    assert following is not None
    assert following > slot + late_ms


@given(timing=timings, after_ms=st.integers(ms(2026, 1, 1), ms(2026, 12, 31)))
def test_slots_rise_and_none_is_passed_over(timing: Timing, after_ms: int) -> None:
    schedule = Schedule(timing)
    slot = schedule.next_after(after_ms)
    assert slot is not None
    assert slot > after_ms
    assert schedule.next_after(slot - 1) == slot
    assert schedule.next_after((after_ms + slot) // 2) == slot


def test_a_plan_is_read_back_as_it_was() -> None:
    options = Options(task="report", attempts=7, backoff=Fixed(1000))
    job = NewJob(
        "", b"\x00\xff", options, priority=-3, extras=Extras(group="g", headers={"a": "b"}), dedup=Dedup("k")
    )
    spec = ScheduleSpec(Schedule(berlin("0 3 * * *"), end_ms=5, limit=3, missed="catch_up"), job)
    assert unpack_spec(pack_spec(spec)) == spec
