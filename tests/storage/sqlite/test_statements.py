"""What every statement of the engine has to keep to."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from penstock.storage.sqlite import RECORD_COLUMNS, SAVED_COLUMNS, migrations, statements
from penstock.storage.sqlite.records import Record

SUBJECTS = sorted(
    file.name.removesuffix(".sql")
    for file in (files("penstock.storage.sqlite") / "sql").iterdir()
    if file.name.endswith(".sql")
)


@pytest.mark.parametrize("subject", SUBJECTS)
def test_no_placeholder_is_numbered(subject: str) -> None:
    """Python 3.12.0 to 3.12.3 takes ``?1`` for a named placeholder, and warns when it gets a sequence."""
    numbered = [name for name, text in statements(subject).items() if re.search(r"\?\d", text)]

    assert numbered == []


def test_a_record_has_a_field_for_each_column_and_every_column_of_the_table_is_written() -> None:
    fields = Record.__struct_fields__
    table = migrations()[1].partition("CREATE TABLE jobs (")[2].partition(")")[0]

    assert fields.index("was") == len(RECORD_COLUMNS) - 1
    assert {"key", "queue", "id", *SAVED_COLUMNS} == set(re.findall(r"^    (\w+) ", table, re.MULTILINE))
