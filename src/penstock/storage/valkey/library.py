"""The names of keys, and the function library: the ``.lua`` files of this package, joined behind one header.

``lua/prelude.lua`` describes the keys. The lists that Lua shares with Python come first (``_lists``), then the files
that verbs share; each verb's file is wrapped in a function. The names of the library and of its functions carry a hash
of its content. So clients of two versions share a server during a rolling upgrade, each with its own library, and
loading one twice does no harm.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Final

import msgspec
from msgspec.structs import asdict, fields

from penstock.core.event import COLUMNS, Event
from penstock.core.job import DEFAULT_OPTIONS, STAGED_FROM_MS, Extras, Options
from penstock.core.outcome import FAILURE_TEXTS
from penstock.core.step import SENT_STEPS
from penstock.storage.bounds import BOUNDS
from penstock.storage.valkey.commands import Caller, ReplyError
from penstock.storage.valkey.jobs import BLOCKED_BY, STATES
from penstock.storage.values import QueueSettings

DEFAULT_NAMESPACE: Final = "default"


class Keys:
    """The keys of one namespace. All keys of a queue carry its hash tag, so they share a slot."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.registry = f"penstock:{namespace}:queues".encode()
        self.attended = f"penstock:{namespace}:attended".encode()
        self._declared: dict[str, tuple[bytes, bytes]] = {}

    def of(self, queue: str) -> bytes:
        """Return the prefix of all keys of a queue."""
        return self.declared(queue)[0]

    def declared(self, queue: str) -> tuple[bytes, bytes]:
        """Return the two keys that every function call declares: the prefix, which never exists, and ``meta``.

        There are two keys, and one of them is missing. So while a cluster moves the slot key by key, both nodes answer
        TRYAGAIN, and no function runs on a part of the queue. With a single key, the importing node would run it.
        """
        keys = self._declared.get(queue)
        if keys is None:
            # The last part of the tag leaves room for partitions of one queue over a cluster.
            prefix = f"penstock:{{{self.namespace}/{queue}/0}}".encode()
            keys = self._declared[queue] = (prefix, prefix + b":meta")
        return keys

    def part(self, queue: str, part: str) -> bytes:
        """Return one key of a queue."""
        return b"%b:%b" % (self.of(queue), part.encode())


SHARED: Final = (
    "parts", "prelude", "record", "metrics", "events", "settings", "outbox", "waiters", "job", "group_records",
    "groups", "admission", "usage", "slot", "deps", "flows", "signals", "steps", "step_damage", "holds", "dedup",
    "schedulers", "links", "replay", "line", "shortcut", "intake", "take", "walk", "typecheck", "guard",
)  # fmt: skip

_HEADER: Final = """#!lua name={name}
local READS, WRITES, REFUSED_WHEN_FULL = {{ 'no-writes' }}, {{ 'allow-oom' }}, {{}}
local Guard = {{}} -- guard.lua

local function register(verb, callback, flags)
  local function guarded(keys, args)
    Guard.writes = flags ~= READS
    local is_done, reply = pcall(callback, keys, args)
    if is_done then return reply end
    error(Guard.meaning(reply, flags))
  end
  redis.register_function({{ function_name = '{name}_' .. verb, callback = guarded, flags = flags or WRITES }})
end

"""


# A function for each verb: Lua allows 200 locals in one, and the shared files have nearly as many.
_VERB: Final = """do
local function define()
{}end
define()
end
"""

_EXTRA: Final = re.compile(r"\b((?:\w+_)?extras(?:_of\w*\([^()]*\))?)\.(\w+)")
_SHORT_NAMES: Final = dict(zip(Extras.__struct_fields__, Extras.__struct_encode_fields__, strict=True))
_COMMAND: Final = re.compile(r"\b(?:call|send|send_all|read_many)\('([A-Z]+)'")


