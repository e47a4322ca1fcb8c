"""What every statement of the engine has to keep to."""

from __future__ import annotations

import re
from importlib.resources import files

import pytest

from penstock.storage.sqlite import statements

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
