"""The tasks of the table tests, in a module that workers can import. Where the store is, the environment says."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from penstock import App, JobContext

app = App(os.environ.get("PENSTOCK_TABLES_URL", "memory://"))


@dataclasses.dataclass
class Score:
    points: float
    label: str


def _count(name: str) -> None:
    """One line per call, written at once: what was run is known even of a process that is killed."""
    log = os.environ.get("PENSTOCK_TABLES_CALLS")
    if log:
        with Path(log).open("a") as file:
            file.write(f"{name}\n")


@app.task(queue="tables", attempts=2, backoff="10ms")
async def score(user_id: int, name: str, context: JobContext) -> Score:
    """Users whose number ends in 3 fail; those that end in 5 fail once."""
    _count(f"{user_id}")
    context.use(usd=0.01)
    if user_id % 10 == 3 or (user_id % 10 == 5 and context.failures == 0):
        raise RuntimeError(f"no score for {name}")
    return Score(user_id * 1.5, name.upper())


@app.task(queue="tables", attempts=1, group="shop-{shop}", cost="{n}", unique=["shop"])
def grouped(context: JobContext, n: int, shop: str = "berlin") -> str:
    return f"{context.group} {context.cost}"


@app.task(queue="tables", attempts=1)
def double(n: int) -> int:
    _count(f"{n}")
    return 2 * n


@app.task(queue="tables", attempts=1)
def spell(n: int) -> str:
    return str(n)


@app.task(queue="tables", attempts=1)
def count(row: dict[str, Any]) -> int:
    """Takes the row as a whole."""
    return len(row)


@app.task(queue="tables", attempts=1)
async def spend(n: int, context: JobContext) -> None:
    _count(f"{n}")
    context.use(usd=1, tokens=10)
