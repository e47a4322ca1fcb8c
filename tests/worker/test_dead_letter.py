"""``@app.dead_letter``: failed jobs reach a function."""

from __future__ import annotations

from typing import Any

import pytest

from penstock import App, DeadLetter, InvalidName, InvalidOption, State, Unrecoverable
from penstock.testing import harness


@pytest.mark.parametrize("engine", ["memory", "valkey"])
async def test_a_failed_job_reaches_the_handler_of_its_dead_letter(
    engine: str, request: pytest.FixtureRequest
) -> None:
    url = "memory://" if engine == "memory" else request.getfixturevalue("valkey_url")
    app = App(url, namespace=f"dead-{id(request)}")
    seen: list[DeadLetter] = []

    @app.task(queue="mail")
    async def send(to: str) -> None:
        raise Unrecoverable(f"no such address: {to}")

    @app.dead_letter("mail")
    async def bury(letter: DeadLetter) -> str:
        seen.append(letter)
        return letter.id

    @app.dead_letter("other", queue="graves")
    def bury_other(letter: DeadLetter) -> None:
        raise AssertionError(letter)

    async with app:
        job = await send.options(id="ada").enqueue("ada")
        worker = app.worker(queues=["mail", "mail.dead"], burst=True)
        await worker.run()
        while not seen:  # a letter may be under way when the queues are drained
            await (await app.connect()).sweep("mail")
            await app.worker(queues=["mail.dead"], burst=True).run()
        assert await job.refresh() is State.FAILED
        assert (await app.queue("other").settings()).dead_letter == "graves"
    [letter] = seen
    assert (letter.queue, letter.id, letter.task, letter.payload) == ("mail", "ada", "send", {"to": "ada"})
    assert letter.error == {"type": "Unrecoverable", "message": "no such address: ada"}
    assert letter.failures == 1


async def test_a_dead_letter_queue_is_checked_at_the_door() -> None:
    async with App("memory://") as app:
        with pytest.raises(InvalidOption, match="must be another queue"):
            await app.queue("mail").configure(dead_letter="mail")
        with pytest.raises(InvalidName):
            await app.queue("mail").configure(dead_letter="no good")
        with pytest.raises(InvalidName):
            app.dead_letter("mail", queue="{}")
        settings = await app.queue("mail").configure(dead_letter="graves", keep_failed=5)
        assert (settings.dead_letter, settings.keep_failed) == ("graves", 5)
        assert (await app.queue("mail").configure(dead_letter=None)).dead_letter is None


@pytest.mark.parametrize("engine", ["memory", "valkey"])
async def test_a_letter_is_treated_as_the_app_and_its_task_say(
    engine: str, request: pytest.FixtureRequest
) -> None:
    url = "memory://" if engine == "memory" else request.getfixturevalue("valkey_url")
    app = App(url, namespace=f"treated-{id(request)}", backoff="7s", timeout="1m")

    @app.task(queue="mail", attempts=1)
    async def send() -> None:
        raise ValueError("no line")

    @app.dead_letter("mail", attempts=5, max_stalls=1)
    async def bury(letter: DeadLetter) -> None:
        raise AssertionError("no worker consumes the letters here")

    async with app:
        await send.enqueue()
        await app.worker(queues=["mail"], burst=True).run()
        await (await app.connect()).sweep("mail")
        [job] = [job async for job in app.queue("mail.dead").list_jobs("waiting")]
        options = job.raw.options
        assert options == bury.defaults
        assert (options.attempts, options.max_stalls, options.timeout_ms) == (5, 1, 60_000)
        assert (await app.queue("mail").configure(dead_letter_task="other")).dead_letter_options == ""


def test_a_letter_takes_no_option_of_an_enqueue() -> None:
    with pytest.raises(InvalidOption, match="priority=1 does not apply to dead letters"):
        App("memory://").dead_letter("mail", priority=1)(lambda letter: None)


async def test_a_worker_says_that_it_does_not_consume_its_dead_letters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App("memory://")

    @app.task(queue="mail")
    async def send() -> None: ...

    @app.dead_letter("mail")
    async def bury(letter: DeadLetter) -> None: ...

    caplog.set_level("INFO", logger="penstock.worker")
    async with app:
        await app.worker(burst=True).run()
        assert "dead letters" not in caplog.text
        await app.worker(queues=["mail"], burst=True).run()
    assert "This worker consumes queue mail, but not mail.dead" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"unique": True},
        {"unique": ["id"]},
        {"group": "{id}"},
        {"deadline": lambda failed_at: "1h"},
        {"priority": 3},
        {"takes_context": True},
        {"serde": "msgpack"},
        {"batch": 5},
    ],
)
def test_an_option_that_cannot_apply_to_dead_letters_is_refused(options: Any) -> None:
    app = App("memory://")

    async def bury(letter: DeadLetter) -> None: ...

    with pytest.raises(InvalidOption, match=rf"{next(iter(options))}=.* does not apply to dead letters"):
        app.dead_letter("mail", **options)(bury)
    assert not app.tasks


async def test_a_dead_letter_is_json_whatever_the_serde_of_its_app() -> None:
    app = App("memory://", serde="msgpack")
    seen: list[DeadLetter] = []

    @app.task(queue="mail")
    async def send(to: str) -> None:
        raise Unrecoverable("no such address")

    @app.dead_letter("mail")
    async def bury(letter: DeadLetter) -> None:
        seen.append(letter)

    async with harness(app) as h:
        job = await send.enqueue("ada")
        await h.drain()
        assert [letter.id for letter in seen] == [job.id]
