"""A task that returns the row it was given, in a module that workers can import."""

from __future__ import annotations

import dataclasses
import json
import os
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from penstock import App

app = App(os.environ.get("PENSTOCK_TABLES_URL", "memory://"))


@dataclasses.dataclass
class Inner:
    a: int | None
    b: list[float | None]


@dataclasses.dataclass
class Returned:
    k: int
    yes: bool
    tiny: int
    single: float
    double: float
    exact: Decimal
    text: str
    short: str
    raw: bytes
    day: date
    at: datetime
    many: list[Inner | None]
    named: dict[str, float]
    numbered: dict[int, dict[str, date]]
    nothing: int | None
    lasting: timedelta | None


@dataclasses.dataclass
class Everything(Returned):
    """A member for every type that comes back as it went in; the last ones come back as text."""

    lasting: timedelta | None = None
    free: Any = None


@app.task(queue="types", attempts=1)
def echo(row: Everything) -> Returned:
    assert row.free == {"v": [1, "x"]}, row.free
    members = {field.name: getattr(row, field.name) for field in dataclasses.fields(Returned)}
    return Returned(**members)


@app.task(queue="types", attempts=1)
def named(k: int, m: dict[str, float]) -> dict[str, float]:
    return m


@dataclasses.dataclass
class Member:
    cents: Decimal | None
    at: datetime | None


@dataclasses.dataclass
class Generated:
    yes: bool | None
    small: int | None
    big: int | None
    single: float | None
    double: float | None
    cents: Decimal | None
    whole: Decimal | None
    fine: Decimal | None
    text: str | None
    raw: bytes | None
    day: date | None
    at: datetime | None
    local: datetime | None
    clock: time | None
    lasting: timedelta | None
    members: list[Member | None] | None
    by_day: dict[date, Decimal | None] | None
    nothing: int | None
    free: str


@dataclasses.dataclass
class Received(Generated):
    """A row as the task receives it; it returns the variant as JSON."""

    free: Any


@app.task(queue="types", attempts=1)
def generated(row: Received) -> Generated:
    members = {field.name: getattr(row, field.name) for field in dataclasses.fields(Generated)}
    return Generated(**{**members, "free": json.dumps(row.free)})
