"""Text that no store can keep as it is."""

from __future__ import annotations

import pytest

from penstock.core.text import check_text, is_storable, storable, storable_value
from penstock.errors import InvalidInput


@pytest.mark.parametrize("text", ["", "plain", "žluťoučký", "🙂", "a\0b", "\x1b[31m"])
def test_text_that_utf8_can_express_stays_as_it_is(text: str) -> None:
    assert is_storable(text)
    assert storable(text) == text
    assert check_text(text, what="header") == text


@pytest.mark.parametrize(
    ("text", "escaped"), [("name \udcff", "name \\udcff"), ("\ud83d", "\\ud83d"), ("ž\udc80ž", "ž\\udc80ž")]
)
def test_a_lone_surrogate_becomes_its_escape(text: str, escaped: str) -> None:
    assert not is_storable(text)
    assert storable(text) == escaped


def test_text_that_a_caller_controls_is_refused_with_its_name() -> None:
    with pytest.raises(InvalidInput, match=r"header 'a\\udcff' cannot be encoded as UTF-8"):
        check_text("a\udcff", what="header")
    with pytest.raises(InvalidInput, match="header must be text, got 5"):
        check_text(5, what="header")


def test_texts_inside_plain_data_are_made_storable() -> None:
    value = {"file\udcff": ["\udcff", 1, None, {"deep": ("\udcfe",)}], "ok": 1.5}
    assert storable_value(value) == {
        "file\\udcff": ["\\udcff", 1, None, {"deep": ["\\udcfe"]}],
        "ok": 1.5,
    }
