"""Text from payloads, errors and names on its way to a terminal or a log.

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

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import SplitResult, urlsplit

from penstock.errors import InvalidInput, InvalidOption

LogFormat = Literal["text", "json"]

_BIDI_AND_SURROGATES: Final = "\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_HIDDEN: Final = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI_AND_SURROGATES}]")
_LOGIN: Final = re.compile(r"(://[^:/?@]*):.*@")
_PASSWORD: Final = re.compile(r"([?&][^=&]*password=)[^&]*")
_LINE: Final = "%(asctime)s %(levelname)s %(message)s"
# The attributes of every record. All others are fields from ``extra``.
_RECORD_FIELDS: Final = frozenset({*logging.makeLogRecord({}).__dict__, "asctime", "message", "taskName"})
_HIDDEN_OR_LINE_END: Final = re.compile(f"[\x00-\x08\x0a-\x1f\x7f-\x9f{_BIDI_AND_SURROGATES}]")


def visible(text: str) -> str:
    r"""Return ``text`` with control characters as escapes such as ``\x1b``. Newlines and tabs stay."""
    return _HIDDEN.sub(_escape, text)


def visible_in_line(text: str) -> str:
    r"""Return ``text`` as one line: like ``visible``, with newlines as ``\n``."""
    return _HIDDEN_OR_LINE_END.sub(_escape, text)


def without_password(url: str) -> str:
    """Return ``url`` without passwords: that of the login, up to the last @, and those of its options."""
    return _LOGIN.sub(r"\1:***@", _PASSWORD.sub(r"\1***", url)) if "://" in url else url


def split_url(url: str) -> SplitResult:
    """Return the parts of a store's URL. Raise ``InvalidOption``, without the URL, if its host cannot be read."""
    try:
        return urlsplit(url)
    except ValueError:
        raise InvalidOption(
            "the host of the store's URL cannot be read. Put an IPv6 address in brackets, such as "
            "valkey://[::1]:6379, and nothing else."
        ) from None


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == 0x0A:
        return "\\n"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shown(value: object, most: int = 80) -> str:
    """Return ``repr(value)`` for an error message, cut to ``most`` characters.

    Return only the type if ``repr`` fails: the value's ``__repr__`` raises, the value is nested too deeply, or it
    is an integer with too many digits.
    """
    try:
        text = repr(value)
    except Exception:
        return f"<{type(value).__qualname__}>"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def get_logger(name: str) -> logging.Logger:
    """Return the logger of that name. It escapes control characters in messages and tracebacks for all handlers."""
    logger = logging.getLogger(name)
    logger.addFilter(_make_visible)
    return logger


class StderrLog(NamedTuple):
    """Options of ``log_to_stderr``.

    ``runs=False`` leaves out the records about single runs of jobs. JSON lines carry the id of the ``worker`` of
    this process.
    """

    format: LogFormat = "text"
    runs: bool = True
    worker: str = ""


_stderr_log: StderrLog | None = None


def stderr_log() -> StderrLog | None:
    """Return how this process prints its log on stderr, so that processes it starts can do the same."""
    return _stderr_log


def log_to_stderr(
    how: StderrLog = StderrLog(),  # noqa: B008
    *,
    level: int = logging.INFO,
    ours: int = logging.NOTSET,
) -> None:
    """Print log lines on stderr, unless the application has set up its own log.

    ``ours`` is the level of Penstock's own lines, if it differs. With the JSON format, the application's handlers
    on standard streams print JSON too.
    """
    global _stderr_log
    _stderr_log = how
    root = logging.getLogger()
    formatter = _JsonFormatter(how.worker) if how.format == "json" else _VisibleFormatter(_LINE)
    if not root.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(formatter)
        if not how.runs:
            handler.addFilter(lambda record: not is_about_run(record))
        logging.basicConfig(level=level, handlers=[handler])
        logging.getLogger("penstock").setLevel(ours)
    elif how.format == "json":
        for theirs in root.handlers:
            if getattr(theirs, "stream", None) in (sys.stderr, sys.stdout):
                theirs.setFormatter(formatter)


