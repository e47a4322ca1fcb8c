from __future__ import annotations

import pytest

from penstock.core.units import byte_count, describe_size
from penstock.errors import InvalidOption


@pytest.mark.parametrize(
    ("written", "count"),
    [(1, 1), ("1B", 1), ("64KiB", 65_536), ("1 MiB", 1_048_576), ("1.5mb", 1_500_000), ("2GiB", 2 * 1024**3)],
)
def test_a_size_is_bytes_or_text_with_a_unit(written: int | str, count: int) -> None:
    assert byte_count(written) == count


@pytest.mark.parametrize("written", [0, -5, True, 1.5, None, "", "12", "MiB", "1 parsec", "-1KiB", "0.1B"])
def test_an_invalid_size_is_refused_with_the_name_of_its_option(written: object) -> None:
    with pytest.raises(InvalidOption, match="max_payload"):
        byte_count(written, what="max_payload")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 bytes"), (812, "812 bytes"), (1536, "1.5 KiB"), (1_048_576, "1.0 MiB")]
)
def test_sizes_are_shown_in_the_largest_unit_that_fits(count: int, shown: str) -> None:
    assert describe_size(count) == shown
