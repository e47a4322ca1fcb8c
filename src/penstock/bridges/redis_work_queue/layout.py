"""The layout of a work queue: its items, keys and Lua scripts, each of which is one atomic step; and its cleaners.

``lua/prelude.lua`` describes the keys. The cleaners return the items that dead workers and cleaners left behind. Both
check twice, ``grace`` apart, and act only on items that have no holder at both checks. The published clients need
several commands for one step: an item may have been taken but not yet marked as leased, or completed while its data are
not yet removed. To act at that moment would lose nothing, but it would hand out the item twice, or leave the id of a
finished item in the queue.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import resources
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeVar, cast

from penstock.client.codec import Json
from penstock.core.names import uuid7
from penstock.errors import InvalidInput, InvalidName, InvalidOption
from penstock.storage.valkey.commands import Again, Arg, ReplyError, Router

_json: Final = Json()
_TAG: Final = re.compile(r"[^{]*\{[^}]+\}")

Verb: TypeAlias = Literal["add", "complete", "lengths", "reclaim", "take", "tidy"]

# Under memory pressure adding fails, but existing items can still be processed.
_FLAGS: Final[dict[Verb, str]] = {"add": "", "lengths": "flags=no-writes"}


class Item:
    """An id and its data. Immutable; equal if both are equal.

    ``data`` is bytes, or text that is stored as UTF-8. The default id is generated. A leased item also has its
    ``lease``, by which ``complete`` recognizes the current holder. Raises ``InvalidInput``.
    """

    __slots__ = ("_data", "_id", "_lease")

    def __init__(self, data: bytes | str, id: str | None = None, *, lease: str = "") -> None:
        if not isinstance(data, bytes | str):
            raise InvalidInput(
                f"an item's data must be bytes or text, got {type(data).__name__}. "
                "For other values use Item.from_json(value)."
            )
        self._data = data.encode() if isinstance(data, str) else data
        self._id = uuid7() if id is None else _checked(id)
        self._lease = lease

    @classmethod
    def from_json(cls, value: Any, id: str | None = None) -> Item:
        """Return an item with ``value`` as JSON. Raise ``SerializationError`` if that fails."""
        return cls(_json.encode(value), id)

    @classmethod
    def from_wire(cls, id: bytes, data: bytes, *, lease: str) -> Item:
        """Return an item read from the server. Its id is not checked, because other clients accepted it."""
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
        """Return the value of the lease key for this lease; empty for an item that was not leased here."""
        return self._lease

    def json(self, type: Any = Any) -> Any:
        """Decode the data from JSON to a value of ``type``. Raise ``SerializationError`` if that fails."""
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
    """Encode an id for keys and lists. An id that arrived as invalid UTF-8 keeps its bytes."""
    return id.encode("utf-8", "surrogateescape")


def _checked(id: object) -> str:
    if not isinstance(id, str) or not id:
        raise InvalidName(f"an item's id must be text that is not empty, got {id!r}.")
    try:
        wire_id(id)
    except UnicodeEncodeError:
        raise InvalidName(f"an item's id must be valid UTF-8, got {id!r}.") from None
    return id


class Keys:
    """The keys of the queue with this prefix. With ``in_cluster`` they must share a slot.

    Raises ``InvalidName`` for an empty prefix, ``InvalidOption`` for a prefix without a hash tag in a cluster.
    """

    __slots__ = ("data", "lists", "prefix", "processing", "queue")

    def __init__(self, prefix: str, *, in_cluster: bool) -> None:
        if not prefix:
            raise InvalidName(
                f"the key prefix must not be empty, got {prefix!r}. Use the prefix of the other clients."
            )
        if in_cluster and not _TAG.match(prefix):
            raise InvalidOption(
                f"the keys of prefix {prefix!r} are spread over the nodes of a cluster, so an item cannot move between "
                f"lists. Use a prefix with a hash tag in all clients, such as {'{' + prefix + '}'!r}, or one server."
            )
        self.prefix = prefix.encode()
        self.queue = self.prefix + b":queue"
        self.processing = self.prefix + b":processing"
        self.lists = (self.queue, self.processing, self.prefix + b":cleaning")
        self.data = self.prefix + b":item:"

    @property
    def data_pattern(self) -> bytes:
        """Return the glob that matches only the data keys, whatever the prefix contains."""
        return re.sub(rb"([*?\[\]^\\-])", rb"\\\1", self.data) + b"*"


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script: ``code`` for EVAL, ``sha`` for EVALSHA."""

    code: str
    sha: str


@cache
def script(verb: Verb) -> Script:
    """Return the script of a verb: the prelude followed by its file."""
    folder = resources.files(__package__) / "lua"
    files = [(folder / f"{name}.lua").read_text("utf-8") for name in ("prelude", verb)]
    code = "\n".join([f"#!lua {_FLAGS.get(verb, 'flags=allow-oom')}".rstrip(), *files])
    return Script(code, hashlib.sha1(code.encode(), usedforsecurity=False).hexdigest())


