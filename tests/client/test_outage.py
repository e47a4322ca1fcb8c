"""A producer whose store is away: it may give up when it likes."""

from __future__ import annotations

import asyncio

import pytest

from penstock import App
from tests.servers import ValkeyServer


async def test_an_enqueue_that_is_given_up_leaves_the_app_usable() -> None:
    with ValkeyServer(aof=True) as server:
        async with App(server.url) as app:

            @app.task
            async def send(to: str) -> None: ...

            await send.enqueue("ada")
            server.kill()
            for _ in range(2):
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await send.options(id="bob").enqueue("bob")
            server.start()
            # The calls that were given up may have reached the server or not; the id makes one job of them.
            await send.options(id="bob").enqueue("bob")
            assert (await app.queue("default").counts()).waiting == 2
