from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.display import get_logger, log_to_stderr, visible, visible_in_line

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
