"""Text that every store can keep.

Python allows lone surrogates in a ``str``: ``os.listdir`` returns them for file names that are not UTF-8. Stores
keep UTF-8, which has no form for them. Penstock follows one rule:

| text | a lone surrogate |
|---|---|
| log lines, progress, error messages, tracebacks: text that a job reports | becomes an escape such as ``\\udcff`` |
| ids, names, headers, payloads, results: values that the caller controls | is refused, with an error that names it |
"""

from __future__ import annotations

from typing import Any

from penstock.core.display import shown
from penstock.errors import InvalidInput

__all__ = ["check_text", "is_storable", "storable", "storable_value", "text_of"]


def is_storable(text: str) -> bool:
    """Return whether ``text`` can be encoded as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def storable(text: str) -> str:
    """Return ``text`` with every lone surrogate replaced by its escape, such as ``\\udcff``."""
    return text if is_storable(text) else text.encode("utf-8", "backslashreplace").decode()


def text_of(value: object) -> str:
    """Return ``str(value)`` as storable text, or the type alone if the value cannot be made a text."""
    try:
        return storable(str(value))
    except Exception:
        return f"<{type(value).__qualname__}>"


def check_text(text: Any, *, what: str) -> str:
    """Return ``text``. Raise ``InvalidInput`` if no store can keep it; ``what`` names it in the message."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be text, got {shown(text)}.")
    if not is_storable(text):
        raise InvalidInput(
            f"{what} {text!r:.80} cannot be encoded as UTF-8: it contains a lone surrogate. "
            'Decode file names with errors="replace", or send the bytes.'
        )
    return str.__str__(text)


def storable_value(value: Any) -> Any:
    """Return plain data (dicts, lists, texts, numbers) with every text in it made ``storable``."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable_value(key): storable_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable_value(item) for item in value]
    return value
