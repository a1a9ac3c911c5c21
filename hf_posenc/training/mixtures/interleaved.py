"""NExtLong: a document in chunks, with chunks of other documents between them that look alike."""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import torch

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.training.bm25 import BM25
from hf_posenc.training.mixtures import register_kind
from hf_posenc.training.mixtures.base import Kind, Material
from hf_posenc.training.packing import MaskedTokens

_MOST_TOKENS = 2048  # of a chunk
_CHUNKS = 16  # of a block, at least
_OWN = 4  # of them, at most, from the document itself
_LEAST_TOKENS = 8


@register_kind
class Interleaved(Kind):
    """Chunks of one document that follow each other, and behind each those of other documents nearest to it.

    Source: NExtLong (Gao et al. 2025, arXiv:2501.12766, section 3 and appendix C). What a document says goes on behind
    text that misleads, so that a far chunk predicts more than the near ones. All tokens count. The authors cut at
    paragraphs, into chunks of 2048, and find negatives by embeddings in a large corpus; here chunks are cut by tokens,
    shorter in short blocks, and BM25 finds the negatives among the documents given (of a single document, among its
    other chunks).
    """

    name: ClassVar[str] = "interleaved"
    reads_texts: ClassVar[bool] = True

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self.num_tokens = min(_MOST_TOKENS, material.seq_len // _CHUNKS)
        self.in_block = material.seq_len // max(self.num_tokens, 1)
        if self.num_tokens < _LEAST_TOKENS:
            raise InvalidRequestError(
                f"{argument('task_mix')}: 'interleaved' needs blocks of at least {_CHUNKS * _LEAST_TOKENS} tokens, "
                f"{_CHUNKS} chunks of {_LEAST_TOKENS}, and a block has {material.seq_len}. Give a longer "
                f"{argument('seq_len')}, or leave interleaved out."
            )
        each = [len(document) // self.num_tokens for document in material.documents]
        if max(each) < 2 or sum(each) < self.in_block + _OWN:
            raise InvalidRequestError(
                f"{argument('task_mix')}: 'interleaved' needs {self.in_block + _OWN} chunks of {self.num_tokens} "
                f"tokens, two of them of one document, and the {len(each)} documents have {sum(each)}, at most "
                f"{max(each)} in one. Give more or longer documents, or leave interleaved out."
            )
        self._document = torch.repeat_interleave(torch.arange(len(each)), torch.tensor(each))
        self._split = [number for number, chunks in enumerate(each) if chunks > 1]
        self._weights = [each[number] for number in self._split]

    @cached_property
    def _chunks(self) -> list[torch.Tensor]:
        """All whole chunks of the documents, one document after the other."""
        split = (torch.split(document, self.num_tokens) for document in self.material.documents)
        return [chunk for chunks in split for chunk in chunks if len(chunk) == self.num_tokens]

    @cached_property
    def _index(self) -> BM25:
        return BM25(self._chunks)

    def block(self, index: int) -> list[MaskedTokens]:
        rng = self.material.rng(self.name, index)
        (number,) = rng.choices(self._split, self._weights)
        (places,) = (self._document == number).nonzero(as_tuple=True)
        count = min(_OWN, len(places))
        start = rng.randint(0, len(places) - count)
        own = places[start : start + count].tolist()
        taken = torch.zeros(len(self._document), dtype=torch.bool)
        taken[own if len(places) + self.in_block > len(taken) else places] = True
        each, more = divmod(self.in_block - count, count)
        ids = []
        for order, chunk in enumerate(own):
            scores = self._index.scores(self._chunks[chunk]).masked_fill(taken, -1.0)
            negatives = scores.topk(each + (order < more)).indices
            taken[negatives] = True
            ids += [self._chunks[one] for one in (chunk, *negatives.tolist())]
        made = torch.cat(ids)
        return [self.material.filled(MaskedTokens(made, torch.ones(len(made), dtype=torch.bool)), rng)]
