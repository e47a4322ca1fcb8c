"""Serdes: a value to the bytes a store keeps, and back to the type that the task's hints ask for.

| name | takes |
|---|---|
| ``json`` | what msgspec knows (dataclasses, structs, dates, bytes, UUID ...), and pydantic models |
| ``msgpack`` | the same, smaller |
| ``raw`` | bytes, as they are |

One's own is any object with ``name``, ``encode`` and ``decode``; ``register_serde`` makes it known by name.
There is no pickle: whoever can write to the store could then run code in the workers.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
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
    """Turns values into bytes and back. One object serves many threads at once."""

    name: str

    def encode(self, value: Any) -> bytes:
        """``value`` as bytes, or ``SerializationError``; nothing is lost silently."""
        ...

    def decode(self, data: bytes, type: Any = Any) -> Any:
        """The value of ``type`` that ``data`` holds, or ``SerializationError``. May ignore ``type``."""
        ...


# Types made on the fly must not accumulate.
_MOST_DECODERS: Final = 4096
# msgspec names the type in this message, and so does ours.
_UNSUPPORTED: Final = re.compile(r"Encoding objects of type .* is unsupported$")


class _Msgspec:
    """What JSON and MessagePack share: decoders made once per type, and errors that say where."""

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
        except (KeyError, TypeError):  # TypeError: Annotated with a list, say, cannot be a key
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
        """msgspec's ``dec_hook``: asked for every type that msgspec does not know itself."""
        validate = getattr(hint, "model_validate_json", None)
        if validate is not None:
            # By way of JSON: there, models read bytes, sets and strict fields as they dumped them.
            return validate(msgspec.json.encode(plain))
        if isinstance(hint, _OneOf):
            return self._choose(hint.members, plain)
        if isinstance(hint, type) and isinstance(plain, hint):
            return plain
        raise TypeError(f"values of type {hint} cannot be decoded")

    def _choose(self, members: tuple[Any, ...], plain: Any) -> Any:
        """The first member that says exactly what is there; failing that, the first that fits at all."""
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
        kind = type(value).__qualname__
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
            f"a value of type {kind} cannot be encoded as {self.name}{cause}. "
            "Use plain values, dataclasses, msgspec structs or pydantic models, or pass a custom serde."
        )

    def _fails(self, value: Any) -> bool:
        try:
            self._encode(value)
        except Exception:
            return True
        return False

    def _undecodable(self, hint: Any, error: Exception) -> SerializationError:
        shown = hint.__qualname__ if isinstance(hint, type) else hint
        return SerializationError(
            f"the stored {self.name} cannot be decoded as {shown}: {error}. "
            "Compare what was enqueued with the type hints, and the writer's serde with the reader's."
        )


class Json(_Msgspec):
    """JSON. NaN and infinity have no place in it and are refused, not turned into ``null``."""

    name = "json"
    _codec = msgspec.json

    def encode(self, value: Any) -> bytes:
        try:
            data = self._encode(value)
        except Exception as error:
            raise self._unencodable(value, error) from error
        # A null may be what msgspec made of a NaN. find(), because "in" on bytes costs twice as much.
        if data.find(b"null") >= 0 and value is not None and _may_hold_nan(value):
            found = _find(value, _is_not_finite)
            if found is not None:
                raise SerializationError(
                    f"the value {shown(found[1])} at {found[0]} cannot be encoded as json, which has finite "
                    'numbers only. Use None or text in its place, or the serde "msgpack".'
                )
        return data


class MessagePack(_Msgspec):
    """MessagePack: like JSON but smaller; bytes stay bytes, NaN stays NaN, integers have 64 bits at most."""

    name = "msgpack"
    _codec = msgspec.msgpack