async def run_script(
    router: Router, verb: Verb, *, keys: tuple[bytes, ...], args: Sequence[Arg], again: Again | None = None
) -> Any:
    """Run a script on the node of its keys; send its text only if the server does not have it.

    ``Router.call`` may repeat it; ``again`` returns the arguments of a repeat. Raise ``StorageError`` on failure.
    """
    lua, now = script(verb), args

    def repeat(*start: str) -> Sequence[Arg]:
        nonlocal now
        now = now if again is None else again()
        return (*start, len(keys), *keys, *now)

    for start in (("EVALSHA", lua.sha), ("EVAL", lua.code)):
        command: Sequence[Arg] = (*start, len(keys), *keys, *now)
        try:
            return await router.call(keys[0], *command, again=partial(repeat, *start))
        except ReplyError as error:
            if error.code != "NOSCRIPT":
                raise
    raise AssertionError("EVAL cannot answer NOSCRIPT")


T = TypeVar("T")

_PAGE: Final = 1000
_ACTS_AT_ONCE: Final = 50
# Each id requires a walk along the whole queue. Short calls let other clients run in between.
_WALKS_AT_ONCE: Final = 4


class Cleaned(NamedTuple):
    """The result of a clean."""

    returned: int = 0
    """Items returned to the end of the queue."""
    dropped: int = 0
    """Entries removed from lists because their item does not exist."""
    surplus: int = 0
    """Entries removed from the queue because their item had more than one; only by a deep clean."""


@dataclass(frozen=True)
class Cleaner:
    """One clean of the queue behind ``router``. Any number may run in parallel with workers and other cleaners."""

    router: Router
    keys: Keys
    grace_ms: int

    async def clean_lightly(self) -> Cleaned:
        """Check the items being processed, and those that another cleaner was handling."""
        listed = await self._listed()
        return await self._reclaim(listed, strays=set())

    async def clean_deeply(self) -> Cleaned:
        """Check every item and every entry."""
        # Read the items first: an item that is added meanwhile is in a list but not among the items, which
        # only costs a second check. The other way round, it would look like an item in no list.
        items = await self._items()
        queue, listed = Counter(await self._entries(self.keys.queue)), await self._listed()
        reclaimed = await self._reclaim(listed, strays=items.difference(queue, listed))
        suspects = [id for id, count in queue.items() if count > 1 or id not in items]
        dropped, surplus = await self._act("tidy", ids=suspects, at_once=_WALKS_AT_ONCE)
        return Cleaned(reclaimed.returned, reclaimed.dropped + dropped, surplus)

    async def _listed(self) -> set[bytes]:
        """Return the ids that are being processed or cleaned."""
        _, processing, cleaning = self.keys.lists
        return {*await self._entries(processing), *await self._entries(cleaning)}

    async def _entries(self, key: bytes) -> list[bytes]:
        """Return a whole list in one call: page by page, entries would shift between pages."""
        return cast(list[bytes], await self.router.call(key, "LRANGE", key, 0, -1))

    async def _items(self) -> set[bytes]:
        """Return the ids of all items that exist during the whole scan."""
        keys, cursor, ids = self.keys, b"0", set[bytes]()
        while True:
            command = ("SCAN", cursor, "MATCH", keys.data_pattern, "COUNT", _PAGE, "TYPE", "string")
            cursor, page = await self.router.call(keys.queue, *command)
            ids.update(key[len(keys.data) :] for key in page)
            if cursor == b"0":
                return ids

    async def _reclaim(self, listed: set[bytes], *, strays: set[bytes]) -> Cleaned:
        abandoned: list[bytes] = []
        for page in _chunks([*listed, *strays], _PAGE):
            abandoned += await self._run("reclaim", b"look", *page)
        if abandoned:
            await self._wait_grace()
        listed_ids = [id for id in abandoned if id in listed]
        stray_ids = [id for id in abandoned if id in strays]
        returned, dropped = await self._act("reclaim", b"listed", ids=listed_ids, at_once=_ACTS_AT_ONCE)
        returned_strays, _ = await self._act("reclaim", b"stray", ids=stray_ids, at_once=_WALKS_AT_ONCE)
        return Cleaned(returned + returned_strays, dropped)

    async def _wait_grace(self) -> None:
        await asyncio.sleep(self.grace_ms / 1000)

    async def _act(self, verb: Verb, *mode: bytes, ids: Sequence[bytes], at_once: int) -> tuple[int, int]:
        """Run a script over ``ids`` in chunks, and add up the two numbers in each answer."""
        answers = [await self._run(verb, *mode, *chunk) for chunk in _chunks(ids, at_once)]
        return sum(first for first, _ in answers), sum(second for _, second in answers)

    async def _run(self, verb: Verb, *args: bytes) -> list[Any]:
        args = (self.keys.prefix, *args)
        return cast(list[Any], await run_script(self.router, verb, keys=self.keys.lists, args=args))


def _chunks(values: Sequence[T], size: int) -> list[Sequence[T]]:
    return [values[start : start + size] for start in range(0, len(values), size)]
