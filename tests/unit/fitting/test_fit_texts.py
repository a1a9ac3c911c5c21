"""Which texts are fitted on and which are held out."""

from __future__ import annotations

import pytest
import torch

from hf_posenc.fitting.splitting import split_texts


def rows(*lengths: int) -> list[torch.Tensor]:
    """Documents of these lengths, each of ids 1000 apart from the next one's."""
    return [torch.arange(length) + 1000 * at for at, length in enumerate(lengths)]


def starts(texts: list[torch.Tensor]) -> list[int]:
    assert all(len(text) == 100 for text in texts)
    assert all(torch.equal(text, torch.arange(int(text[0]), int(text[0]) + 100)) for text in texts)
    return [int(text[0]) for text in texts]


@pytest.mark.parametrize(
    ("lengths", "max_documents", "held_out", "fitted", "kept"),
    [
        ((100, 150), 1, 1, [0], [1000]),
        ((150, 99, 100), 1, 1, [0], [2000]),  # short ones are passed over
        ((100, 100, 100, 100), 9, 1, [0, 1000, 2000], [3000]),
        ((100, 100, 100, 100), 9, 2, [0, 1000], [2000, 3000]),
        ((100, 100), 9, 0, [0, 1000], []),
        ((200,), 1, 1, [0], [100]),  # behind the fitted part of the only one
        ((50, 350, 99), 1, 2, [1000], [1100, 1200]),
        ((350,), 1, 0, [0], []),
    ],
)
def test_split(lengths: tuple[int, ...], max_documents: int, held_out: int, fitted: list[int], kept: list[int]) -> None:
    texts = split_texts(rows(*lengths), 100, max_documents, held_out)
    assert starts(texts.fitted) == fitted
    assert starts(texts.held_out) == kept


def test_at_most_so_many_are_fitted_evenly_spread() -> None:
    texts = split_texts(rows(*[100] * 10), 100, 3, 1)
    assert starts(texts.held_out) == [9000]
    found = starts(texts.fitted)
    assert len(found) == 3
    assert max(found) - min(found) >= 5000


def test_a_document_given_twice() -> None:
    (one, other), same = rows(100, 100), torch.arange(150)
    with pytest.raises(ValueError, match="held out"):
        split_texts([one, other, same], 100, 2, 1)
    assert starts(split_texts([one, same], 100, 1, 0).fitted) == [0]


@pytest.mark.parametrize(
    ("lengths", "held_out", "message"),
    [
        ((90, 70), 1, "the longest of the 2 given has 90: 10 tokens are missing"),
        ((1,), 0, "has 1: 99 tokens are missing"),
        ((100,), 1, "2 documents of 100 tokens are needed.*1 of the 1 given has as many.*one document of 200 tokens"),
        ((199,), 1, "1 of the 1 given has as many"),
        ((100, 60), 1, "1 of the 2 given has as many: 40 tokens are missing"),
        ((100, 130, 95), 2, "3 documents of 100.*2 of the 3 given have as many: 5 tokens are missing"),
    ],
)
def test_what_is_missing(lengths: tuple[int, ...], held_out: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_texts(rows(*lengths), 100, 1, held_out)
