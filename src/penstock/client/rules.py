"""Rules of a task that compute options of each job from its arguments: its group, its dedup key, its deadline.

``@app.task(group="customer-{customer_id}", unique=["order"])``. A rule is a template such as ``"{order.customer}"``, or
a function whose parameters have the names of the task's. Rules are checked where the task is defined. They read the
encoded payload, so all callers compute the same: from arguments, a row of a table or a line of JSON.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from dataclasses import fields as fields_of
from datetime import datetime
from inspect import Parameter
from string import Formatter
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias, get_args, get_type_hints

import msgspec
from msgspec.structs import FieldInfo, asdict

from penstock.client.codec import Json, MessagePack
from penstock.client.options import RULES
from penstock.client.parsers import listed
from penstock.core.job import Dedup, Enqueued
from penstock.core.lifecycle import OPEN, TERMINAL, State
from penstock.core.names import content_id, plain_model
from penstock.core.text import shown
from penstock.core.units import Duration, milliseconds
from penstock.errors import InvalidInput, InvalidOption, JobExists, PenstockError, SerializationError

if TYPE_CHECKING:
    from penstock.client.codec import Serde
    from penstock.client.signature import Signature

OnDuplicate: TypeAlias = Literal["skip", "raise", "replace"]
States: TypeAlias = Literal["open", "pending", "any"]
Compute: TypeAlias = Callable[[Mapping[str, Any]], Any]

_NUMBERS: Final = ("cost", "priority")
_LONGEST_NAME: Final = 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Unique:
    """At most one open job of a task with the same arguments: ``@app.task(unique=Unique(by=["order"], period="1h"))``.

    ``by`` names the arguments to compare; ``None``: all. ``period``: an earlier job counts for that long after its
    enqueue. ``states``: it counts in these states: ``"open"``, ``"pending"`` (not started), ``"any"``, or a list of
    states, such as ``[*"scheduled waiting blocked active completed".split()]``; ended jobs count for a ``period`` only.

    ``on_conflict``: ``enqueue`` returns a handle of the earlier job (``"skip"``), raises ``JobExists`` (``"raise"``),
    or the new job takes the place of one that has not started (``"replace"``), and is skipped if that one runs. The
    store keeps all this as a ``Dedup`` key.
    """

    by: str | Sequence[str] | None = None
    period: Duration | None = None
    states: States | Sequence[State | str] = "open"
    on_conflict: OnDuplicate = "skip"

    def dedup_of(self, task: str) -> Dedup:
        """Return the rule with an empty key. Raise ``InvalidOption`` if the values do not go together."""
        where = f"unique of task {shown(task)}"
        if self.on_conflict not in get_args(OnDuplicate):
            raise InvalidOption(
                f"on_conflict of {where} must be 'skip', 'raise' or 'replace', got {shown(self.on_conflict)}."
            )
        period_ms = 0 if self.period is None else milliseconds(self.period, what=f"period of {where}")
        if self.period is not None and period_ms < 1:
            raise InvalidOption(f"period of {where} must be longer than 0, got {shown(self.period)}.")
        states = _states(where, self.states)
        if ended := sorted(TERMINAL.intersection(states)):
            if not period_ms:
                raise InvalidOption(
                    f"{where} counts jobs that are {ended[0]}, so it needs a period: period='1d'."
                )
            if self.on_conflict == "replace":
                raise InvalidOption(f"{where} cannot replace jobs that are {ended[0]}. Leave the state out.")
        if self.on_conflict == "replace":
            if period_ms:
                raise InvalidOption(f"{where} replaces a job whenever it was enqueued. Leave out the period.")
            return Dedup("", "debounce", 0, (State.ACTIVE,) if State.ACTIVE in states else ())
        if states == frozenset(State):
            return Dedup("", "throttle", period_ms)
        chosen = () if states == OPEN else tuple(state for state in State if state in states)
        return Dedup("", "simple", period_ms, chosen)


def _states(where: str, given: Any) -> frozenset[State]:
    named = {"open": OPEN, "pending": OPEN - {State.ACTIVE}, "any": frozenset(State)}
    if isinstance(given, str) and given in named:
        return named[given]
    try:
        states = frozenset(State(state) for state in ([given] if isinstance(given, str) else given))
    except (TypeError, ValueError) as error:
        raise InvalidOption(
            f"states of {where} must be 'open', 'pending', 'any' or a list of {', '.join(State)}: {error}."
        ) from error
    if not states:
        raise InvalidOption(f"states of {where} must not be empty. Leave unique out, or give 'open'.")
    return states


class Rule(NamedTuple):
    """A rule for one option: ``compute`` takes the arguments named in ``reads``."""

    reads: tuple[str, ...]
    compute: Compute


class Rules:
    """The rules of a task.

    ``constants`` are the options among them that do not depend on arguments. ``given`` are all as the user wrote them.
    Spark sends rules to executors, so they can be pickled if their functions can.
    """

    __slots__ = ("_read", "_rules", "constants", "fields", "given", "signature", "task")

    def __init__(
        self,
        task: str,
        given: Mapping[str, Any],
        fields: Mapping[str, FieldInfo],
        signature: Signature | None = None,
    ) -> None:
        self.task = task
        self.given = dict(given)
        self.fields = fields
        self.signature = signature
        self.constants: dict[str, Any] = {}
        self._rules: dict[str, Rule] = {}
        parameters = _Parameters(task, fields)
        for option, value in self.given.items():
            parsed = _parsed(option, value, parameters)
            if isinstance(parsed, Rule):
                self._rules["dedup" if option == "unique" else option] = parsed
            elif parsed is not None:
                self.constants[option] = parsed
        reads = dict.fromkeys(name for rule in self._rules.values() for name in rule.reads)
        self._read = _reading_struct({name: fields[name] for name in reads})

    def __reduce__(self) -> tuple[Any, ...]:
        return Rules, (self.task, self.given, self.fields)

    @property
    def computed(self) -> Collection[str]:
        """Return the options that depend on arguments, by the names that jobs have for them."""
        return self._rules.keys()

    @property
    def raises(self) -> bool:
        """Return whether a duplicate is an error for its caller."""
        unique = self.given.get("unique")
        return isinstance(unique, Unique) and unique.on_conflict == "raise"

    def beside(self, given: Mapping[str, Any]) -> Rules | None:
        """Return the rules that apply to a job with these options, which win; ``None`` if none applies."""
        replaced = {option for option, value in given.items() if value is not None}
        for names in _ALTERNATIVES:
            if not names.isdisjoint(replaced):
                replaced |= names
        if given.get("unique"):
            left = {**self.given, "unique": given["unique"]}
            return Rules(self.task, left, self.fields, self.signature).without(*replaced - {"unique"})
        return self.without(*replaced)

    def without(self, *options: str) -> Rules | None:
        """Return the rules without those of these options; ``None`` if none is left."""
        left = {option: value for option, value in self.given.items() if option not in options}
        if len(left) == len(self.given):
            return self
        return Rules(self.task, left, self.fields, self.signature) if left else None

    def options(self, payload: bytes, serde: Serde) -> dict[str, Any]:
        """Return the options that the rules compute for the job with this payload.

        Raises:
            InvalidInput: an argument is missing, or a rule cannot compute a value from it.
        """
        values = self._values(payload, serde)
        options: dict[str, Any] = {}
        for option, rule in self._rules.items():
            try:
                value = rule.compute(values)
            except Exception as error:
                cause = str(error) if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
                raise InvalidInput(
                    f"{option} of task {shown(self.task)} cannot be computed: {cause}"
                ) from error
            if value is not None:
                options[option] = value
        return options

    def _values(self, payload: bytes, serde: Serde) -> Mapping[str, Any]:
        if self.signature is None or isinstance(serde, (Json, MessagePack)):
            try:
                return asdict(serde.decode(payload, self._read))
            except SerializationError as error:
                options = ", ".join(self._rules)
                raise InvalidInput(
                    f"{options} of task {shown(self.task)} cannot be computed from the payload: {error.__cause__}. "
                    f"If a result is to supply the argument, give the option: options({next(iter(self._rules))}=...)."
                ) from error
        return self.signature.decoded(payload, serde)

    def check_repeated(self) -> None:
        """Raise ``InvalidInput`` for rules that a schedule cannot have: it computes them once, for all its jobs."""
        if "deadline" in self._rules:
            raise InvalidInput(
                f"deadline of task {shown(self.task)} would be computed once, for all jobs of the schedule. "
                "Use options(ttl=...), which counts from each enqueue."
            )

    def refuse_duplicate(self, answer: Enqueued, queue: str) -> None:
        """Raise ``JobExists`` if the rules say so for this answer of an enqueue."""
        if answer.status == "duplicate" and self.raises:
            state = answer.state or "gone"
            raise JobExists(
                f"task {shown(self.task)} is unique, and job {answer.id!r} of queue {queue!r} has the same arguments "
                f"({state}). Nothing was enqueued.",
                job_id=answer.id,
            )


_ALTERNATIVES: Final = (frozenset({"dedup", "unique"}), frozenset({"ttl", "deadline"}))
"""Sets of options that exclude each other."""


def task_rules(task: str, given: Mapping[str, Any], signature: Signature) -> Rules | None:
    """Return the rules among the options of a task; ``None`` if there are none.

    Raises:
        InvalidOption: a name that is not a parameter of the function, or a value that is not a rule.
    """
    found = {name: given[name] for name in RULES if given.get(name) is not None}
    for names in _ALTERNATIVES:
        if len(both := sorted(names & {name for name in given if given[name] is not None})) > 1:
            raise InvalidOption(
                f"{both[0]} and {both[1]} of task {shown(task)} exclude each other. Give one of them."
            )
    if type(found.get("priority")) is int:
        del found["priority"]
    return Rules(task, found, signature.fields, signature) if found else None


class _Parameters(NamedTuple):
    """The parameters that rules of a task may read."""

    task: str
    fields: Mapping[str, FieldInfo]

    def check(self, names: Iterable[Any], option: str) -> tuple[str, ...]:
        """Return ``names``. Raise ``InvalidOption`` for one that is not a parameter."""
        names = tuple(names)
        for name in names:
            if not isinstance(name, str) or name not in self.fields:
                known = ", ".join(self.fields) or "none"
                raise InvalidOption(
                    f"{option} of task {shown(self.task)} reads {shown(name)}, which is not a parameter of its "
                    f"function. The parameters are: {known}."
                )
        return tuple(dict.fromkeys(names))

    def check_path(self, path: Sequence[str], option: str) -> None:
        """Raise ``InvalidOption`` if a class in the annotations has no field of that name."""
        hint: Any = self.fields[path[0]].type
        for name in path[1:]:
            hints = _fields_of(hint)
            if hints is None:
                return
            if name not in hints:
                raise InvalidOption(
                    f"{option} of task {shown(self.task)} reads {'.'.join(path)!r}, and {hint.__name__} has no field "
                    f"{name!r}. It has: {', '.join(hints)}."
                )
            hint = hints[name]


def _fields_of(hint: Any) -> Mapping[str, Any] | None:
    """Return the annotated fields of a class; ``None`` if any name may be there."""
    if not isinstance(hint, type) or hint.__module__ == "builtins":
        return None
    try:
        hints = get_type_hints(hint)
    except Exception:
        return None
    members = {name: Any for name in dir(hint) if not name.startswith("_")}
    return {**members, **hints} if hints else None


def _parsed(option: str, value: Any, parameters: _Parameters) -> Any:
    """Return the ``Rule`` for an option of a task, or its constant value; ``None`` for no rule."""
    if option == "unique":
        return _unique(value, parameters)
    if callable(value) and not isinstance(value, type):
        return _by_function(option, value, parameters)
    if isinstance(value, datetime):
        raise InvalidOption(
            f"{option} of task {shown(parameters.task)} is a single time, {value.isoformat()}, and a task has many "
            "jobs. Give a duration, a template such as '{until}', or a function."
        )
    if isinstance(value, Dedup):
        template = _template(f"the key of {option}", value.key, parameters)
        if not isinstance(template, Rule):
            return value
        return Rule(
            template.reads, lambda values: msgspec.structs.replace(value, key=template.compute(values))
        )
    if isinstance(value, str):
        return _template(option, value, parameters)
    return value


def _unique(given: Any, parameters: _Parameters) -> Rule | None:
    unique = given if isinstance(given, Unique) else Unique(by=None if given is True else given)
    if given is False:
        return None
    dedup = unique.dedup_of(parameters.task)
    by = unique.by
    names = (
        parameters.fields
        if by is None
        else [by]
        if isinstance(by, str)
        else listed("unique", by, of="parameters")
    )
    reads = parameters.check(names, "unique")
    task = parameters.task

    def compute(values: Mapping[str, Any]) -> Dedup:
        digest = content_id([task, {name: _plain(values[name]) for name in reads}])
        return msgspec.structs.replace(dedup, key=f"{task[:_LONGEST_NAME]}:{digest}")

    return Rule(reads, compute)


def _by_function(option: str, function: Callable[..., Any], parameters: _Parameters) -> Rule:
    try:
        own = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise InvalidOption(
            f"{option} of task {shown(parameters.task)}: the parameters of {shown(function)} are unknown ({error}). "
            "Wrap it in a function."
        ) from error
    names: list[str] = []
    for parameter in own:
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.POSITIONAL_ONLY):
            raise InvalidOption(
                f"{option} of task {shown(parameters.task)}: its function gets arguments by name, and {parameter} of "
                f"{shown(function)} takes them by position. Name the parameters as the task does."
            )
        if parameter.kind is Parameter.VAR_KEYWORD:
            names += [name for name in parameters.fields if name not in names]
        elif parameter.name in parameters.fields or parameter.default is Parameter.empty:
            names.append(parameter.name)
    reads = parameters.check(names, option)
    return Rule(reads, lambda values: function(**{name: values[name] for name in reads}))


def _template(option: str, text: str, parameters: _Parameters) -> Any:
    """Return the ``Rule`` of a template, or the text if it has no fields."""
    where = f"{option} of task {shown(parameters.task)}"
    try:
        parts = list(Formatter().parse(text))
    except ValueError as error:
        raise InvalidOption(f"{where}: the template {shown(text)} is not valid: {error}.") from error
    pieces: list[tuple[str, tuple[str, ...]]] = []
    for literal, field, spec, conversion in parts:
        path = tuple(field.split(".")) if field is not None else ()
        if field is not None and (spec or conversion or not all(name.isidentifier() for name in path)):
            raise InvalidOption(
                f"{where}: the template {shown(text)} may have only names of parameters in braces, such as "
                "'{order}' or '{order.customer}'. Use a function for anything else."
            )
        if path:
            parameters.check(path[:1], option)
            parameters.check_path(path, option)
        pieces.append((literal, path))
    if not any(path for _, path in pieces):
        if option in _NUMBERS:
            raise InvalidOption(f"{where} must be an integer, a template such as '{{size}}', or a function.")
        return "".join(literal for literal, _ in pieces)
    reads = tuple(dict.fromkeys(path[0] for _, path in pieces if path))
    is_value = option in (*_NUMBERS, "deadline")
    if is_value and (len(pieces) > 1 or pieces[0][0]):
        raise InvalidOption(
            f"{where} must be one name in braces, such as '{{size}}', or a function, got {shown(text)}."
        )
    if is_value:
        return Rule(reads, lambda values: _at(values, pieces[0][1]))
    return Rule(reads, lambda values: "".join(_filled(literal, path, values) for literal, path in pieces))


def _filled(literal: str, path: tuple[str, ...], values: Mapping[str, Any]) -> str:
    return literal + _text(_at(values, path), path) if path else literal


def _at(values: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value = values[path[0]]
    for name in path[1:]:
        try:
            value = value[name] if isinstance(value, Mapping) else getattr(value, name)
        except (KeyError, AttributeError):
            raise InvalidInput(f"{'.'.join(path)} is missing in {shown(values[path[0]])}.") from None
    return value


def _text(value: Any, path: tuple[str, ...]) -> str:
    """Return a value as a template shows it: as JSON does, so that all callers compute the same."""
    plain = _plain(value)
    if isinstance(plain, str):
        return plain
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, float) and plain.is_integer():
        return str(int(plain))
    if isinstance(plain, int | float):
        return str(plain)
    raise InvalidInput(
        f"{'.'.join(path)} is {shown(value)}, which a template cannot show. Use a function; it may return None."
    )


def _plain(value: Any) -> Any:
    """Return a value in its JSON form."""
    if type(value) in (str, int):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if is_dataclass(value):  # msgspec leaves out a default that a payload did not have
        return {field.name: _plain(getattr(value, field.name)) for field in fields_of(value)}
    return msgspec.to_builtins(value, str_keys=True, enc_hook=plain_model)


def _reading_struct(fields: Mapping[str, FieldInfo]) -> type[msgspec.Struct]:
    """Return a struct that decodes these arguments of a payload and passes over the others."""
    definitions: list[Any] = []
    for name, field in fields.items():
        if field.default is not msgspec.NODEFAULT:
            definitions.append((name, field.type, field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            definitions.append((name, field.type, msgspec.field(default_factory=field.default_factory)))
        else:
            definitions.append((name, field.type))
    return msgspec.defstruct("Arguments", definitions, kw_only=True, gc=False)
