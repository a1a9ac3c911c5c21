"""BM25 over token ids: which chunks of text share rare tokens with one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_K1, _B = 1.2, 0.75


class BM25:
    """An index of chunks, each a bag of token ids; in any language, since no words are needed.

    A chunk's score is the sum over the query's different tokens of
    ``idf * count * (k1 + 1) / (count + k1 * (1 - b + b * length / mean length))``, with
    ``idf = ln(1 + (N - n + 0.5) / (n + 0.5))``, ``n`` of ``N`` chunks holding the token, ``k1`` 1.2 and ``b`` 0.75.

    Args:
        chunks: int64 ``(num_tokens,)`` each, not empty.

    Reference: Robertson and Zaragoza 2009, The Probabilistic Relevance Framework, section 3.2; Lucene's idf, which is
        never below 0.
    """

    def __init__(self, chunks: Sequence[torch.Tensor]) -> None:
        self.num_chunks = len(chunks)
        lengths = torch.tensor([len(chunk) for chunk in chunks])
        tokens = torch.cat(list(chunks))
        owner = torch.repeat_interleave(torch.arange(len(chunks)), lengths)
        # Sorted by token.
        keys, counts = torch.unique(tokens * len(chunks) + owner, return_counts=True)
        self._owner = keys % len(chunks)
        held, spread = torch.unique_consecutive(keys // len(chunks), return_counts=True)
        idf = torch.log1p((len(chunks) - spread + 0.5) / (spread + 0.5))
        long = 1 - _B + _B * lengths[self._owner] / lengths.double().mean()
        self._weight = torch.repeat_interleave(idf, spread) * counts * (_K1 + 1) / (counts + _K1 * long)
        ends = spread.cumsum(0)
        self._range = dict(zip(held.tolist(), zip((ends - spread).tolist(), ends.tolist(), strict=True), strict=True))

    def scores(self, query: torch.Tensor) -> torch.Tensor:
        """Return the score of each chunk for a query, float64 ``(num_chunks,)``."""
        found = torch.zeros(self.num_chunks, dtype=torch.float64)
        for token in set(query.tolist()):
            start, stop = self._range.get(token, (0, 0))
            found.index_add_(0, self._owner[start:stop], self._weight[start:stop].double())
        return found
