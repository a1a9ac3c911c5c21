"""Free text as tokens to hide things in: cut to an exact number of tokens, and opened where a sentence ends."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from transformers import PreTrainedTokenizerBase

from hf_posenc.assets import HELD_OUT_NOVEL, TRAIN_NOVELS, load_novel
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.documents import hash_tokenizer

_LAST: dict[tuple[str, bytes], Haystack] = {}  # what was read last: the rows of a table hide things in the same text
_SENTENCE_END = re.compile(r"[.!?][\"')\]\u201d\u2019]*\s*$")
_TITLES = ("Mr", "Mrs", "Dr", "St")  # their full stop ends no sentence


@dataclass(frozen=True)
class Haystack:
    """Token ids of a text, and the positions (rising) that a sentence or line ends before.

    ``near`` is how many tokens a needle may be from the requested depth, to be at such an end.
    """

    ids: list[int]
    ends: list[int]
    near: int = 32

    def cut(self, num_tokens: int, rng: Random) -> Haystack:
        """Return exactly so many tokens in a row, from the beginning of a random sentence on.

        Raises:
            ValueError: The text is shorter.
        """
        if num_tokens > len(self.ids):
            raise InvalidRequestError(
                f"the prompt has room for {num_tokens} tokens of free text and the documents have {len(self.ids)} in "
                "all. Give longer documents, or a shorter context length."
            )
        last = len(self.ids) - num_tokens
        start = self._sentence_before(rng.randint(0, last))
        stop = start + num_tokens
        first, end = bisect_right(self.ends, start), bisect_left(self.ends, stop)
        return Haystack(self.ids[start:stop], [at - start for at in self.ends[first:end]])

    def position_of(self, depth: float) -> int:
        """Return the number of tokens before a depth in percent: to the end of the nearest sentence, if one is near."""
        exact = round(len(self.ids) * depth / 100)
        if exact in (0, len(self.ids)):
            return exact
        index = bisect_left(self.ends, exact)
        near = [end for end in self.ends[max(index - 1, 0) : index + 1] if abs(end - exact) <= self.near]
        return min(near, key=lambda at: abs(at - exact), default=exact)

    def _sentence_before(self, position: int) -> int:
        index = bisect_right(self.ends, position)
        return self.ends[index - 1] if index else 0


def read_haystack(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str] | None) -> Haystack:
    """Tokenise texts, one paragraph a line; None takes the six novels in the package.

    Texts of white space alone stay as they are. Nothing in them distracts, so that what a model does not find there is
    lost to the distance (Du et al. 2025, arXiv:2510.05381).

    Raises:
        ValueError: The documents are empty.
    """
    if documents is None:
        documents = [load_novel(name) for name in (HELD_OUT_NOVEL, *TRAIN_NOVELS)]
    key = (hash_tokenizer(tokenizer), hashlib.sha256("\0".join(documents).encode("utf-8", "surrogatepass")).digest())
    if key not in _LAST:
        tokenized = _tokenize(tokenizer, documents)
        _LAST.clear()
        _LAST[key] = tokenized
    return _LAST[key]


def _tokenize(tokenizer: PreTrainedTokenizerBase, documents: Sequence[str]) -> Haystack:
    paragraphs = [" ".join(part.split()) for text in documents for part in re.split(r"\n\s*\n", text)]
    lines = [f"{paragraph}\n" for paragraph in paragraphs if paragraph]
    if not lines:
        blank: list[int] = tokenizer("".join(documents), add_special_tokens=False, verbose=False).input_ids
        if not blank:
            raise InvalidRequestError("documents hold no text to hide anything in. Give texts, or leave documents out.")
        return Haystack(blank, list(range(1, len(blank) + 1)))
    rows: list[list[int]] = tokenizer(lines, add_special_tokens=False, verbose=False).input_ids
    ids = [token for row in rows for token in row]
    texts = {token: str(tokenizer.decode([token])) for token in set(ids)}
    is_end = {token for token, text in texts.items() if _SENTENCE_END.search(text)}
    titles = {token for token, text in texts.items() if text.strip() in _TITLES}
    after_title = (at and ids[at - 1] in titles for at in range(len(ids)))
    ends = [at + 1 for at, titled in enumerate(after_title) if ids[at] in is_end and not titled]
    return Haystack(ids, ends)
