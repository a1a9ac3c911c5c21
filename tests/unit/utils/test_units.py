"""Lengths as people write them."""

from __future__ import annotations

import pytest

from hf_posenc.errors import InvalidRequestError
from hf_posenc.utils.units import TokenCount, length_name


@pytest.mark.parametrize(
    ("length", "name"),
    [(500, "500"), (512, "512"), (1024, "1k"), (1280, "1280"), (1536, "1.5k"), (12800, "12.5k"), (32768, "32k")],
)
def test_a_length_has_no_more_than_one_decimal(length: int, name: str) -> None:
    assert length_name(length) == name


@pytest.mark.parametrize(
    ("text", "count"), [("4.1M", 4_100_000), ("16.1k", 16_100), ("300_000", 300_000), ("2.01M", 2_010_000)]
)
def test_a_count_with_decimals_is_whole_where_its_digits_say_so(text: str, count: int) -> None:
    assert TokenCount(text) == count


@pytest.mark.parametrize("text", ["1.2.3", "1.0005k", "1.5", "_1", "1_"])
def test_what_is_no_whole_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequestError, match="number of tokens"):
        TokenCount(text)
