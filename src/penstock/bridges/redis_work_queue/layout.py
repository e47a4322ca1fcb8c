"""What is in a work queue: items, an id with some bytes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any, Final, Literal, TypeAlias

from penstock.client.codec import Json
from penstock.core.names import uuid7
from penstock.errors import InvalidInput, InvalidName, InvalidOption
from penstock.storage.valkey.replies import Again, Arg, ReplyError
from penstock.storage.valkey.routers import Router

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


# The names of a queue's keys. What each holds is told at the top of ``lua/prelude.lua``.


_TAG: Final = re.compile(r"[^{]*\{[^}]+\}")


class Keys:
    """The keys of the queue with this prefix; ``in_cluster`` demands that they share a slot.

    Raises ``InvalidName`` for an empty prefix, ``InvalidOption`` for one without a hash tag in a cluster.
    """

    __slots__ = ("data", "lists", "prefix", "processing", "queue")

    def __init__(self, prefix: str, *, in_cluster: bool) -> None:
        if not prefix:
            raise InvalidName(
                f"{prefix!r} cannot be a key prefix: it is empty. Use that of the other clients."
            )
        if in_cluster and not _TAG.match(prefix):
            raise InvalidOption(
                f"the keys of prefix {prefix!r} are spread over the nodes of a cluster, where an item cannot move from "
                f"list to list. Use a prefix with a hash tag in all clients, {'{' + prefix + '}'!r} say, or one server."
            )
        self.prefix = prefix.encode()
        self.queue = self.prefix + b":queue"
        self.processing = self.prefix + b":processing"
        self.lists = (self.queue, self.processing, self.prefix + b":cleaning")
        self.data = self.prefix + b":item:"

    @property
    def data_pattern(self) -> bytes:
        """The glob that matches the data keys and, whatever the prefix holds, no others."""
        return re.sub(rb"([*?\[\]^\\-])", rb"\\\1", self.data) + b"*"


# The Lua scripts of the bridge: each is one atomic step. The keys they use are told in
# ``lua/prelude.lua``.


Verb: TypeAlias = Literal["add", "complete", "lengths", "reclaim", "take", "tidy"]

# Under memory pressure nothing new comes in, and what is there can still be worked off.
_FLAGS: Final[dict[Verb, str]] = {"add": "", "lengths": "flags=no-writes"}


@dataclass(frozen=True, slots=True)
class Script:
    """``code`` is what EVAL takes; ``sha`` names it for EVALSHA."""

    code: str
    sha: str


@cache
def script(verb: Verb) -> Script:
    """The script of a verb: its file behind the prelude."""
    folder = resources.files(__package__) / "lua"
    files = [(folder / f"{name}.lua").read_text("utf-8") for name in ("prelude", verb)]
    code = "\n".join([f"#!lua {_FLAGS.get(verb, 'flags=allow-oom')}".rstrip(), *files])
    return Script(code, hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest())


async def run_script(
    router: Router,
    verb: Verb,
    *,
    keys: tuple[bytes, ...],
    args: Sequence[Arg],
    again: Again | None = None,
) -> Any:
    """Run a script where its keys are, sending its text only if the server does not have it.

    Repeated as ``Router.call`` says; ``again`` gives the arguments of a repeat. Raises ``StorageError``.
    """
    wanted, now = script(verb), args

    def repeat(*start: str) -> Sequence[Arg]:
        nonlocal now
        now = now if again is None else again()
        return (*start, len(keys), *keys, *now)

    for start in (("EVALSHA", wanted.sha), ("EVAL", wanted.code)):
        command: Sequence[Arg] = (*start, len(keys), *keys, *now)
        try:
            return await router.call(keys[0], *command, again=partial(repeat, *start))
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
    raise AssertionError("EVAL needs no script to be there")
