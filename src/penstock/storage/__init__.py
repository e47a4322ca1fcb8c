"""Storage: the contract (``contract``), its values, and the engines that implement it, by URL scheme.

An engine is imported when a URL first needs it. Third parties add engines with ``register_engine``, or with an entry
point in the group ``penstock.engines`` whose name is the scheme and whose value is the factory.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias

from penstock.errors import InvalidOption
from penstock.storage.contract import Storage

__all__ = ["EngineFactory", "Storage", "open_storage", "register_engine"]

EngineFactory: TypeAlias = Callable[..., Storage]
"""Called with the URL and the options of ``open_storage``. Returns a storage that is not connected."""

_SQLITE: Final = "penstock.storage.sqlite.engine:SqliteStorage.from_url"
_VALKEY: Final = "penstock.storage.valkey.engine:ValkeyStorage.from_url"
_VALKEY_SCHEMES: Final = tuple(
    f"{server}{kind}"
    for server in ("valkey", "redis")
    for kind in ("", "s", "+cluster", "s+cluster", "+sentinel", "s+sentinel", "+unix")
)
_BUILT_IN: Final = {"sqlite": _SQLITE, "memory": _SQLITE, **dict.fromkeys(_VALKEY_SCHEMES, _VALKEY)}
_EXTRAS: Final = {"hiredis": "valkey"}
_GROUP: Final = "penstock.engines"

_registered: dict[str, EngineFactory] = {}


def register_engine(scheme: str, factory: EngineFactory) -> None:
    """Use ``factory(url, **options)`` for URLs of this scheme in this process."""
    _registered[scheme.lower()] = factory


def open_storage(url: str, **options: Any) -> Storage:
    """Return the storage of a URL, not yet connected: ``await storage.open()`` connects.

    Raise ``InvalidOption`` for a URL without an engine, an option that the engine does not know, or a missing
    extra.
    """
    scheme, separator, _ = url.partition("://")
    if not separator:  # The message leaves out the text, which may contain a password.
        raise InvalidOption(
            "the store's address is not a URL: it has no scheme. Use a URL such as sqlite:///penstock.db or valkey://host."
        )
    factory = _factory(scheme.lower())
    try:
        return factory(url, **options)
    except TypeError as error:
        if "unexpected keyword argument" in str(error):
            raise InvalidOption(f"{scheme}:// does not take this option: {error}.") from error
        raise


def _factory(scheme: str) -> EngineFactory:
    if scheme in _registered:
        return _registered[scheme]
    if scheme in _BUILT_IN:
        return _load(scheme, _BUILT_IN[scheme])
    for entry in entry_points(group=_GROUP, name=scheme):
        loaded: EngineFactory = entry.load()
        return loaded
    raise _unknown(scheme)


def _load(scheme: str, target: str) -> EngineFactory:
    module, _, names = target.partition(":")
    try:
        target_object: Any = import_module(module)
    except ModuleNotFoundError as error:
        extra = _EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        raise InvalidOption(
            f"{scheme}:// needs the package {error.name}, which is not installed: pip install 'penstock[{extra}]'"
        ) from error
    for name in names.split("."):
        target_object = getattr(target_object, name)
    factory: EngineFactory = target_object
    return factory


def _unknown(scheme: str) -> InvalidOption:
    known = sorted({*_registered, *_BUILT_IN, *entry_points(group=_GROUP).names})
    close = get_close_matches(scheme, known, n=1)
    hint = f" Did you mean {close[0]}://?" if close else ""
    return InvalidOption(f"No engine serves {scheme}://.{hint} Known: {', '.join(known)}.")
