"""Where a job comes from: its queue, and how its payload and result are written and read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.core.size import describe_size
from penstock.errors import PayloadTooLarge, SerializationError
from penstock.serde import Json, Raw

if TYPE_CHECKING:
    from penstock.app import App
    from penstock.serde import Serde

__all__ = ["Source"]

_json = Json()


class Source:
    """Shared by all handles of a task's, or a queue's, jobs. Immutable."""

    __slots__ = ("app", "payload_type", "queue", "result_serde", "result_type", "serde")

    def __init__(
        self,
        app: App,
        queue: str,
        *,
        serde: Serde,
        result_serde: Serde,
        payload_type: Any = Any,
        result_type: Any = Any,
    ) -> None:
        self.app = app
        self.queue = queue
        self.serde = serde
        self.result_serde = result_serde
        self.payload_type = payload_type
        self.result_type = result_type

    def on(self, queue: str) -> Source:
        """The same for jobs that go to another queue."""
        return Source(
            self.app,
            queue,
            serde=self.serde,
            result_serde=self.result_serde,
            payload_type=self.payload_type,
            result_type=self.result_type,
        )

    def encode_payload(self, value: Any) -> bytes:
        """Raises ``SerializationError`` or ``PayloadTooLarge``."""
        data = self.serde.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("payload", data, self.app.max_payload)
        return data

    def decode_payload(self, data: bytes) -> Any:
        """Raises ``SerializationError``."""
        return self.serde.decode(data, self.payload_type)

    def encode_result(self, value: Any) -> bytes:
        """Raises ``SerializationError`` or ``PayloadTooLarge``. ``None`` needs no encoder: it may be no bytes."""
        data = (
            b"" if value is None and isinstance(self.result_serde, Raw) else self.result_serde.encode(value)
        )
        if len(data) > self.app.max_payload:
            raise too_large("result", data, self.app.max_payload)
        return data

    def encode_signal(self, value: Any) -> bytes:
        """JSON, whatever the serde: who signals need not know the task. Raises as ``encode_payload``."""
        data = b"" if value is None else _json.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("signal", data, self.app.max_payload)
        return data

    def decode_result(self, data: bytes | None) -> Any:
        """Raises ``SerializationError``. No bytes are no result."""
        if not data and not (isinstance(self.result_serde, Raw) and data is not None):
            return None
        try:
            return self.result_serde.decode(data or b"", self.result_type)
        except SerializationError as error:
            error.add_note(f"while reading a result of queue {self.queue!r}")
            raise


def too_large(what: str, data: bytes, limit: int) -> PayloadTooLarge:
    """The error for ``data``: how much, how much is allowed, and what to do."""
    return PayloadTooLarge(
        f"the {what} has {describe_size(len(data))} ({len(data)} bytes), more than the limit of "
        f"{describe_size(limit)}. Keep large data elsewhere and pass a reference to it, or raise max_payload."
    )
