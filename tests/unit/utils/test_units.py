"""Lengths as people write them."""

from __future__ import annotations

import pytest

from hf_posenc.utils.units import length_name


@pytest.mark.parametrize(
    ("length", "name"),
    [(500, "500"), (512, "512"), (1024, "1k"), (1280, "1280"), (1536, "1.5k"), (12800, "12.5k"), (32768, "32k")],
)
def test_a_length_has_no_more_than_one_decimal(length: int, name: str) -> None:
    assert length_name(length) == name
