"""``@app.dead_letter``: failed jobs reach a function."""

from __future__ import annotations

import pytest

from penstock import App, DeadLetter, InvalidName, InvalidOption, State, Unrecoverable


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
        with pytest.raises(InvalidOption, match="is the queue itself"):
            await app.queue("mail").configure(dead_letter="mail")
        with pytest.raises(InvalidName):
            await app.queue("mail").configure(dead_letter="no good")
        with pytest.raises(InvalidName):
            app.dead_letter("mail", queue="{}")
        settings = await app.queue("mail").configure(dead_letter="graves", keep_failed=5)
        assert (settings.dead_letter, settings.keep_failed) == ("graves", 5)
        assert (await app.queue("mail").configure(dead_letter=None)).dead_letter is None
