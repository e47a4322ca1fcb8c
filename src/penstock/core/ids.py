"""Ids: ``uuid7`` for jobs whose id nobody chose, ``content_id`` for jobs that are what their payload is."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from hashlib import blake2b
from typing import Any, Final

import msgspec

from penstock.core.display import shown
from penstock.errors import InvalidOption, SerializationError

__all__ = ["content_id", "plain_model", "uuid7"]

_VERSION_7: Final = 0x7 << 76
_VARIANT: Final = 0x2 << 62
_LOW_MASK: Final = (1 << 62) - 1


class _Sequence:
    """The last id given out. One per process: a child of a fork starts its own, or both would count alike.

    Within a millisecond ids rise by a random step of up to 2**32, so that one does not tell the next. Each
    millisecond begins in the lower half of the low 62 bits: room for half a thousand million ids and more.
    """

    __slots__ = ("last", "limit", "lock", "ms", "randbits")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ms = 0
        self.last = 0
        self.limit = 0
        # A generator of our own: after random.seed(1) in a program, all its processes would make equal ids.
        self.randbits = random.Random(os.urandom(32)).getrandbits

    def begin(self, ms: int) -> int:
        """The first id of a millisecond."""
        head = ms << 80 | _VERSION_7 | self.randbits(12) << 64 | _VARIANT
        self.ms = ms
        self.limit = head | _LOW_MASK
        self.last = head | self.randbits(61)
        return self.last


_sequence = _Sequence()


def _start_afresh() -> None:
    """A new sequence with a new lock: the old one may be held by a thread that the child does not have."""
    global _sequence
    _sequence = _Sequence()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_start_afresh)


def uuid7() -> str:
    """A new UUID of version 7 (RFC 9562) as 32 hexadecimal digits.

    Ids of one process rise strictly, whichever thread asks and even if the clock is set back. Safe to call
    from any thread and after a fork. Without dashes, because a store keeps every id several times;
    ``uuid.UUID`` reads it.
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
    """An id made of what ``payload`` says: ``length`` hexadecimal digits (16 to 128) of the hash of its
    canonical JSON.

    Payloads with equal JSON have equal ids, whatever the order of their keys and whether they are dicts,
    dataclasses, msgspec structs or pydantic models. ``1`` and ``1.0`` differ, as they do in JSON. The digits
    depend on ``length`` only in number: a shorter id is the beginning of the longer one.

    Raises:
        SerializationError: the payload has no JSON, or holds NaN or infinity, which would pass for ``null``.
        InvalidOption: a length out of range, or odd.
    """
    if not 16 <= length <= 128 or length % 2:
        raise InvalidOption(
            f"length={shown(length)} is not valid for a content id: fewer digits than 16 collide, "
            "and the hash has 128. Give an even number from 16 to 128."
        )
    return blake2b(_canonical_json(payload)).hexdigest()[:length]


def plain_model(value: Any) -> Any:
    """A pydantic model as the JSON-like dict it dumps itself to; msgspec's ``enc_hook`` wherever we encode.

    A model is known by its method, so that pydantic need not be installed. Raises ``TypeError`` for all else.
    """
    dump = getattr(type(value), "model_dump", None)
    if dump is None:
        raise TypeError(f"values of type {type(value).__qualname__} cannot be encoded")
    return dump(value, mode="json", by_alias=True, round_trip=True)


_canonical: Final = msgspec.json.Encoder(order="sorted", enc_hook=plain_model)


def _canonical_json(payload: Any) -> bytes:
    try:
        data = _canonical.encode(payload)
        # msgspec writes NaN and infinity as null; only where there is a null is a second look needed.
        if data.find(b"null") >= 0:
            json.dumps(msgspec.to_builtins(payload, str_keys=True, enc_hook=plain_model), allow_nan=False)
    except Exception as error:
        raise SerializationError(
            f"a payload of type {type(payload).__qualname__} has no content id: {error}. "
            "Make the id of what JSON can say: dicts, lists, text, finite numbers, dates, dataclasses."
        ) from error
    return data
