from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.names import (
    check_consumer,
    check_id,
    check_namespace,
    check_queue,
    check_task,
    check_worker,
)
from penstock.errors import InvalidName

PLACES = [check_queue, check_namespace]
ALL = [check_id, *PLACES, check_task, check_worker, check_consumer]

Check = Callable[[str], str]


class Name(StrEnum):
    MAIL = "mail"


class OldName(str, Enum):  # noqa: UP042 (what people wrote before 3.11)
    MAIL = "mail"


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("value", ["mail", "a", "Mail_2.eu-west", "0"])
def test_ordinary_names_pass(check: Check, value: str) -> None:
    assert check(value) is value


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize("value", [Name.MAIL, OldName.MAIL])
def test_members_of_string_enums_become_plain_text(check: Check, value: str) -> None:
    assert type(check(value)) is str
    assert check(value) == "mail"


@pytest.mark.parametrize("check", ALL)
@pytest.mark.parametrize(
    "value", ["", " a", "a ", "a\n", "a\nb", "a\0", "\ud800", "x" * 201, None, 5, b"mail"]
)
def test_what_can_be_no_name_is_refused_with_cause_and_remedy(check: Check, value: str) -> None:
    with pytest.raises(InvalidName, match=r"is not allowed as .*: .*\. Use 1 to"):
        check(value)


@pytest.mark.parametrize("check", PLACES)
@pytest.mark.parametrize("value", ["{mail}", "shop{mail}", "mail}"])
def test_names_with_braces_are_refused_because_the_hash_tag_is_ours(check: Check, value: str) -> None:
    with pytest.raises(InvalidName, match=r"Penstock adds the hash tag .* leave out the braces"):
        check(value)


@pytest.mark.parametrize("check", PLACES)
@pytest.mark.parametrize("value", ["a/b", "{a}", "a:b", "-a", ".a", "_a", "a b", "é", "x" * 101, "٣"])
def test_queues_and_namespaces_keep_out_what_keys_are_built_with(check: Check, value: str) -> None:
    with pytest.raises(InvalidName):
        check(value)


def test_each_kind_has_its_own_characters() -> None:
    assert check_id("order 17/é:{x} 漢") == "order 17/é:{x} 漢"
    assert check_task("app.mail:send-now") == "app.mail:send-now"
    assert check_worker("host-1.example:4711@blue") == "host-1.example:4711@blue"
    with pytest.raises(InvalidName):
        check_task("send mail")
    with pytest.raises(InvalidName):
        check_worker("a/b")


def test_a_long_value_is_not_repeated_whole_in_the_message() -> None:
    with pytest.raises(InvalidName) as caught:
        check_id("x" * 1_000_000)
    assert len(str(caught.value)) < 300


@given(st.text(max_size=210))
def test_every_text_is_kept_as_it_is_or_refused(text: str) -> None:
    for check in ALL:
        try:
            assert check(text) == text
        except InvalidName:
            continue
        assert text == text.strip()
        assert 0 < len(text) <= 200
        assert not {"\n", "\0"} & set(text)
        text.encode()
