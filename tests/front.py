"""A port that passes everything on to a server: what stands between clients and a server in tests."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Self

from tests.servers import HOST, Sentinel, ValkeyServer, free_port

__all__ = ["Front"]

TIMEOUT_S = 10.0


class Front:
    """Listens on ``port`` and relays every connection to ``server``, in a thread and a loop of its own."""

    def __init__(self, server: ValkeyServer | Sentinel) -> None:
        self.server = server
        self.port = free_port()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        context = self._tls()
        self._thread.start()
        listening = asyncio.start_server(self._serve, HOST, self.port, ssl=context)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self.loop).result(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._shut(), self.loop).result(TIMEOUT_S)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()

    def _tls(self) -> ssl.SSLContext | None:
        return None

    async def _shut(self) -> None:
        self._listener.close()
        # Also those of connections that were accepted just now, and have not begun.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # transports that were aborted are closed in the next round

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._relay(reader, writer)
        except OSError:  # the server is down: hang up, as it would
            pass
        except asyncio.CancelledError:  # by `_shut`, which waits; asyncio would log it
            pass
        finally:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(HOST, self.server.port)
        link = object()
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, link=link, is_reply=False)),
            asyncio.create_task(self._pump(server_reader, writer, link=link, is_reply=True)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Before the next await, where `_shut` may cancel this task.
            server_writer.transport.abort()
            self._forget(link)
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, link: object, is_reply: bool
    ) -> None:
        while data := await source.read(65536):
            if not await self._let_through(link, is_reply=is_reply):
                return
            sink.write(data)
            await sink.drain()

    async def _let_through(self, link: object, *, is_reply: bool) -> bool:
        """Whether to pass on what has just been read; false ends the connection."""
        return True

    def _forget(self, link: object) -> None:
        """The connection is closed."""
