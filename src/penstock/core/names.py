"""The rules for ids and names.

| name | allowed |
|---|---|
| id | 1 to 200 printable characters of any script; spaces inside, not at the ends |
| ref | queue, ``/``, id; the first slash separates them, because queue names have none |
| queue, namespace | 1 to 100 of ``A-Z a-z 0-9 _ . -``, beginning with a letter or a digit |
| task | 1 to 200 of ``A-Z a-z 0-9 _ . : -`` |
| group | like an id, but not ``*`` |
| dedup key | like an id |
| scheduler | like an id, but at most 150 characters: its jobs' ids begin with it |
| worker, consumer | 1 to 200 of ``A-Z a-z 0-9 _ . : @ -`` |

Names exclude ``/ { }`` because Valkey's keys contain them (``{namespace/queue/0}``). Every check returns the plain
``str`` of its argument, or raises ``InvalidName``.
"""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Final, TypeAlias

import msgspec

from penstock.core.text import shown
from penstock.errors import InvalidName, InvalidOption, SerializationError

_LONGEST: Final = 200
_LONGEST_SCHEDULER: Final = 150

_Rule: TypeAlias = Callable[[str], re.Match[str] | None]

_place: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.\-]{0,99}").fullmatch
_task: Final = re.compile(r"[A-Za-z0-9_.:\-]{1,200}").fullmatch
_worker: Final = re.compile(r"[A-Za-z0-9_.:@\-]{1,200}").fullmatch

_PLACE_RULE: Final = (
    "1 to 100 letters (A-Z, a-z), digits, '_', '.' or '-', beginning with a letter or a digit"
)
_TASK_RULE: Final = "1 to 200 letters (A-Z, a-z), digits, '_', '.', ':' or '-'"
_WORKER_RULE: Final = "1 to 200 letters (A-Z, a-z), digits, '_', '.', ':', '@' or '-'"
_REF_RULE: Final = "queue/id, as job.ref has it"
_ID_RULE: Final = f"1 to {_LONGEST} printable characters, without white space at either end"


def check_id(value: str) -> str:
    """Return ``value`` if it is a valid job id."""
    if type(value) is not str:
        value = _plain("id", value, _ID_RULE)
    # isprintable() is false for control characters, line ends, lone surrogates and all white space but " ".
    if value.isprintable() and 0 < len(value) <= _LONGEST and value[0] != " " and value[-1] != " ":
        return value
    raise _refused("id", value, _ID_RULE)


def ref_of(queue: str, id: str) -> str:
    """Return the one string that names a job within its namespace."""
    return f"{queue}/{id}"


def split_ref(ref: str) -> tuple[str, str]:
    """Return the queue and the id of a ref."""
    plain = _plain("ref", ref, _REF_RULE)
    queue, slash, id = plain.partition("/")
    if not slash:
        raise InvalidName(
            f"{shown(ref)} is not a job's ref. Give {_REF_RULE}, or use app.queue(name).job(id)."
        )
    return check_queue(queue), check_id(id)


def check_group(value: str) -> str:
    """Return ``value`` if it is a valid group key."""
    plain = _text("group", value)
    if plain == "*":
        raise InvalidName(
            "group='*' stands for all groups without their own limit, so a group cannot have that name."
        )
    return plain


def check_dedup_key(value: str) -> str:
    """Return ``value`` if it is a valid dedup key."""
    return _text("dedup key", value)


def check_scheduler(value: str) -> str:
    """Return ``value`` if it is a valid scheduler name."""
    name = _text("scheduler name", value)
    if len(name) > _LONGEST_SCHEDULER:
        raise _refused("scheduler name", value, f"at most {_LONGEST_SCHEDULER} characters")
    return name


def _text(what: str, value: str) -> str:
    plain = _plain(what, value, _ID_RULE)
    if plain.isprintable() and 0 < len(plain) <= _LONGEST and plain == plain.strip():
        return plain
    raise _refused(what, value, _ID_RULE)


def _checker(what: str, allowed: _Rule, rule: str) -> Callable[[str], str]:
    """Return a function that returns its argument if it is a valid name, or raises ``InvalidName``."""

    def check(value: str) -> str:
        if type(value) is str and allowed(value):
            return value
        plain = _plain(what, value, rule)
        if allowed(plain):
            return plain
        raise _refused(what, value, rule)

    return check


check_queue: Final = _checker("queue name", _place, _PLACE_RULE)
check_namespace: Final = _checker("namespace", _place, _PLACE_RULE)
check_task: Final = _checker("task name", _task, _TASK_RULE)
check_signal: Final = _checker("signal name", _task, _TASK_RULE)
check_step: Final = _checker("step name", _task, _TASK_RULE)
check_consumer: Final = _checker("consumer name", _worker, _WORKER_RULE)
"""Checks the name of a reader of the event log."""
check_worker: Final = _checker("worker name", _worker, _WORKER_RULE)


def check_stage(value: str | None) -> str | None:
    """Return ``value`` if it is a valid stage name. ``None`` and the empty name stand for the beginning of a job."""
    if value is None or value == "":
        return value
    return _text("stage", value)


_MOST_STEP_NAMES: Final = 1024
_step_names: Final[set[str]] = set()
"""Names that have been checked."""


