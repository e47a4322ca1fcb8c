"""Commands: their parts, the router that sends them, the error replies, and the facts that a server reports.

An error reply is raised as ``ReplyError``; ``storage_error`` turns it into one of Penstock's errors.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeAlias

from penstock.core.text import visible_in_line
from penstock.errors import (
    NotReplicated,
    StorageError,
    StorageFull,
    StorageReadOnly,
    StorageRefused,
    StorageUnavailable,
    StorageVersion,
)

Arg: TypeAlias = str | bytes | int | float | memoryview

Key: TypeAlias = str | bytes
"""Selects the server: a command goes where its key is."""

Again: TypeAlias = Callable[[], Sequence[Arg]]
"""Makes the command to send when an earlier attempt may have been carried out."""


class Caller(Protocol):
    """Sends a command and returns its reply."""

    def call(self, *command: Arg) -> Awaitable[Any]: ...


OnConnect: TypeAlias = Callable[[Caller], Awaitable[object]]
"""Runs on each new connection before any call uses it. If it raises, the attempt to connect raises the same."""


class Router(Protocol):
    """Sends commands to the servers of keys. It belongs to the loop that first used it; ``connect`` is optional."""

    async def connect(self) -> None:
        """Connect once, without retries, so that a wrong URL or password fails immediately."""

    async def call(self, key: Key, *command: Arg, again: Again | None = None) -> Any:
        """Send ``command`` to the server of ``key``, with retries. Raises StorageError."""

    async def call_blocking(
        self,
        key: Key,
        *command: Arg,
        timeout: float | None,
        then: Sequence[Arg] = (),
        again: Again | None = None,
    ) -> Any:
        """Send a command that blocks up to ``timeout`` seconds, on a connection of its own.

        ``then`` is a second command, sent right behind it: the server runs it the moment the first one ends, without
        a round trip in between. The reply is that of the last command. If the server refuses ``then`` for now, only
        ``then`` is sent again, as ``call`` does with ``again``.

        If the caller is cancelled, the connection is dropped, so a late reply reaches no other call. A connection
        lost after the command was written is not retried: StorageUnavailable tells the caller to look again.
        """

    async def lifeline(self, key: Key, *, lost: Callable[[], None]) -> str:
        """Return the name of the connection by which the server of ``key`` sees that this process lives, such as
        ``<run id> <client id>``; empty if there can be none. ``lost`` is called when that connection ends."""

    def cut_at(self, key: Key) -> float:
        """Return when a connection to the server of ``key`` was last found lost, by the loop's clock; minus infinity
        if never."""

    async def call_replicated(
        self, key: Key, *command: Arg, replicas: int, again: Again | None = None
    ) -> Any:
        """Call, and wait until ``replicas`` replicas have confirmed the command, on a connection of its own.

        Raises NotReplicated if they do not within ``retry_for`` seconds; then the command was carried out.
        """

    async def call_every_node(self, *command: Arg) -> list[Any]:
        """Send ``command`` to every primary. Return the replies in no particular order."""

    async def close(self) -> None:
        """Close the router's connections. Calls under way, and later ones, raise StorageError."""