@dataclass(frozen=True, slots=True)
class Library:
    """A function library. ``code`` is the argument of FUNCTION LOAD; ``commands`` are those that its functions run."""

    name: str
    code: str
    commands: tuple[str, ...]

    def function(self, verb: str) -> str:
        """Return the name by which FCALL knows a verb."""
        return f"{self.name}_{verb}"

    async def ensure(self, caller: Caller) -> None:
        """Load the library into one server unless it is there."""
        if not await caller.call("FUNCTION", "LIST", "LIBRARYNAME", self.name):
            await self.load(caller)

    async def load(self, caller: Caller) -> None:
        """Load the library into one server, unless another client has just done so."""
        try:
            await caller.call("FUNCTION", "LOAD", self.code)
        except ReplyError as error:
            if "already exists" not in str(error):
                raise


def assemble(files: dict[str, str]) -> Library:
    """Return the library made of these Lua files (by name, without the suffix)."""
    verbs = sorted(name for name in files if name not in SHARED)
    parts = [*(files[name] for name in SHARED), *(_VERB.format(files[name]) for name in verbs)]
    body = "\n".join([_lists(), *map(_shortened, parts)])
    name = f"penstock_{hashlib.sha256((_HEADER + body).encode()).hexdigest()[:12]}"
    return Library(name, _HEADER.format(name=name) + body, tuple(sorted(set(_COMMAND.findall(body)))))


def _shortened(lua: str) -> str:
    """Return a file in which ``extras.group`` is ``extras.g``: the files use the names of ``Extras``, the stored maps
    the short ones. Translating them here costs nothing when the functions run."""
    return _EXTRA.sub(lambda place: f"{place[1]}.{_SHORT_NAMES[place[2]]}", lua)


def _lists() -> str:
    """Return the lists that Lua shares with Python, as Lua.

    - ``STORED``: the places of stored options, by name, and their defaults; the types of the extras, by short name; the
      columns of events that hold numbers; the defaults of a queue's settings.
    - ``STATES`` and ``BLOCKED_BY``: by letter. ``BOUNDS``: see ``storage.bounds``.
    - ``FAILURE_TEXTS``: the messages of failures that a store creates, by type.
    """
    options = Options.__struct_fields__
    event_types = {field.name: field.type for field in fields(Event)}
    lists = {
        "STORED": {
            "options": {name: place for place, name in enumerate(options, 1)},
            "defaults": [msgspec.to_builtins(getattr(DEFAULT_OPTIONS, name)) for name in options],
            "extras": {field.encode_name: _lua_type(field.type) for field in fields(Extras)},
            "numbers": {short: True for short, name in COLUMNS.items() if event_types[name] in (int, float)},
            "settings": {name: bound for name, bound in asdict(QueueSettings()).items() if bound},
        },
        "STATES": STATES,
        "BLOCKED_BY": BLOCKED_BY,
        "BOUNDS": BOUNDS | {"STAGED_FROM_MS": STAGED_FROM_MS, "SENT_STEPS": SENT_STEPS},
        "FAILURE_TEXTS": FAILURE_TEXTS,
    }
    return "\n".join(f"local {name} = {_lua(value)}" for name, value in lists.items())


def _lua(value: Any) -> str:
    """Return a value as a Lua expression."""
    match value:
        case Mapping():
            return f"{{ {', '.join(f'{name} = {_lua(part)}' for name, part in value.items())} }}"
        case list():
            return f"{{ {', '.join(map(_lua, value))} }}"
        case _:
            return json.dumps(value, ensure_ascii=False)


def _lua_type(hint: Any) -> str:
    """Return the type that Lua gives to values with a Python type."""
    scalars = {str: "string", int: "number", bool: "boolean"}
    return scalars.get(hint, "table")


@cache
def library() -> Library:
    """Return the library of this version of Penstock."""
    folder = resources.files(__package__) / "lua"
    sources = [entry for entry in folder.iterdir() if entry.name.endswith(".lua")]
    return assemble({entry.name.removesuffix(".lua"): entry.read_text("utf-8") for entry in sources})
