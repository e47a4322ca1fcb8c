"""What is in a work queue: items, an id with some bytes."""

from __future__ import annotations

from typing import Any, Final

from penstock.core.ids import uuid7
from penstock.errors import InvalidInput, InvalidName
from penstock.serde import Json

__all__ = ["Item", "wire_id"]

_json: Final = Json()


class Item:
    """An id and its data. Immutable; equal if both are equal.

    ``data`` are bytes, or text that is stored as UTF-8. The id is made unless given. An item that was leased also
    knows its ``lease``, by which ``complete`` tells the holder from those before it. Raises ``InvalidInput``.
    """

    __slots__ = ("_data", "_id", "_lease")

    def __init__(self, data: bytes | str, id: str | None = None, *, lease: str = "") -> None:
        if not isinstance(data, bytes | str):
            raise InvalidInput(
                f"an item's data cannot be of type {type(data).__name__}: they are bytes on the wire. "
                "Give bytes or text, or use Item.from_json(value)."
            )
        self._data = data.encode() if isinstance(data, str) else data
        self._id = uuid7() if id is None else _checked(id)
        self._lease = lease

    @classmethod
    def from_json(cls, value: Any, id: str | None = None) -> Item:
        """An item whose data are ``value`` as JSON. Raises ``SerializationError``."""
        return cls(_json.encode(value), id)

    @classmethod
    def from_wire(cls, id: bytes, data: bytes, *, lease: str) -> Item:
        """An item as it was found. Whatever its id is, other clients took it."""
        item = cls.__new__(cls)
        item._id, item._data, item._lease = id.decode("utf-8", "surrogateescape"), data, lease
        return item

    @property
    def id(self) -> str:
        return self._id

    @property
    def data(self) -> bytes:
        return self._data

    @property
    def lease(self) -> str:
        """What stands in the lease key for this lease; empty for an item that was not leased here."""
        return self._lease

    def json(self, type: Any = Any) -> Any:
        """The data read as JSON, as a value of ``type``. Raises ``SerializationError``."""
        return _json.decode(self._data, type)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Item):
            return NotImplemented
        return (self._id, self._data) == (other._id, other._data)

    def __hash__(self) -> int:
        return hash((self._id, self._data))

    def __repr__(self) -> str:
        return f"<Item {self._id!r}, {len(self._data)} bytes>"


def wire_id(id: str) -> bytes:
    """An id as it stands in keys and lists. What came from there and was no UTF-8 goes back as it came."""
    return id.encode("utf-8", "surrogateescape")


def _checked(id: object) -> str:
    if not isinstance(id, str) or not id:
        raise InvalidName(f"{id!r} is not allowed as an item's id: it must be a text that is not empty.")
    try:
        wire_id(id)
    except UnicodeEncodeError:
        raise InvalidName(
            f"{id!r} is not allowed as an item's id: it has no UTF-8. Use other text."
        ) from None
    return id
