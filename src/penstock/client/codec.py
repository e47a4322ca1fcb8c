"""Serdes, which encode values for the store and decode them to the annotated types; and ``JobCodec``, which uses them.

| name | takes |
|---|---|
| ``json`` | what msgspec knows (dataclasses, structs, dates, bytes, UUID ...), and pydantic models |
| ``msgpack`` | the same, smaller |
| ``raw`` | bytes, as they are |

A custom serde is any object with ``name``, ``encode`` and ``decode``; ``register_serde`` registers it by name.
There is no pickle, because anyone with write access to the store could then run code in the workers.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from copy import copy
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Final,
    Protocol,
    Union,
    cast,
    get_args,
    get_origin,
    runtime_checkable,
)

import msgspec

from penstock.core.names import check_task, plain_model
from penstock.core.text import shown
from penstock.core.units import describe_size
from penstock.errors import InvalidOption, PayloadTooLarge, SerializationError

if TYPE_CHECKING:
    from penstock.client.app import App


@runtime_checkable
class Serde(Protocol):
    """An encoder and decoder of values. Several threads may use one object at the same time."""

    name: str

    def encode(self, value: Any) -> bytes:
        """Return ``value`` as bytes. Raise ``SerializationError`` if that would lose anything."""
        ...

    def decode(self, data: bytes, type: Any = Any) -> Any:
        """Return the value of ``type`` in ``data``, or raise ``SerializationError``. May ignore ``type``."""
        ...


# A program may create types without end, so the cache of their decoders is bounded.
_MOST_DECODERS: Final = 4096
# msgspec names the type in this message, and so does ours.
_UNSUPPORTED: Final = re.compile(r"Encoding objects of type .* is unsupported$")


class _Msgspec:
    """The base of JSON and MessagePack: it caches decoders by type, and its errors name the place of a bad value."""

    name: str
    _codec: Any

    def __init__(self) -> None:
        self._encode: Callable[[Any], bytes] = self._codec.Encoder(enc_hook=plain_model).encode
        self._encode_sorted = self._codec.Encoder(enc_hook=plain_model, order="sorted").encode
        self._decoders: dict[Any, Callable[[bytes], Any]] = {}

    def encode(self, value: Any) -> bytes:
        try:
            return self._encode(value)
        except Exception as error:
            raise self._unencodable(value, error) from error

    def decode(self, data: bytes, type: Any = Any) -> Any:
        try:
            decode = self._decoders[type]
        except (KeyError, TypeError):  # TypeError: not hashable, such as Annotated with a list
            decode = self._decoder(type)
        try:
            return decode(data)
        except Exception as error:
            raise self._undecodable(type, error) from error

    def _decoder(self, hint: Any) -> Callable[[bytes], Any]:
        try:
            decoder = self._codec.Decoder(decodable(hint), dec_hook=self._convert)
        except NameError as error:
            raise self._undecodable(hint, error) from error
        if len(self._decoders) >= _MOST_DECODERS:
            self._decoders.clear()
        with suppress(TypeError):
            self._decoders[hint] = decoder.decode
        return cast(Callable[[bytes], Any], decoder.decode)

    def _convert(self, hint: Any, plain: Any) -> Any:
        """Convert to a type that msgspec does not support itself; its ``dec_hook``."""
        validate = getattr(hint, "model_validate_json", None)
        if validate is not None:
            # Models read bytes, sets and strict fields from JSON as they dumped them.
            return validate(msgspec.json.encode(plain))
        if isinstance(hint, _OneOf):
            return self._choose(hint.members, plain)
        if isinstance(hint, type) and isinstance(plain, hint):
            return plain
        raise TypeError(f"values of type {hint} cannot be decoded")

    def _choose(self, members: tuple[Any, ...], plain: Any) -> Any:
        """Return the first member that represents ``plain`` exactly, else the first one that accepts it."""
        fitting: list[Any] = []
        exact = self._encode_sorted(plain)
        for member in members:
            try:
                candidate = msgspec.convert(plain, member, dec_hook=self._convert, str_keys=True)
            except msgspec.ValidationError:
                continue
            if self._encode_sorted(candidate) == exact:
                return candidate
            fitting.append(candidate)
        if not fitting:
            raise ValueError("the value fits none of the types in the union")
        return fitting[0]

    def _unencodable(self, value: Any, error: Exception) -> SerializationError:
        if isinstance(error, RecursionError):
            cause = ": it contains itself, or is nested too deeply"
        else:
            path, culprit = _find(value, self._fails) or ("$", value)
            if inspect.iscoroutine(culprit):
                return SerializationError(
                    f"a coroutine cannot be encoded as {self.name}: an `await` is missing before the call "
                    f"that returned {shown(culprit.__qualname__)}."
                )
            cause = "" if _UNSUPPORTED.match(str(error)) else f": {error}"
            cause += " (at $)" if path == "$" else f" (at {path}, of type {type(culprit).__qualname__})"
        return SerializationError(
            f"a value of type {type(value).__qualname__} cannot be encoded as {self.name}{cause}. "
            "Use plain values, dataclasses, msgspec structs or pydantic models, or pass a custom serde."
        )

    def _fails(self, value: Any) -> bool:
        try:
            self._encode(value)
        except Exception:
            return True
        return False

    def _undecodable(self, hint: Any, error: Exception) -> SerializationError:
        kind = hint.__qualname__ if isinstance(hint, type) else hint
        return SerializationError(
            f"the stored {self.name} cannot be decoded as {kind}: {error}. "
            "Compare what was enqueued with the type hints, and the writer's serde with the reader's."
        )


class Json(_Msgspec):
    """JSON. It refuses NaN and infinity instead of encoding them as ``null``."""

    name = "json"
    _codec = msgspec.json

    def encode(self, value: Any) -> bytes:
        try:
            data = self._encode(value)
        except Exception as error:
            raise self._unencodable(value, error) from error
        # msgspec encodes NaN as null. find() takes half the time of "in".
        if data.find(b"null") >= 0 and value is not None and _may_hold_nan(value):
            leaf = _find(value, _is_not_finite)
            if leaf is not None:
                raise SerializationError(
                    f"the value {shown(leaf[1])} at {leaf[0]} cannot be encoded as json, which has only finite "
                    'numbers. Use None or text instead, or the serde "msgpack".'
                )
        return data


class MessagePack(_Msgspec):
    """MessagePack: like JSON but smaller; bytes stay bytes, NaN stays NaN, integers have 64 bits at most."""

    name = "msgpack"
    _codec = msgspec.msgpack


class Raw:
    """Bytes, unchanged. It ignores types."""

    name = "raw"

    def encode(self, value: Any) -> bytes:
        if isinstance(value, bytes | bytearray | memoryview):
            return bytes(value)
        raise SerializationError(
            f"a value of type {type(value).__qualname__} cannot be encoded as raw: raw takes bytes only. "
            'Encode it first, or use the serde "json".'
        )

    def decode(self, data: bytes, type: Any = Any) -> Any:
        return bytes(data)


_serdes: dict[str, Serde] = {serde.name: serde for serde in (Json(), MessagePack(), Raw())}


def resolve_serde(value: str | Serde) -> Serde:
    """Return the serde of that name, or the serde itself. Raise ``InvalidOption`` for anything else."""
    if isinstance(value, str):
        if value in _serdes:
            return _serdes[value]
        cause = f"the registered serdes are {', '.join(sorted(_serdes))}"
    elif isinstance(value, type):
        cause = "it is a class"
    elif isinstance(value, Serde):
        return value
    else:
        cause = f"{type(value).__qualname__} has no name, encode and decode"
    raise InvalidOption(
        f"serde={shown(value)} is not valid: {cause}. Give a registered name, or an object with all three."
    )


def register_serde(serde: Serde) -> Serde:
    """Register ``serde`` by its name in this process, and return it.

    Raises:
        InvalidOption: it is not a serde, or another one has that name. You may register the same object again.
        InvalidName: the name cannot be stored.
    """
    resolve_serde(serde)
    name = check_task(serde.name)
    if _serdes.setdefault(name, serde) is not serde:
        raise InvalidOption(
            f"a serde named {shown(name)} is registered already, and jobs in the store may depend on it. "
            "Give yours another name."
        )
    return serde


def decodable(hint: Any) -> Any:
    """Return ``hint`` in a form that msgspec can decode with our hooks: usually ``hint`` itself.

    msgspec refuses unions of several dataclasses, untagged structs or models. For these, the decoder chooses the
    first member that represents the stored value exactly. Ambiguous unions, where one text or dict could mean two
    members (``str | bytes``, ``dict | A``), are still refused.

    Raises:
        SerializationError: values of this type cannot be decoded.
        NameError: the type refers to an unknown name.
    """
    try:
        return _accepted(hint)
    except TypeError as error:
        try:
            return _accepted(_rewritten(hint))
        except TypeError:
            raise SerializationError(
                f"values of type {hint} cannot be decoded: {error}. Use types that the stored value "
                "can be told apart by, such as structs with a tag, or annotate with Any."
            ) from error


def _accepted(hint: Any) -> Any:
    msgspec.json.Decoder(hint)
    return hint


def _rewritten(hint: Any) -> Any:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return Annotated[(_rewritten(arguments[0]), *hint.__metadata__)]
    if origin is Union or origin is UnionType:
        members = tuple(_rewritten(member) for member in arguments)
        try:
            return _accepted(_union(members))
        except TypeError:
            return _one_of(members)
    if isinstance(origin, type):
        return cast(Any, origin)[tuple(_rewritten(argument) for argument in arguments)]
    return hint


def _union(members: tuple[Any, ...]) -> Any:
    return Union[members]  # noqa: UP007 (the members are values here, and some know no "|")


class _OneOf(type):
    """A stand-in for a union, which ``_Msgspec._convert`` decodes by trying the members."""

    members: tuple[Any, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return True  # msgspec checks the value that _convert returned, which is an instance of a member


class _Record(msgspec.Struct):
    """A stand-in for any dataclass, struct or model."""


def _one_of(members: tuple[Any, ...]) -> Any:
    records = tuple(member for member in members if _is_record(member))
    others = tuple(member for member in members if member not in records)
    _accepted(_union((*others, _Record)))  # raises TypeError if the others are ambiguous
    rest = tuple(member for member in others if member is not NoneType)
    choices = (*records, _union(rest)) if rest else records
    one_of: Any = _OneOf("OneOf", (), {"members": choices})
    return one_of | None if NoneType in others else one_of


def _is_record(hint: Any) -> bool:
    known = ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__", "model_validate_json")
    return isinstance(hint, type) and any(hasattr(hint, name) for name in known)


# NaN and infinity in MessagePack. Other bytes may match too; then the slow search decides.
_NOT_FINITE: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_as_msgpack: Final = msgspec.msgpack.Encoder(enc_hook=plain_model).encode


def _may_hold_nan(value: Any) -> bool:
    """Return whether a payload may contain NaN. Many payloads contain a null, so this check is quick, not exact."""
    try:
        return _NOT_FINITE.search(_as_msgpack(value)) is not None
    except OverflowError:  # an integer too large for MessagePack
        return True


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _find(value: Any, bad: Callable[[Any], bool], path: str = "$") -> tuple[str, Any] | None:
    """Return the path and the value of the first leaf that is ``bad``."""
    children = _children(value)
    if children is None:
        return (path, value) if bad(value) else None
    return next(filter(None, (_find(child, bad, path + label) for label, child in children)), None)


def _children(value: Any) -> Iterable[tuple[str, Any]] | None:
    if isinstance(value, dict):
        return ((f"[{shown(key)}]", child) for key, child in value.items())
    if isinstance(value, list | tuple | set | frozenset):
        return ((f"[{index}]", child) for index, child in enumerate(value))
    if hasattr(type(value), "model_dump"):
        return ((f".{name}", child) for name, child in value)
    for attribute in ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__"):
        fields = getattr(type(value), attribute, None)
        if fields is not None:
            names = (getattr(field, "name", field) for field in fields)
            return ((f".{name}", getattr(value, name)) for name in names if hasattr(value, name))
    return None


_json = Json()


class JobCodec:
    """The queue of a job, and the serdes and types of its payload and result."""

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

    def on(self, queue: str) -> JobCodec:
        """Return a copy for another queue."""
        codec = copy(self)
        codec.queue = queue
        return codec

    def encode_payload(self, value: Any) -> bytes:
        """Encode a payload. Raise ``SerializationError`` or ``PayloadTooLarge``."""
        data = self.serde.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("payload", data, self.app.max_payload)
        return data

    def decode_payload(self, data: bytes) -> Any:
        """Decode a payload. Raise ``SerializationError``."""
        return self.serde.decode(data, self.payload_type)

    def encode_result(self, value: Any) -> bytes:
        """Encode a result. ``raw`` encodes ``None`` as no bytes. Raise as ``encode_payload`` does."""
        is_empty = value is None and isinstance(self.result_serde, Raw)
        data = b"" if is_empty else self.result_serde.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("result", data, self.app.max_payload)
        return data

    def encode_signal(self, value: Any) -> bytes:
        """Encode signal data, always as JSON: the sender may not know the task. Raise as ``encode_payload`` does."""
        data = b"" if value is None else _json.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("signal", data, self.app.max_payload)
        return data

    def decode_result(self, data: bytes | None) -> Any:
        """Decode a result; without bytes it is ``None``. Raise ``SerializationError``."""
        if not data and not (isinstance(self.result_serde, Raw) and data is not None):
            return None
        try:
            return self.result_serde.decode(data or b"", self.result_type)
        except SerializationError as error:
            if misfit := self._misfit(data, error):
                raise misfit from error
            error.add_note(f"while reading a result of queue {self.queue!r}")
            raise

    def _misfit(self, data: bytes | None, error: SerializationError) -> SerializationError | None:
        """Return an error that shows the result, if it can be decoded without the type."""
        try:
            value = self.result_serde.decode(data or b"")
        except SerializationError:
            return None
        name = getattr(self.result_type, "__qualname__", self.result_type)
        return SerializationError(
            f"the function returned {shown(value)}, but its annotation says {name} (queue {shown(self.queue)}): "
            f"{error.__cause__}. Correct the return annotation, or the returned value."
        )


def too_large(what: str, data: bytes, limit: int) -> PayloadTooLarge:
    """Return the error for data over the limit."""
    return PayloadTooLarge(
        f"the {what} has {describe_size(len(data))} ({len(data)} bytes), more than the limit of "
        f"{describe_size(limit)}. Store large data elsewhere and pass a reference to it, or raise max_payload."
    )
