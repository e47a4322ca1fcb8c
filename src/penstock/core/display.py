r"""Text from payloads, errors and names on its way to a terminal or a log.

A terminal obeys control characters: a job named ``\x1b[2J`` would clear the screen of the operator who lists it, and
other sequences rename the window, hide lines or forge them. Penstock shows such characters as escapes instead:
``\x1b``, ``\x9b``, ``\u202e``.

| shown as an escape | why |
|---|---|
| C0, DEL and C1 controls, except newline and tab | terminals obey them |
| U+202A to U+202E and U+2066 to U+2069 | they reorder the text around them |
| lone surrogates | no terminal can print them |
"""

from __future__ import annotations

import logging
import re
from typing import Final

__all__ = ["get_logger", "log_to_stderr", "shown", "visible", "visible_in_line"]

_BIDI_AND_SURROGATES: Final = "\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_HIDDEN: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI_AND_SURROGATES}]")
_HIDDEN_OR_LINE_END: Final = re.compile(f"[\x00-\x08\x0a-\x1f\x7f-\x9f{_BIDI_AND_SURROGATES}]")


def visible(text: str) -> str:
    r"""Return ``text`` with control characters as escapes such as ``\x1b``. Newlines and tabs stay."""
    return _HIDDEN.sub(_escape, text)


def visible_in_line(text: str) -> str:
    r"""Return ``text`` as one line: like ``visible``, with newlines as ``\n``."""
    return _HIDDEN_OR_LINE_END.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == 0x0A:
        return "\\n"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shown(value: object, most: int = 80) -> str:
    """Return ``repr(value)`` for an error message, cut to ``most`` characters.

    Return the type alone if there is none: the value's own ``__repr__`` raises, the value is nested too deeply, or it
    is an integer of too many digits.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__qualname__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name. Its messages and tracebacks are visible text, whatever handler prints them."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_visible)
    return logger


def log_to_stderr() -> None:
    """Print log lines on stderr, unless the application has set up its own log."""
    handler = logging.StreamHandler()
    handler.setFormatter(_VisibleFormatter("%(asctime)s %(levelname)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


class _VisibleFormatter(logging.Formatter):
    """For records of every logger, those of the application and of libraries included."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record))


def _make_visible(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except (
        Exception
    ):  # An argument cannot be formatted. The handler reports that, as it does for every logger.
        return True
    if (shown := visible_in_line(message)) != message:
        record.msg, record.args = shown, ()
    if record.exc_info and not record.exc_text:
        # A handler takes the traceback from here if it is set. It formats harmless ones itself, in its own way.
        traceback = logging.Formatter().formatException(record.exc_info)
        if (shown := visible(traceback)) != traceback:
            record.exc_text = shown
    return True