class Raw:
    """Bytes in, bytes out; types are not looked at."""

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
    """The serde of that name, or the serde itself. Raises ``InvalidOption`` for what is neither."""
    if isinstance(value, str):
        if value in _serdes:
            return _serdes[value]
        cause = f"no serde of that name is registered, only {', '.join(sorted(_serdes))}"
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
    """Make ``serde`` known by its name in this process; returns it.

    Raises:
        InvalidOption: not a serde, or another one has that name. The same one may be registered again.
        InvalidName: a name that cannot be stored.
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
    """``hint`` in a form that msgspec decodes to with our hooks: most often ``hint`` itself.

    msgspec refuses unions of several dataclasses, untagged structs or models. Those are told apart by
    which of them says exactly what is stored; of two that would, the first in the union is taken. Unions
    of which one text or one dict could mean two members (``str | bytes``, ``dict | A``) stay refused: a
    guess is silent.

    Raises:
        SerializationError: no value of this type could be decoded.
        NameError: the type refers to a name that cannot be resolved.
    """
    try:
        return _accepted(hint)
    except TypeError as error:
        try:
            return _accepted(_rewritten(hint))
        except TypeError:
            raise SerializationError(
                f"values of type {hint} cannot be decoded: {error}. Use a type that the stored value alone "
                "can tell, such as structs with a tag, or annotate with Any."
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
    """A type that only ``_Msgspec._convert`` understands: it stands for a union, and tries the members."""

    members: tuple[Any, ...]

    def __instancecheck__(cls, instance: object) -> bool:
        return True  # msgspec asks about what _convert returned, and that is an instance of a member


class _Record(msgspec.Struct):
    """Stands for any dataclass, struct or model when a union is tried."""


def _one_of(members: tuple[Any, ...]) -> Any:
    records = tuple(member for member in members if _is_record(member))
    others = tuple(member for member in members if member not in records)
    _accepted(_union((*others, _Record)))  # a TypeError says that the others cannot be told apart
    rest = tuple(member for member in others if member is not NoneType)
    choices = (*records, _union(rest)) if rest else records
    one_of: Any = _OneOf("OneOf", (), {"members": choices})
    return one_of | None if NoneType in others else one_of


def _is_record(hint: Any) -> bool:
    known = ("__struct_fields__", "__dataclass_fields__", "__attrs_attrs__", "model_validate_json")
    return isinstance(hint, type) and any(hasattr(hint, name) for name in known)


# How MessagePack writes NaN and infinity. Other bytes may look so too; then the slow search decides.
_NOT_FINITE: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")
_as_msgpack: Final = msgspec.msgpack.Encoder(enc_hook=plain_model).encode


def _may_hold_nan(value: Any) -> bool:
    """A quick first look, for payloads with a null: most rows of most tables have one."""
    try:
        return _NOT_FINITE.search(_as_msgpack(value)) is not None
    except OverflowError:  # an integer that JSON can say and MessagePack cannot
        return True


def _is_not_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _find(value: Any, bad: Callable[[Any], bool], path: str = "$") -> tuple[str, Any] | None:
    """The path and value of the first bad leaf."""
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


# Where a job comes from: its queue, and how its payload and result are written and read.


_json = Json()


class JobCodec:
    """Shared by all handles of a task's, or a queue's, jobs. Immutable."""

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
        """The same for jobs that go to another queue."""
        return JobCodec(
            self.app,
            queue,
            serde=self.serde,
            result_serde=self.result_serde,
            payload_type=self.payload_type,
            result_type=self.result_type,
        )

    def encode_payload(self, value: Any) -> bytes:
        """Raises ``SerializationError`` or ``PayloadTooLarge``."""
        data = self.serde.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("payload", data, self.app.max_payload)
        return data

    def decode_payload(self, data: bytes) -> Any:
        """Raises ``SerializationError``."""
        return self.serde.decode(data, self.payload_type)

    def encode_result(self, value: Any) -> bytes:
        """Raises ``SerializationError`` or ``PayloadTooLarge``. ``None`` needs no encoder: it may be no bytes."""
        data = (
            b"" if value is None and isinstance(self.result_serde, Raw) else self.result_serde.encode(value)
        )
        if len(data) > self.app.max_payload:
            raise too_large("result", data, self.app.max_payload)
        return data

    def encode_signal(self, value: Any) -> bytes:
        """JSON, whatever the serde: who signals need not know the task. Raises as ``encode_payload``."""
        data = b"" if value is None else _json.encode(value)
        if len(data) > self.app.max_payload:
            raise too_large("signal", data, self.app.max_payload)
        return data

    def decode_result(self, data: bytes | None) -> Any:
        """Raises ``SerializationError``. No bytes are no result."""
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
    """The error for ``data``: how much, how much is allowed, and what to do."""
    return PayloadTooLarge(
        f"the {what} has {describe_size(len(data))} ({len(data)} bytes), more than the limit of "
        f"{describe_size(limit)}. Keep large data elsewhere and pass a reference to it, or raise max_payload."
    )
