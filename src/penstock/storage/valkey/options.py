"""Options as they are stored: a header, and the reference that records carry in its place.

All jobs of a task share their options, so a queue keeps each header once, under a hash of it. What a
reference stands for never changes, so encoding and decoding is looked up rather than done.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import msgspec

from penstock.core.job import Options

__all__ = ["StoredOptions", "UnknownOptions", "decode_options", "learn", "parse_header", "stored_options"]

# Trailing values equal to these are not stored: part of the format, whatever Options' own defaults become.
_STORED_DEFAULTS: Final = ("", "", 3, 3, 3_600_000, 2_592_000_000, 0)
# A process that makes ever new options must not fill its queues with headers: from then on they stand in each record.
_MOST_REFERENCES: Final = 1000

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Options).decode


class UnknownOptions(LookupError):
    """A reference that this process has not met: ``learn`` what the queue has."""


class StoredOptions(NamedTuple):
    """``reference`` is what records carry; empty if they carry the header itself."""

    header: bytes
    reference: bytes

    def head(self, flags: int) -> bytes:
        """What the body of a record begins with (lua/record.lua)."""
        if self.reference:
            return bytes((flags,)) + self.reference
        return bytes((flags | 32,)) + len(self.header).to_bytes(2, "big") + self.header


_stored: dict[Options, StoredOptions] = {}
_known: dict[bytes, Options] = {}


def stored_options(options: Options) -> StoredOptions:
    """How these options are stored."""
    stored = _stored.get(options)
    if stored is None:
        header = _encode(_shortened(options))
        if len(_stored) >= _MOST_REFERENCES:
            return StoredOptions(header, b"")
        reference = b"\0" + hashlib.sha256(header).digest()[:5]
        stored = _stored[options] = StoredOptions(header, reference)
        _known[reference] = options
    return stored


def decode_options(header: bytes) -> Options:
    """The options of a header or reference. Raises UnknownOptions for a reference not met before."""
    options = _known.get(header)
    if options is None:
        if header[:1] == b"\0":
            raise UnknownOptions
        options = parse_header(header)
    return options


def parse_header(header: bytes) -> Options:
    """The options of a header itself."""
    return _decode(header)


def learn(reference: bytes, header: bytes) -> None:
    """Take note of what a queue has under a reference."""
    _known[reference] = parse_header(header)


def _shortened(options: Options) -> list[Any]:
    values = [getattr(options, name) for name in Options.__struct_fields__]
    defaults = [*_STORED_DEFAULTS, Options().backoff]
    while values and values[-1] == defaults[len(values) - 1]:
        values.pop()
    return values