def step_name(name: str, key: str | int | None) -> str:
    """Return the name of a step in its job. Raise ``InvalidName`` or ``InvalidOption``."""
    if name not in _step_names or type(name) is not str:
        check_step(name)
        if len(_step_names) < _MOST_STEP_NAMES:
            _step_names.add(name)
    if key is None:
        return name
    full = f"{name}[{key}]"
    if type(key) not in (str, int) or key == "" or not full.isprintable() or len(full) > _LONGEST:
        raise InvalidOption(
            f"key={shown(key)} is not allowed for a step: use an integer or a printable text. Name and key may have "
            f"{_LONGEST - 2} characters together."
        )
    return full


def _plain(what: str, value: object, rule: str) -> str:
    """Return the plain text of a ``str`` or a member of a ``StrEnum``: only that is stored and compared."""
    if isinstance(value, str):
        return str.__str__(value)
    raise _refused(what, value, rule)


def _refused(what: str, value: object, rule: str) -> InvalidName:
    return InvalidName(f"{shown(value)} is not allowed as {what}: {_cause(value)}. Use {rule}.")


def _cause(value: object) -> str:
    if not isinstance(value, str):
        return f"it is of type {type(value).__name__}, not str"
    if not value:
        return "it is empty"
    if len(value) > _LONGEST:
        return f"it has {len(value)} characters"
    if value != value.strip():
        return "it begins or ends with white space"
    unprintable = next((character for character in value if not character.isprintable()), None)
    if unprintable is not None:
        return f"it contains the character {shown(unprintable)}"
    if "{" in value or "}" in value:
        return "Penstock adds the hash tag that a cluster needs by itself, so leave out the braces"
    return "a character or its length is not allowed"


# Ids: ``uuid7`` makes random ones, ``content_id`` derives one from a payload.


_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0x2 << 62
_LOW_MASK: Final = (1 << 62) - 1


class _Sequence:
    """The last id of this process. A child of a fork starts its own sequence, or both would make the same ids.

    Within a millisecond ids rise by a random step of up to 2**32, so that one id does not reveal the next. Each
    millisecond starts in the lower half of the low 62 bits, which leaves room for more than 500 million ids.
    """

    __slots__ = ("last", "limit", "lock", "ms", "randbits")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ms = 0
        self.last = 0
        self.limit = 0
        # A separate generator: a program that calls random.seed(1) would make the same ids in all its
        # processes.
        self.randbits = random.Random(os.urandom(32)).getrandbits

    def begin(self, ms: int) -> int:
        """Return the first id of a millisecond."""
        head = ms << 80 | _VERSION_7 | self.randbits(12) << 64 | _VARIANT
        self.ms = ms
        self.limit = head | _LOW_MASK
        self.last = head | self.randbits(61)
        return self.last


_sequence = _Sequence()


def _restart_after_fork() -> None:
    """Start a new sequence with a new lock: a thread that does not exist in the child may hold the old one."""
    global _sequence
    _sequence = _Sequence()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_restart_after_fork)


def uuid7() -> str:
    """Return a new UUID of version 7 (RFC 9562) as 32 hexadecimal digits.

    Ids of one process rise strictly, across threads and even if the clock is set back. Safe to call from any thread
    and after a fork. The digits have no dashes, because a store keeps every id several times; ``uuid.UUID`` accepts
    them.
    """
    sequence = _sequence
    with sequence.lock:
        ms = time.time_ns() // 1_000_000
        if ms > sequence.ms:
            value = sequence.begin(ms)
        else:
            value = sequence.last + 1 + sequence.randbits(32)
            if value > sequence.limit:  # the millisecond is used up: borrow from the next
                value = sequence.begin(sequence.ms + 1)
            else:
                sequence.last = value
    return value.to_bytes(16, "big").hex()


def content_id(payload: Any, *, length: int = 32) -> str:
    """Return an id derived from ``payload``: ``length`` hexadecimal digits (16 to 128) of the hash of its canonical
    JSON.

    Payloads with equal JSON have equal ids, whatever the order of their keys and whether they are dicts,
    dataclasses, msgspec structs or pydantic models. ``1`` and ``1.0`` differ, as they do in JSON. A shorter id is
    the beginning of a longer one.

    Raises:
        SerializationError: the payload has no JSON form, or contains NaN or infinity, which would become ``null``.
        InvalidOption: ``length`` is odd or out of range.
    """
    if not 16 <= length <= 128 or length % 2:
        raise InvalidOption(
            f"length={shown(length)} is not valid for a content id: fewer digits than 16 collide, "
            "and the hash has 128. Give an even number from 16 to 128."
        )
    return blake2b(_canonical_json(payload)).hexdigest()[:length]


def plain_model(value: Any) -> Any:
    """Return a pydantic model as a JSON-like dict: the ``enc_hook`` of all msgspec encoders here.

    A model is recognised by its ``model_dump`` method, so pydantic need not be installed. Raise ``TypeError`` for
    other types.
    """
    dump = getattr(type(value), "model_dump", None)
    if dump is None:
        raise TypeError(f"values of type {type(value).__qualname__} cannot be encoded")
    return dump(value, mode="json", by_alias=True, round_trip=True)


_canonical: Final = msgspec.json.Encoder(order="sorted", enc_hook=plain_model)


def _canonical_json(payload: Any) -> bytes:
    try:
        data = _canonical.encode(payload)
        # msgspec writes NaN and infinity as null, so only data with a null needs a second check.
        if data.find(b"null") >= 0:
            json.dumps(msgspec.to_builtins(payload, str_keys=True, enc_hook=plain_model), allow_nan=False)
    except Exception as error:
        raise SerializationError(
            f"a payload of type {type(payload).__qualname__} has no content id: {error}. "
            "Use values that JSON can hold: dicts, lists, text, finite numbers, dates, dataclasses."
        ) from error
    return data
