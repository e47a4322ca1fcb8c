from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import text as core_text
from penstock.core.text import StderrLog, get_logger, log_to_stderr, visible, visible_in_line

HOSTILE = "\x1b[2J\x00\x07\x08\x0b\r\x7f\x9b31m\u202e\u2066\udcff"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain", "plain"),
        ("zwei\nZeilen\tund ümläute 漢字 🚰", "zwei\nZeilen\tund ümläute 漢字 🚰"),
        ("\x1b[31m", r"\x1b[31m"),
        ("\x00\x07\x08\x0b\x0c\r\x7f", r"\x00\x07\x08\x0b\x0c\x0d\x7f"),
        ("\x80\x85\x9b\x9f", r"\x80\x85\x9b\x9f"),
        ("\u202a\u202e\u2066\u2069", r"\u202a\u202e\u2066\u2069"),
        ("\ud800\udcff", r"\ud800\udcff"),
    ],
)
def test_control_characters_become_escapes(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_a_line_has_no_line_ends() -> None:
    assert visible_in_line("one\ntwo\x1b") == r"one\ntwo\x1b"


@given(st.text(st.characters(exclude_categories=()) | st.sampled_from(HOSTILE)))
def test_what_is_shown_can_be_printed_and_is_shown_the_same_again(text: str) -> None:
    shown = visible(text)
    shown.encode()
    assert not [c for c in shown if (ord(c) < 0x20 and c not in "\n\t") or 0x7F <= ord(c) < 0xA0]
    assert visible(shown) == shown


@pytest.fixture
def printed() -> Iterator[io.StringIO]:
    stream, logger = io.StringIO(), logging.getLogger("penstock.test")
    handler = logging.StreamHandler(stream)
    logger.addHandler(handler)
    yield stream
    logger.removeHandler(handler)


def test_log_lines_are_visible_whatever_handler_prints_them(printed: io.StringIO) -> None:
    logger = get_logger("penstock.test.lines")
    logger.warning("job %r failed %d times: %s", "\x1b[2J", 3, ValueError("one\n\x1b[2Jtwo"))
    assert printed.getvalue() == "job '\\x1b[2J' failed 3 times: one\\n\\x1b[2Jtwo\n"


def test_tracebacks_in_the_log_are_visible_and_keep_their_lines(printed: io.StringIO) -> None:
    logger = get_logger("penstock.test.tracebacks")
    try:
        raise ValueError("\x1b[2J")
    except ValueError:
        logger.exception("it failed")
    text = printed.getvalue()
    assert text.startswith("it failed\nTraceback (most recent call last):\n")
    assert text.endswith("ValueError: \\x1b[2J\n")


def test_an_argument_that_cannot_be_formatted_is_left_to_the_handler() -> None:
    logger = get_logger("penstock.test.wrong")
    record = logger.makeRecord(logger.name, logging.INFO, __file__, 1, "%d", ("not a number",), None)
    assert logger.filter(record)
    assert record.args == ("not a number",)


def test_the_log_on_stderr_shows_escapes_of_every_logger(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr(logging, "lastResort", None)
    log_to_stderr()
    logging.getLogger("somebody.else").warning("got \x1b]0;owned\x07")
    sys.stderr.flush()
    assert capsys.readouterr().err.endswith(" WARNING got \\x1b]0;owned\\x07\n")


@pytest.fixture
def log_as_json(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def begin(*handlers: logging.Handler) -> None:
        # In the test itself, because pytest adds handlers of its own before it.
        root = logging.getLogger()
        monkeypatch.setattr(root, "handlers", list(handlers))
        monkeypatch.setattr(root, "level", root.level)
        monkeypatch.setattr(core_text, "_stderr_log", None)
        log_to_stderr(StderrLog("json"))

    return begin


def test_the_log_on_stderr_can_be_json(
    log_as_json: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    log_as_json()
    try:
        raise ValueError("two\nlines \x1b[2J")
    except ValueError:
        get_logger("penstock.test.json").exception("job %r\x85", "é", extra={"queue": "mail", "run": 2})
    [line] = capsys.readouterr().err.splitlines()
    fields = json.loads(line)
    assert list(fields) == ["time", "level", "logger", "message", "queue", "run", "exception"]
    assert datetime.fromisoformat(fields["time"]).utcoffset() == timedelta(0)
    assert (fields["level"], fields["logger"]) == ("ERROR", "penstock.test.json")
    assert fields["message"] == "job 'é'\\x85"
    assert (fields["queue"], fields["run"]) == ("mail", 2)
    assert fields["exception"].startswith("Traceback (most recent call last):\n")
    assert "\x1b" not in line


def test_json_lines_take_any_field(
    log_as_json: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    log_as_json()
    circular: list[object] = []
    circular.append(circular)
    extra = {"time": "mine", "n": float("nan"), "o": object, "c": circular, "d": {1: (2, "\ud800")}}
    logging.getLogger("somebody.else").warning("x", extra=extra)
    fields = json.loads(capsys.readouterr().err, parse_constant=pytest.fail)
    assert fields["time"] != "mine"
    assert (fields["n"], fields["o"]) == ("nan", "<class 'object'>")
    assert fields["c"] == "[[...]]"
    assert fields["d"] == {"1": [2, "\ud800"]}


def test_json_that_was_asked_for_replaces_the_lines_of_an_application(
    log_as_json: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = logging.StreamHandler(io.StringIO())
    log_as_json(logging.StreamHandler(), elsewhere)
    logging.getLogger("somebody.else").warning("x")
    assert json.loads(capsys.readouterr().err)["message"] == "x"
    assert elsewhere.stream.getvalue() == "x\n"
