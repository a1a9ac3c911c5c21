"""Untie the Knots: documents cut into chunks and shuffled, with tags that say where each goes on."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import ClassVar, NamedTuple

import torch

from hf_posenc.data.reading import added_bos, tokenize_text
from hf_posenc.data.tokens import MaskedTokens, joined
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.mixtures import register_kind
from hf_posenc.mixtures.base import Kind, Material
from hf_posenc.mixtures.made_up import names

_DOCUMENTS = 4  # in a block
_MOST_CUTS = 3  # of a document
_LEAST_CHUNK = 8  # tokens


class _Tags(NamedTuple):
    """The tags that join the chunks of a document: for each cut the tag behind it and that before its continuation."""

    behind: list[MaskedTokens]
    before: list[MaskedTokens]
    order: MaskedTokens

    @property
    def num_tokens(self) -> int:
        return sum(map(len, [*self.behind, *self.before, self.order]))


@register_kind
class Knots(Kind):
    """Several documents, each cut at random, all their chunks shuffled; two tags with one name tie each cut.

    Source: Untie the Knots (Tian et al. 2024, arXiv:2409.04774, and gpt_dataset_utk.py of its code). One tag is behind
    the chunk that was cut, the other before the chunk that goes on. Behind the last chunk of a document that comes, the
    names are listed in the order of the document (backtracing). As in the authors' code the tags do not count in the
    loss, nor does the token behind one; the lists do. Tags are text here, since new tokens would need embeddings that
    an adapter does not train; and the names of the cuts are what is listed, where the authors give each chunk a number
    besides.
    """

    name: ClassVar[str] = "knots"
    reads_texts: ClassVar[bool] = True

    def __init__(self, material: Material) -> None:
        super().__init__(material)
        self._begin, self._end = (
            MaskedTokens.uniform(torch.tensor([] if token is None else [token], dtype=torch.int64), counted=True)
            for token in (added_bos(material.tokenizer), material.tokenizer.eos_token_id)
        )
        self._lengths = [len(document) for document in material.documents]
        shortest = 2 * _LEAST_CHUNK + self._tags(1, Random(0)).num_tokens
        if _DOCUMENTS * shortest > material.seq_len:
            raise InvalidRequestError(
                f"{argument('task_mix')}: 'knots' ties {_DOCUMENTS} documents of at least {shortest} tokens in a "
                f"block, and a block has {material.seq_len}. Give a longer {argument('seq_len')}, or leave knots out."
            )
        if max(self._lengths) < 2 * _LEAST_CHUNK:
            raise InvalidRequestError(
                f"{argument('task_mix')}: 'knots' cuts documents into chunks of at least {_LEAST_CHUNK} tokens, and "
                f"the longest document has {max(self._lengths)}. Give longer documents, or leave knots out."
            )

    def block(self, index: int) -> list[MaskedTokens]:
        rng, room = self.material.rng(self.name, index), self.material.seq_len
        chunks: list[tuple[int, MaskedTokens]] = []  # of which document
        lists: list[MaskedTokens] = []
        while room > 0:
            most = min(room, self.material.seq_len // _DOCUMENTS)
            tied, order = self._tied(self._excerpt(most, rng), most, rng)
            chunks += [(len(lists), chunk) for chunk in tied]
            lists.append(order)
            room -= sum(map(len, tied)) + len(order)
        rng.shuffle(chunks)
        last = {document: at for at, (document, _) in enumerate(chunks)}
        parts = [[chunk, lists[of]] if last[of] == at else [chunk] for at, (of, chunk) in enumerate(chunks)]
        return [joined([part for some in parts for part in some])]

    def _tied(self, text: MaskedTokens, most: int, rng: Random) -> tuple[list[MaskedTokens], MaskedTokens]:
        """Return the chunks of a text with their tags, and its list: together at most so many tokens.

        What is too short for tags stays in one chunk, whose list is empty.
        """
        for cuts in range(rng.randint(1, _MOST_CUTS), 0, -1):
            tags = self._tags(cuts, rng)
            kept = text[: most - tags.num_tokens] if tags.num_tokens < most else text[:0]
            if len(kept) < (cuts + 1) * _LEAST_CHUNK:
                continue
            parts = [_without_first(part) for part in _cut(kept, cuts, rng)]
            befores, behinds = [text[:0], *tags.before], [*tags.behind, text[:0]]
            tied = zip(befores, parts, behinds, strict=True)
            return [joined(list(three)) for three in tied], tags.order
        return [_without_first(text)], text[:0]

    def _tags(self, cuts: int, rng: Random) -> _Tags:
        ties = names(rng, cuts)
        behind, before = (
            [self._tokens(f"\n[{way} {tie}]\n", counted=False) for tie in ties] for way in ("on to", "on from")
        )
        order = [
            self._tokens("\n[order:", counted=False),
            self._tokens(f" {', '.join(ties)}]\n", counted=True),
        ]
        return _Tags(behind, before, joined(order))

    def _excerpt(self, most: int, rng: Random) -> MaskedTokens:
        """Return at most so many tokens of one document; longer documents come more often.

        Its beginning has BOS before it, where the tokenizer puts one, and its end EOS behind it.
        """
        (document,) = rng.choices(self.material.documents, self._lengths)
        start = rng.randint(0, max(0, len(document) - most))
        text = document[start : start + most]
        begin = self._begin if start == 0 else self._begin[:0]
        return joined(
            [
                begin,
                MaskedTokens.uniform(text, counted=True),
                self._end if start + most >= len(document) else self._end[:0],
            ]
        )[:most]

    def _tokens(self, text: str, *, counted: bool) -> MaskedTokens:
        return MaskedTokens.uniform(tokenize_text(self.material.tokenizer, text), counted=counted)


def _cut(text: MaskedTokens, cuts: int, rng: Random) -> list[MaskedTokens]:
    """Return a text in chunks of at least ``_LEAST_CHUNK`` tokens, cut at random."""
    spare = len(text) - (cuts + 1) * _LEAST_CHUNK
    places = sorted(rng.randint(0, spare) for _ in range(cuts))
    borders = [0, *(place + number * _LEAST_CHUNK for number, place in enumerate(places, 1)), len(text)]
    return [text[start:stop] for start, stop in pairwise(borders)]


def _without_first(chunk: MaskedTokens) -> MaskedTokens:
    """Return a chunk whose first token does not count: nothing before it says what it is."""
    counted = chunk.counted.clone()
    counted[0] = False
    return MaskedTokens(chunk.ids, counted)
