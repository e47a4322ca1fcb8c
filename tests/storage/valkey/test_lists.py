"""The lists that Python and Lua share: written once, and part of the storage format."""

from __future__ import annotations

import re
from importlib import resources
from typing import get_args

import pytest

from penstock.core.job import DAY_MS, HOUR_MS, EnqueueStatus, Extras, Options
from penstock.core.lifecycle import (
    AttachAnswer,
    CancelAnswer,
    ChangeAnswer,
    CopyStepsAnswer,
    EventType,
    HoldAnswer,
    PromoteAnswer,
    ReleaseAnswer,
    RemoveAnswer,
    ResetAnswer,
    RetryAnswer,
    SchedulerAnswer,
    SignalAnswer,
    State,
    StepAnswer,
    UnchangedAnswer,
)
from penstock.core.outcome import FAILURE_TEXTS
from penstock.core.retry import Exponential
from penstock.storage.valkey.jobs import ANSWERS, ENQUEUED, STATES, letters_of, parse_header, stored_options
from penstock.storage.valkey.library import library
from penstock.storage.values import Extended

FILES = {
    entry.name: entry.read_text()
    for entry in (resources.files("penstock.storage.valkey") / "lua").iterdir()
    if entry.name.endswith(".lua")
}


def test_stored_options_leave_out_trailing_values_of_the_first_release() -> None:
    first = Options("", "", 3, 3, HOUR_MS, 30 * DAY_MS, 0, Exponential())

    assert stored_options(first).header == b"\x90"
    assert parse_header(b"\x90") == first
    assert stored_options(Options(task="send")).header == b"\x91\xa4send"


def test_stored_options_keep_their_places() -> None:
    names = (
        "task",
        "version",
        "attempts",
        "max_stalls",
        "result_ttl_ms",
        "failure_ttl_ms",
        "timeout_ms",
        "backoff",
    )

    assert Options.__struct_fields__[: len(names)] == names


def test_every_option_and_every_extra_is_known_to_the_library() -> None:
    lists = library().code.partition("local STORED = ")[2].partition("\n")[0]

    assert all(re.search(rf"\b{name} = \d", lists) for name in Options.__struct_fields__)
    assert all(re.search(rf'\b{name} = "', lists) for name in Extras.__struct_encode_fields__)


def test_the_library_has_the_short_names_of_extras() -> None:
    names = {name for text in FILES.values() for name in re.findall(r"\bextras(?:_of\(\w+\))?\.(\w+)", text)}
    code = library().code

    assert names <= set(Extras.__struct_fields__)
    assert "extras.g)" in code
    assert not re.search(r"\bextras\.(?:group|holds|dependents)\b", code)


def test_every_state_has_a_letter() -> None:
    assert set(STATES.values()) == set(State)
    assert len(STATES) == len(State)


def test_the_library_emits_only_events_that_exist() -> None:
    emitted = {
        name
        for text in FILES.values()
        for name in re.findall(r"\b(?:emit|emit_queue|group_for)\('(\w+)'", text)
    }

    assert len(emitted) > 10
    assert emitted <= {event.value for event in EventType}


def test_headers_of_lua_files_name_only_events_that_exist() -> None:
    for name, text in FILES.items():
        named = re.findall(r"^-- events: +(.*(?:\n--   .*)*)", text, re.MULTILINE)
        words = {word for line in named for word in re.findall(r"\b\w+ed\b|\bcancelling\b", line)}
        assert words <= {event.value for event in EventType}, name


TYPES = {
    "attach": AttachAnswer,
    "cancel": CancelAnswer,
    "change": ChangeAnswer,
    "copy_steps": CopyStepsAnswer,
    "extend": Extended,
    "hold": HoldAnswer,
    "promote": PromoteAnswer,
    "put_scheduler": SchedulerAnswer,
    "record_steps": StepAnswer,
    "release": ReleaseAnswer,
    "remove": RemoveAnswer,
    "remove_unchanged": UnchangedAnswer,
    "reset_step": ResetAnswer,
    "retry": RetryAnswer,
    "signal": SignalAnswer,
}


def letters_in_header(verb: str) -> set[str]:
    """Return the letters that the header of a verb's file explains: ``r removed, a active, - not found``."""
    [text] = [text for text in FILES.values() if f"register('{verb}'" in text]
    header = text.partition("\n\n")[0].replace("\n--   ", " ")
    [returned] = re.findall(
        rf"^-- {verb}: .*\n(?:-- arguments: .*\n)?-- returns: +(.+)", header, re.MULTILINE
    )
    return set(re.findall(r"(?:^|, |: |\{)([a-z-]) ", returned.partition(";")[0].removeprefix("a letter")))


@pytest.mark.parametrize("verb", TYPES)
def test_each_answer_of_a_verb_has_a_letter_of_its_own_that_its_file_explains(verb: str) -> None:
    letters = ANSWERS.get(verb) or letters_of(TYPES[verb])
    explained = letters_in_header(verb) | (letters_in_header("cancel_rerun") if verb == "cancel" else set())

    assert set(letters.values()) == set(get_args(TYPES[verb]))
    assert set(letters) == explained


def test_each_answer_of_enqueue_has_a_letter() -> None:
    assert set(ENQUEUED.values()) == set(get_args(EnqueueStatus))


def test_the_library_takes_each_message_of_a_failure_from_the_list() -> None:
    code = re.sub(r"--.*", "", "\n".join(FILES.values()))
    unused = [name for name in FAILURE_TEXTS if not re.search(rf"FAILURE_TEXTS\.{name}\b|'{name}'", code)]

    assert unused == []
    assert not re.search("is not known|was cancelled|was removed|was refused|ttl passed", code)
