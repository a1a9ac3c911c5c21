"""The free slots of a static cache, which are not read."""

from __future__ import annotations

import torch

from hf_posenc.attention.layout import written_slots


def test_free_slots_are_those_that_the_last_query_of_no_row_sees() -> None:
    keys = torch.arange(16.0).view(2, 1, 8, 1)
    dense = torch.zeros(2, 1, 4, 8, dtype=torch.bool)
    dense[0, 0, :, :2] = True  # a shorter text, with padding behind it
    dense[1, 0, :, :4] = True
    for mask in (dense, torch.where(dense, 0.0, -1e9)):
        cut, _, seen = written_slots(keys, keys, mask)
        assert torch.equal(cut, keys[:, :, :4])
        assert seen.shape == (2, 1, 4, 4)
