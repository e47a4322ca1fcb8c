"""What a command is made of, and what sends it."""

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
"""Names the server: a command goes where its key is."""

Again: TypeAlias = Callable[[], Sequence[Arg]]
"""Gives the command to send when an earlier attempt may have been carried out."""


class Caller(Protocol):
    """Whatever sends a command and gives its reply."""

    def call(self, *command: Arg) -> Awaitable[Any]: ...


OnConnect: TypeAlias = Callable[[Caller], Awaitable[object]]
"""Run on each new connection before anybody uses it; what it raises, the attempt to connect raises."""


# Error replies and what they mean, and who the server says it is.
#
# An error reply is raised as ``ReplyError``; ``storage_error`` says which of Penstock's errors it is.


RETRYABLE: Final = frozenset({"LOADING", "TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "BUSY", "NOREPLICAS"})
"""Codes of refusals that pass by themselves; the command was not carried out."""

REDIRECT: Final = re.compile(r"(MOVED|ASK) (\d+) (.*):(\d+)$")
"""An error reply that names another server of the cluster: which kind, the slot, its host and port."""

_MINIMUM: Final = (7, 0)
_LONGEST: Final = 800


class ReplyError(StorageError):
    """The server answered with an error: ``code`` is its first word, ``message`` the rest."""

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
    """The error to raise for an error reply of the server ``where``. Codes unknown here stay ReplyErrors."""
    text = str(error)
    for pattern, kind, remedy in _REFUSALS:
        if re.match(pattern, text):
            # The arguments that the server quotes may hold a password or a payload.
            said = text.partition(", with args")[0].rstrip(". ")
            return kind(f"{where} says: {said}. {remedy}")
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
    """Ask who the server is. Raises StorageVersion if it is older than 7.0."""
    try:
        found = _facts(await caller.call("INFO", "server", "replication", "persistence", "memory"))
    except ReplyError as error:
        if "syntax error" not in str(error):
            raise
        found = _facts(await caller.call("INFO", "server"))  # before 7.0
    redis, valkey = found.get("redis_version", "0"), found.get("valkey_version")
    name = "redis" if valkey is None else "valkey"
    server = Server(name, _numbers(valkey or redis), _numbers(redis))
    if max(server.version, server.compatible) < _MINIMUM:
        told = f"the server is {name} {valkey or redis}"
        raise StorageVersion(f"{told}; Penstock needs Valkey, or Redis 7.0 or newer")
    return replace(
        server,
        run_id=found.get("run_id", ""),
        history=found.get("master_replid", ""),
        earlier=found.get("master_replid2", ""),
        up_ms=int(found.get("uptime_in_seconds", 0)) * 1000,
        appends=found.get("aof_enabled", "1") == "1",
        eviction=found.get("maxmemory_policy", "noeviction"),
        from_snapshot=found.get("aof_enabled") != "1" and found.get("rdb_last_load_keys_loaded") != "0",
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
    """Return what tells this run of a server from every other, as INFO gives it."""
    found = re.search(rb"^run_id:(\w+)", info, re.MULTILINE)
    return found.group(1).decode() if found else ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.strip().split(".") if part.isdigit())


def replicated(reply: Any, confirmed: Any, *, replicas: int) -> Any:
    """Return the reply of a call that enough replicas have confirmed."""
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
