"""The signature of a task, which converts the arguments of a call to a payload and back.

The payload is an object by parameter name, ``{"to": "ada@example.org", "template": "hello"}``, so that people
can read it, and other languages and tables can write it. ``*args`` is an array and ``**kwargs`` an object, each under
its name. It leaves out the arguments that the caller leaves out: the worker uses the defaults of its function. Each
function gets two struct classes, one to pack and one to unpack, so that each direction is one call into C.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from inspect import Parameter
from types import UnionType
from typing import Any, Final, Optional, TypeAlias, Union, get_args, get_origin, get_type_hints

import msgspec
from msgspec.structs import FieldInfo, asdict, astuple

from penstock.client.codec import Json, MessagePack, Raw, Serde, decodable
from penstock.client.hints import NotCalled
from penstock.core.text import shown
from penstock.errors import InvalidInput, InvalidOption, SerializationError

_Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
_Types: TypeAlias = tuple[frozenset[type] | None, ...]
_Arrange: TypeAlias = Callable[[tuple[Any, ...], Any], _Arguments]

_TYPED: Final = (Json, MessagePack)
_VARIABLE: Final = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_BY_NAME: Final = (Parameter.KEYWORD_ONLY, Parameter.VAR_KEYWORD)
_ORDINARY: Final = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
# Values of these types always decode to the annotation. Others are decoded as a check when they are enqueued.
_FITTING: Final[Mapping[Any, frozenset[type]]] = {
    **{hint: frozenset({hint}) for hint in (str, int, bool, bytes, list, dict, type(None))},
    float: frozenset({float, int}),
    list[Any]: frozenset({list}),
}
# Defaults that a struct accepts directly. Others need a default factory.
_SIMPLE_DEFAULTS: Final = (type(None), bool, int, float, str, bytes)


@dataclass(frozen=True, slots=True, eq=False)
class Signature(NotCalled):
    """The parameters and the result type of a task's function. Immutable."""

    name: str
    parameters: tuple[str, ...]
    """The names in a payload, in the order of the parameters, without the context."""
    context_parameter: str | None
    """The parameter that gets the job's context, if any."""
    takes_first: bool
    """True if a flow can pass a result as the first argument: it exists, and is not variable."""
    takes_any_name: bool
    """True if the function has ``**kwargs``."""
    result_type: Any
    """The return annotation; ``Any`` if there is none."""

    _shown: str
    _pack: Callable[..., Any]
    _unpacked: type[msgspec.Struct]
    _arrange: _Arrange | None
    _plain: Mapping[Any, _Types]
    """The exact types that always fit each field of a packed payload, by class of serde. ``None``: all types fit.

    Empty if there is nothing to check.
    """

    @classmethod
    def of(cls, function: Callable[..., Any], *, takes_context: bool = False) -> Signature:
        """Return the signature of ``function``.

        A parameter annotated with a class that has ``__penstock_context__ = True`` gets the job's context;
        with ``takes_context`` and no such annotation, the first parameter does. An annotation that cannot be
        resolved (a local class, an import for type checkers only) counts as ``Any``.

        Raises:
            InvalidOption: two contexts, ``self`` without an annotation, or a name with two leading underscores.
            SerializationError: payloads cannot be decoded to the type of a parameter.
        """
        name = getattr(function, "__qualname__", type(function).__qualname__)
        signature, hints = resolved(function)
        result_type = hints.pop("return")
        if not takes_context:
            _refuse_self(name, signature)
        context = _find_context(name, hints, takes_context=takes_context)
        payload = [p for p in signature.parameters.values() if p.name != context]
        _check_names(name, payload)
        bindable = inspect.Signature([_with_hint(p, hints[p.name]) for p in payload])
        packed = _packing_struct(name, payload)
        ordinary = all(p.kind in _ORDINARY for p in payload)
        return cls(
            name=name,
            parameters=tuple(p.name for p in payload),
            context_parameter=context,
            takes_first=bool(payload) and payload[0].kind in (*_ORDINARY, Parameter.POSITIONAL_ONLY),
            takes_any_name=any(p.kind is Parameter.VAR_KEYWORD for p in payload),
            result_type=result_type,
            _shown=f"{name}{bindable}",
            _pack=packed if ordinary else _binder(bindable, packed),
            _unpacked=(unpacked := _unpacking_struct(name, payload, hints)),
            _plain={kind: _plain_types(packed, unpacked, kind) for kind in _TYPED},
            _arrange=_arranger(list(signature.parameters.values()), context),
        )

    @property
    def fields(self) -> dict[str, FieldInfo]:
        """Return the fields of a payload by name, each with its type and default."""
        return {field.encode_name: field for field in msgspec.structs.fields(self._unpacked)}

    def pack(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the payload of a call as a struct. Types are not checked.

        Raises:
            InvalidInput: an argument is missing, unknown or given twice.
        """
        try:
            return self._pack(*args, **kwargs)
        except TypeError as error:
            raise InvalidInput(
                f"{self.name} cannot be called with these arguments: {error}. Its signature is {self._shown}."
            ) from None

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any], *, serde: Serde) -> bytes:
        """Pack and encode a call. A custom serde gets a dict, ``raw`` the only argument.

        Raises:
            InvalidInput: as ``pack``, or the worker could not decode a value to the type of its parameter.
            SerializationError: the serde cannot encode a value.
        """
        try:
            packed = self._pack(*args, **kwargs)
        except TypeError:
            packed = self.pack(args, kwargs)  # raises InvalidInput
        try:
            if isinstance(serde, _TYPED):
                data = serde.encode(packed)
                if types := self._plain.get(type(serde)):
                    for value, fitting in zip(astuple(packed), types):  # noqa: B905 (strict costs 100 ns)
                        if fitting is not None and type(value) not in fitting:
                            self._check_types(packed, data, serde)
                            break
                return data
            arguments = _arguments(packed)
            value = arguments.get(self._only_parameter()) if isinstance(serde, Raw) else arguments
            return serde.encode(value)
        except SerializationError as error:
            raise self._error_of_argument(packed, serde, error) from error.__cause__

    def _check_types(self, packed: Any, data: bytes, serde: Serde) -> None:
        """Decode the payload as the worker does. Raise ``InvalidInput`` for the argument that does not fit."""
        try:
            serde.decode(data, self._unpacked)
        except SerializationError:
            for name, value in _arguments(packed).items():
                if misfit := self.misfit(name, value, serde):
                    raise InvalidInput(misfit) from None

    def misfit(self, name: str, value: Any, serde: Serde, *, origin: str = "") -> str:
        """Return why a value cannot be decoded to the type of a parameter, or an empty text if it can."""
        if not isinstance(serde, _TYPED):
            return ""
        try:
            serde.decode(serde.encode(value), self.fields[name].type)
        except SerializationError as error:
            misfit = f"argument {shown(name)} of {self.name} does not fit its type: got {shown(value)}"
            return f"{misfit} ({error.__cause__}). {origin}The signature is {self._shown}."
        return ""

    def _error_of_argument(self, packed: Any, serde: Serde, error: SerializationError) -> SerializationError:
        """Return the error of the first argument that cannot be encoded by itself, or ``error``."""
        for name, value in _arguments(packed).items():
            try:
                serde.encode(value if isinstance(serde, (*_TYPED, Raw)) else {name: value})
            except SerializationError as cause:
                return SerializationError(f"argument {shown(name)} of {self.name}: {cause}")
        return error

    def unpack(self, data: bytes, serde: Serde, *, context: Any = None) -> _Arguments:
        """Return the arguments of the function in their annotated types, with ``context`` in its place.

        Raises:
            SerializationError: the bytes are not a payload of this function, or a value has another type.
        """
        if isinstance(serde, _TYPED):
            values = astuple(serde.decode(data, self._unpacked))
        else:
            values = self._decoded_by_custom(data, serde)
        return (values, {}) if self._arrange is None else self._arrange(values, context)

    def decoded(self, data: bytes, serde: Serde) -> dict[str, Any]:
        """Return the arguments by name from a payload of a custom serde. Raise as ``unpack`` does."""
        return dict(zip(self.parameters, self._decoded_by_custom(data, serde), strict=True))

    def _decoded_by_custom(self, data: bytes, serde: Serde) -> tuple[Any, ...]:
        """Return the values from a custom serde, which may return a dict by name."""
        if isinstance(serde, Raw):
            return astuple(self._unpacked(**{self._only_parameter(): serde.decode(data)}))
        decoded = serde.decode(data, self._unpacked)
        if isinstance(decoded, Mapping):
            try:
                decoded = self._unpacked(**decoded)
            except TypeError as error:
                raise SerializationError(
                    f"the payload does not fit {self._shown}: {error}. Enqueue it with the right arguments."
                ) from error
        if isinstance(decoded, self._unpacked):
            return astuple(decoded)
        raise SerializationError(
            f"serde {shown(serde.name)} decoded the payload of {self.name} to a {type(decoded).__qualname__}. "
            "It must return a dict by parameter name, or an instance of the type it was given."
        )

    def _only_parameter(self) -> str:
        if len(self.parameters) == 1:
            return self.parameters[0]
        raise InvalidOption(
            f'serde="raw" needs a function with exactly one parameter, and {self._shown} has {len(self.parameters)}. '
            'Use the serde "json" or "msgpack", or take one parameter.'
        )


def _plain_types(packed: type[msgspec.Struct], unpacked: type[msgspec.Struct], serde: Any) -> _Types:
    hints = {field.name: field.type for field in msgspec.structs.fields(unpacked)}
    types = tuple(_fitting(hints[name], serde) for name in packed.__struct_fields__)
    if all(fitting is None for fitting in types):
        return ()
    return tuple(None if fitting is None else fitting | {msgspec.UnsetType} for fitting in types)


def _fitting(hint: Any, serde: Any) -> frozenset[type] | None:
    """Return the exact types whose values always decode to ``hint``, or ``None`` for all types."""
    if hint is Any:
        return None
    if get_origin(hint) in (Union, UnionType):
        arms = [_fitting(arm, serde) for arm in get_args(hint)]
        return None if None in arms else frozenset().union(*filter(None, arms))
    try:
        is_object = hint == dict[str, Any] and serde is Json  # keys are strings in JSON
        return frozenset({dict}) if is_object else _FITTING.get(hint, frozenset())
    except TypeError:  # not hashable, such as Annotated with a list
        return frozenset()


def _arguments(packed: Any) -> dict[str, Any]:
    return {name: value for name, value in asdict(packed).items() if value is not msgspec.UNSET}


def _packing_struct(name: str, payload: list[Parameter]) -> type[msgspec.Struct]:
    """Return a struct that binds arguments as the function does, and leaves out missing ones. It ignores types."""
    required = {p.name for p in payload if p.default is Parameter.empty and p.kind not in _VARIABLE}
    fields = {
        by_name: [
            (p.name, Any) if p.name in required else (p.name, Any, msgspec.UNSET)
            for p in payload
            if (p.kind in _BY_NAME) is by_name
        ]
        for by_name in (False, True)
    }
    # Only a base class can add keyword-only fields.
    base = msgspec.defstruct(name, fields[True], kw_only=True, gc=False)
    return msgspec.defstruct(name, fields[False], bases=(base,), gc=False)


def _unpacking_struct(name: str, payload: list[Parameter], hints: Mapping[str, Any]) -> type[msgspec.Struct]:
    """Return a struct that decodes to the annotated types, with the defaults of the function.

    It refuses unknown names, so that no argument is dropped silently.
    """
    fields = [(p.name, _field_type(name, p, hints[p.name]), *_field_default(p)) for p in payload]
    return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True, gc=False)


def _field_type(name: str, parameter: Parameter, hint: Any) -> Any:
    if parameter.default is None and hint is not Any:
        hint = Optional[hint]  # noqa: UP045 (a value here; "to: str = None" allows None)
    try:
        hint = decodable(hint)
    except NameError:
        hint = Any
    except SerializationError as error:
        raise SerializationError(f"parameter {shown(parameter.name)} of {name}: {error}") from error
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return tuple[hint, ...]
    return dict[str, hint] if parameter.kind is Parameter.VAR_KEYWORD else hint


def _field_default(parameter: Parameter) -> tuple[Any, ...]:
    if parameter.kind is Parameter.VAR_POSITIONAL:
        return ((),)
    if parameter.kind is Parameter.VAR_KEYWORD:
        return (msgspec.field(default_factory=dict),)
    default = parameter.default
    if default is Parameter.empty:
        return ()
    return (
        (default,) if type(default) in _SIMPLE_DEFAULTS else (msgspec.field(default_factory=lambda: default),)
    )


def _binder(signature: inspect.Signature, packed: type[msgspec.Struct]) -> Callable[..., Any]:
    """Return a packer for functions with ``*args``, ``**kwargs`` or positional-only parameters. It is slower."""
    positional = [p.name for p in signature.parameters.values() if p.kind not in _BY_NAME]

    def pack(*args: Any, **kwargs: Any) -> Any:
        by_name = signature.bind(*args, **kwargs).arguments
        by_order = [by_name.pop(name, msgspec.UNSET) for name in positional]
        return packed(*by_order, **by_name)

    return pack


def _arranger(parameters: list[Parameter], context: str | None) -> _Arrange | None:
    """Return a function from the values of a payload to (args, kwargs); ``None`` if the values are the args."""
    kinds = [p.kind for p in parameters]
    star, double_star = Parameter.VAR_POSITIONAL in kinds, Parameter.VAR_KEYWORD in kinds
    by_order = [p.name for p in parameters if p.kind not in (*_BY_NAME, Parameter.VAR_POSITIONAL)]
    by_name = [p.name for p in parameters if p.kind is Parameter.KEYWORD_ONLY]
    context_by_name = context in by_name
    context_at = by_order.index(context) if context in by_order else None
    if context is None and not (star or by_name or double_star):
        return None
    count = len(by_order) - (context_at is not None)
    names = [name for name in by_name if name != context]

    def arrange(values: tuple[Any, ...], given_context: Any) -> _Arguments:
        args = values[:count]
        if context_at is not None:
            args = (*args[:context_at], given_context, *args[context_at:])
        if star:
            args += tuple(values[count])
        kwargs = dict(zip(names, values[count + star :], strict=False)) if names else {}
        if double_star:
            kwargs.update(values[-1])
        if context_by_name:
            kwargs[str(context)] = given_context
        return args, kwargs

    return arrange


def resolved(function: Callable[..., Any]) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the signature of ``function``, and its annotations as types by parameter and under ``"return"``."""
    try:
        signature = _inspected(function)
    except (TypeError, ValueError) as error:
        raise InvalidOption(f"{shown(function)} cannot be a task: {error}. Wrap it in a function.") from error
    namespace = _namespace(function)
    hints = {key: _resolved(p.annotation, namespace) for key, p in signature.parameters.items()}
    return signature, hints | {"return": _resolved(signature.return_annotation, namespace)}


def _inspected(function: Callable[..., Any]) -> inspect.Signature:
    if sys.version_info >= (3, 14):
        # Annotations are evaluated lazily, and may fail as a whole.
        from annotationlib import Format

        return inspect.signature(function, annotation_format=Format.FORWARDREF)
    return inspect.signature(function)


def _namespace(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the names that the annotations of ``function`` may use: global ones and enclosing ones."""
    inner: Any = function
    while isinstance(inner, partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    inner = getattr(inner, "__func__", inner)
    if not inspect.isfunction(inner):  # an object that can be called
        inner = type(inner).__call__
    if not inspect.isfunction(inner):
        return {}
    return {**inner.__globals__, **dict(_closed_over(inner))}


def _closed_over(function: Any) -> Iterator[tuple[str, Any]]:
    """Yield the enclosing variables that have a value already. A task that refers to itself has none yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        with suppress(ValueError):
            yield name, cell.cell_contents


def _resolved(annotation: Any, namespace: dict[str, Any]) -> Any:
    if annotation is Parameter.empty:
        return Any

    def bearer() -> None: ...

    bearer.__annotations__ = {"hint": annotation}
    try:
        return get_type_hints(bearer, namespace, include_extras=True)["hint"]
    except Exception:
        # Probably imported for type checkers only. Even then, the parameter of the context must be found.
        return _ContextByName if _names_context(annotation) else Any


class _ContextByName:
    __penstock_context__ = True


def _names_context(annotation: Any) -> bool:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__forward_arg__", "")
    return text.partition("|")[0].strip().rpartition(".")[2] == "JobContext"


def is_context(hint: Any) -> bool:
    """Return whether a parameter with this annotation gets the job's context."""
    origin = get_origin(hint)
    if origin is Union or origin is UnionType:
        return any(is_context(member) for member in get_args(hint))
    return getattr(origin or hint, "__penstock_context__", False) is True


def _find_context(name: str, hints: Mapping[str, Any], *, takes_context: bool) -> str | None:
    contexts = [key for key, hint in hints.items() if is_context(hint)]
    if takes_context and not contexts:
        contexts = list(hints)[:1]
    if len(contexts) > 1 or (takes_context and not contexts):
        raise InvalidOption(
            f"{name} must have one parameter for the job's context, got {len(contexts)} "
            f"({', '.join(contexts) or 'none'}). Annotate exactly one parameter with JobContext."
        )
    return contexts[0] if contexts else None


def _refuse_self(name: str, signature: inspect.Signature) -> None:
    first = next(iter(signature.parameters.values()), None)
    if first is not None and first.name == "self" and first.annotation is Parameter.empty:
        raise InvalidOption(
            f"the first parameter of {name} is 'self' without an annotation, so it would be an argument of the job. "
            "Annotate it to get the job's context (self: JobContext), or remove it."
        )


def _check_names(name: str, payload: list[Parameter]) -> None:
    for parameter in payload:
        if parameter.name.startswith("__"):
            raise InvalidOption(
                f"parameter {shown(parameter.name)} of {name} is reserved: its name has two leading underscores. "
                "Rename it, or write def f(x, /) for a positional-only parameter."
            )


def _with_hint(parameter: Parameter, hint: Any) -> Parameter:
    """Return the parameter with its annotation as a type, for messages: ``to: str`` instead of ``to: "str"``."""
    return parameter.replace(annotation=Parameter.empty if hint is Any else hint)
