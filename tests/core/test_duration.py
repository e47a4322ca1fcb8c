from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.units import MAX_MS, describe, milliseconds
from penstock.errors import InvalidOption


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("250ms", 250),
        ("30s", 30_000),
        ("5m", 300_000),
        ("1h30m", 5_400_000),
        ("1h 30m", 5_400_000),
        (" 2d ", 172_800_000),
        ("1w", 604_800_000),
        ("1.5h", 5_400_000),
        ("0.1s", 100),
        ("1w2d3h4m5s6ms", 788_645_006),
        ("5min", 300_000),
        ("5mins", 300_000),
        ("5 minutes", 300_000),
        ("1 minute", 60_000),
        ("30sec", 30_000),
        ("30 secs", 30_000),
        ("1second", 1_000),
        ("90 seconds", 90_000),
        ("1hr", 3_600_000),
        ("2hrs", 7_200_000),
        ("1 hour 30 minutes", 5_400_000),
        ("1h30min", 5_400_000),
        ("1 day", 86_400_000),
        ("2days", 172_800_000),
        ("1week", 604_800_000),
        ("2 weeks", 1_209_600_000),
        ("250 milliseconds", 250),
        ("1msec", 1),
        ("5 s", 5_000),
        ("0s", 0),
        (0, 0),
        (90, 90_000),
        (0.25, 250),
        (0.1 + 0.2, 300),
        (timedelta(minutes=1, microseconds=400), 60_000),
        (timedelta(0), 0),
    ],
)
def test_reads_what_people_write(value: timedelta | str | float, expected: int) -> None:
    assert milliseconds(value) == expected


@pytest.mark.parametrize("value", [0.0001, "0.1ms", timedelta(microseconds=1)])
def test_a_positive_duration_never_rounds_to_zero(value: timedelta | str | float) -> None:
    assert milliseconds(value) == 1


@pytest.mark.parametrize(
    "value",
    [
        "",
        " ",
        "30",
        "s",
        "-5s",
        "30m1h",
        "1h1h",
        "5  s",
        "5S",
        "5M",
        "5mo",
        "1month",
        "5minsecs",
        "5mseconds",
        "1y",
        "1e3s",
        "٣s",
        "9" * 5000 + "s",
        "20000w",
        -1,
        -0.5,
        timedelta(seconds=-1),
        float("nan"),
        float("inf"),
        1e300,
        10**30,
        True,
        None,
        b"5s",
        [5],
    ],
)
def test_an_invalid_duration_is_refused_with_the_name_of_its_option(value: object) -> None:
    with pytest.raises(InvalidOption, match=r"^lease=.* is not a valid duration: .* Give .*\"30s\""):
        milliseconds(value, what="lease")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0s"),
        (250, "250ms"),
        (5_400_000, "1h30m"),
        (604_800_000, "7d"),
        (1_500, "1s500ms"),
        (-60_000, "-1m"),
    ],
)
def test_describes_for_people(ms: int, text: str) -> None:
    assert describe(ms) == text


@given(st.integers(0, MAX_MS))
def test_a_description_reads_back_as_the_same_duration(ms: int) -> None:
    assert milliseconds(describe(ms)) == ms


@given(st.timedeltas(timedelta(0), timedelta(days=60_000)))
def test_a_timedelta_is_off_by_less_than_a_millisecond(value: timedelta) -> None:
    assert abs(timedelta(milliseconds=milliseconds(value)) - value) < timedelta(milliseconds=1)


@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_an_invalid_option(text: str) -> None:
    try:
        assert 0 <= milliseconds(text) <= MAX_MS
    except InvalidOption:
        pass
