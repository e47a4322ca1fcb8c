from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from penstock.core.limits import MOST, Rate, parse_rate
from penstock.errors import InvalidOption


@pytest.mark.parametrize(
    ("given", "rate"),
    [
        ("100/s", Rate(100, 1_000)),
        ("5/2m", Rate(5, 120_000)),
        (" 1 / 500ms ", Rate(1, 500)),
        ("10/h", Rate(10, 3_600_000)),
        ("3/1h30m", Rate(3, 5_400_000)),
        ("7/1.5s", Rate(7, 1_500)),
        ("9/ms", Rate(9, 1)),
        ((5, "2m"), Rate(5, 120_000)),
        ((5, 0.25), Rate(5, 250)),
        ((5, timedelta(days=1)), Rate(5, 86_400_000)),
        (Rate(5, 2_000), Rate(5, 2_000)),
        (f"{MOST}/s", Rate(MOST, 1_000)),
    ],
)
def test_a_rate_is_read_in_every_form(given: Any, rate: Rate) -> None:
    assert parse_rate(given) == rate


@pytest.mark.parametrize(
    "given",
    [
        "",
        "100",
        "100/",
        "/s",
        "100/fortnight",
        "100/s/s",
        "1.5/s",
        "-1/s",
        "0/s",
        "1/0s",
        "٣/s",
        "²/s",
        "9" * 5000 + "/s",
        f"{MOST + 1}/s",
        100,
        None,
        True,
        (1,),
        (1.5, "s"),
        (True, "1s"),
        (5, 0),
        (5, "s"),
        ("5", "1s"),
        (5, -1),
        Rate(0, 1_000),
        Rate(1, 0),
        ["100/s"],
    ],
)
def test_an_invalid_rate_is_refused_by_name(given: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^limit=") as refused:
        parse_rate(given, what="limit")
    assert len(str(refused.value)) < 400


@pytest.mark.parametrize("text", ["100/s", "5/2m", "1/500ms", "3/1h30m", "2/d", "9/ms", "4/10s", "4/11h"])
def test_a_rate_is_shown_as_it_is_read(text: str) -> None:
    assert str(parse_rate(text)) == text