RETRYABLE: Final = frozenset({"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "NOREPLICAS"})
"""Codes of refusals that pass by themselves; the server did not carry out the command."""

REDIRECT: Final = re.compile(r"(MOVED|ASK) (\d+) (.*):(\d+)$")
"""An error reply that names another server of the cluster: kind, slot, host and port."""

_MINIMUM: Final = (7, 0)
_LONGEST: Final = 800


class ReplyError(StorageError):
    """An error reply of the server: ``code`` is its first word, ``message`` the rest."""

    def __init__(self, text: str) -> None:
        super().__init__(visible_in_line(text[:_LONGEST]))
        self.code, _, self.message = text.partition(" ")


_REFUSALS: Final[tuple[tuple[str, type[StorageError], str], ...]] = (
    (r"OOM ", StorageFull, "Raise maxmemory, or let workers drain queues; nothing was written"),
    (r"READONLY ", StorageReadOnly, "It is a replica: point the URL at the primary, or use Sentinel"),
    (r"MISCONF .*No space left", StorageFull, "Free disk space on the server; nothing was written"),
    (r"MISCONF ", StorageReadOnly, "It cannot save to disk, so takes no writes: see its log"),
    (r"(NOAUTH|WRONGPASS|DENIED) ", StorageRefused, "Check user and password in the URL"),
    (r"NOPERM |ERR ACL failure in script", StorageRefused, "Give the user this right (ACL SETUSER)"),
    (r"(MOVED|ASK) ", StorageError, "It is part of a cluster: use valkey+cluster://"),
    (r"ERR .*cluster support disabled", StorageError, "It is not a cluster: use valkey://"),
    (
        r"ERR DB index is out of range",
        StorageRefused,
        "Choose a database it has, in the URL: 0 is always there",
    ),
    (r"ERR max number of clients", StorageUnavailable, "Raise maxclients, or open fewer connections"),
    (r"ERR AUTH .*called without", StorageRefused, "Remove the password from the URL, or set one there"),
    (r"ERR unknown command", StorageVersion, "Penstock needs Valkey, or Redis 7.0 or newer"),
    (rf"({'|'.join(sorted(RETRYABLE))}|UNBLOCKED) ", StorageUnavailable, "Try again later"),
)


def storage_error(error: ReplyError, where: object) -> StorageError:
    """Return the error to raise for an error reply of the server ``where``. Unknown codes stay ReplyErrors."""
    text = str(error)
    for pattern, kind, remedy in _REFUSALS:
        if re.match(pattern, text):
            # Without the arguments that the server quotes: they may hold a password or a payload.
            reply = text.partition(", with args")[0].rstrip(". ")
            return kind(f"{where} says: {reply}. {remedy}")
    return error


@dataclass(frozen=True, slots=True)
class Server:
    """Facts of a server: ``name`` is valkey or redis, ``compatible`` the Redis version it stands for.

    ``run_id`` names its process, ``history`` what it replicates; ``earlier`` is the history that it took over when it
    was promoted. ``up_ms``: how long it has run. ``from_snapshot``: it began with the data of a snapshot, which may
    lack the last writes. ``appends``: it has an append-only file. ``eviction``: what it does when it is full.
    """

    name: str
    version: tuple[int, ...]
    compatible: tuple[int, ...]
    run_id: str = ""
    history: str = ""
    earlier: str = ""
    up_ms: int = 0
    from_snapshot: bool = False
    appends: bool = True
    eviction: str = "noeviction"


async def check_server(caller: Caller) -> Server:
    """Ask the server for its facts. Raises StorageVersion if it is older than 7.0."""
    try:
        facts = _facts(await caller.call("INFO", "server", "replication", "persistence", "memory"))
    except ReplyError as error:
        if "syntax error" not in str(error):
            raise
        facts = _facts(await caller.call("INFO", "server"))  # before 7.0
    redis, valkey = facts.get("redis_version", "0"), facts.get("valkey_version")
    name = "redis" if valkey is None else "valkey"
    server = Server(name, _numbers(valkey or redis), _numbers(redis))
    if max(server.version, server.compatible) < _MINIMUM:
        raise StorageVersion(
            f"the server is {name} {valkey or redis}; Penstock needs Valkey, or Redis 7.0 or newer"
        )
    return replace(
        server,
        run_id=facts.get("run_id", ""),
        history=facts.get("master_replid", ""),
        earlier=facts.get("master_replid2", ""),
        up_ms=int(facts.get("uptime_in_seconds", 0)) * 1000,
        appends=facts.get("aof_enabled", "1") == "1",
        eviction=facts.get("maxmemory_policy", "noeviction"),
        from_snapshot=facts.get("aof_enabled") != "1" and facts.get("rdb_last_load_keys_loaded") != "0",
    )


def _facts(info: Any) -> dict[str, str]:
    if not isinstance(info, bytes | str):
        raise StorageVersion(
            f"the server answered INFO with a {type(info).__name__}, so it is neither Valkey nor Redis. Check the "
            "address in the URL"
        )
    lines = (info if isinstance(info, str) else info.decode(errors="replace")).splitlines()
    return {name: value for name, _, value in (line.partition(":") for line in lines)}


def run_id(info: bytes) -> str:
    """Return the id of this run of a server from its INFO."""
    match = re.search(rb"^run_id:(\w+)", info, re.MULTILINE)
    return match.group(1).decode() if match else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.strip().split(".") if part.isdigit())


def replicated(reply: Any, confirmed: Any, *, replicas: int) -> Any:
    """Return the reply of a call, if enough replicas have confirmed it. Raises NotReplicated otherwise."""
    if isinstance(confirmed, ReplyError):
        if confirmed.code == "NOPERM":
            raise StorageRefused(f"{confirmed}. The call was carried out. Give the user the right to WAIT")
        raise NotReplicated(
            f"written, but no replica has confirmed it: {confirmed}. Repeating the call is safe"
        )
    if confirmed < replicas:
        raise NotReplicated(
            f"written, but {confirmed} of {replicas} replicas have confirmed it. Repeating the call is safe. Check "
            "that the replicas run and keep up, or ask for fewer (the option replicas)"
        )
    return reply
