"""Each tool names the cause that keeps a job from running."""

from __future__ import annotations

import asyncio

import pytest

from penstock import App
from tests.causes import CAUSES, plant
from tests.cli.conftest import Shell

# Each starts the script many times, which takes a while where the machine is busy.
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def planted(on_both: Shell) -> Shell:
    """A store with a job for each cause."""

    async def put_in() -> None:
        url = on_both.environment.get("PENSTOCK_URL", f"sqlite:///{on_both.folder}/penstock.db")
        async with App(url) as app:
            await plant(app)

    asyncio.run(put_in())
    return on_both


def test_why_names_each_cause_and_its_remedy(planted: Shell) -> None:
    for cause in CAUSES:
        text, remedy = planted.ok("why", cause.id).splitlines()
        assert all(words in text for words in cause.words), text
        assert cause.remedy in remedy
    told = planted.json("why", "second")
    assert (told["id"], told["queue"], told["state"]) == ("second", "capped", "waiting")
    assert (told["kind"], told["jobs"], told["until"]) == ("queue limit", ["capped/first-of-queue"], None)


def test_why_of_an_unknown_job_fails(on_both: Shell) -> None:
    on_both.ok("enqueue", "true")
    on_both.ok("why", on_both.json("list")[0]["id"])
    assert "no job 'nobody'" in on_both.refused("why", "nobody", code=3)
