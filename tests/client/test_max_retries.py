"""``max_retries`` is another way to give ``attempts``."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import App, InvalidOption


async def attempts_of(job: Any) -> int:
    info = await job.get()
    assert info is not None
    attempts: int = info.raw.options.attempts
    return attempts


async def test_attempts_are_one_more_than_max_retries(memory_app: App) -> None:
    @memory_app.task(max_retries=4)
    async def send(to: str) -> None: ...

    assert await attempts_of(await send.enqueue("ada")) == 5
    assert await attempts_of(await send.options(max_retries=0).enqueue("ada")) == 1
    assert await attempts_of(await send.options(attempts=2).enqueue("ada")) == 2
    job = await memory_app.queue("mail").enqueue({"to": "ada"}, max_retries=2)
    assert await attempts_of(job) == 3


async def test_the_defaults_of_an_app_take_it() -> None:
    async with App("memory://", max_retries=1) as app:

        @app.task
        async def send() -> None: ...

        assert await attempts_of(await send.enqueue()) == 2


def test_both_options_together_are_refused(memory_app: App) -> None:
    with pytest.raises(
        InvalidOption, match=r"attempts=3 and max_retries=2 both say .* attempts is max_retries"
    ):

        @memory_app.task(attempts=3, max_retries=2)
        async def send() -> None: ...


@pytest.mark.parametrize("value", [-1, None, 1.5, True, 2**31])
def test_an_invalid_number_of_retries_is_refused(memory_app: App, value: Any) -> None:
    with pytest.raises(InvalidOption, match=r"^max_retries must be an integer"):

        @memory_app.task(max_retries=value)
        async def send() -> None: ...


async def test_a_job_with_max_retries_runs_that_often_again(memory_app: App) -> None:
    runs = 0

    @memory_app.task(max_retries=2, backoff=0)
    async def broken() -> None:
        nonlocal runs
        runs += 1
        raise ValueError("no")

    await broken.enqueue()
    await memory_app.worker(burst=True).run()
    assert runs == 3
