"""The router of a primary that sentinels watch over."""

from __future__ import annotations

from penstock.errors import StorageUnavailable
from penstock.storage.valkey.connection import Connection, open_connection
from penstock.storage.valkey.endpoint import Address
from penstock.storage.valkey.replies import ReplyError, storage_error
from penstock.storage.valkey.standalone import StandaloneRouter

__all__ = ["SentinelRouter"]


class SentinelRouter(StandaloneRouter):
    """The primary that the sentinels name; looked for anew whenever it is lost, or says it is a replica."""

    def _passes(self, failure: ReplyError) -> bool:
        return failure.code == "READONLY"

    async def _dial(self) -> Connection:
        causes: list[str] = []
        for sentinel in self._endpoint.addresses:
            try:
                return await self._open(await self._ask(sentinel), primary_only=True)
            except StorageUnavailable as error:
                causes.append(f"{sentinel}: {error}")
        service = self._endpoint.service
        raise StorageUnavailable(f"no sentinel led to the primary of {service!r}; {'; '.join(causes)}")

    async def _ask(self, sentinel: Address) -> Address:
        connection = await open_connection(sentinel, self._endpoint.for_sentinels())
        try:
            reply = await connection.call("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._endpoint.service)
        except ReplyError as error:
            raise storage_error(error, sentinel) from None
        finally:
            await connection.close()
        if reply is None:
            raise StorageUnavailable(f"it does not know the service {self._endpoint.service!r}")
        return Address(reply[0].decode(), int(reply[1]))