def is_about_run(record: logging.LogRecord) -> bool:
    """Return whether a log record is about a single run of a job."""
    return record.name == "penstock.worker" and hasattr(record, "id") and hasattr(record, "run")


def _has_no_traceback(record: logging.LogRecord) -> bool:
    """Return whether a record's exception was never raised here, such as that of a failed command."""
    error = record.exc_info[1] if record.exc_info else None
    return error is not None and not (error.__traceback__ or error.__cause__ or error.__context__)


class _JsonFormatter(logging.Formatter):
    """One JSON object per line, in ASCII, so that no text can leave its line or reach a terminal unescaped."""

    def __init__(self, worker: str = "") -> None:
        super().__init__()
        self._worker = worker

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if self._worker:
            fields["worker"] = self._worker
        for name, value in record.__dict__.items():
            if name not in _RECORD_FIELDS:
                fields.setdefault(name, value)
        if record.exc_info or record.exc_text:
            fields["exception"] = record.exc_text or self.formatException(record.exc_info)  # type: ignore[arg-type]
        if record.stack_info:
            fields["stack"] = record.stack_info
        try:
            return json.dumps(fields, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            return json.dumps({name: _plain(value) for name, value in fields.items()})


def _plain(value: object) -> object:
    """Return ``value`` if it has a JSON form, otherwise its text."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        return shown(value, most=1_000)
    return value


class _VisibleFormatter(logging.Formatter):
    """Formats the records of all loggers, including those of the application and of libraries."""

    def format(self, record: logging.LogRecord) -> str:
        if is_about_run(record) and _has_no_traceback(record):
            # The message already ends with the error.
            record = logging.makeLogRecord(record.__dict__ | {"exc_info": None, "exc_text": None})
        return visible(super().format(record))


def _make_visible(record: logging.LogRecord) -> bool:
    try:
        message = record.getMessage()
    except Exception:
        # An argument cannot be formatted. The handler reports that, as it does for every logger.
        return True
    if (shown := visible_in_line(message)) != message:
        record.msg, record.args = shown, ()
    if record.exc_info and not record.exc_text:
        # Handlers use this traceback if it is set. They format harmless ones themselves, in their own way.
        try:
            traceback = logging.Formatter().formatException(record.exc_info)
        except Exception as broken:
            record.exc_text = f"<the traceback cannot be formatted: {type(broken).__name__}>"
            return True
        if (shown := visible(traceback)) != traceback:
            record.exc_text = shown
    return True


# Storable text. Python allows lone surrogates in a ``str``: ``os.listdir`` returns them for file names that
# are not UTF-8. Stores use UTF-8, which cannot encode them. Penstock follows one rule: in text that a job
# reports (log lines, progress, error messages, tracebacks) a lone surrogate becomes an escape such as
# ``\udcff``; in values that the caller controls (ids, names, headers, payloads, results) it is refused with
# an error that names the value.


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
    """Return ``str(value)`` as storable text, or only its type if ``str`` fails."""
    try:
        return storable(str(value))
    except Exception:
        return f"<{type(value).__qualname__}>"


def check_text(text: Any, *, what: str) -> str:
    """Return ``text``. Raise ``InvalidInput`` if stores cannot keep it; ``what`` names it in the message."""
    if not isinstance(text, str):
        raise InvalidInput(f"{what} must be text, got {shown(text)}.")
    if not is_storable(text):
        raise InvalidInput(
            f"{what} {text!r:.80} cannot be encoded as UTF-8: it contains a lone surrogate. "
            'Decode file names with errors="replace", or send the bytes.'
        )
    return str.__str__(text)


def storable_value(value: Any) -> Any:
    """Return plain data (dicts, lists, strings, numbers) with every string made ``storable``."""
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, dict):
        return {storable_value(key): storable_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [storable_value(item) for item in value]
    return value
